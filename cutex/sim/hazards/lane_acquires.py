"""Lanes that access what others have written, by a flag that only other lanes of their warp have
acquired.

An acquire, or a strong read and a fence behind it, orders the thread that executes it (PTX ISA 8.8,
8.9.2). Where one lane polls a flag, or
takes a lock, for its warp, the other lanes know of it by a bar.warp.sync or a barrier behind that.
Warps usually come together behind such a loop, so a missing one is an advisory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cutex.sim.hazards.cluster_order import bits_of
from cutex.sim.hazards.global_marks import LANE
from cutex.sim.hazards.global_races import GlobalRaces
from cutex.sim.machine.batch import Lanes
from cutex.sim.machine.events import Observer
from cutex.sim.machine.memory import Part, Region
from cutex.sim.ptx.program import Instruction, Program
from cutex.sim.ptx.strength import is_fence, strength

if TYPE_CHECKING:
    from cutex.sim.hazards.clocks import Clocks
    from cutex.sim.machine.machine import Machine


class _Acquired(NamedTuple):
    """The lanes of a warp that have acquired since its lanes last met; what all of them know, of
    their cluster by slot, and of others by cluster and slot.
    """

    lanes: set[int]
    known: np.ndarray
    others: dict[int, np.ndarray]
    instruction: Instruction


def acquires(program: Program) -> bool:
    """Whether any access, or a fence, acquires from other CTAs."""
    code = program.code
    return any(is_fence(x.op) or (strength(x.op).acquires and strength(x.op).far) for x in code)


class LaneAcquires(Observer):
    """The acquires of single lanes, since their warps have synchronised."""

    def __init__(self, machine: Machine, clocks: Clocks, races: GlobalRaces) -> None:
        self.m, self.clocks, self.races = machine, clocks, races
        self.acquired: dict[int, _Acquired] = {}  # by warp
        # by warp: the lanes (bits) that have read strongly since its last fence, and the last read
        self.observed: dict[int, tuple[int, Instruction]] = {}
        self.told: set[int] = set()  # lines

    def global_loaded(self, where: Lanes, size: int, ins: Instruction) -> None:
        """NOTE: the order of clusters has to take the acquire after this."""
        how = strength(ins.op)
        if how.acquires and how.far:
            self._acquire(where, ins)
        elif how.strong and how.far:
            for warp, lane in zip(where.warps.tolist(), where.lanes.tolist(), strict=True):
                self.observed[warp] = self.observed.get(warp, (0, ins))[0] | 1 << lane, ins
        elif self.acquired and not how.strong:
            region = self.m.memory.find(int(where.addresses[0])) if len(where.addresses) else None
            if region is not None:
                offsets = (where.addresses - np.uint64(region.base)).astype(np.int64)
                inside = (offsets >= 0) & (offsets + size <= len(region.data))
                self._access(where.pick(inside), region, offsets[inside], size, "reads", ins)

    def global_stores(
        self, where: Lanes, values: np.ndarray, parts: Sequence[Part], ins: Instruction
    ) -> None:
        if self.acquired and not strength(ins.op).strong:
            for region, members, offsets in parts:
                lanes = where.pick(members)
                self._access(lanes, region, offsets, values.shape[1], "overwrites", ins)

    def fenced(self, warps: np.ndarray, lanes: np.ndarray, releases: bool, scope: str) -> None:
        """NOTE: the order of clusters has to take the acquire after this."""
        if scope != "gpu" or not self.observed:
            return
        for warp, by in zip(warps.tolist(), bits_of(lanes), strict=True):
            read, ins = self.observed.get(warp, (0, None))
            if read & by and ins is not None:
                del self.observed[warp]
                one = np.flatnonzero((read & by) >> np.arange(32) & 1)
                self._acquire(Lanes(np.full(len(one), warp), one, one), ins)

    def _acquire(self, where: Lanes, ins: Instruction) -> None:
        for warp in np.unique(where.warps).tolist():
            lanes, before = where.lanes[where.warps == warp].tolist(), self.acquired.get(warp)
            if len(lanes) == self.m.live[warp].sum():
                continue
            if before is None:
                foreign = self.races.order.clocks_of_others(warp)
                known = self.clocks.known[warp].copy()
                self.acquired[warp] = _Acquired(set(lanes), known, foreign, ins)
            else:
                before.lanes.update(lanes)

    def _access(
        self,
        where: Lanes,
        region: Region,
        offsets: np.ndarray,
        size: int,
        verb: str,
        ins: Instruction,
    ) -> None:
        """Tell of a lane that accesses what its warp knows of by another lane's acquire only."""
        marks, r = self.races.writes.get(region.base), self.races.records
        if marks is None or ins.line in self.told:
            return
        for warp in {*np.unique(where.warps).tolist()} & self.acquired.keys():
            by, own = self.acquired[warp], int(self.m.grid.cta_cluster[self.m.grid.cta_of(warp)])
            for k in np.flatnonzero(where.warps == warp).tolist():
                if int(where.lanes[k]) in by.lanes:
                    continue
                at = int(offsets[k])
                for rec in {int(m) >> LANE for m in marks[at : at + size].tolist() if m}:
                    cluster, slot, count = (int(x[rec]) for x in (r.who, r.slot, r.count))
                    known = by.known if cluster - 1 == own else by.others.get(cluster - 1)
                    if slot == self.clocks.slot[warp] and cluster - 1 == own:
                        continue
                    if known is None or slot >= len(known) or count > known[slot]:
                        self._tell(warp, int(where.lanes[k]), by, verb, region.element(at), ins)
                        return

    def _tell(
        self, warp: int, lane: int, by: _Acquired, verb: str, place: str, ins: Instruction
    ) -> None:
        self.told.add(ins.line)
        self.m.findings.add(
            "race",
            f"lane {lane} of {self.m.grid.name_warp(warp)} {verb} {place}, of which only lane "
            f"{min(by.lanes)} knows by its acquire at PTX line {by.instruction.line}: by the "
            "letter, a bar.warp.sync is missing between the two lanes",
            ins,
            advisory=True,
            remedy="sync_warp() behind the loop in which one lane asks",
        )

    # -- what orders the lanes ---------------------------------------------------------------------

    def lanes_met(self, warps: np.ndarray) -> None:
        for warp in warps.tolist() if self.acquired or self.observed else ():
            self._met(warp)

    def some_lanes_met(self, warp: int, lanes: int) -> None:
        by, named = self.acquired.get(warp), np.flatnonzero(lanes >> np.arange(32) & 1).tolist()
        if by is not None and by.lanes.intersection(named):
            by.lanes.update(named)

    def named_passed(self, key: tuple[int, int], warp: int) -> None:
        self._met(warp)

    def cluster_passed(self, which: int, warp: int) -> None:
        self._met(warp)

    def mbarrier_passed(self, barrier: object, warp: int, lanes: np.ndarray, ins: object) -> None:
        if len(lanes) == 32:  # NOTE: the lane may have arrived there behind its acquire
            self._met(warp)

    def _met(self, warp: int) -> None:
        self.acquired.pop(warp, None)
        if warp in self.observed:  # NOTE: then a fence of any lane counts, see cluster_order
            self.observed[warp] = -1, self.observed[warp][1]
