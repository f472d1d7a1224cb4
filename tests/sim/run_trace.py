"""What a run of a kernel did, by the lines of its PTX, from which `equivalent.py` derives reasons.

Nothing of the simulator's checks is used, only the events of the machine.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any
from unittest import mock

import numpy as np
from knowledge import Facts, Order
from subjects import Subject

from cutex.sim import simulate
from cutex.sim.hazards.checks import Checks
from cutex.sim.machine.events import Observer
from cutex.sim.machine.machine import Machine
from cutex.sim.machine.operation import Kind, Span
from cutex.sim.ptx.program import Instruction

_BULK = "cp.async.bulk", "cp.reduce.async.bulk"
Thread = tuple[int, int, int]  # the clusters' turn, warp, lane
Barrier = tuple[int, int, int]  # the clusters' turn, CTA, offset
Phase = tuple[Barrier, int]
Wait = tuple[int, int]  # stores of the thread before it, its line


class _Bulk:
    """The bulk stores of a thread: groups, of so many stores, that it has not waited for."""

    def __init__(self) -> None:
        self.open: list[int] = []
        self.unread: list[list[int]] = []  # committed, not known to have read shared memory
        self.unwritten: list[list[int]] = []
        self.stores = 0
        # store: the wait that told that it has read, and that it has written
        self.read: dict[int, Wait] = {}
        self.written: dict[int, Wait] = {}
        self.reused: set[int] = set()  # stores whose shared memory something has written again

    def store(self) -> None:
        self.open.append(self.stores)
        self.stores += 1

    def commit(self) -> None:
        self.unread.append(self.open)
        self.unwritten.append(self.open)
        self.open = []

    def wait(self, allowed: int, read: bool, line: int) -> bool:
        """Whether the wait, at a line of the PTX, was for any store."""
        older = (self.unread if read else self.unwritten)[: -allowed or None]
        for groups, known in ((self.unread, self.read), (self.unwritten, self.written))[: 2 - read]:
            for store in chain(*groups[: -allowed or None]):
                known.setdefault(store, (self.stores, line))
            del groups[: -allowed or None]
        return any(older)


class Trace:
    """What the instructions of a run did, by their line of the PTX."""

    def __init__(self, silent: int = 0) -> None:
        self.silent = silent  # the line of an arrival on an mbarrier that tells nothing of its warp
        self.turn = 0  # of the clusters that were resident together
        self.executed: set[int] = set()
        self.phases: dict[int, set[int]] = defaultdict(set)  # complete when a wait passed
        self.fence_phases: dict[int, set[int]] = defaultdict(
            set
        )  # and a tcgen05.fence stood behind
        self.fills: dict[int, set[Phase]] = defaultdict(set)  # phases that a line may complete
        self.waited: dict[Barrier, int] = {}  # the most phases that a wait has seen
        self.bulk: dict[Thread, _Bulk] = defaultdict(_Bulk)
        self.bulk_waits: Counter[int] = Counter()  # waits that had stores to wait for
        self.arrivals: Counter[tuple[int, ...]] = Counter()
        self.fenced: set[int] = set()  # wgmma.fence between accesses to registers and a wgmma
        self.loaded: dict[int, set[str]] = defaultdict(
            set
        )  # waited for by tcgen05.wait::ld, wgmma's wait
        self.made: dict[int, set[Barrier]] = defaultdict(set)  # by the line of its initialisation
        self.used: set[Barrier] = set()
        self.overwritten: Counter[str] = (
            Counter()
        )  # writes over a bulk store not known to have read
        self.unordered: Counter[str] = Counter()  # accesses that nothing orders, by the later one
        # tcgen05.fence::after behind an access by tcgen05 of another warp
        self.fences_behind_others: set[int] = set()
        # tcgen05.fence::after before an access by tcgen05 of the warp, ::before behind one
        self.fences_used: set[int] = set()
        # tcgen05.fence::after behind a wait for a phase on which another warp that accesses tensor
        # memory has arrived, or behind another barrier, since the warp's last such fence
        self.fences_for_others: set[int] = set()
        # who has waited for each phase, and who has arrived on it by a line
        self.passers: dict[Phase, set[int]] = defaultdict(set)
        self.arrivers: dict[int, dict[Phase, set[int]]] = defaultdict(lambda: defaultdict(set))
        # lines of a bar.warp.sync of some lanes, or behind a store to shared memory
        self.lanes_meet: set[int] = set()
        # accesses to global memory by warps that know of no griddepcontrol.wait
        self.uninformed: Counter[str] = Counter()
        # by turn and warp: for each wgmma, the first wait that tells of its end, by number
        self.wgmmas: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)


class _Recorder(Observer):
    """Writes a trace."""

    def __init__(self, machine: Machine, trace: Trace, facts: Facts) -> None:
        self.m, self.t, self.code = machine, trace, machine.program.code
        self.facts = facts
        trace.turn += 1
        self.pc = 0
        self.since: dict[int, set[str]] = {}  # registers named since a warp's last wgmma
        self.fences: dict[int, set[int]] = defaultdict(set)  # of a warp since then
        self.unwaited: dict[int, set[str]] = defaultdict(set)  # what tcgen05.ld loads
        self.passed: dict[int, int] = {}  # by warp: the phases that its last wait has seen
        self.groups: Counter[int] = Counter()  # of wgmma, committed by a warp
        self.waits: Counter[int] = Counter()  # for them
        self.pending: dict[int, list[int]] = defaultdict(list)  # the groups of a warp's wgmmas
        # by warp: the group and the registers of each wgmma that it has not waited for
        self.accumulates: dict[int, list[tuple[int, frozenset[str]]]] = defaultdict(list)
        self.tcgen05: set[int] = set()  # warps that have accessed tensor memory or issued an MMA
        self.accessing: set[int] = set()  # those that have since their last tcgen05.fence::before
        self.after: dict[int, set[int]] = defaultdict(set)  # fences before no tcgen05 access yet
        self.arrived: dict[Phase, set[int]] = defaultdict(set)  # by warps; ~warp: by its commit
        self.met: dict[int, set[int]] = defaultdict(
            set
        )  # warps of which one has waited, since then
        self.storing: set[int] = set()  # warps that have stored since their last barrier
        # stores, of a lane or of several that ask for the same, each with its number in the thread
        self.stores: list[list[tuple[Thread, int]]] = [[]]
        self.coming: dict[int, list[tuple[Thread, int]]] = {}  # those that a warp issues now
        # the last of them that read each byte of shared memory
        self.stored = np.zeros((machine.grid.num_ctas, machine.smem_bytes), np.int32)

    def watched_places(self) -> set[int]:
        return {pc for pc, ins in enumerate(self.code) if ins.op.startswith(_BULK)}

    def using_registers(self, batch: Any, pc: int) -> None:
        ins = self.code[pc]
        for warp in batch.idx.tolist():
            self.coming.pop(warp, None)
        if not ins.op.startswith(_BULK):
            return
        for row, lanes in enumerate(batch.active()):
            for lane in lanes.nonzero()[0].tolist():
                self._bulk((self.t.turn, int(batch.idx[row]), lane), ins)

    def _bulk(self, thread: Thread, ins: Instruction) -> None:
        of = self.t.bulk[thread]
        if "commit_group" in ins.op:
            of.commit()
        elif "wait_group" in ins.op:
            if of.wait(int(ins.text.rstrip(";").split()[-1]), ".read" in ins.op, ins.line):
                self.t.bulk_waits[ins.line] += 1
            self.facts.known[thread[1]].update((thread, store) for store in of.read)
        elif re.search(r"global\S*\.shared", ins.op):
            self.coming.setdefault(thread[1], []).append((thread, of.stores))
            of.store()

    def issued(self, ops: Any) -> None:
        for op in ops:
            store = len(self.stores)
            if op.is_store:
                self.stores.append(self.coming[op.warp])
            for place in (p for p in op.writes if isinstance(p, Span)):
                stored = self.stored[place.cta, place.low : place.high]
                self._written(stored, {op.warp}, op.instruction)
            for place in (p for p in op.reads if op.is_store and isinstance(p, Span)):
                self.stored[place.cta, place.low : place.high] = store

    def shared(self, at: Any, write: bool, ordinary: bool, ins: Instruction) -> None:
        if write:
            self.storing.update(at.warps.tolist())
            offsets = at.offset[:, None] + np.arange(at.width)
            self._written(self.stored[at.cta[:, None], offsets], set(at.warps.tolist()), ins)

    def _written(self, stored: np.ndarray, warps: set[int], ins: Instruction) -> None:
        for number in set(stored[stored > 0].tolist()):
            for thread, store in self.stores[number]:
                self.t.bulk[thread].reused.add(store)
            told = [w for w in warps if self.facts.known[w].issuperset(self.stores[number])]
            self.t.overwritten[ins.text] += len(warps) - len(told)

    def executing(self, batch: Any, pc: int) -> None:
        self.pc, ins = pc, self.code[pc]
        self.t.executed.add(ins.line)
        if ins.name == "bar":
            self._meet(batch, ins)
        if (ins.name == "bar" and "warp" not in ins.parts) or "cluster.wait" in ins.op:
            everyone = set(range(self.m.grid.num_warps))
            self.met.update(dict.fromkeys(batch.idx.tolist(), everyone))
        for warp in batch.idx.tolist():
            if ins.op.startswith("wgmma.mma"):
                self._wgmma(warp, ins)
            elif ins.op.startswith("wgmma.commit_group"):
                self.groups[warp] += 1
            elif ins.op.startswith("wgmma.fence"):
                self.fences[warp].add(ins.line)
            elif warp in self.since:
                self.since[warp] |= _named(ins)
            if ins.op.startswith("mov.") and self.unwaited[warp] & _named(ins):
                self.unwaited[warp] |= _named(ins)  # under another name
            if re.match(r"tcgen05\.(ld|st|mma|cp|shift)", ins.op):
                self.tcgen05.add(warp)
                self.accessing.add(warp)
                self.t.fences_used.update(self.after.pop(warp, set()))
            if ins.op.startswith("tcgen05.fence::before") and warp in self.accessing:
                self.t.fences_used.add(ins.line)
                self.accessing.discard(warp)
            if ins.op.startswith("tcgen05.fence::after"):
                self.after[warp].add(ins.line)
                met = self.met.pop(warp, set()) - {warp}
                if any(w < 0 or w in self.tcgen05 for w in met):
                    self.t.fences_for_others.add(ins.line)
                cluster = self.m.grid.first_cta
                if any(w != warp and cluster[w] == cluster[warp] for w in self.tcgen05):
                    self.t.fences_behind_others.add(ins.line)
                self.t.fence_phases[ins.line].add(self.passed.get(warp, -1))
            if ins.op.startswith("tcgen05.ld"):
                self.unwaited[warp] |= _in_braces(ins)
            elif ins.op.startswith("tcgen05.wait::ld"):
                self.t.loaded[ins.line] |= self.unwaited.pop(warp, set())

    def _meet(self, batch: Any, ins: Instruction) -> None:
        apart = batch.mask is not None and (self.m.live[batch.idx] & ~batch.mask).any()
        if apart or not self.storing.isdisjoint(batch.idx.tolist()):
            self.t.lanes_meet.add(ins.line)
        self.storing.difference_update(batch.idx.tolist())

    def _wgmma(self, warp: int, ins: Instruction) -> None:
        if warp not in self.since or self.since[warp] & _in_braces(ins):
            self.t.fenced |= self.fences[warp]
        self.since[warp], self.fences[warp] = set(), set()
        self.pending[warp].append(self.groups[warp] + 1)
        self.accumulates[warp].append((self.groups[warp] + 1, _in_braces(ins)))

    def waited(self, warps: Sequence[int], kind: Kind, numbers: Sequence[int]) -> None:
        if kind is not Kind.TENSOR:
            return
        for warp, number in zip(warps, numbers, strict=True):
            for _, registers in (a for a in self.accumulates[warp] if a[0] <= number):
                self.t.loaded[self.code[self.pc].line] |= registers
            self.accumulates[warp] = [a for a in self.accumulates[warp] if a[0] > number]
            self.waits[warp] += 1
            known = self.t.wgmmas[self.t.turn, warp]
            for which, group in enumerate(self.pending[warp]):
                if group <= number:
                    known.setdefault(which, self.waits[warp])

    def mbarrier_passed(self, barrier: Any, warp: int, lanes: Any, ins: Any) -> None:
        self.t.phases[self.code[self.pc].line].add(barrier.phases)
        self.passed[warp] = barrier.phases
        key = self.t.turn, barrier.cta, barrier.offset
        self.t.waited[key] = max(self.t.waited.get(key, 0), barrier.phases)
        self.t.passers[key, barrier.phases].add(warp)
        self.met[warp] |= self.arrived[key, barrier.phases]

    def mbarrier_used(self, barrier: Any, warp: int, ins: Instruction) -> None:
        self.t.used.add((self.t.turn, barrier.cta, barrier.offset))

    def mbarrier_made(self, barrier: Any, warp: int, lane: int, again: bool) -> None:
        self.t.made[self.code[self.pc].line].add((self.t.turn, barrier.cta, barrier.offset))
        self._fills(barrier, self.code[self.pc].line)

    def mbarrier_arrives(self, barrier: Any, warp: int, to_cluster: bool, ins: Instruction) -> None:
        key = self.t.turn, barrier.cta, barrier.offset
        self.t.arrivals[*key, warp, ins.line] += 1
        self.t.arrivers[ins.line][key, barrier.phases + 1].add(warp)
        self.arrived[key, barrier.phases + 1].add(warp)
        self._fills(barrier, ins.line)

    def mbarrier_arrives_late(self, barrier: Any, arrival: Any) -> None:
        self._fills(barrier, arrival.instruction.line)
        key = self.t.turn, barrier.cta, barrier.offset
        self.arrived[key, barrier.phases + 1].add(~arrival.warp)

    def _fills(self, barrier: Any, line: int) -> None:
        key = self.t.turn, barrier.cta, barrier.offset
        self.t.fills[line].add((key, barrier.phases + 1))


@cache
def names_of(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"%[a-z]+\d+", text))


def _named(ins: Instruction) -> frozenset[str]:
    return names_of(ins.text)


@cache
def _braces(text: str) -> frozenset[str]:
    return names_of(" ".join(re.findall(r"\{[^}]*\}", text)))


def _in_braces(ins: Instruction) -> frozenset[str]:
    """The registers of a wgmma's accumulator and of A."""
    return _braces(ins.text)


def trace(subject: Subject, kernel: Any, silent: int = 0) -> Trace:
    """What a run of the kernel, or of a mutant of it, does in the default order."""
    found, observers = Trace(silent), Checks.observers

    def with_recorder(self: Checks) -> list[Observer]:
        facts = Facts(self.m, found)
        return [*observers(self), facts, _Recorder(self.m, found, facts), Order(self.m, found)]

    with mock.patch.object(Checks, "observers", with_recorder):
        subject.launch(
            lambda *given: simulate(kernel, *given, raise_findings=False), subject.kernel
        )
    return found


@cache
def trace_of(subject: Subject) -> Trace:
    return trace(subject, subject.kernel)
