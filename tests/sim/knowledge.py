"""What warps know of each other in a run, by barriers of every kind: for deriving why a mutant may
be as right as its kernel. Nothing of the simulator's checks is used, only the machine's events.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import numpy as np

from cutex.sim.machine.events import Observer
from cutex.sim.machine.machine import Machine
from cutex.sim.machine.operation import CHUNK, Engine, Kind, Span
from cutex.sim.ptx.program import Instruction


class Trace(Protocol):
    """Where the accesses are counted that something does not order, by the instruction's text."""

    uninformed: Counter[str]
    unordered: Counter[str]


Fact = Hashable  # GRID, or a bulk store: its thread and its number there
GRID = "griddepcontrol.wait"


class Meetings(Observer):
    """What warps tell each other by barriers of every kind: who arrives, or whose operation
    completes on a barrier, tells those who pass its phase.
    """

    def __init__(self) -> None:
        self.late: dict[Any, Any] = {}  # by an arrival that comes later: what is told by it

    def _told(self, warp: int) -> Any:
        """What the warp tells by an arrival now."""
        raise NotImplementedError

    def _adds(self, key: Hashable, told: Any) -> None:
        raise NotImplementedError

    def _arrives(self, key: Hashable, warp: int) -> None:
        self._adds(key, self._told(warp))

    def _completes(self, key: Hashable) -> None:
        raise NotImplementedError

    def _passes(self, key: Hashable, warp: int) -> None:
        raise NotImplementedError

    def issued(self, ops: Any) -> None:
        for op in ops:
            for signal in op.signals:
                self._arrives(signal, op.warp)

    def mbarrier_arrives(self, barrier: Any, warp: int, to_cluster: bool, ins: Any) -> None:
        self._arrives((barrier.cta, barrier.offset), warp)

    def arrives_late(self, arrival: Any) -> None:
        self.late[arrival] = self._told(arrival.warp)

    def mbarrier_arrives_late(self, barrier: Any, arrival: Any) -> None:
        self._adds((barrier.cta, barrier.offset), self.late[arrival])

    def mbarrier_completed(self, barrier: Any) -> None:
        self._completes((barrier.cta, barrier.offset))

    def mbarrier_passed(self, barrier: Any, warp: int, lanes: Any, ins: Any) -> None:
        self._passes((barrier.cta, barrier.offset), warp)

    def named_arrives(self, key: Any, warp: int, whole: bool, ins: Any) -> None:
        self._arrives(("named", *key), warp)

    def named_completed(self, key: Any) -> None:
        self._completes(("named", *key))

    def named_passed(self, key: Any, warp: int) -> None:
        self._passes(("named", *key), warp)

    def cluster_arrives(self, which: int, warp: int, relaxed: bool, ins: Any) -> None:
        self._arrives(("cluster", which), warp)

    def cluster_completed(self, which: int) -> None:
        self._completes(("cluster", which))

    def cluster_passed(self, which: int, warp: int) -> None:
        self._passes(("cluster", which), warp)


class Facts(Meetings):
    """What each warp knows: that it, or another warp, has executed griddepcontrol.wait, and which
    bulk stores have read their memory. It learns that by a wait of its own, and from those who have
    arrived at a barrier that it passes, or whose operations complete on it.
    """

    def __init__(self, machine: Machine, trace: Trace) -> None:
        super().__init__()
        self.m, self.t = machine, trace
        self.known: dict[int, set[Fact]] = defaultdict(set)  # by warp
        self.coming: dict[Hashable, set[Fact]] = defaultdict(set)  # by barrier: of this phase
        self.passed: dict[Hashable, set[Fact]] = {}  # of the last phase

    def grids_waited(self, warps: np.ndarray, lanes: np.ndarray) -> None:
        for warp in warps.tolist():
            self.known[warp].add(GRID)

    def _told(self, warp: int) -> set[Fact]:
        return set(self.known[warp])

    def _adds(self, key: Hashable, told: set[Fact]) -> None:
        self.coming[key] |= told

    def _completes(self, key: Hashable) -> None:
        self.passed[key] = self.coming.pop(key, set())

    def _passes(self, key: Hashable, warp: int) -> None:
        self.known[warp] |= self.passed.get(key, set())

    def _accesses(self, warps: Any, ins: Instruction) -> None:
        if any(GRID not in self.known[warp] for warp in warps):
            self.t.uninformed[ins.text] += 1

    def global_loaded(self, where: Any, size: int, ins: Instruction) -> None:
        self._accesses(where.warps.tolist(), ins)

    def global_stores(self, where: Any, values: Any, parts: Any, ins: Instruction) -> None:
        self._accesses(where.warps.tolist(), ins)

    def bulk_issued(self, warp: int, address: int, size: int, write: bool, ins: Any) -> None:
        self._accesses([warp], ins)

    def box_issued(self, warp: int, tmap: Any, at: Any, write: bool, ins: Any) -> None:
        self._accesses([warp], ins)


