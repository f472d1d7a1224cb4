"""The order that mbarriers establish, and that of their initialisation.

An arrival releases the clock of its warp into the phase, a wait that passes acquires those of the
last completed phase (PTX ISA 9.7.13.15). An mbarrier's slot in the vector clocks counts its phases.
A relaxed arrival releases only what a fence of its warp before it has, and a relaxed wait acquires
at the next fence (9.7.13.15.13, 9.7.13.15.16); both order when things happen.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from cutex.sim.hazards.clocks import Clocks
from cutex.sim.machine.events import LateArrival, Observer
from cutex.sim.ptx.once import once
from cutex.sim.ptx.program import Instruction, Program

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine
    from cutex.sim.machine.phase import MBarrier


_TO_CLUSTER = re.compile(r"\.(acquire|relaxed)\.(cluster|gpu|sys)")


@dataclass
class _Known:
    """The clocks of one mbarrier."""

    slot: int
    warp: int  # the thread that initialised it, and its warp's count at that
    lane: int
    count: int
    fenced: int | None = None  # the count at which that thread executed fence.mbarrier_init
    known_to: set[int] = field(default_factory=set)  # warps ordered after its initialisation
    given: np.ndarray | None = None  # the clock that this phase's arrivals release
    released: np.ndarray | None = None  # the clock of the last completed phase


@once
def _has_relaxed(program: Program) -> bool:
    """Whether any arrival or wait is relaxed."""
    return any(ins.name == "mbarrier" and "relaxed" in ins.parts for ins in program.code)


@once
def _stores_remotely(program: Program) -> bool:
    """Whether any ordinary store is to shared memory of the cluster."""
    return any(ins.name == "st" and "cluster" in ins.parts for ins in program.code)


class MBarrierOrder(Observer):
    """The clocks of the mbarriers of all resident CTAs."""

    def __init__(self, machine: Machine, clocks: Clocks) -> None:
        self.m, self.clocks = machine, clocks
        self.barriers: dict[tuple[int, int], _Known] = {}
        self.given: dict[int, np.ndarray] = {}  # by warp: what its arrivals at hand release
        self.late: WeakKeyDictionary[LateArrival, np.ndarray] = WeakKeyDictionary()
        self.relaxed = _has_relaxed(machine.program)
        self.remote = _stores_remotely(machine.program)
        self.at_fence: dict[int, np.ndarray] = {}  # by warp: the clock that its last fence released
        self.observed: dict[int, list[tuple[_Known, int, np.ndarray | None]]] = {}

    def slot(self, barrier: MBarrier) -> int:
        """Its slot in the vector clocks."""
        return self.barriers[barrier.cta, barrier.offset].slot

    # -- initialisation ----------------------------------------------------------------------------

    def mbarrier_made(self, barrier: MBarrier, warp: int, lane: int, again: bool) -> None:
        slot = self.clocks.barrier_slot(barrier.cta, barrier.offset, again)
        known = _Known(slot, warp, lane, self.clocks.now(warp))
        self.barriers[barrier.cta, barrier.offset] = known

    def mbarrier_init_fenced(self, warp: int, lanes: np.ndarray) -> None:
        now = self.clocks.now(warp)
        for known in self.barriers.values():
            if known.warp == warp and lanes[known.lane]:
                known.fenced = known.fenced or now

    def mbarrier_used(self, barrier: MBarrier, warp: int, ins: Instruction) -> None:
        """Report a race unless its initialisation is ordered before (9.7.13.15.1), which needs a
        barrier in between; across CTAs, one that releases it to the cluster. No fence of the async
        proxy: copies and commits use their barriers through the generic one (9.7.9.25.4.1).
        """
        known = self.barriers[barrier.cta, barrier.offset]
        if warp not in known.known_to:
            if not self._knows(warp, known):
                self._unordered(barrier, known, warp, ins)
            known.known_to.add(warp)

    def _knows(self, warp: int, known: _Known) -> bool:
        slot = self.clocks.slot[known.warp]
        if known.warp == warp or self.clocks.known[warp, slot] >= known.count:
            return True
        return known.fenced is not None and self.clocks.follows[warp, slot] >= known.fenced

    def _unordered(self, barrier: MBarrier, known: _Known, warp: int, ins: Instruction) -> None:
        m = self.m
        why = "no barrier orders the two"
        if self.clocks.follows[warp, self.clocks.slot[known.warp]] >= known.count:
            why = (
                "barrier.cluster.arrive.relaxed does not release it without a "
                "fence.mbarrier_init.release.cluster of that thread before it"
            )
        m.findings.add(
            "race",
            f"{m.grid.name_warp(warp)} uses {m.mbarriers.name(barrier.cta, barrier.offset)}, which "
            f"{m.grid.name_warp(known.warp)} lane {known.lane} initialised: {why}",
            ins,
            remedy="sync_threads() behind mbarrier_init, or a barrier of the cluster for its CTAs",
        )

    # -- phases ------------------------------------------------------------------------------------

    def arriving(self, warps: np.ndarray, whole: np.ndarray) -> None:
        self.given = self.clocks.give_each(warps, whole)

    def mbarrier_arrives(
        self,
        barrier: MBarrier,
        warp: int,
        to_cluster: bool,
        ins: Instruction,
    ) -> None:
        given = self.given[warp]
        if "relaxed" in ins.parts:
            given = self._relaxed(given, warp)
        if not to_cluster and barrier.cta != self.m.grid.cta_of(warp):
            given = given.copy()
            given[3, : self.clocks.warps] = 0
        self._give(barrier, given)

    def arrives_late(self, arrival: LateArrival) -> None:
        given = self.clocks.give(arrival.warp)
        if arrival.number:
            slot = self.clocks.agent(arrival.kind, arrival.warp)
            self.clocks.release(given, slot, arrival.number)
        self.late[arrival] = given

    def mbarrier_arrives_late(self, barrier: MBarrier, arrival: LateArrival) -> None:
        self._give(barrier, self.late[arrival])

    def _give(self, barrier: MBarrier, given: np.ndarray) -> None:
        known = self.barriers[barrier.cta, barrier.offset]
        known.given = given if known.given is None else self.clocks.join(known.given, given)

    def mbarrier_completed(self, barrier: MBarrier) -> None:
        known = self.barriers[barrier.cta, barrier.offset]
        known.released, known.given = known.given, None

    def mbarrier_passed(
        self, barrier: MBarrier, warp: int, lanes: np.ndarray, ins: Instruction
    ) -> None:
        """Order the warp after the phase's arrivals, and after the operations that the phases
        waited for.
        """
        known = self.barriers[barrier.cta, barrier.offset]
        if "relaxed" in ins.parts:
            self._follow(known, barrier.phases, warp)
            return
        released = known.released
        if self.remote and released is not None and not _TO_CLUSTER.search(ins.op):
            released = self._within_cta(released, warp)
        self.clocks.take(warp, released)
        self.clocks.learn(warp, known.slot, barrier.phases)

    def _within_cta(self, released: np.ndarray, warp: int) -> np.ndarray:
        """The part of a clock that a wait with the scope of its CTA acquires by the letter: not
        what warps of other CTAs have stored (8.5).
        """
        out, own = released.copy(), self.clocks.of_cta(warp)
        mine = out[3, own].copy()
        out[3, : self.clocks.warps] = 0
        out[3, own] = mine
        return out

    # -- relaxed ones ------------------------------------------------------------------------------

    def fenced(self, warps: np.ndarray, lanes: np.ndarray, releases: bool, scope: str) -> None:
        """NOTE: the clocks have to count the fence after this."""
        if not self.relaxed:
            return
        for warp in warps.tolist():
            for known, phases, released in self.observed.pop(warp, ()):
                self.clocks.take(warp, released)
                self.clocks.learn(warp, known.slot, phases)
            if releases:
                self.at_fence[warp] = self.clocks.rows[:, warp].copy()

    def _relaxed(self, given: np.ndarray, warp: int) -> np.ndarray:
        """The part of a clock that a relaxed arrival releases."""
        relaxed, fenced = given.copy(), self.at_fence.get(warp)
        for row in (0, 1, 3):
            relaxed[row] = 0
            if fenced is not None:
                relaxed[row, : fenced.shape[1]] = fenced[row]
        return relaxed

    def _follow(self, known: _Known, phases: int, warp: int) -> None:
        """Let the warp run after a phase, and acquire it at its next fence."""
        for row in (self.clocks.follows, self.clocks.caused):
            row[warp, known.slot] = max(row[warp, known.slot], phases)
            if known.released is not None:
                mine = row[warp, : known.released.shape[1]]
                np.maximum(mine, known.released[2], out=mine)
        self.observed.setdefault(warp, []).append((known, phases, known.released))
