"""Orders of events that the simulator knows, by name; what they do: cutex/sim/policy.py.

Here, so that the command line can name them without importing the simulator.
"""

from __future__ import annotations

ORDERS = ("fifo", "eager", "starved", "peer-late", "elected", "random")
