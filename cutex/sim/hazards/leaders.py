"""Bulk stores of one lane that an elect.sync chooses and their groups of a lane by its number, or
the reverse: groups are of the thread that issued, and which lane is elected is not defined (PTX ISA
9.7.9.25.4, 9.7.13.14).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cutex.sim.machine.events import Observer
from cutex.sim.ptx.elections import leader_places
from cutex.sim.ptx.once import once
from cutex.sim.ptx.program import Instruction, Program

if TYPE_CHECKING:
    from cutex.sim.machine.batch import Batch
    from cutex.sim.machine.machine import Machine

WAIT, COMMIT = "cp.async.bulk.wait_group", "cp.async.bulk.commit_group"


class _Step(NamedTuple):
    """A step of one lane of a warp on its bulk stores."""

    lane: int
    elected: bool
    instruction: Instruction


@once
def places_of_groups(program: Program) -> frozenset[int]:
    """The bulk stores of a program, their commits and waits; none if all are of elected lanes, or
    none is.
    """
    names = (WAIT, COMMIT)
    places = {
        pc
        for pc, ins in enumerate(program.code)
        if ins.op.startswith(names) or "bulk_group" in ins.parts
    }
    if not places or not any(ins.name == "elect" for ins in program.code):
        return frozenset()
    elected = places & leader_places(program)
    return frozenset(places if elected and elected != places else ())


class Leaders(Observer):
    """The last step of each warp whose lanes were one."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        self.places = places_of_groups(machine.program)
        self.last: dict[int, _Step] = {}

    def watched_places(self) -> set[int]:
        return set(self.places)

    def using_registers(self, b: Batch, pc: int) -> None:
        if pc not in self.places:
            return
        ins, active = self.m.program.code[pc], b.active()
        elected = pc in leader_places(self.m.program)
        for row in np.flatnonzero(active.sum(1) == 1).tolist():
            step = _Step(int(active[row].argmax()), elected, ins)
            warp = int(b.idx[row])
            before = self.last.get(warp)
            if before is not None and before.lane == step.lane and before.elected != elected:
                self._tell(warp, before, step)
            self.last[warp] = step

    def _tell(self, warp: int, before: _Step, step: _Step) -> None:
        by = {True: "which an elect.sync has chosen", False: "by its number"}
        self.m.findings.add(
            "elect",
            f"{self.m.grid.name_warp(warp)} executes {step.instruction.op} with lane {step.lane}, "
            f"{by[step.elected]}, and {before.instruction.where()} with that lane, "
            f"{by[before.elected]}: which lane is elected is not defined, and groups of bulk "
            "stores are of the thread that issues them",
            step.instruction,
            advisory=True,
            remedy="one elect.sync for the stores, their commit and their wait, or one lane's "
            "number for all",
        )