class Order(Meetings):
    """Accesses to shared memory by warps that nothing orders, counted by the text of the later one;
    of each 16 bytes the last write and each warp's last read are kept. Copies in flight are the
    issuing warp's accesses, wgmma's reads those of its warps when they have waited for it.
    """

    def __init__(self, machine: Machine, trace: Trace) -> None:
        super().__init__()
        self.m, self.t = machine, trace
        grid = machine.grid
        rank = grid.cta_rank[grid.warp_cta]
        self.slot = (rank * grid.warps_per_cta + grid.warp_in_cta).tolist()  # in its cluster
        slots = grid.cluster_size * grid.warps_per_cta
        self.known = np.zeros((grid.num_warps, slots), np.int32)  # by warp: how much of each
        for warp, slot in enumerate(self.slot):
            self.known[warp, slot] = 1
        self.coming: dict[Hashable, np.ndarray] = {}  # by barrier: what those who arrived know
        self.passed: dict[Hashable, np.ndarray] = {}  # of the last phase
        chunks = grid.num_ctas, -(-machine.smem_bytes // CHUNK)
        self.writer, self.wrote = np.zeros(chunks, np.int32), np.zeros(chunks, np.int32)
        self.reads = np.zeros((*chunks, slots), np.int32)
        self.groups: dict[int, list[tuple[int, Span]]] = defaultdict(list)  # by warp: wgmma's reads
        # by named barrier: who has arrived in this phase and in the one before, and when
        self.here: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
        self.before: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
        self.words: dict[int, tuple[int, bool]] = {}  # of global memory: a warp, and if it stored

    def _access(self, warp: int, cta: Any, chunk: Any, write: bool, text: str) -> None:
        known, slot = self.known[warp], self.slot[warp]
        late = self.wrote[cta, chunk] > known[self.writer[cta, chunk]]
        if write:
            late = late | (self.reads[cta, chunk] > known).any(-1)
            self.writer[cta, chunk], self.wrote[cta, chunk] = slot, known[slot]
        else:
            self.reads[cta, chunk, slot] = known[slot]
        self.t.unordered[text] += int(np.count_nonzero(late))

    def _span(self, warp: int, place: Span, write: bool, text: str) -> None:
        self._access(warp, place.cta, _chunks_of(place), write, text)

    def shared(self, at: Any, write: bool, ordinary: bool, ins: Instruction) -> None:
        for warp in set(at.warps.tolist()):
            mine = at.warps == warp
            for end in (0, at.width - 1):
                chunk = (at.offset[mine] + end) // CHUNK
                self._access(warp, at.cta[mine], chunk, write, ins.text)

    def copying(self, at: Any, op: Any, ins: Instruction) -> None:
        self.shared(at, True, True, ins)

    def issued(self, ops: Any) -> None:
        for op in ops:
            for place in (p for p in op.reads if isinstance(p, Span)):
                for warp in op.issuers if place.part is None else [op.issuers[place.part]]:
                    if op.engine is Engine.WGMMA:
                        self.groups[warp].append((dict(op.agents)[warp], place))
                    self._span(warp, place, False, op.instruction.text)
            for place in (p for p in op.writes if isinstance(p, Span)):
                self._span(op.warp, place, True, op.instruction.text)
            for signal in op.signals:
                self._arrives(signal, op.warp)

    def waited(self, warps: Sequence[int], kind: Kind, numbers: Sequence[int]) -> None:
        if kind is not Kind.TENSOR:
            return
        for warp, number in zip(warps, numbers, strict=True):
            for _, place in (g for g in self.groups[warp] if g[0] <= number):
                self._span(warp, place, False, "wgmma")
            self.groups[warp] = [g for g in self.groups[warp] if g[0] > number]

    def mbarrier_made(self, barrier: Any, warp: int, lane: int, again: bool) -> None:
        self._access(warp, barrier.cta, barrier.offset // CHUNK, True, "mbarrier.init")

    def mbarrier_used(self, barrier: Any, warp: int, ins: Instruction) -> None:
        self._access(warp, barrier.cta, barrier.offset // CHUNK, False, ins.text)

    def mbarrier_arrives(self, barrier: Any, warp: int, to_cluster: bool, ins: Any) -> None:
        told = self._told(warp)
        if ins.line == self.t.silent:
            told[self.slot[warp]] = 0
        self._adds((barrier.cta, barrier.offset), told)

    def named_arrives(self, key: Any, warp: int, whole: bool, ins: Any) -> None:
        now, before = self.here[key], self.before[key]
        told = all(self.known[warp, slot] >= count for slot, count in before)
        self.t.unordered["an arrival again"] += self.slot[warp] in dict(now) or not told
        now.append((self.slot[warp], int(self.known[warp, self.slot[warp]])))
        super().named_arrives(key, warp, whole, ins)

    def named_completed(self, key: Any) -> None:
        self.before[key] = self.here.pop(key, [])
        super().named_completed(key)

    def global_loaded(self, where: Any, size: int, ins: Instruction) -> None:
        self._word(where, False, ins)

    def global_stores(self, where: Any, values: Any, parts: Any, ins: Instruction) -> None:
        self._word(where, True, ins)

    def _word(self, where: Any, write: bool, ins: Instruction) -> None:
        """What two warps access in global memory, one of them by a store, is not followed."""
        if ins.name in ("atom", "red"):
            return
        for warp, at in zip(where.warps.tolist(), (where.addresses // 4).tolist(), strict=True):
            other, stored = self.words.get(at, (warp, False))
            self.t.unordered["global memory"] += other != warp and (write or stored)
            self.words[at] = warp, write or (stored and other == warp)

    def _told(self, warp: int) -> np.ndarray:
        told = self.known[warp].copy()
        self.known[warp, self.slot[warp]] += 1
        return told

    def _adds(self, key: Hashable, told: np.ndarray) -> None:
        self.coming[key] = np.maximum(self.coming.get(key, 0), told)

    def _completes(self, key: Hashable) -> None:
        self.passed[key] = self.coming.pop(key, np.zeros(self.known.shape[1], np.int32))

    def _passes(self, key: Hashable, warp: int) -> None:
        np.maximum(self.known[warp], self.passed.get(key, 0), out=self.known[warp])


def _chunks_of(place: Span) -> np.ndarray:
    if place.chunks is not None:
        return place.chunks.reshape(-1)
    return np.arange(place.low // CHUNK, -(-place.high // CHUNK))
