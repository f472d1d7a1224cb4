"""The MLA decode kernel on Hopper."""
