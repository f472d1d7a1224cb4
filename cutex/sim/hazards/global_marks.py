"""Marks of accesses to global memory: who has touched a byte last, and how.

An access of a warp, or a bulk store, is one row of `Records`; the bytes that it touches are marked
with the row's number and the lane, so that a byte needs one word.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Set
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from cutex.sim.isa.boxes import box_places
from cutex.sim.machine.memory import GlobalMemory, Region
from cutex.sim.machine.runs import heads_of, lengths_of
from cutex.sim.ptx.program import Instruction
from cutex.sim.ptx.strength import Strength

PLAIN, STRONG, ATOMIC, NEAR = range(4)  # kinds of accesses; NEAR: strong within a cluster only
LANE = 5  # bits of the lane in a mark
ALONE = 2  # as ``partial`` of a record: one lane of its warp


class By(NamedTuple):
    """The agents of an access: of each place, (n,) or (1,), the warp and lane, and the slot and
    count of the agent. ``clock``: the clock at the issue of a bulk store, if it is one.
    """

    warps: np.ndarray
    lanes: np.ndarray
    slots: np.ndarray
    counts: np.ndarray
    how: Strength
    line: int
    clock: np.ndarray | None = None

    @property
    def kind(self) -> int:
        if self.how.near and self.how.strong:
            return NEAR
        return ATOMIC if self.how.atomic else STRONG if self.how.strong else PLAIN


class Clash(NamedTuple):
    """Two unordered accesses of a byte: the place of the later one in its access, the number of the
    earlier one in the records, and the byte's place in its region. ``fenced``: whether fences of
    other threads than by the letter order them.
    """

    later: int
    earlier: int
    place: int
    fenced: bool = False


class BoxRead(NamedTuple):
    """A TMA load of a box, by the cluster ``owner`` of the grid; or, without a map, a bulk copy
    from ``at``: its address, and the number of its bytes."""

    tmap: Any
    at: tuple[int, ...]
    owner: int
    instruction: Instruction

    @property
    def itemsize(self) -> int:
        return 1 if self.tmap is None else self.tmap.itemsize

    def places(
        self, memory: GlobalMemory, among: Container[int]
    ) -> tuple[Region, np.ndarray] | None:
        """The tensor that it reads, and the offset of each element; None if the tensor's address is
        not ``among`` these."""
        if self.tmap is not None:
            return box_places(memory, self.tmap, self.at, among)
        address, size = self.at
        region = memory.find(address)
        if region is None or region.base not in among:
            return None
        return region, address - region.base + np.arange(size)


class Touched(NamedTuple):
    """The accesses of some clusters of a grid, by the regions' addresses; bits are packed."""

    written: dict[int, np.ndarray]  # bytes
    read: Mapping[int, np.ndarray] = MappingProxyType({})
    loaded: Set[int] = frozenset()  # regions loaded by TMA that these clusters do not write

    def clashes(self, other: Touched) -> bool:
        """Whether both touch a byte that one of them writes."""
        pairs: list[tuple[Mapping[int, np.ndarray], Mapping[int, np.ndarray]]]
        pairs = [(self.written, other.written), (self.written, other.read)]
        pairs += [(other.written, self.read)]
        if self.loaded & other.written.keys() or other.loaded & self.written.keys():
            return True
        return any(bool((a[base] & b[base]).any()) for a, b in pairs for base in a.keys() & b)


class Records:
    """The accesses of a launch, by number from 1: the cluster's number in the grid plus 1, the
    agent's slot and count, the warp, the PTX line, the kind, and whether some lanes of the warp
    took no part.
    """

    FIELDS = ("who", "slot", "count", "warp", "line", "kind", "partial")

    def __init__(self) -> None:
        self.n = 1
        self._table = np.zeros((len(self.FIELDS), 1024), np.int32)

    def __getattr__(self, name: str) -> np.ndarray:
        return self._table[self.FIELDS.index(name)]

    def add(self, by: By, who: np.ndarray, partial: np.ndarray) -> np.ndarray:
        """Add an access and return the marks of its places; ``who``, ``partial`` as in ``by``."""
        heads = heads_of(by.warps)
        end = self.n + len(heads)
        if end > self._table.shape[1]:
            more = np.zeros((len(self.FIELDS), max(end, self._table.shape[1])), np.int32)
            self._table = np.concatenate([self._table, more], 1)
        new = self._table[:, self.n : end]
        fields = (who, by.slots, by.counts, by.warps)
        for row, field in zip(new, fields, strict=False):
            row[:] = field[heads]
        new[4], new[5], new[6] = by.line, by.kind, partial[heads]
        which = np.repeat(np.arange(self.n, end), lengths_of(heads, len(by.warps)))
        self.n = end
        return (which.astype(np.uint32) << np.uint32(LANE)) | by.lanes.astype(np.uint32)
