"""Asynchronous accesses to shared and tensor memory, and the warps that are ordered after them.

A TMA copy, a tensor-core operation or a bulk store accesses memory at some moment between its issue
and its completion, which releases to the mbarrier, the commit or the group that it belongs to. A
later access to the same memory must have acquired that completion, through any chain of barriers
(PTX ISA 8.9.1 and 9.7.13.15.5 for mbarriers; 9.7.15.7.3 for wgmma, 9.7.16.6.2 for tcgen05,
9.7.9.25.4.6 for bulk groups); otherwise it races, whether the operation is still in flight or
happens to be complete.

A `Track` is one place that operations access, in all CTAs: the kernels of a grid have the same
places, so the overlap of two places is computed once. It keeps the last write, and the last read of
each agent, with counts of the vector clocks (see clocks).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cutex.sim.hazards.async_reports import AsyncReports
from cutex.sim.hazards.clocks import NEVER, Clocks
from cutex.sim.hazards.mbarrier_order import MBarrierOrder
from cutex.sim.hazards.smem_shadow import SmemShadow
from cutex.sim.hazards.tmem_shadow import PEERS, TmemShadow
from cutex.sim.machine.events import Observer, SharedBytes
from cutex.sim.machine.operation import Engine, Footprint, Operation, Rectangle, Span
from cutex.sim.ptx.program import Instruction
from cutex.sim.reports import UNORDERED

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine


class Last:
    """The last access of a kind in each CTA: the agent's slot, its count, and the operation."""

    __slots__ = ("count", "operation", "slot")

    def __init__(self, num_ctas: int) -> None:
        self.slot = np.zeros(num_ctas, np.int32)
        self.count = np.zeros(num_ctas, np.int32)  # 0: none
        self.operation = np.full(num_ctas, None, object)

    def set(self, cta: Any, slot: int, count: Any, op: Any) -> None:
        """Set the last access of one CTA, or of several, with an array of each value but the
        slot."""
        self.slot[cta], self.count[cta], self.operation[cta] = slot, count, op


class Track:
    """One place, in all CTAs."""

    def __init__(self, place: Footprint, num_ctas: int) -> None:
        self.place = place
        self.write = Last(num_ctas)
        self.reads: dict[int, Last] = {}  # by slot
        self.lasts = [(self.write, "write")]  # and these, each with its kind
        self.meets: list[Track] = []  # the tracks that overlap it, itself included
        self.covers: list[Track] = []  # the tracks inside of it, itself included


