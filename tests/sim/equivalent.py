"""Why a mutant of which nothing is told may be as right as the kernel: derived from what a run of
the kernel did, and of the mutant where that says more; "" where nothing here shows it.

Nothing of the simulator's checks is used, only the events of the machine.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any
from unittest import mock

import numpy as np
from knowledge import Facts, Order
from mutants import Site
from subjects import Subject

from cutex.sim import SimError, simulate
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

    def __init__(self) -> None:
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
        self.loaded: dict[int, set[str]] = defaultdict(set)  # waited for by a tcgen05.wait::ld
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

    def waited(self, warps: Sequence[int], kind: Kind, numbers: Sequence[int]) -> None:
        if kind is not Kind.TENSOR:
            return
        for warp, number in zip(warps, numbers, strict=True):
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
def _names(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"%[a-z]+\d+", text))


def _named(ins: Instruction) -> frozenset[str]:
    return _names(ins.text)


@cache
def _braces(text: str) -> frozenset[str]:
    return _names(" ".join(re.findall(r"\{[^}]*\}", text)))


def _in_braces(ins: Instruction) -> frozenset[str]:
    """The registers of a wgmma's accumulator and of A."""
    return _braces(ins.text)


def trace(subject: Subject, kernel: Any) -> Trace:
    """What a run of the kernel, or of a mutant of it, does in the default order."""
    found, observers = Trace(), Checks.observers

    def with_recorder(self: Checks) -> list[Observer]:
        facts = Facts(self.m, found)
        return [*observers(self), facts, _Recorder(self.m, found, facts), Order(self.m, found)]

    with mock.patch.object(Checks, "observers", with_recorder):
        subject.launch(
            lambda *given: simulate(kernel, *given, raise_findings=False), subject.kernel
        )
    return found


@cache
def _trace_of(subject: Subject) -> Trace:
    return trace(subject, subject.kernel)


# ---- reasons, by operator


def _not_executed(subject: Subject, site: Site) -> str:
    return "" if site.line in _trace_of(subject).executed else "no run comes here at this size"


def _first_phase(subject: Subject, site: Site) -> str:
    known = _trace_of(subject).phases[site.line] <= {0}
    return "it only waits for slots before their first use" if known else ""


def _never_waited_for(subject: Subject, site: Site) -> str:
    of = _trace_of(subject)
    waits = any(of.waited.get(b, -1) >= phase for b, phase in of.fills[site.line])
    return "" if waits else "nobody waits for the phases that it is for: their slots' last ones"


def _nobody_waits(subject: Subject, site: Site) -> str:
    of = _trace_of(subject)
    waited = any(of.waited.get(barrier) for barrier, _ in of.fills[site.line])
    return "" if waited else "nobody waits for the end of a phase of the barrier"


def _never_used(subject: Subject, site: Site) -> str:
    of = _trace_of(subject)
    used = not of.made[site.line] or of.made[site.line] & of.used
    return "" if used else "nothing uses the mbarrier in a run of this size"


def _informed(subject: Subject, site: Site) -> str:
    early = trace(subject, site.mutant).uninformed - _trace_of(subject).uninformed
    return "" if early else "who accesses global memory behind it knows of another warp's wait"


def _own_waits(subject: Subject, site: Site) -> str:
    of = _trace_of(subject)
    others = any(of.passers[phase] - who for phase, who in of.arrivers[site.line].items())
    return "" if others else "the warp that arrives is the only one that waits for it"


def _no_tcgen05(subject: Subject, site: Site) -> str:
    where = "before it" if "::before" in site.text else "behind it, but dealloc"
    used = site.line in _trace_of(subject).fences_used
    return "" if used else f"no access by tcgen05 of the warp comes {where}"


def _no_other_tcgen05(subject: Subject, site: Site) -> str:
    needed = site.line in _trace_of(subject).fences_behind_others
    ours = site.text.startswith("tcgen05.fence::after")
    return "no access by tcgen05 of another warp comes before it" if ours and not needed else ""


