"""The sectors of global memory that an ordinary store or an atomic of a warp touches, and how.

L1 puts together what a warp stores into its last few lines: words 8 bytes apart, and then those in
between, take no longer than all at once; but not where it waits for a load between the two.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from cutex.sim.timing.events import Event, Need, Touch
from cutex.sim.timing.fetches import LINE, SECTOR

HALF = SECTOR // 2  # bytes: a line that gets them takes no longer than a whole one
# of a slice of L2, relative to a sector, for each lane that adds to a word that others add to
MEETING = 1.35  # probe: a warp's lanes all one word of 16, 64, 512 lines, 12 to 1.2 cycles, H200
TOGETHER = 4  # lines: four stores, 16 bytes apart, are put together, eight, 32 bytes apart, are not


def touched(at: np.ndarray, size: int, waits: bool, adds: bool) -> Touch:
    """Return what lanes that access `size` bytes each, at these addresses, ask of L2. `waits`: for
    what was there; `adds`: to it."""
    words, lanes = np.unique(at, return_counts=True)
    ends = np.concatenate([words, words + size - 1])
    sectors, lines = len(np.unique(ends // SECTOR)), len(np.unique(ends // 128))
    if waits or adds:
        queued = _queued(words // SECTOR, lanes)
        sums = sectors + queued * MEETING
        return Touch(sectors, lines, waits, adds, sectors, queued, sums=sums)
    return Touch(sectors, lines, waits, adds, sectors - _whole(words, size))


class _Line(NamedTuple):
    bytes: np.ndarray  # (LINE // SECTOR, SECTOR) bool: which have been stored
    store: list[Touch]  # the last store, which its lines share


class Together:
    """The last lines that each warp has stored to."""

    def __init__(self) -> None:
        self.lines: dict[int, dict[int, _Line]] = defaultdict(dict)  # by warp and number
        self.sent: dict[int, set[int]] = defaultdict(set)  # by CTA: sectors
        self.seen: dict[int, int] = {}  # by warp: its events up to its last store

    def store(self, warp: int, cta: int, at: np.ndarray, size: int, program: list[Event]) -> Touch:
        """A store of `size` bytes of each lane at these addresses: only what L1 has not got from
        stores before it. Those are, in the warp's ``program``, no partial ones any more of the
        sectors that this one fills.
        """
        known, full = self.lines[warp], touched(at, size, False, False)
        if any(isinstance(e, Need) for e in program[self.seen.get(warp, 0) :]):
            known.clear()
        self.seen[warp] = len(program)
        if full.partial:
            sectors = set((at // SECTOR).tolist())
            again = len(sectors & self.sent[cta])
            self.sent[cta] |= sectors
            full = full._replace(packets=_thin(at, size), again=again)
        if full.lines > TOGETHER:
            known.clear()
            return full
        stored = (np.unique(at)[:, None] + np.arange(size)).ravel()
        numbers, which = np.unique(stored // LINE, return_inverse=True)
        mine = np.zeros((len(numbers), LINE), bool)
        mine[which.reshape(-1), stored % LINE] = True
        store, fresh_sectors, partial, packets = [full], 0, 0, 0
        for number, parts in zip(
            numbers.tolist(), mine.reshape(-1, LINE // SECTOR, SECTOR), strict=True
        ):
            before = known.pop(number, None)
            if before is not None:
                filled = ~before.bytes.all(1) & before.bytes.any(1)
                fresh = ~before.bytes.any(1)
                parts = parts | before.bytes
                filled &= parts.all(1)
                if filled.any():
                    _fill(before.store, int(filled.sum()), program)
            else:
                fresh = parts.any(1)
            fresh = fresh & parts.any(1)
            fresh_sectors += int(fresh.sum())
            packets += bool(fresh.any() and full.packets and parts.sum(1).max() < HALF)
            partial += int((fresh & ~parts.all(1)).sum())
            known[number] = _Line(parts, store)
        while len(known) > TOGETHER:
            del known[next(iter(known))]
        store[0] = full._replace(
            sectors=fresh_sectors, partial=partial, packets=packets,
            again=min(full.again, fresh_sectors),
        )  # fmt: skip
        return store[0]


def _fill(store: list[Touch], sectors: int, program: list[Event]) -> None:
    """Let sectors of an earlier store of the program be whole."""
    for at in range(len(program) - 1, -1, -1):
        if program[at] is store[0]:
            left = max(0, store[0].partial - sectors)
            program[at] = store[0] = store[0]._replace(partial=left)
            return


def _thin(at: np.ndarray, size: int) -> int:
    """Of how many lines no sector is stored by half."""
    stored = np.unique((np.unique(at)[:, None] + np.arange(size)).ravel())
    sectors, count = np.unique(stored // SECTOR, return_counts=True)
    lines, first = np.unique(sectors // (LINE // SECTOR), return_index=True)
    return int((np.maximum.reduceat(count, first) < HALF).sum()) if len(lines) else 0


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
