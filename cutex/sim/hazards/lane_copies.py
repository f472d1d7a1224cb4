"""Lanes that come to a barrier with a cp.async for which only other lanes of their warp have
waited.

A wait for groups of cp.async is for the copies of the thread that executes it (PTX ISA
9.7.9.25.3.3), and so is what a barrier behind it makes of it. Warps execute the wait as one
instruction, so that it is one for all their copies in hardware: an advisory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cutex.sim.machine.events import Observer
from cutex.sim.machine.operation import Operation
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine
    from cutex.sim.machine.phase import MBarrier


class _Owed(NamedTuple):
    """A copy of a warp that some lanes have waited for. ``group``: (32,), each lane's, -1 where the
    lane has no part in it or has waited.
    """

    op: Operation
    group: np.ndarray


class LaneCopies(Observer):
    """The copies of each warp that a part of their lanes has waited for."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        self.owed: dict[int, list[_Owed]] = {}  # by warp

    def copies_waited(
        self,
        warp: int,
        lanes: np.ndarray,
        limit: np.ndarray,
        ops: Sequence[tuple[Operation, np.ndarray]],
    ) -> None:
        owed = [*self.owed.pop(warp, ()), *(_Owed(*of) for of in ops)]
        gone = ~self.m.live[warp]
        left = [
            o._replace(group=np.where(gone | (lanes & (o.group < limit)), -1, o.group))
            for o in owed
        ]
        if left := [o for o in left if (o.group >= 0).any()]:
            self.owed[warp] = left

    def named_arrives(self, key: tuple[int, int], warp: int, whole: bool, ins: Instruction) -> None:
        self._arrives(warp, ins)

    def cluster_arrives(self, which: int, warp: int, relaxed: bool, ins: Instruction) -> None:
        self._arrives(warp, ins)

    def mbarrier_arrives(
        self, barrier: MBarrier, warp: int, to_cluster: bool, ins: Instruction
    ) -> None:
        self._arrives(warp, ins)

    def _arrives(self, warp: int, ins: Instruction) -> None:
        for op, group in self.owed.pop(warp, ()):
            self.m.findings.add(
                "race",
                f"lane {int((group >= 0).argmax())} of {self.m.grid.name_warp(warp)} arrives, and "
                f"only other lanes have waited for the cp.async at PTX line "
                f"{op.instruction.line}, of which one copy is its own: by the letter, a wait is "
                "for the copies of its own thread",
                ins,
                advisory=True,
                remedy="cp.async.wait_group by each lane that copies",
            )