def _nothing_handed_over(subject: Subject, site: Site) -> str:
    needed = site.line in _trace_of(subject).fences_for_others
    ours = site.text.startswith("tcgen05.fence::after")
    why = "what it has waited for since its last such fence tells of no other warp's tensor memory"
    return why if ours and not needed else ""


_NOTHING = re.compile(r"prefetch|mov\b|add\b|cvta\b|shl\b|mad\b|cvt\b")


def _only_prefetches(subject: Subject, site: Site) -> str:
    """Of an elected lane, whose block of code is as short as that."""
    behind = [line.split("//")[0].strip() for line in subject.kernel.ptx.split("\n")[site.line :]]
    jump = next(i for i, text in enumerate(behind) if re.search(r"\bbra\b", text))
    to = behind[jump].rstrip(";").split()[-1]
    block = behind[jump + 1 : behind.index(f"{to}:")]
    code = [text for text in block if text and not text.startswith(".")]
    ours = code and all(_NOTHING.match(text) for text in code)
    return "the elected lane only prefetches" if ours else ""


def _arrival_not_waited_for(subject: Subject, site: Site) -> str:
    """Of an arrival whose address a mapa gives."""
    lines = subject.kernel.ptx.split("\n")
    to = site.text.split(maxsplit=1)[1].partition(",")[0]
    arrives = re.compile(rf"mbarrier\.arrive.*\[{re.escape(to)}[\]+]")
    at = next((n for n in range(site.line, len(lines)) if arrives.search(lines[n])), None)
    return "" if at is None else _never_waited_for(subject, site._replace(line=at + 1))


def _told_before(subject: Subject, site: Site) -> str:
    """As without the change, whoever writes memory that a bulk store reads knows that it has."""
    mine, other = _trace_of(subject), trace(subject, site.mutant)
    if other.overwritten - mine.overwritten:
        return ""
    for thread, before in mine.bulk.items():
        if other.bulk[thread].read.keys() != before.read.keys():
            return ""
    return "who writes the memory of each store knows that it has read it"


def _ordered_anyway(subject: Subject, site: Site) -> str:
    if "tcgen05" in subject.kernel.ptx:
        return ""
    mine, other = _trace_of(subject), trace(subject, site.mutant)
    if mine.unordered["global memory"] or other.unordered - mine.unordered:
        return ""
    bulk = other.overwritten - mine.overwritten
    return "" if bulk else "other barriers order all accesses that it orders"


def _whole_warps(subject: Subject, site: Site) -> str:
    needed = site.line in _trace_of(subject).lanes_meet
    return "" if needed else "whole warps come there, and have stored nothing since their last one"


def _same_waits(subject: Subject, site: Site) -> str:
    mine, other = _trace_of(subject).wgmmas, trace(subject, site.mutant).wgmmas
    return "each wgmma is known to be complete by the same wait" if mine == other else ""


def _behind_first_phase(subject: Subject, site: Site) -> str:
    first = _trace_of(subject).fence_phases[site.line] == {0}
    return "the wait before it is for a first use" if first else ""


def _no_store(subject: Subject, site: Site) -> str:
    idle = not _trace_of(subject).bulk_waits[site.line]
    return "the thread has no store to wait for here" if idle else ""


def _waited_for(subject: Subject, site: Site) -> str:
    """Each store is known by the same wait, or by a later one where nothing writes its memory
    again; and at the end of its thread to have read or written as without the change."""
    mine, other = _trace_of(subject).bulk, trace(subject, site.mutant).bulk
    for thread in mine.keys() | other.keys():
        a, b = mine[thread], other[thread]
        if a.read.keys() != b.read.keys() or a.written.keys() != b.written.keys():
            return ""
        if any(b.read.get(store) != a.read.get(store) for store in a.reused | b.reused):
            return ""
    return "each store is waited for before its memory is used again, or the thread ends"


def _same_arrivals(subject: Subject, site: Site) -> str:
    mine, other = _trace_of(subject).arrivals, trace(subject, site.mutant).arrivals
    # NOTE: lines are those of the kernel; only an operand differs
    same = mine == other and site.text.startswith("mapa")
    return "each warp arrives on the same barriers there, in another order" if same else ""


