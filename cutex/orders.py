"""The simulator's choices on command lines, which read them without importing it: the names of its
orders of events, explained in cutex/sim/policy.py, and the limit on processes that share a grid."""

from __future__ import annotations

ORDERS = ("fifo", "eager", "starved", "peer-late", "elected", "random")
MOST_JOBS = 64
