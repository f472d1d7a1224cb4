"""The simulator's choices on command lines, which read them without importing it: the names of its
orders of events, explained in cutex/sim/policy.py, and the limit on processes that share a grid."""

from __future__ import annotations

from argparse import _ActionsContainer

ABOUT = {
    "fifo": "copies and MMAs complete as late as the program allows",
    "eager": "they complete at once",
    "starved": "one warp runs last",
    "peer-late": "so do all CTAs of a cluster but one",
    "elected": "elect.sync returns another lane",
    "random": "any order",
}
ORDERS = tuple(ABOUT)
MOST_JOBS = 64


def add_order(to: _ActionsContainer) -> None:
    """Add --order, None unless it is given, to a command line."""
    each = "; ".join(f"{order}: {what}" for order, what in ABOUT.items())
    to.add_argument("--order", choices=ORDERS, help=f"of events; {each}; default: fifo")
