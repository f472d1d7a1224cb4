"""The decode kernel on Blackwell."""
