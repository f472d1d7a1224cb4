"""Copies of global memory by the async proxy, beside ordinary stores to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.hazards.clocks import Clocks
from cutex.sim.hazards.global_clashes import GlobalClashes
from cutex.sim.hazards.global_marks import LANE, Records
from cutex.sim.hazards.global_reports import GlobalReports
from cutex.sim.machine.memory import Region
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine


class GlobalProxies:
    """The fences of proxies of the resident clusters' warps."""

    clocks: Clocks  # of the resident clusters

    def __init__(
        self, machine: Machine, clashes: GlobalClashes, records: Records, reports: GlobalReports
    ) -> None:
        self.clashes, self.records, self.reports = clashes, records, reports
        code = machine.program.code
        self.fences_all = any(ins.op == "fence.proxy.async" for ins in code)
        # whether a fence of proxies may be one of global memory
        self.fences = self.fences_all or any(i.op == "fence.proxy.async.global" for i in code)

    def start(self, clocks: Clocks) -> None:
        """Begin with other resident clusters."""
        self.clocks = clocks
        # by warp: its clock at its last fence.proxy.async.global
        self.fences_of: dict[int, np.ndarray] = {}

    def fenced(self, warps: np.ndarray) -> None:
        """Warps execute a ``fence.proxy.async.global``."""
        for warp in warps.tolist():
            self.fences_of[warp] = self.clocks.known[warp].copy()
        self.clocks.count(warps)

    def check(
        self,
        warp: int,
        last: np.ndarray,
        places: np.ndarray,
        region: Region,
        ins: Instruction,
        write: bool = False,
    ) -> None:
        """Report a copy by the async proxy of what ordinary stores of its cluster have written, or
        a bulk reduction of it, with no fence of proxies on the way (PTX ISA 9.7.9.25.1); of a bulk
        store onto it that is an advisory. A fence of global memory only counts where the warp that
        stores or the one that copies has it.

        NOTE: a fence of shared memory only is taken for one of all in a kernel that has those, too.
        What bulk stores of another cluster wrote takes one by the letter, as its own does not
        (8.9.5): told of kernels that have none.
        """
        rec, r = last >> LANE, self.records
        slot, own = r.slot[rec], int(self.clashes.clusters(np.array([warp]))[0]) + 1
        unseen = (last != 0) & (slot < self.clocks.warps)
        if not (self.fences or write):
            unseen |= (last != 0) & (slot >= self.clocks.warps) & (r.who[rec] != own)
        if self.fences:  # NOTE: between clusters any may be the one
            unseen &= r.who[rec] == own
        if self.fences_all:
            unseen &= r.count[rec] > self.clocks.visible[warp, slot]
        for who in {warp, *np.unique(r.warp[rec[unseen]]).tolist()} & self.fences_of.keys():
            unseen &= r.count[rec] > self.fences_of[who][slot]
        if unseen.any():
            at = tuple(int(v[0]) for v in np.nonzero(unseen))
            place = region.element(int(places[at]))
            self.reports.proxy(warp, place, int(rec[at]), ins, write)
