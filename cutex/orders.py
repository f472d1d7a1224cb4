"""The names of the simulator's orders of events; cutex/sim/policy.py says what they do.

Here, so that the command line can name them without importing the simulator.
"""

from __future__ import annotations

ORDERS = ("fifo", "eager", "starved", "peer-late", "elected", "random")
