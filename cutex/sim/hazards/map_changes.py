"""Tensor maps in global memory that a kernel changes, and the fence that makes changes visible to
TMA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutex.sim.hazards.global_races import GlobalRaces
from cutex.sim.machine.events import Observer
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

MAP_BYTES = 128


class TensorMapChanges(Observer):
    """The times at which maps in global memory changed, and at which each CTA last fenced them.

    A TMA operation may use an older copy of a map that this launch has changed, unless a
    ``fence.proxy.tensormap::generic.acquire`` of the map comes in between (9.7.9.29). Of ordinary
    stores to a map it is only known that they came, so any such fence of its CTA will do.
    """

    def __init__(self, machine: Machine, races: GlobalRaces) -> None:
        self.m, self.races, self.now = machine, races, 0
        self.changed: dict[int, tuple[int, Instruction]] = {}  # by address
        self.acquired: dict[tuple[int, int], int] = {}  # by CTA and address

    def map_changed(self, address: int, ins: Instruction) -> None:
        self.now += 1
        self.changed[address] = self.now, ins

    def map_fenced(self, warp: int, address: int) -> None:
        self.acquired[int(self.m.grid.warp_cta[warp]), address] = self.now

    def map_used(self, warp: int, address: int, ins: Instruction) -> None:
        key = int(self.m.grid.warp_cta[warp]), address
        if address in self.changed:
            when, by = self.changed[address]
            line, how = by.line, f"changed ({by.op})"
            fenced = self.acquired.get(key, 0) >= when
        else:
            line, how = self.races.last_store(address, MAP_BYTES), "wrote by an ordinary store"
            fenced = not line or key in self.acquired
        if not fenced:
            self.m.findings.add(
                "proxy",
                f"{ins.op} of {self.m.grid.name_warp(warp)} takes the tensor map at 0x{address:x}, "
                f"which PTX line {line} {how}, with no fence.proxy.tensormap::generic.acquire of "
                "its CTA in between",
                ins,
                remedy="fence.proxy.tensormap::generic.release by the thread that changes the map, "
                "and ::generic.acquire of its 128 bytes by the one that uses it",
            )
