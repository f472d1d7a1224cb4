"""The phase in which an arrival on an mbarrier counts.

An arrival counts in the phase that is current when it comes (PTX ISA 9.7.13.15.3). One that comes
in a later phase, and of which nothing says that it comes after the end of the phase before, may
count in that phase instead: it then completes in place of an arrival that was meant, and who waits
goes on too early. That does not depend on the order at hand: the row ``caused`` of the clocks must
include the end of the phase before, or all the arrivals in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.hazards.clocks import Clocks
from cutex.sim.hazards.mbarrier_order import MBarrierOrder
from cutex.sim.machine.events import LateArrival, Observer
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cutex.sim.machine.machine import Machine
    from cutex.sim.machine.operation import Operation
    from cutex.sim.machine.phase import MBarrier


@dataclass
class _Phase:
    """What has come in one phase."""

    arrivals: dict[int, int] = field(default_factory=dict)  # by slot: the last count
    last: Instruction | None = None
    opaque: bool = False  # bytes have come, too, of which only a wait tells
    caused: np.ndarray | None = None  # what came before the issue of the operations of its bytes


class MBarrierPhases(Observer):
    """The current and the last phase of all mbarriers."""

    def __init__(self, machine: Machine, clocks: Clocks, order: MBarrierOrder) -> None:
        self.m, self.clocks, self.order = machine, clocks, order
        self.now: dict[tuple[int, int], _Phase] = {}
        self.before: dict[tuple[int, int], _Phase] = {}
        self.issuers: dict[int, np.ndarray] = {}  # by operation: its issuer's row ``caused``

    def mbarrier_made(self, barrier: MBarrier, warp: int, lane: int, again: bool) -> None:
        self.now[barrier.cta, barrier.offset] = _Phase()

    def mbarrier_arrives(
        self, barrier: MBarrier, warp: int, to_cluster: bool, ins: Instruction
    ) -> None:
        row, slot = self.order.given[warp][4], int(self.clocks.slot[warp])
        self._arrive(barrier, row, slot, warp, ins)

    def mbarrier_arrives_late(self, barrier: MBarrier, arrival: LateArrival) -> None:
        warp, row = arrival.warp, self.order.late[arrival][4]
        slot = self.clocks.agent(arrival.kind, warp) if arrival.number else self.clocks.slot[warp]
        self._arrive(barrier, row, int(slot), warp, arrival.instruction)

    def _arrive(
        self, barrier: MBarrier, row: np.ndarray, slot: int, warp: int, ins: Instruction
    ) -> None:
        key = barrier.cta, barrier.offset
        if barrier.phases and row.item(self.order.slot(barrier)) < barrier.phases:
            self._check(barrier, self.before[key], row, warp, ins)
        phase = self.now[key]
        phase.arrivals[slot], phase.last = row.item(slot), ins

    def _check(
        self, barrier: MBarrier, before: _Phase, row: np.ndarray, warp: int, ins: Instruction
    ) -> None:
        if not before.opaque and all(row[s] >= count for s, count in before.arrivals.items()):
            return
        m, number = self.m, barrier.phases
        name = m.mbarriers.name(barrier.cta, barrier.offset).partition(" (init")[0]
        last = f", as the one at {before.last.where()}" if before.last else ""
        m.findings.add(
            "barrier",
            f"{m.grid.name_warp(warp)} arrives on {name} for its phase {number}, and nothing that "
            f"it has waited for says that phase {number - 1} is complete: it may count there, in "
            f"place of an arrival that is meant{last}",
            ins,
            remedy=f"a wait for phase {number - 1} of {name}, or for what comes after it, before "
            "this arrival; or an mbarrier for each who arrives",
        )

    def mbarrier_completed(self, barrier: MBarrier) -> None:
        key = barrier.cta, barrier.offset
        phase = self.before[key] = self.now[key]
        phase.opaque = bool(barrier.tx_expected or barrier.tx_arrived)
        self.now[key] = _Phase()

    def mbarrier_passed(
        self, barrier: MBarrier, warp: int, lanes: np.ndarray, ins: Instruction
    ) -> None:
        phase = self.before.get((barrier.cta, barrier.offset))
        if phase is not None and phase.caused is not None:
            mine = self.clocks.caused[warp, : len(phase.caused)]
            np.maximum(mine, phase.caused, out=mine)

    # -- bytes -------------------------------------------------------------------------------------

    def issued(self, ops: Sequence[Operation]) -> None:
        for op in ops:
            if op.signals and not op.agents:
                self.issuers[op.number] = self.clocks.caused[op.warp].copy()

    def completing(self, op: Operation) -> None:
        row = self.issuers.pop(op.number, None)
        if row is None:
            return
        for signal in op.signals:
            phase = self.now.get(signal)
            if phase is not None:
                phase.caused = row if phase.caused is None else _joined(phase.caused, row)


def _joined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    short, long = sorted((a, b), key=len)
    out = long.copy()
    np.maximum(out[: len(short)], short, out=out[: len(short)])
    return out
