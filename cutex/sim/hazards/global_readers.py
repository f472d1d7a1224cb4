"""Who has read each byte of global memory by ordinary loads.

A write must come after all readers. Kept are the last reader of each byte and one of those before
it of which that one knows nothing. Which of several that is differs from element to element, so
that none of a few dozen readers of a row is forgotten in all of it.
"""

from __future__ import annotations

import numpy as np

from cutex.sim.hazards.global_clashes import GlobalClashes
from cutex.sim.hazards.global_marks import LANE, By

_WEYL = np.uint32(0x9E3779B1)  # 2**32 over the golden ratio: spreads numbers


class Readers:
    """The readers of one tensor."""

    def __init__(self, size: int) -> None:
        self.last, self.other = (np.zeros(size, np.uint32) for _ in range(2))
        self.among = np.zeros(size, np.uint16)  # of how many the other one is one

    def add(self, places: np.ndarray, by: By, marks: np.ndarray, clashes: GlobalClashes) -> None:
        """Loads of the bytes ``places`` (n, size), with a mark for each lane, (n,)."""
        before = self.last[places]
        apart = clashes.late(before, by, reads=True)
        if apart is not None and apart.any():
            self._keep(places, before, apart, by, clashes, 1)
        self.last[places] = marks[:, None]
        lost = self.last[places[:, 0]] >> LANE != marks >> LANE
        if lost.any():  # several warps of one batch
            which = np.flatnonzero(lost)
            which = which[np.argsort(_spread(places[which, 0], marks[which]))]
            others = by._replace(
                warps=by.warps[which],
                lanes=by.lanes[which],
                slots=by.slots[which],
                counts=by.counts[which],
            )
            number = len(np.unique(marks >> LANE)) - 1
            mine = places[which], marks[which, None], np.ones((len(which), 1), bool)
            self._keep(*mine, others, clashes, number)

    def _keep(
        self,
        places: np.ndarray,
        before: np.ndarray,
        apart: np.ndarray,
        by: By,
        clashes: GlobalClashes,
        number: int,
    ) -> None:
        """Keep the readers ``before``, ``number`` of each byte, where they are ``apart`` from the
        one that comes now: all where the one kept is known to it, else each with the same chance.
        """
        first = places[:, : apart.shape[1]]  # NOTE: one decision for an element will do
        kept = self.other[first]
        unknown = clashes.late(np.where(apart, kept, 0), by, reads=True)
        if unknown is None:
            unknown = np.zeros(first.shape, bool)
        count = np.where(unknown, self.among[first].astype(np.int64), 0) + number
        chance = _spread(first[:, :1], kept) >> np.uint32(16)
        new = apart & (~unknown | (chance * count < number << 16))
        if first.shape == places.shape:
            self.other[places[new]] = before[new]
            self.among[places[apart]] = np.minimum(count[apart], 1 << 15)
        else:
            self.other[places[new[:, 0]]] = before[new[:, 0]]
            self.among[places] = np.minimum(count, 1 << 15)

    def forget(self, places: np.ndarray) -> None:
        """Drop the readers of these bytes."""
        self.last[places] = self.other[places] = self.among[places] = 0


def _spread(places: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """A number that looks random for each place and mark."""
    out = (places.astype(np.uint32) >> np.uint32(2)) * _WEYL ^ (marks >> np.uint32(LANE)) * _WEYL
    out ^= out >> np.uint32(15)
    out *= np.uint32(0x85EBCA6B)
    return out ^ out >> np.uint32(13)