class AsyncAccesses(Observer):
    """The asynchronous accesses of all resident CTAs."""

    def __init__(
        self,
        machine: Machine,
        clocks: Clocks,
        mbarriers: MBarrierOrder,
        smem_shadow: SmemShadow,
        tmem_shadow: TmemShadow | None,
    ) -> None:
        """``tmem_shadow``: None for a program without tensor memory."""
        self.m, self.clocks, self.mbarriers = machine, clocks, mbarriers
        self.smem_shadow, self.tmem_shadow = smem_shadow, tmem_shadow
        self.reports = AsyncReports(machine, clocks)
        self.tracks: dict[Hashable, Track] = {}
        self.spans: list[Track] = []  # in shared memory
        self._bounds: tuple[np.ndarray, np.ndarray] | None = None
        # by operation of tcgen05: the count of the warp that issued it
        self.issues: dict[int, int] = {}
        code = machine.program.code
        self.sends = any(i.name in ("st", "red") and "async" in i.parts for i in code)

    def _track(self, place: Footprint) -> Track:
        track = self.tracks.get(place.key)
        if track is None:
            track = Track(place.anywhere(), self.m.grid.num_ctas)
            for other in [*self.tracks.values(), track]:
                if track.place.meets(other.place):
                    track.meets.append(other)
                    if track.place.covers(other.place):
                        track.covers.append(other)
                    if other is not track:
                        other.meets.append(track)
                        if other.place.covers(track.place):
                            other.covers.append(track)
            self.tracks[place.key] = track
            if isinstance(place, Span):
                self.spans.append(track)
                self._bounds = None
        return track

    def clusters_ended(self) -> None:
        """Break the reference cycles between tracks, for what they keep to be released at once."""
        for track in self.tracks.values():
            track.meets.clear()
            track.covers.clear()

    # -- operations --------------------------------------------------------------------------------

    def issued(self, ops: Sequence[Operation]) -> None:
        """Record and check operations in flight: together, if they are alike."""
        for op in ops:
            if op.engine in (Engine.TCGEN05_MMA, Engine.TCGEN05_CP):
                self.issues[op.number] = self.clocks.now(op.warp)
        if len(ops) == 1:
            self._issue(ops[0])
        else:
            self._issue_alike(ops)

    def _issue(self, op: Operation) -> None:
        """Record that ``op`` accesses its places from here on, and check that it is ordered after
        earlier accesses.
        """
        shadow = self.smem_shadow
        tracks: list[Track] = []
        for write, places in ((False, op.reads), (True, op.writes)):
            for place in places:
                issuers = op.issuers if place.part is None else [op.issuers[place.part]]
                if not isinstance(place, Span):
                    if self.tmem_shadow is not None:
                        self.tmem_shadow.issue(op.warp, place, write, op.what, op.instruction)
                elif shadow.touched(place):
                    for warp in issuers:
                        shadow.asynchronous(warp, place, write, op)
                tracks.append(self._track(place))
                self._check(op, tracks[-1], place, write, issuers)
        agents = self._slots(op)
        for place, track in zip(op.reads, tracks, strict=False):
            for slot, count in self._agents(op, place, agents):
                self._reads(track, slot).set(place.cta, slot, count, op)
        for place, track in zip(op.writes, tracks[len(op.reads) :], strict=True):
            self._forget(track, place.cta)
            ((slot, count),) = self._agents(op, place, agents)
            track.write.set(place.cta, slot, count, op)

    def _issue_alike(self, ops: Sequence[Operation]) -> None:
        """As `_issue`, for operations of one instruction in different clusters, with the same
        places in each: checked together, or one by one where a race is possible.
        """
        first, columns = ops[0], list(zip(*(op.reads + op.writes for op in ops), strict=True))
        issuers = np.array([op.issuers for op in ops])
        of_warps = self._of_warps(ops) if first.agents else None
        accesses: list[tuple[bool, Track, np.ndarray, np.ndarray]] = []
        for i, places in enumerate(columns):
            place, write = places[0], i >= len(first.reads)
            track, ctas = self._track(place), np.array([p.cta for p in places])
            by = issuers if place.part is None else issuers[:, place.part, None]
            if of_warps is None:
                agents = np.array([self._agents(*x, []) for x in zip(ops, places, strict=True)])
            else:
                agents = of_warps if place.part is None else of_warps[:, place.part, None]
            same = bool((agents[..., 0] == agents[0, :, 0]).all())  # slots, of other clusters
            if not same or not self._come_after(track, place, write, ctas, by):
                for op in ops:
                    self._issue(op)
                return
            accesses.append((write, track, ctas, agents))
        operations = np.array(ops, object)
        for write, track, ctas, agents in accesses:
            if write:
                self._forget(track, ctas)
            for slot, counts in zip(agents[0, :, 0].tolist(), agents[..., 1].T, strict=True):
                last = track.write if write else self._reads(track, slot)
                last.set(ctas, slot, counts, operations)

    def _come_after(
        self, track: Track, place: Footprint, write: bool, ctas: np.ndarray, issuers: np.ndarray
    ) -> bool:
        """Whether accesses to a place in ``ctas`` (n,), by warps (n, those of an operation), are
        certainly ordered after all others there.
        """
        if not isinstance(place, Span) or self.smem_shadow.touched_any(place, ctas):
            return False
        for other in track.meets:
            for last, _ in self._lasts(other, write):
                count = last.count[ctas]
                if not np.count_nonzero(count):
                    continue
                known = self.clocks.known[issuers, last.slot[ctas, None]]
                if np.count_nonzero(count[:, None] > known):
                    return False
        return True

    def _reads(self, track: Track, slot: int) -> Last:
        if slot not in track.reads:
            last = track.reads[slot] = Last(self.m.grid.num_ctas)
            track.lasts.append((last, "read"))
        return track.reads[slot]

    def _check(
        self, op: Operation, track: Track, place: Footprint, write: bool, issuers: list[int]
    ) -> None:
        """Report a race unless all ``issuers`` are ordered after earlier accesses to the place."""
        cta, known = place.cta, self.clocks.known.item
        for other in track.meets:
            lasts = [other.write, *other.reads.values()] if write else [other.write]
            for last in lasts:
                count, slot = last.count.item(cta), last.slot.item(cta)
                for warp in issuers if count else ():
                    if count > known(warp, slot):
                        break
                else:
                    if count and self.sends and not write:
                        self._check_proxy(op, last, place, issuers[0])
                    continue
                before = last.operation[cta]
                assert before is not None
                if before.queue != op.queue:
                    verb = "overwrites" if write else "reads"
                    did = "write" if last is other.write else "read"
                    why = self.reports.advisory_reason(before, slot, count, op.warp)
                    if op.source is not None and op.source == before.source:
                        why = why or "both copy the same bytes to the same place"
                    self.reports.race(
                        op.what, verb, op.warp, op.instruction, place, before, did, why
                    )
                    if not why:
                        return
                elif op.warp != before.warp and before.number in self.issues:
                    self._check_issue(op, before, place)

    def _check_proxy(self, op: Operation, last: Last, place: Footprint, warp: int) -> None:
        """Tell of an operation of the async proxy that reads what st.async or red.async, which are
        of the generic one, have written, with no fence in between (9.7.9.25.1): as an advisory, as
        what cp.async has copied.
        """
        before, cta, slot = last.operation[place.cta], place.cta, last.slot[place.cta]
        if before is None or not before.generic or op.generic:
            return
        if self.clocks.visible[warp, slot] < last.count[cta]:
            self.m.findings.add(
                "proxy",
                f"{op.what} of {self.m.grid.name_warp(warp)} reads {place}, which {before.what} "
                f"wrote at PTX line {before.instruction.line}, with no fence.proxy.async in "
                "between",
                op.instruction,
                advisory=True,
            )

    def _check_issue(self, op: Operation, before: Operation, place: Footprint) -> None:
        """Report operations of tcgen05 by two threads whose issue nothing orders: what they do is
        in that order, and needs no wait (9.7.16.6.4.3).
        """
        m, by = self.m, self.clocks.slot[before.warp]
        if self.clocks.follows[op.warp, by] < self.issues[before.number]:
            m.findings.add(
                "race",
                f"{op.what} of {m.grid.name_warp(op.warp)} uses {place}, as does {before.what} "
                f"issued by {m.grid.name_warp(before.warp)} at {before.instruction.where()}: "
                + UNORDERED,
                op.instruction,
                remedy="one thread that issues both, or a barrier of both threads in between",
            )

    @staticmethod
    def _lasts(track: Track, write: bool) -> list[tuple[Last, str]]:
        """The earlier accesses that an access must be ordered after."""
        return track.lasts if write else track.lasts[:1]

    def _of_warps(self, ops: Sequence[Operation]) -> np.ndarray:
        """The slots and counts of the agents of each operation, (n, agents, 2)."""
        agents = np.array([op.agents for op in ops])  # warp, number
        agents[..., 0] = ops[0].kind * self.clocks.warps + self.clocks.slot[agents[..., 0]]
        return agents

    def completing(self, op: Operation) -> None:
        """Record the completion of ``op``: the number of its mbarrier's phase then identifies
        it."""
        if op.agents:
            return
        for write, places in ((False, op.reads), (True, op.writes)):
            for place in places:
                barrier = self.m.mbarriers.barriers.get(op.signal_on(place.cta))
                if barrier is None:
                    continue
                track = self._track(place)
                last = track.write if write else track.reads[self.mbarriers.slot(barrier)]
                if last.operation[place.cta] is op and last.count[place.cta]:
                    last.count[place.cta] = barrier.phases + 1

    def unknown(self, cta: int, known: np.ndarray) -> Iterator[tuple[Operation, str]]:
        """Yield the operations on the shared memory of ``cta`` that ``known`` (slots,) does not
        include, and the kind of their access.
        """
        for track in self.spans:
            for last, did in self._lasts(track, True):
                if last.count[cta] > known[last.slot[cta]]:
                    op = last.operation[cta]
                    assert op is not None
                    yield op, "writes" if did == "write" else "reads"

    def _slots(self, op: Operation) -> list[tuple[int, int]]:
        """The slots and counts of its agents."""
        return [(self.clocks.agent(op.kind, warp), number) for warp, number in op.agents]

    def _agents(
        self, op: Operation, place: Footprint, agents: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """The slots and counts that mark the end of its access to ``place``: of its ``agents``, or
        of its mbarrier."""
        if agents:
            return agents if place.part is None else [agents[place.part]]
        barrier = self.m.mbarriers.barriers[op.signal_on(place.cta)]
        return [(self.mbarriers.slot(barrier), NEVER)]

    # -- accesses by warps -------------------------------------------------------------------------

    def tmem_accessed(self, warp: int, place: Rectangle, write: bool, ins: Instruction) -> None:
        what = "tcgen05.st" if write else "tcgen05.ld"
        self._touch(place, write, what, warp, ins, self.clocks.usable[warp])

    def tmem_freeing(self, warp: int, place: Rectangle, own: bool, ins: Instruction) -> None:
        usable = np.maximum(self.clocks.usable[warp], self.clocks.ordered[warp])
        self._touch(place, True, "tcgen05.dealloc", warp, ins, usable, "" if own else PEERS)

    def _touch(
        self,
        place: Rectangle,
        write: bool,
        what: str,
        warp: int,
        ins: Instruction,
        usable: np.ndarray,
        advisory_reason: str = "",
    ) -> None:
        """Check an access by a warp to tensor memory; ``usable``: the counts that strictly precede
        it. ``advisory_reason``: the reason why a missing order is an advisory only, if it is.
        """
        if not self.tracks:
            return
        # NOTE: tcgen05's fences compose with what orders execution (9.7.16.6.3)
        known, cta = self.clocks.follows[warp], place.cta
        verb = "overwrites" if write else "reads"
        for other in self._track(place).meets:
            for last, did in self._lasts(other, write):
                before, slot, count = last.operation[cta], last.slot[cta], last.count[cta]
                if count > known[slot]:
                    assert before is not None
                    why = self.reports.advisory_reason(before, slot, count, warp)
                    why = why or (advisory_reason and f"{advisory_reason}, comes after that")
                    self.reports.race(what, verb, warp, ins, place, before, did, why)
                    return
                if count > usable[slot]:
                    assert before is not None
                    self.m.findings.add(
                        "race",
                        f"{what} of {self.m.grid.name_warp(warp)} {verb} {place} after "
                        f"{before.what} at {before.instruction.where()}: by the letter, a "
                        "tcgen05.fence::after_thread_sync is missing behind the wait",
                        ins,
                        advisory=True,
                        cause=before.instruction.line,
                    )

    def tmem_freed(self, place: Rectangle) -> None:
        """Drop the accesses to a place that is freed."""
        if self.tracks:
            self._forget(self._track(place), place.cta)

    @staticmethod
    def _forget(track: Track, cta: int | np.ndarray) -> None:
        for inner in track.covers:
            inner.write.count[cta] = 0
            for last in inner.reads.values():
                last.count[cta] = 0

    def copying(self, at: SharedBytes, op: Operation, ins: Instruction) -> None:
        self.shared(at, True, True, ins)

    def shared(self, at: SharedBytes, write: bool, ordinary: bool, ins: Instruction) -> None:
        """Check an access by lanes."""
        warps, _, cta, offset, width = at
        near = self._near(int(offset.min()), int(offset.max()) + width)
        if not near:
            return
        heads = np.flatnonzero(np.diff(warps, prepend=-1) | np.diff(cta, prepend=-1))
        first, by = cta[heads], warps[heads]
        for track in near:
            for last, did in self._lasts(track, write):
                known = self.clocks.known[by, last.slot[first]]
                if not (last.count[first] > known).any():
                    continue
                unknown = last.count[cta] > self.clocks.known[warps, last.slot[cta]]
                assert isinstance(track.place, Span)
                unknown &= track.place.holds(offset, width)
                if unknown.any():
                    k = int(unknown.argmax())
                    before = last.operation[int(cta[k])]
                    assert before is not None
                    place = Span(int(cta[k]), int(offset[k]), int(offset[k]) + width)
                    what, verb = ("a store", "overwrites") if write else ("a load", "reads")
                    slot, count = last.slot[cta[k]], last.count[cta[k]]
                    why = self.reports.advisory_reason(before, slot, count, int(warps[k]))
                    self.reports.race(what, verb, int(warps[k]), ins, place, before, did, why)
                    if not why:
                        return

    def _near(self, low: int, high: int) -> list[Track]:
        """The tracks of shared memory whose bounds overlap ``[low, high)``."""
        if self._bounds is None:
            bounds = [(t.place.low, t.place.high) for t in self.spans]
            lows, highs = np.array(bounds, np.int64).reshape(-1, 2).T
            self._bounds = lows, highs
        lows, highs = self._bounds
        return [self.spans[i] for i in np.nonzero((lows < high) & (highs > low))[0].tolist()]
