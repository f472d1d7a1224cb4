"""The tcgen05.ld and st of each warp, and those that each warp has waited for.

Both are asynchronous: stores are complete after ``tcgen05.wait::st``, loads after ``wait::ld`` (PTX
ISA 9.7.16.6.2.1.2, 9.7.16.8.5), or once an instruction has used the loaded value (see tmem_loads).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.hazards.clocks import Clocks
from cutex.sim.hazards.tmem_loads import watched
from cutex.sim.machine.events import Observer
from cutex.sim.machine.operation import Kind
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.batch import Batch
    from cutex.sim.machine.machine import Machine


class TmemAccesses(Observer):
    """Accesses of all resident warps to tensor memory."""

    def __init__(self, machine: Machine, clocks: Clocks) -> None:
        self.m, self.clocks = machine, clocks
        warps = machine.grid.num_warps
        self.begun = {Kind.LOAD: np.zeros(warps, int), Kind.STORE: np.zeros(warps, int)}
        self.done = {Kind.LOAD: np.zeros(warps, int), Kind.STORE: np.zeros(warps, int)}
        self.watched = watched(machine.program)
        # by warp and watched register: the number of the last load into it
        self.filled_by = np.zeros((warps, self.watched.columns), int)
        self.complete = np.zeros(warps, int)  # loads of each warp, from its first one on
        # by warp: watched loads that are not complete, with their PTX line; and later ones that
        # are, because their values were used
        self.lines: list[dict[int, int]] = [{} for _ in range(warps)]
        self.used: list[set[int]] = [set() for _ in range(warps)]
        self.in_flight = False  # whether any load is not complete

    def issue(self, kind: Kind, warp: int, ins: Instruction) -> int:
        """The number of a new ld or st of the warp."""
        self.begun[kind][warp] += 1
        number = int(self.begun[kind][warp])
        if ins.line in self.watched.loads:
            self.filled_by[warp, self.watched.loads[ins.line]] = number
            self.lines[warp][number] = ins.line
            self.in_flight = True
        return number

    def tmem_waited(self, kind: Kind, warps: np.ndarray) -> None:
        """A wait::ld or wait::st of these warps."""
        slots, counts = self._slots(kind, warps), self.begun[kind][warps]
        self.done[kind][warps] = counts
        for row in (self.clocks.known, self.clocks.follows, self.clocks.usable):
            row[warps, slots] = counts
        if kind is Kind.LOAD:
            self.complete[warps] = counts
        if kind is Kind.LOAD and self.in_flight:
            for warp in warps.tolist():
                self.lines[warp].clear()
                self.used[warp].clear()
            self.in_flight = bool((self.begun[kind] > self.complete).any())

    def watched_places(self) -> set[int]:
        return set(self.watched.steps)

    def using_registers(self, b: Batch, pc: int) -> None:
        """Follow watched registers through an instruction that reads or writes them."""
        if not self.in_flight or pc not in self.watched.steps:
            return
        step, ins = self.watched.steps[pc], self.m.program.code[pc]
        warps = b.idx if b.mask is None else b.idx[b.any_active()]
        filled_by = np.zeros(len(warps), int)
        if len(step.reads):
            filled_by = self.filled_by[warps[:, None], step.reads].max(1)
            if not step.copies:
                late = filled_by > self.complete[warps]
                for k in np.nonzero(late)[0].tolist():
                    self._use(int(warps[k]), step.reads, ins)
                filled_by[:] = 0
        if len(step.writes):
            whole = b.mask is None
            before = 0 if whole else self.filled_by[warps[:, None], step.writes]
            self.filled_by[warps[:, None], step.writes] = np.maximum(before, filled_by[:, None])

    def _use(self, warp: int, registers: np.ndarray, ins: Instruction) -> None:
        """Mark loads as complete whose registers are used without a wait; nothing else is ordered
        by it.
        """
        used, known = self.used[warp], int(self.complete[warp])
        for number in set(self.filled_by[warp, registers].tolist()) - used:
            if number <= known:
                continue
            used.add(number)
            line = self.lines[warp].pop(number)
            self.m.findings.add(
                "register",
                f"{self.m.grid.name_warp(warp)} uses what the tcgen05.ld at PTX line {line} loads, "
                "with no tcgen05.wait::ld in between: right by the dependency of registers, but "
                "nothing else that comes after knows of the load's end",
                ins,
                advisory=True,
                cause=0,
                remedy="tcgen05.wait::ld behind the load",
            )
        while known + 1 in used:
            known += 1
            used.remove(known)
        self.complete[warp] = known
        self.clocks.learn(warp, self.clocks.agent(Kind.LOAD, warp), known)

    def tmem_fenced(self, before: bool, warps: np.ndarray) -> None:
        """Order what the warps have waited for, or take over what others have ordered."""
        if before:
            for kind in (Kind.LOAD, Kind.STORE):
                self.clocks.ordered[warps, self._slots(kind, warps)] = self.done[kind][warps]
            return
        usable = self.clocks.usable
        usable[warps] = np.maximum(usable[warps], self.clocks.ordered[warps])

    def _slots(self, kind: Kind, warps: np.ndarray) -> np.ndarray:
        return int(kind) * self.clocks.warps + self.clocks.slot[warps]
