"""Accesses to what is in flight: whoever touches what an operation reads or writes races with
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutex.sim.machine.operation import Operation, Place, Span, meet
from cutex.sim.ptx.parse import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine


class InFlight:
    """The operations in flight on each CTA's shared and tensor memory."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.at: dict[tuple[type, int], dict[int, Operation]] = {}

    def enter(self, op: Operation, reads: list[Place], writes: list[Place]) -> None:
        """``op`` reads and writes these places from here on; compares it with everything that it
        is not ordered with.
        """
        places = {(type(p), p.cta) for p in (*reads, *writes)}
        m = self.machine
        for write, mine in ((False, reads), (True, writes)):
            for p in mine:
                if isinstance(p, Span):
                    m.clocks.asynchronous(op.warp, p, write, op.what, op.instruction)
                else:
                    m.tmem.shadow.issue(op.warp, p, write, op.what, op.instruction)
        for place in places:
            for other in self.at.get(place, {}).values():
                if other.queue != op.queue:
                    self._compare(op, reads, writes, other)
        for place in places:
            self.at.setdefault(place, {})[op.number] = op

    def leave(self, op: Operation) -> None:
        for place in (*op.reads, *op.writes):
            self.at[type(place), place.cta].pop(op.number, None)

    def busy(self, kind: type, cta: int) -> bool:
        """Whether anything in flight is on the CTA's shared (Span) or tensor (Rectangle) memory."""
        return bool(self.at.get((kind, cta)))

    def _compare(
        self, op: Operation, reads: list[Place], writes: list[Place], other: Operation
    ) -> None:
        for kind, mine, theirs in (
            ("write", reads, other.writes),
            ("read", writes, other.reads),
            ("write", writes, other.writes),
        ):
            for a in mine:
                for b in theirs:
                    if meet(a, b):
                        verb = "reads" if mine is reads else "overwrites"
                        self._race(op.what, verb, op.warp, op.instruction, a, other, kind)
                        return

    def touch(
        self, place: Place, write: bool, what: str, warp: int, instruction: Instruction
    ) -> None:
        """A synchronous access by a warp: races with what is in flight on the same place."""
        for other in list(self.at.get((type(place), place.cta), {}).values()):
            for kind, theirs in (
                ("write", other.writes),
                *([("read", other.reads)] if write else []),
            ):
                if any(meet(place, b) for b in theirs):
                    self._race(
                        what,
                        "overwrites" if write else "reads",
                        warp,
                        instruction,
                        place,
                        other,
                        kind,
                    )
                    return

    def _race(
        self,
        what: str,
        verb: str,
        warp: int,
        ins: Instruction,
        place: Place,
        other: Operation,
        kind: str,
    ) -> None:
        m = self.machine
        if isinstance(place, Span):
            where = f"shared memory 0x{place.low:x}..0x{place.high:x}"
        else:
            where = f"tensor memory columns {place.low}..{place.high - 1}"
        doing = "being written by" if kind == "write" else "being read by"
        message = (
            f"{what} of {m.grid.name_warp(warp)} {verb} {where} while it is still {doing} "
            f"{other.what} issued by {m.grid.name_warp(other.warp)} at {other.instruction.where()}"
        )
        if other.signals is not None:
            message += f"; {self._last_wait(warp, other.signals)}"
        m.findings.add("race", message, ins)

    def _last_wait(self, warp: int, barrier: tuple[int, int]) -> str:
        """What the racing warp knows of the barrier on which the operation completes."""
        m = self.machine
        name = m.mbarriers.name(*barrier)
        seen = m.last_wait[warp].get(barrier)
        if seen is None:
            return f"it completes on {name}, on which this warp never waited"
        parity, phases, ins = seen
        return (
            f"it completes on {name}, on which this warp last waited with parity {parity} at "
            f"{ins.where()}: that passed after {phases} completed "
            f"phase{'s' if phases != 1 else ''}, {m.mbarriers.phases(*barrier)} are complete now"
        )
