"""Tensor maps in global memory that a kernel changes, and the fence that makes changes visible to
TMA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutex.sim.machine.events import Observer
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine


class TensorMapChanges(Observer):
    """The times at which maps in global memory changed, and at which each CTA last fenced them.

    A TMA operation may use an older copy of a map that this launch has changed, unless a
    ``fence.proxy.tensormap::generic.acquire`` of the map comes in between (9.7.9.29).
    """

    def __init__(self, machine: Machine) -> None:
        self.m, self.now = machine, 0
        self.changed: dict[int, tuple[int, Instruction]] = {}  # by address
        self.acquired: dict[tuple[int, int], int] = {}  # by CTA and address

    def map_changed(self, address: int, ins: Instruction) -> None:
        self.now += 1
        self.changed[address] = self.now, ins

    def map_fenced(self, warp: int, address: int) -> None:
        self.acquired[int(self.m.grid.warp_cta[warp]), address] = self.now

    def map_used(self, warp: int, address: int, ins: Instruction) -> None:
        when, by = self.changed.get(address, (0, ins))
        if self.acquired.get((int(self.m.grid.warp_cta[warp]), address), 0) < when:
            self.m.findings.add(
                "proxy",
                f"{ins.op} of {self.m.grid.name_warp(warp)} takes the tensor map at 0x{address:x}, "
                f"which PTX line {by.line} changed ({by.op}), with no "
                "fence.proxy.tensormap::generic.acquire of its CTA in between",
                ins,
            )
