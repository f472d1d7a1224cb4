"""What all parts of a machine share: the grid, the registers, the warps that sleep, the events."""

from __future__ import annotations

from typing import Any

import numpy as np

from cutex.sim.machine.divergence import BLOCKED, Divergence
from cutex.sim.machine.events import Events, Observer
from cutex.sim.machine.findings import Findings
from cutex.sim.machine.grid import Grid
from cutex.sim.machine.waits import Wait
from cutex.sim.ptx.program import Program


class Core:
    """The base of a machine, which its parts know."""

    def __init__(self, program: Program, grid: Grid, findings: Findings) -> None:
        self.program: Program = program
        self.grid: Grid = grid
        self.findings: Findings = findings
        self.progress = 0  # grows with every visible effect; distinguishes a spin loop from work
        banks = {1: bool, 16: np.uint16, 32: np.uint32, 64: np.uint64, 128: np.uint64}
        self.registers = {
            bank: np.zeros((count, grid.num_warps, 32, *((2,) if bank == 128 else ())), banks[bank])
            for bank, count in program.registers.items()
        }  # NOTE: temporaries share storage, and untouched pages take no memory
        self.lanes = Divergence(program)
        self.sleepers: dict[Any, list[tuple[int, Wait]]] = {}  # by key
        self.observers: list[Observer] = []
        self.events = Events()

    def start(self) -> None:
        """Begin with the threads of the grid's resident clusters, awake."""
        self.lanes.clear(self.grid.threads())
        self.sleepers.clear()
        self.waits: dict[int, list[Wait]] = {}  # by warp
        self.timed_out = np.zeros((self.grid.num_warps, 32), bool)

    @property
    def live(self) -> np.ndarray:
        """The lanes, (warps, 32), that have not returned."""
        return self.lanes.live

    def observe(self, *observers: Observer) -> None:
        """Tell these of what the resident clusters do from now on."""
        self.observers += observers
        self.events = Events(self.observers)

    def sleep(self, warp: int, wait: Wait) -> None:
        """Put the executing lanes of ``warp`` to sleep until `wake` is called with ``wait.key``."""
        self.waits.setdefault(warp, []).append(wait)
        self.sleepers.setdefault(wait.key, []).append((warp, wait))
        self.lanes.state[warp] = BLOCKED

    def wake(self, key: Any) -> None:
        for warp, wait in self.sleepers.pop(key, ()):
            self._forget(warp, wait)
            if wait.on_wake is not None:
                wait.on_wake()
            self.lanes.wake(warp, wait.lanes)

    def time_out(self, warp: int, wait: Wait) -> None:
        """Let a try_wait return false once."""
        self.sleepers[wait.key].remove((warp, wait))
        if not self.sleepers[wait.key]:
            del self.sleepers[wait.key]
        self._forget(warp, wait)
        self.timed_out[warp, slice(None) if wait.lanes is None else wait.lanes] = True
        self.lanes.wake(warp, wait.lanes)

    def _forget(self, warp: int, wait: Wait) -> None:
        self.waits[warp].remove(wait)
        if not self.waits[warp]:
            del self.waits[warp]
