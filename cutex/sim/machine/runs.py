"""Runs of equal numbers: the lanes of one access, warp by warp.

NOTE: `np.diff` with `prepend`, and `np.tile`, took a twentieth of a simulation.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def heads_of(numbers: np.ndarray) -> np.ndarray:
    """The places where a number differs from the one before it; the first is one of them."""
    begins = np.empty(len(numbers), bool)
    begins[:1] = True
    np.not_equal(numbers[1:], numbers[:-1], out=begins[1:])
    return begins.nonzero()[0]


def lengths_of(heads: np.ndarray, total: int) -> np.ndarray:
    """The lengths of runs that begin at `heads`, of `total` numbers."""
    ends = np.empty_like(heads)
    ends[:-1] = heads[1:]
    ends[-1:] = total
    return ends - heads


@lru_cache(maxsize=256)
def lanes_of(warps: int, lanes: int = 32) -> np.ndarray:
    """The number of each lane in its warp, for so many warps with `lanes` lanes each; read-only."""
    found = np.tile(np.arange(lanes), warps)
    found.setflags(write=False)
    return found
