"""Tensor maps in global memory that a kernel changes, and the fence that makes changes visible to
TMA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.hazards.global_races import GlobalRaces
from cutex.sim.machine.events import Observer
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

MAP_BYTES = 128


class TensorMapChanges(Observer):
    """The times at which maps in global memory changed, and at which each CTA last fenced them.

    A TMA operation may use an older copy of a map that this launch has changed, unless a
    ``fence.proxy.tensormap::generic.acquire`` of the map comes in between (9.7.9.29), behind a
    ``release`` of the thread that changes it, which ``cp_fenceproxy`` is; where only that lacks it
    is an advisory. Of ordinary stores to a map it is only known that they came, so any such fence
    of its CTA will do, and any release.
    """

    def __init__(self, machine: Machine, races: GlobalRaces) -> None:
        self.m, self.races, self.now = machine, races, 0
        self.changed: dict[int, tuple[int, Instruction]] = {}  # by address
        self.acquired: dict[tuple[int, int], int] = {}  # by CTA and address
        self.released = -1  # when a warp last did

    def map_changed(self, address: int, ins: Instruction) -> None:
        self.now += 1
        self.changed[address] = self.now, ins
        if "cp_fenceproxy" in ins.op:
            self.released = self.now

    def maps_released(self, warps: np.ndarray) -> None:
        self.released = self.now

    def map_fenced(self, warp: int, address: int) -> None:
        self.acquired[int(self.m.grid.warp_cta[warp]), address] = self.now

    def map_used(self, warp: int, address: int, ins: Instruction) -> None:
        key = int(self.m.grid.warp_cta[warp]), address
        if address in self.changed:
            when, by = self.changed[address]
            line, how = by.line, f"changed ({by.op})"
            fenced, released = self.acquired.get(key, 0) >= when, self.released >= when
        else:
            line, how = self.races.last_store(address, MAP_BYTES), "wrote by an ordinary store"
            fenced, released = not line or key in self.acquired, not line or self.released >= 0
        if not fenced or not released:
            which = "release of the thread that did" if fenced else "acquire of its CTA"
            self.m.findings.add(
                "proxy",
                f"{ins.op} of {self.m.grid.name_warp(warp)} takes the tensor map at 0x{address:x}, "
                f"which PTX line {line} {how}, with no fence.proxy.tensormap::generic.{which} "
                "in between",
                ins,
                fenced,
                remedy="fence.proxy.tensormap::generic.release by the thread that changes the map, "
                "and ::generic.acquire of its 128 bytes by the one that uses it",
            )
