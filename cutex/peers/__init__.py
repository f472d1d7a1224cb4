"""Other libraries' implementations of the operators, under one interface: each function returns a
launch of a problem's inputs and outputs.

A library is imported when its function is called, which raises ImportError if it is not installed,
and ValueError for a problem that it does not support.
"""
