"""The start and the end of a CTA: its shared memory and mbarriers must be there for all accesses.

Another CTA of the cluster may not have started (CUDA C++ Programming Guide, Distributed Shared
Memory): whoever accesses its shared memory must be ordered after something that it has done, as by
a barrier of the cluster; for mbarriers see mbarrier_order. A CTA ends with its last thread.
Accesses of other CTAs of the cluster (PTX ISA 9.7.16.5, 9.7.13.4) and asynchronous operations on
its shared memory must come before that: some warp of the CTA must be ordered after each of them, by
the vector clocks, when that warp returns. So a missing wait is found whether or not the CTA ended
too early in the simulated order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.hazards.async_accesses import AsyncAccesses
from cutex.sim.hazards.async_reports import UNCOMMITTED
from cutex.sim.hazards.clocks import Clocks
from cutex.sim.hazards.mbarrier_order import MBarrierOrder
from cutex.sim.machine.events import LateArrival, Observer, SharedBytes
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine
    from cutex.sim.machine.phase import MBarrier


@dataclass
class RemoteUse:
    """The last use of a CTA's memory or mbarrier by an agent of another CTA."""

    count: int  # the agent's count at the use, see clocks
    phase: int  # the phase of the mbarrier used that completes after it; 0: no mbarrier
    what: str
    warp: int
    instruction: Instruction


class Lifetimes(Observer):
    """The resident CTAs that have ended, and the clocks of their warps at that time."""

    def __init__(
        self,
        machine: Machine,
        clocks: Clocks,
        mbarriers: MBarrierOrder,
        async_accesses: AsyncAccesses,
    ) -> None:
        self.m, self.clocks, self.mbarriers = machine, clocks, mbarriers
        self.async_accesses = async_accesses
        self.ended = np.zeros(machine.grid.num_ctas, bool)
        # the joined clocks of the warps that have returned, (5, slots), by CTA
        self.known: dict[int, np.ndarray] = {}
        self.uses: dict[int, dict[tuple[int, int], RemoteUse]] = {}  # by CTA; slot, barrier's slot

    def mbarrier_reached(self, barrier: MBarrier, warp: int, what: str, ins: Instruction) -> None:
        use = RemoteUse(self.clocks.now(warp), barrier.phases + 1, what, warp, ins)
        self._use(barrier.cta, int(self.clocks.slot[warp]), use, barrier)

    def mbarrier_arrives_late(self, barrier: MBarrier, arrival: LateArrival) -> None:
        if barrier.remote:
            warp, slot = arrival.warp, self.clocks.agent(arrival.kind, arrival.warp)
            number = int(self.mbarriers.late[arrival][0, slot])
            phase = barrier.phases + 1
            use = RemoteUse(number, phase, "the commit", warp, arrival.instruction)
            self._use(barrier.cta, slot, use, barrier)

    def _use(self, cta: int, slot: int, use: RemoteUse, barrier: MBarrier | None = None) -> None:
        """Record that an agent of another CTA uses shared memory, or an mbarrier, of ``cta``."""
        if self.ended[cta]:
            m = self.m
            m.findings.add(
                "exit",
                f"{use.what} of {m.grid.name_warp(use.warp)} reaches {m.grid.name_cta(cta)}, which "
                "has exited",
                use.instruction,
            )
        of = -1 if barrier is None else self.mbarriers.slot(barrier)
        self.uses.setdefault(cta, {})[slot, of] = use

    def shared(self, at: SharedBytes, write: bool, ordinary: bool, ins: Instruction) -> None:
        """Record accesses by lanes to the shared memory of other CTAs."""
        m, warps, cta = self.m, at.warps, at.cta
        if m.grid.cluster_size == 1:
            return
        remote = np.nonzero(cta != m.grid.warp_cta[warps])[0]
        if not len(remote):
            return
        what = "a store" if write else "a load"
        for warp, target in set(zip(warps[remote].tolist(), cta[remote].tolist(), strict=True)):
            self._check_started(warp, target, what, ins)
            use = RemoteUse(self.clocks.now(warp), 0, what, warp, ins)
            self._use(target, int(self.clocks.slot[warp]), use)

    def _check_started(self, warp: int, target: int, what: str, ins: Instruction) -> None:
        m = self.m
        first = int(m.grid.cta_rank[target]) * m.grid.warps_per_cta
        if not self.clocks.follows[warp, first : first + m.grid.warps_per_cta].any():
            m.findings.add(
                "start",
                f"{what} of {m.grid.name_warp(warp)} reaches {m.grid.name_cta(target)}, of which "
                "nothing that this warp has waited for says that it has started",
                ins,
                remedy="a barrier of the cluster before it",
            )

    def warps_left(self, warps: np.ndarray) -> None:
        """Record that warps have returned, and end the CTAs whose last warps they were."""
        m = self.m
        for warp in warps.tolist():
            cta, known = int(m.grid.warp_cta[warp]), self.clocks.rows[:, warp]
            self.known[cta] = self.clocks.join(self.known.get(cta), known.copy())
        for cta in np.unique(m.grid.warp_cta[warps]).tolist():
            if not m.live[cta :: m.grid.num_ctas].any():
                self._end(cta)

    def _end(self, cta: int) -> None:
        m = self.m
        self.ended[cta] = True
        known = np.zeros((len(self.clocks.rows), self.clocks.rows.shape[2]), np.int32)
        gone = self.known.pop(cta)
        known[:, : gone.shape[1]] = gone
        for op, did in self.async_accesses.unknown(cta, np.maximum(known[0], known[2])):
            on = m.mbarriers.name(*op.signal_on(cta)) if op.signals else ""
            m.findings.add(
                "exit",
                f"{m.grid.name_cta(cta)} returns, and its shared memory with it, which {op.what} "
                f"of {m.grid.name_warp(op.warp)} {did}: no thread of the CTA has waited for that"
                + (f"; it completes on {on}" if on else "")
                + (f"; {UNCOMMITTED}" if m.bulk_groups.uncommitted(op) else ""),
                op.instruction,
                remedy=f"a wait for the phase of {on}"
                if on
                else self.async_accesses.reports.completes(op),
            )
        for (slot, barrier), use in self.uses.pop(cta, {}).items():
            if known[0, slot] >= use.count:
                continue
            if barrier >= 0 and known[0, barrier] >= use.phase:
                continue
            relaxed = bool(known[2, slot] >= use.count)
            if relaxed and use.phase == 0:
                continue  # an access by lanes, which are at the barrier with what they loaded
            m.findings.add(
                "exit",
                f"{m.grid.name_cta(cta)} returns without having waited for {use.what} of "
                f"{m.grid.name_warp(use.warp)} in its shared memory"
                + (
                    ": only a barrier.cluster.arrive.relaxed is in between, which does not wait "
                    "for memory; an H100 faults once in some thousand launches"
                    if relaxed
                    else ""
                ),
                use.instruction,
                advisory=relaxed,
                remedy="a barrier of the cluster behind the access, before the CTA returns, as "
                "cluster_arrive() and cluster_wait()",
            )
