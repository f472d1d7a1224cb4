"""What command lines say of the simulator without importing it: the names of its orders of events,
which cutex/sim/policy.py explains, and how many processes may share a grid.
"""

from __future__ import annotations

ORDERS = ("fifo", "eager", "starved", "peer-late", "elected", "random")
MOST_JOBS = 64