def _untouched(subject: Subject, site: Site) -> str:
    needed = site.line in _trace_of(subject).fenced
    return "" if needed else "nothing but wgmmas accesses their registers in between"


def _releases_anyway(subject: Subject, site: Site) -> str:
    behind = subject.kernel.ptx.split("\n")[site.line :]
    relaxed = any("barrier.cluster.arrive.relaxed" in line for line in behind)
    ours = site.text.startswith("fence.mbarrier_init")
    return "no relaxed cluster barrier needs it" if ours and not relaxed else ""


_HANDOVER = re.compile(r"\b(mbarrier|bar|barrier|fence|membar|tcgen05\.(commit|fence|dealloc))\.")


def _common(a: str, b: str) -> int:
    """How many characters they begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


def _unused(subject: Subject, site: Site) -> str:
    """What it waits for is neither used nor handed over by what it is moved behind."""
    old, new = subject.kernel.ptx, site.mutant.ptx
    low, high = _common(old, new), len(old) - _common(old[::-1], new[::-1])
    passed = re.sub(r"//[^\n]*|\.loc[^\n]*", "", old[low:high]).replace(site.text, "")
    loaded = _trace_of(subject).loaded[site.line]
    used = not loaded or loaded & _names(passed)
    if "wait::ld" not in site.text or _HANDOVER.search(passed) or used:
        return ""
    return "nothing that it is moved behind uses what was loaded"


Reason = Callable[[Subject, Site], str]
REASONS: dict[str, tuple[Reason, ...]] = {
    "an mbarrier's wait": (_first_phase,),
    "an mbarrier's arrival": (_never_waited_for,),
    "an mbarrier's arrival, earlier": (_never_waited_for, _own_waits),
    "an mbarrier's initialisation": (_never_used,),
    "an arrival less": (_never_used, _nobody_waits),
    "an arrival more": (_never_used, _nobody_waits),
    "a barrier of a warp": (_whole_warps,),
    "a named barrier": (_ordered_anyway,),
    "a named barrier only arrived at": (_ordered_anyway,),
    "a named barrier, earlier": (_ordered_anyway,),
    "a named barrier, later": (_ordered_anyway,),
    "a wait for the grid before": (_informed,),
    "a wait for the grid before, later": (_informed,),
    "a group of wgmma": (_same_waits,),
    "a group of wgmma, earlier": (_same_waits,),
    "a commit of tcgen05": (_never_waited_for,),
    "a commit to one CTA less": (_never_waited_for,),
    "a commit of tcgen05, earlier": (_never_waited_for,),
    "a fence of tcgen05": (
        _behind_first_phase, _no_tcgen05, _no_other_tcgen05, _nothing_handed_over
    ),
    "a fence of tcgen05, later": (_no_tcgen05, _no_other_tcgen05, _nothing_handed_over),
    "every lane elected": (_only_prefetches,),
    "a wait for bulk stores": (_no_store, _waited_for, _told_before),
    "a wait for one bulk store more": (_no_store, _waited_for, _told_before),
    "a wait for bulk stores, later": (_no_store, _waited_for, _told_before),
    "a group of bulk stores": (_waited_for, _told_before),
    "a group of bulk stores, earlier": (_waited_for, _told_before),
    "an arrival in another CTA": (_same_arrivals, _arrival_not_waited_for),
    "a fence of wgmma": (_untouched,),
    "a fence of wgmma, later": (_untouched,),
    "another fence": (_releases_anyway,),
    "a wait for tcgen05.ld or st, later": (_unused,),
}  # fmt: skip


def why(subject: Subject, site: Site) -> str:
    """Why the mutant is as right as the kernel; "" if that is not known."""
    for reason in (_not_executed, *REASONS.get(site.operator, ())):
        try:
            if found := reason(subject, site):
                return found
        except SimError:  # NOTE: a mutant's own run may end by one
            continue
    return ""
