"""Bytes that come on an mbarrier and were not announced for its phase.

A phase completes when its arrivals are all there and as many bytes have come as were announced
(PTX ISA 9.7.13.15.5). If fewer are announced than the copies issued for the phase bring, it
completes while some of them are under way, and whoever waits for it reads what they still write:
races at places that have done nothing wrong. The cause is the announcement.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cutex.sim.machine.events import Observer
from cutex.sim.machine.operation import Barrier, Operation
from cutex.sim.reports import BYTES

if TYPE_CHECKING:
    from cutex.sim.machine.core import Core
    from cutex.sim.machine.mbarrier import MBarriers
    from cutex.sim.machine.phase import MBarrier


class ByteCounts(Observer):
    """The copies issued for the phase at hand of each mbarrier."""

    def __init__(self, core: Core, mbarriers: MBarriers) -> None:
        self.m, self.mbarriers = core, mbarriers
        self.issued_for: dict[Barrier, list[Operation]] = defaultdict(list)

    def issued(self, ops: Sequence[Operation]) -> None:
        for op in ops:
            for barrier in op.signals:
                self.issued_for[barrier].append(op)

    def mbarrier_completed(self, barrier: MBarrier) -> None:
        ops = self.issued_for.pop((barrier.cta, barrier.offset), None)
        # NOTE: the last operation, whose bytes complete the phase, is done as well
        if ops and (late := [op for op in ops if not op.done]):
            self._report(barrier, ops, late[0])

    def _report(self, barrier: MBarrier, ops: list[Operation], late: Operation) -> None:
        announced = barrier.announced or late.instruction
        issued = sum(op.bytes // max(1, len(op.signals)) for op in ops)
        came = barrier.tx_expected
        name = self.mbarriers.name(barrier.cta, barrier.offset)
        self.m.findings.add(
            BYTES,
            f"phase {barrier.phases - 1} of {name} is complete with the {came} bytes that were "
            f"announced for it, while {len(ops)} copies of {issued} bytes were issued on it: "
            f"{late.what} issued by {self.m.grid.name_warp(late.warp)} at "
            f"{late.instruction.where()} is still under way, and nobody waits for its bytes",
            announced,
            remedy=f"an expect_tx of all {issued} bytes that come in one phase",
        )
