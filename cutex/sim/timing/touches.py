"""The sectors of global memory that an ordinary store or an atomic of a warp touches, and how."""

from __future__ import annotations

import numpy as np

from cutex.sim.timing.events import Touch
from cutex.sim.timing.fetches import SECTOR


def touched(at: np.ndarray, size: int, waits: bool, adds: bool) -> Touch:
    """Return what lanes that access `size` bytes each, at these addresses, ask of L2. `waits`: for
    what was there; `adds`: to it."""
    words, lanes = np.unique(at, return_counts=True)
    ends = np.concatenate([words, words + size - 1])
    sectors, lines = len(np.unique(ends // SECTOR)), len(np.unique(ends // 128))
    if waits or adds:
        return Touch(sectors, lines, waits, adds, sectors, _queued(words // SECTOR, lanes))
    return Touch(sectors, lines, waits, adds, sectors - _whole(words, size))


def _whole(words: np.ndarray, size: int) -> int:
    """How many sectors the words, of `size` bytes each, fill."""
    at = words if size <= SECTOR else (words[:, None] + np.arange(0, size, SECTOR)).ravel()
    _, count = np.unique(at // SECTOR, return_counts=True)
    return int((count * min(size, SECTOR) >= SECTOR).sum())


def _queued(sectors: np.ndarray, lanes: np.ndarray) -> int:
    """For all sectors the most lanes that change one word, of those with several."""
    _, first = np.unique(sectors, return_index=True)
    most = np.maximum.reduceat(lanes, first)
    return int(most[most > 1].sum())
