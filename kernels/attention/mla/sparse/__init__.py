"""MLA decode of chosen keys."""
