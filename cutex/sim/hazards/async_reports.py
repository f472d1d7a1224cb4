"""The reports of races with asynchronous accesses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutex.sim.hazards.clocks import Clocks
from cutex.sim.machine.operation import Engine, Footprint, Operation
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

_COMPLETES = {  # the wait that orders an access after an operation without an mbarrier
    Engine.TMA_STORE: "cp.async.bulk.wait_group by the thread that issued it",
    Engine.WGMMA: "wgmma.wait_group by its warps",
    Engine.TCGEN05_MMA: "tcgen05.commit to an mbarrier by the thread that issued it, and a wait",
    Engine.TCGEN05_CP: "tcgen05.commit to an mbarrier by the thread that issued it, and a wait",
}
_SILENT = "in whose phase no expect_tx has announced bytes, and "
UNCOMMITTED = "no cp.async.bulk.commit_group of its thread has come since, so no wait is for it"


class AsyncReports:
    """Composes the findings of races on the resident CTAs."""

    def __init__(self, machine: Machine, clocks: Clocks) -> None:
        self.m, self.clocks = machine, clocks

    def race(
        self,
        what: str,
        verb: str,
        warp: int,
        ins: Instruction,
        place: Footprint,
        other: Operation,
        did: str,
        advisory_reason: str,
    ) -> None:
        """Report a race; ``advisory_reason``: the reason why it is an advisory only, if it is."""
        m = self.m
        issued = f"issued by {m.grid.name_warp(other.warp)} at {other.instruction.where()}"
        message = f"{what} of {m.grid.name_warp(warp)} {verb} {place} "
        if advisory_reason:
            did = "wrote" if did == "write" else "read"
            message += f"which {other.what} {issued} {did}: {advisory_reason}"
        elif other.done:
            done = "wrote" if did == "write" else "read"
            message += (
                f"which {other.what} {issued} {done}: it is complete, but nothing that this warp "
                "has waited for says so"
            )
        else:
            doing = "written" if did == "write" else "read"
            message += f"while it is still being {doing} by {other.what} {issued}"
        if other.signals:
            message += f"; {self._last_wait(warp, other)}"
        elif m.bulk_groups.uncommitted(other):
            message += f"; {UNCOMMITTED}"
        elif m.warpgroups.uncommitted(other):
            message += "; no wgmma.commit_group has come since, so no wait is for it"
        m.findings.add(
            "race", message, ins, bool(advisory_reason), remedy=self._remedy(other, place.cta)
        )

    def _remedy(self, other: Operation, cta: int) -> str:
        """The wait that orders an access after an operation."""
        if other.signals:
            barrier = self.m.mbarriers.name(*other.signal_on(cta)).partition(" (init")[0]
            return f"a wait, by this warp or one that it waits for, for the phase of {barrier}"
        return f"{self.completes(other)}, then a barrier with this warp if it is another"

    def completes(self, op: Operation) -> str:
        """The wait that tells of the end of an operation without an mbarrier."""
        if self.m.bulk_groups.uncommitted(op):
            return "cp.async.bulk.commit_group and wait_group by the thread that issued it"
        return _COMPLETES.get(op.engine, "a wait for its group by the thread that issued it")

    def advisory_reason(self, before: Operation, slot: int, count: int, warp: int) -> str:
        """The reason why an access of ``warp`` after an operation, whose end is ``count`` of the
        agent in ``slot``, breaks only the letter of the ISA; "" if it is a race.

        To the PTX ISA (9.7.15.7.3) a wgmma is one operation of the warpgroup, whose end one warp
        may pass on, and NVIDIA's kernels rely on it; but its tensor cores are four.
        """
        clocks = self.clocks
        agents = ((clocks.agent(before.kind, w), number) for w, number in before.agents)
        if any(clocks.known[warp, agent] >= number for agent, number in agents):
            return (
                "what this warp has waited for says that it is complete for some of the four "
                "warps, not for all"
            )
        if clocks.follows[warp, slot] >= count:
            return "only a barrier.cluster.arrive.relaxed is in between, which releases no memory"
        return ""

    def _last_wait(self, warp: int, other: Operation) -> str:
        """The racing warp's last wait on the barrier on which the operation completes, as text."""
        m, barrier = self.m, other.signals[0]
        name = m.mbarriers.name(*barrier)
        failed = m.failed_wait[warp].get(barrier)
        if failed is not None:
            return (
                f"it completes on {name}; the {failed.name}.{failed.parts[1]} of this warp at "
                f"{failed.where()} returned false, and the warp went on"
            )
        seen, state = m.last_wait[warp].get(barrier), m.mbarriers.barriers.get(barrier)
        if seen is None:
            return f"it completes on {name}, on which this warp never waited"
        parity, phases, ins = seen
        loads = other.engine in (Engine.TMA_LOAD, Engine.DSMEM) and not other.done
        silent = loads and state is not None and not state.tx_expected
        return (
            f"it completes on {name}, {_SILENT if silent else ''}on which this warp last waited "
            f"with parity {parity} at "
            f"{ins.where()}: that passed after {phases} completed "
            f"phase{'s' if phases != 1 else ''}, {m.mbarriers.phases(*barrier)} are complete now"
        )
