"""Who has touched each byte of global memory without knowing of each other.

A write must come after all readers, and whatever is no atomic after all atomics, and after all
writes of the same value. Kept are the last access of each byte and those before it of which no
later one knows: what comes after an access that knows of another comes after that, too. Most bytes
have one. Of several the earlier ones are a set, which all bytes that the same accesses have touched
share: a new access makes a set of the one before and the last access.
"""

from __future__ import annotations

import numpy as np

from cutex.sim.hazards.global_clashes import GlobalClashes
from cutex.sim.hazards.global_marks import LANE, By, Clash, Records
from cutex.sim.hazards.sparse_marks import Marks, Pages, marks_of

_LARGEST = 1 << 22  # bytes of the largest tensor that has all its marks at once
_WEYL = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: spreads numbers


class AccessSets:
    """Sets of accesses of a launch, as marks; 0 is the empty one.

    A set is another one and more marks. An agent that comes again takes the place of its earlier
    access when a set has become twice as large as its agents are many.
    """

    def __init__(self, records: Records) -> None:
        self.records = records
        self.parents: list[int] = [0]
        self.more: list[np.ndarray] = [np.zeros(0, np.uint32)]
        self.sizes: list[int] = [0]
        self.compact_at: list[int] = [64]

    def add(self, parent: int, marks: np.ndarray) -> int:
        """The set of ``parent`` and these."""
        size, limit = self.sizes[parent] + len(marks), self.compact_at[parent]
        if size > limit:
            marks = self._newest(np.concatenate([self.marks(parent), marks]))
            parent, size = 0, len(marks)
            limit = max(64, 2 * size)
        self.parents.append(parent)
        self.more.append(marks)
        self.sizes.append(size)
        self.compact_at.append(limit)
        return len(self.parents) - 1

    def marks(self, number: int) -> np.ndarray:
        """All marks of a set, the oldest first."""
        parts = []
        while number:
            parts.append(self.more[number])
            number = self.parents[number]
        return np.concatenate(parts[::-1]) if parts else self.more[0]

    def _newest(self, marks: np.ndarray) -> np.ndarray:
        """Of each agent the last mark."""
        rec = marks >> LANE
        agent = self.records.who[rec].astype(np.int64) << 32 | self.records.slot[rec]
        _, last = np.unique(agent[::-1], return_index=True)
        return marks[np.sort(len(marks) - 1 - last)]


class Unordered:
    """The accesses of one tensor before the last of each byte."""

    def __init__(self, size: int, sets: AccessSets, pages: Pages) -> None:
        self.sets = sets
        self.before = marks_of(size, pages, _LARGEST)  # the set of those before the last

    def keep(self, last: Marks, places: np.ndarray, marks: np.ndarray) -> None:
        """Note the new last accesses, with a mark for each lane, (n,), of the bytes ``places``
        (n, size), and those of the same batch that are none: they do not know of each other."""
        last[places] = marks[:, None]
        lost = last[places[:, 0]] >> LANE != marks >> LANE
        if lost.any():
            self._push_lost(places[lost], marks[lost])

    def first(
        self, places: np.ndarray, by: By, among: np.ndarray | None, clashes: GlobalClashes
    ) -> Clash | None:
        """The first access before the last of the places, of those ``among``, that one there is
        not ordered after.
        """
        kept = self.before[places]
        if among is not None:
            kept = np.where(among, kept, 0)
        if not kept.any():
            return None
        row, column = np.nonzero(kept)
        warps = by.warps[0 * row if len(by.warps) == 1 else row].astype(np.int64)
        _, one = np.unique(warps << 32 | kept[row, column], return_index=True)
        each = [self.sets.marks(int(kept[row[k], column[k]])) for k in one.tolist()]
        which = np.repeat(one, [len(marks) for marks in each])
        of, at = row[which], places[row[which], column[which]][:, None]
        mine = by
        if len(by.warps) > 1:
            mine = by._replace(
                warps=by.warps[of], lanes=by.lanes[of], slots=by.slots[of], counts=by.counts[of]
            )
        clash = clashes.first(np.concatenate(each)[:, None], at, mine)
        return None if clash is None else clash._replace(later=int(of[clash.later]))

    def push(self, places: np.ndarray, last: np.ndarray) -> None:
        """Add the last access of each of the places (n,) to the set of those before it."""
        kept = self.before[places]
        pairs, which = np.unique(
            kept.astype(np.uint64) << np.uint64(32) | last >> LANE, return_inverse=True
        )
        marks = np.zeros(len(pairs), np.uint32)
        marks[which] = last  # NOTE: of its lanes any
        new = [
            self.sets.add(int(pair) >> 32, marks[k : k + 1])
            for k, pair in enumerate(pairs.tolist())
        ]
        self.before[places] = np.array(new, np.uint32)[which.reshape(-1)]

    def _push_lost(self, places: np.ndarray, marks: np.ndarray) -> None:
        """Add accesses of the batch of the last one, which do not know of each other, (n, size)."""
        order = np.lexsort((marks, places[:, 0]))
        places, marks = places[order], marks[order]
        heads = np.flatnonzero(np.r_[True, places[1:, 0] != places[:-1, 0]])
        spread = (marks >> np.uint32(LANE)).astype(np.uint64) * _WEYL
        spread = (spread ^ spread >> np.uint64(29)) * _WEYL
        alike = np.add.reduceat(spread, heads) ^ self.before[places[heads, 0]] * _WEYL
        _, first, which = np.unique(alike, return_index=True, return_inverse=True)
        ends = np.r_[heads[1:], len(places)]
        new = np.zeros(len(first), np.uint32)
        for k, head in enumerate(first.tolist()):
            kept = int(self.before[places[heads[head], :1]][0])
            new[k] = self.sets.add(kept, marks[heads[head] : ends[head]])
        numbers = np.repeat(new[which.reshape(-1)], ends - heads)
        self.before[places] = numbers[:, None]


class Readers(Unordered):
    """The readers of one tensor."""

    def __init__(self, size: int, sets: AccessSets, pages: Pages) -> None:
        super().__init__(size, sets, pages)
        self.last = marks_of(size, pages, _LARGEST)

    def add(self, places: np.ndarray, by: By, marks: np.ndarray, clashes: GlobalClashes) -> None:
        """Loads of the bytes ``places`` (n, size), with a mark for each lane, (n,)."""
        last = self.last[places]
        apart = clashes.late(last, by, alike=True)
        if apart is not None and apart.any():
            self.push(places[apart], last[apart])
        self.keep(self.last, places, marks)

    def forget(self, places: np.ndarray) -> None:
        """Drop the readers of these bytes."""
        self.last[places] = self.before[places] = 0
