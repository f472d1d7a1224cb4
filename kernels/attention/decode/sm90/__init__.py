"""The decode kernel on Hopper."""
