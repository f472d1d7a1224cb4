"""The order that named barriers and the barriers of clusters establish (PTX ISA 9.7.13.1,
9.7.13.4).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.hazards.clocks import Clocks
from cutex.sim.machine.barriers import arrived_again
from cutex.sim.machine.events import Observer
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine


@dataclass
class _Known:
    """The clocks of one barrier."""

    given: np.ndarray | None = None  # the clock that the arrived warps release
    released: np.ndarray | None = None  # the clock of the last completed phase
    # warps that have arrived in this phase with all lanes, with their counts; those of the phase
    # before; and the warps whose last arrival was a bar.arrive
    present: dict[int, int] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)
    arrived_only: set[int] = field(default_factory=set)

    def complete(self) -> None:
        self.before, self.present = self.present, {}
        self.released, self.given = self.given, None


class BarrierOrder(Observer):
    """The clocks of the named barriers of all resident CTAs, and of the clusters' barriers."""

    def __init__(self, machine: Machine, clocks: Clocks) -> None:
        self.m, self.clocks = machine, clocks
        self.named: dict[tuple[int, int], _Known] = defaultdict(_Known)
        self.clusters: dict[int, _Known] = defaultdict(_Known)
        self.waiting: set[int] = set()  # warps that have not waited since their cluster arrival

    def named_arrives(self, key: tuple[int, int], warp: int, whole: bool, ins: Instruction) -> None:
        barrier = self.named[key]
        if whole:
            if warp not in barrier.present:
                self._check_phase(barrier, warp, key[1], ins)
            barrier.present[warp] = self.clocks.now(warp)
            (set.add if "arrive" in ins.parts else set.discard)(barrier.arrived_only, warp)
        barrier.given = self.clocks.join(barrier.given, self.clocks.give(warp))

    def _check_phase(self, barrier: _Known, warp: int, number: int, ins: Instruction) -> None:
        """Report a warp that arrives and is not ordered after the completion of the phase before:
        it may count in that phase, and not in this one (9.7.13.1). A warp may count twice in one
        phase where that is intended: in FlashAttention-4 one arrives as all do, then waits as the
        one that stores.
        """
        known, slot, name = self.clocks.known[warp], self.clocks.slot, self.m.grid.name_warp
        peer = next((p for p, n in barrier.before.items() if known[slot[p]] < n), None)
        if peer is None:
            return
        if warp in barrier.arrived_only:
            message = (
                f"{name(warp)} arrives at named barrier {number} again, and nothing that it has "
                "waited for says that the barrier has completed: its own last arrival was a "
                "bar.arrive, which does not wait"
            )
            remedy = (
                "bar.sync at the arrival before, or a wait for another barrier behind which all "
                "have arrived at this one"
            )
        else:
            message = (
                f"{name(warp)} arrives at named barrier {number}, and nothing that it has waited "
                f"for says that the phase before is complete, at which {name(peer)} arrived: it "
                "may count there, in place of a warp that is meant"
            )
            remedy = "a barrier of its own for each group of warps, or one of all in between"
        self.m.findings.add("barrier", message, ins, remedy=remedy)

    def named_completed(self, key: tuple[int, int]) -> None:
        self.named[key].complete()

    def named_passed(self, key: tuple[int, int], warp: int) -> None:
        self.clocks.take(warp, self.named[key].released)

    # -- clusters ----------------------------------------------------------------------------------

    def cluster_arrives(self, which: int, warp: int, relaxed: bool, ins: Instruction) -> None:
        """Raises BarrierMisuse for a warp that has not waited since its last arrival, and is not
        ordered after that phase by other barriers.
        """
        barrier = self.clusters[which]
        if warp in self.waiting and not self._knows(warp, barrier.released):
            raise arrived_again(self.m.grid.name_warp(warp), ins)
        self.waiting.add(warp)
        barrier.given = self.clocks.join(barrier.given, self.clocks.give(warp, relaxed))

    def _knows(self, warp: int, released: np.ndarray | None) -> bool:
        if released is None:
            return False
        return bool((released[2] <= self.clocks.follows[warp, : released.shape[1]]).all())

    def cluster_completed(self, which: int) -> None:
        self.clusters[which].complete()

    def cluster_passed(self, which: int, warp: int) -> None:
        self.waiting.discard(warp)
        self.clocks.take(warp, self.clusters[which].released)
