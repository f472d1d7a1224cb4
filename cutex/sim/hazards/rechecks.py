"""Ordinary loads of what another thread changes by an atomic, with nothing that orders the two.

Such a load may return any of the values (PTX ISA 8.7.1). A loop around compare-and-swap begins
with one on purpose, and so does a maximum that is looked at before it is raised: the thread goes on
to an atomic on the same place, which reads it again. Whether a load is of that kind is known when
the grid has ended; until then its races are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.machine.batch import Lanes
from cutex.sim.machine.events import Observer, SharedBytes
from cutex.sim.ptx.program import Instruction
from cutex.sim.ptx.strength import strength

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

_NONE = np.zeros(0, np.int64)
Tell = Callable[[bool], None]  # report a race; True: as an advisory


class Rechecks(Observer):
    """The loads of a launch whose places the same threads then access by atomics or the like."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        code = machine.program.code
        self.active = any(strength(ins.op).strong for ins in code)
        # by PTX line of a load: the warps and places of its last execution
        self.last: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.open: set[int] = set()  # lines of loads with races, of which no atomic was seen
        self.asked: set[int] = set()  # and of those that an atomic followed
        self.races: list[tuple[int, Tell]] = []

    def global_loaded(self, where: Lanes, size: int, ins: Instruction) -> None:
        if self.active:
            self._accessed(where.warps, where.addresses.astype(np.int64), ins)

    def shared(self, at: SharedBytes, write: bool, ordinary: bool, ins: Instruction) -> None:
        if self.active and not (write and ordinary):
            self._accessed(at.warps, -1 - (at.cta * self.m.smem_bytes + at.offset), ins)

    def _accessed(self, warps: np.ndarray, places: np.ndarray, ins: Instruction) -> None:
        if not strength(ins.op).strong:
            if ins.line not in self.asked:
                self.last[ins.line] = warps, places
            return
        for line in list(self.open):
            by, at = self.last.get(line, (_NONE, _NONE))
            if ((by[:, None] == warps) & (at[:, None] == places)).any():
                self.asked.add(line)
                self.open.remove(line)

    def race(self, line: int, tell: Tell) -> None:
        """Keep the race of the load at a line of the PTX."""
        if line not in self.asked:
            self.open.add(line)
        self.races.append((line, tell))

    def finish(self) -> None:
        """Report the races, those of loads that are followed by an atomic as advisories."""
        for line, tell in self.races:
            tell(line in self.asked)
        self.races.clear()
