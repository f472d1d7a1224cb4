"""The MLA decode kernel on Blackwell."""
