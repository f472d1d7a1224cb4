"""Grids of one stream that may overlap, and `griddepcontrol.wait` between them.

A grid launched with programmatic stream serialisation may start as soon as the one before it has
executed ``griddepcontrol.launch_dependents`` in all its CTAs; the accesses of that grid are
complete and visible after a ``griddepcontrol.wait`` (PTX ISA 9.7.13.13). Grids are simulated one
after another, so the vector clocks decide: the end of the grids before has a slot of its own, which
a wait acquires and barriers pass on. An access of global memory that is not ordered after it races
with the grids before if they touch the same bytes. If they do not, the kernel is right after some
kernels and wrong after others: an advisory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cutex.sim.hazards.clocks import Clocks
from cutex.sim.isa.boxes import box_range
from cutex.sim.machine.batch import Lanes
from cutex.sim.machine.events import Observer, Storing
from cutex.sim.machine.memory import MODULE_WINDOW, Part, Region
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine


@dataclass
class Footprint:
    """The bytes written, and the ranges read, by a grid that may still run when others start."""

    kernel: str
    waited: bool = False  # for the grid before it, so that its end is that one's, too
    ended: bool = False  # before the next grid starts
    written: dict[int, np.ndarray] = field(default_factory=dict)  # by a tensor's address
    read: dict[int, tuple[int, int]] = field(default_factory=dict)  # the same; from, to

    def write(self, region: Region, offsets: np.ndarray, size: int) -> None:
        marks = self.written.setdefault(region.base, np.zeros(len(region.data), bool))
        marks[offsets[:, None] + np.arange(size)] = True

    def load(self, region: Region, low: int, high: int) -> None:
        old = self.read.get(region.base, (low, high))
        self.read[region.base] = min(low, old[0]), max(high, old[1])

    def wrote(self, low: int, high: int) -> bool:
        """Whether it wrote any of the bytes in ``[low, high)``."""
        return any(
            bool(marks[max(low - base, 0) : max(high - base, 0)].any())
            for base, marks in self.written.items()
        )

    def reads(self, low: int, high: int) -> bool:
        return any(base + a < high and low < base + b for base, (a, b) in self.read.items())


class Stream:
    """The grids of a stream that may still run when the next one starts."""

    def __init__(self) -> None:
        self.running: list[Footprint] = []


class GridOrder(Observer):
    """The order of the current launch after earlier ones. Costs nothing if it neither waits nor
    lets the next one start.
    """

    def __init__(self, machine: Machine, programmatic: bool, stream: Stream) -> None:
        self.m, self.programmatic, self.stream = machine, programmatic, stream
        names = [ins.op for ins in machine.program.code]
        self.footprint = Footprint(machine.program.title)
        self.lets_start = "griddepcontrol.launch_dependents" in names
        self.early: set[int] = set()  # CTAs that let the next grid start before they have waited
        self.active = programmatic or self.lets_start
        if not programmatic:
            stream.running.clear()
        self.before = list(stream.running)  # grids that may still run
        # by warp: the lanes that have waited, if not all have, since its lanes last met
        self.some_waited: dict[int, set[int]] = {}
        self.beyond = self._beyond()

    def _beyond(self) -> list[Footprint]:
        """The grids for which a wait of this one does not wait."""
        last = len(self.before) - 1
        while last > 0 and self.before[last].waited:
            last -= 1
        return [grid for grid in self.before[: max(last, 0)] if not grid.ended]

    def start(self, clocks: Clocks) -> None:
        """Begin with other resident clusters."""
        self.clocks = clocks

    def grids_waited(self, warps: np.ndarray, lanes: np.ndarray) -> None:
        self.footprint.waited = True
        if self.programmatic:
            slot = self.clocks.grid_slot()
            for warp, active in zip(warps.tolist(), lanes, strict=True):
                some = set(np.flatnonzero(active).tolist())
                if len(some) < self.m.live[warp].sum() and not self.clocks.known[warp, slot]:
                    self.some_waited[warp] = some
                elif warp in self.some_waited:
                    self.some_waited[warp] |= some
                self.clocks.learn(warp, slot, 1)

    def dependents_let_start(self, warps: np.ndarray) -> None:
        """A CTA lets the next grid start with the first of its threads that executes this,
        whichever that is.
        """
        m = self.m
        ctas, slot = m.grid.warp_cta[warps], self.clocks.grid_slot()
        number = m.grid.cta_cluster[ctas] * m.grid.cluster_size + m.grid.cta_rank[ctas]
        early = self.clocks.known[warps, slot] == 0
        self.early |= set(number[early].tolist())

    def finish(self) -> None:
        """Record the end of the grid."""
        running, mine = self.stream.running, self.footprint
        if not self.active:
            running.clear()
            return
        x, y, z = self.m.grid.dims
        # NOTE: the next grid starts when all CTAs have let it, or have ended: if one of them does
        # so after its wait, the grids before are at their end then
        before_waits = self.lets_start and len(self.early) == x * y * z
        if mine.waited and not before_waits:
            running.clear()
        if self.lets_start:
            running.append(mine)
        elif running:
            mine.ended = True
            running.append(mine)

    # -- accesses ----------------------------------------------------------------------------------

    def global_loaded(self, where: Lanes, size: int, ins: Instruction) -> None:
        self._lanes(where, size, False, ins)

    def global_stores(
        self,
        where: Lanes,
        values: np.ndarray,
        parts: Sequence[Part],
        ins: Instruction,
    ) -> None:
        self._lanes(where, values.shape[1], True, ins)

    def _lanes(self, where: Lanes, size: int, write: bool, ins: Instruction) -> None:
        """Accesses to ``size`` bytes at each address."""
        warps, lanes, addresses = where
        if not len(addresses):
            return
        if self.lets_start:
            for region, members in self._by_region(addresses):
                offsets = (addresses[members] - np.uint64(region.base)).astype(np.int64)
                if write:
                    self.footprint.write(region, offsets, size)
                else:
                    self.footprint.load(region, int(offsets.min()), int(offsets.max()) + size)
        if not self.programmatic:
            return
        early = self.clocks.known[warps, self.clocks.grid_slot()] == 0
        for warp in np.unique(warps if self.beyond else warps[early]).tolist():
            mine = addresses[warps == warp]
            for region, members in self._by_region(mine):
                low, high = int(mine[members].min()), int(mine[members].max()) + size
                self._check(warp, region, low, high, write, ins)
        for warp in {*np.unique(warps).tolist()} & self.some_waited.keys():
            others = (warps == warp) & ~np.isin(lanes, list(self.some_waited[warp]))
            for k in np.flatnonzero(others).tolist():
                if warp in self.some_waited:
                    self._check_lane(warp, int(lanes[k]), int(addresses[k]), size, write, ins)

    def box_issued(
        self, warp: int, tmap: Any, at: tuple[int, ...], write: bool, ins: Instruction
    ) -> None:
        address, size = box_range(self.m.memory, tmap, at)
        if size:
            self.bulk_issued(warp, address, size, write, ins)

    def bulk_issued(
        self, warp: int, address: int, size: int, write: bool, ins: Instruction
    ) -> None:
        region = self.m.memory.find(address)
        if region is None:
            return
        if self.lets_start and not write:
            self.footprint.load(region, address - region.base, address + size - region.base)
        if self.programmatic:
            self._check(warp, region, address, address + size, write, ins)

    def bulk_writes(
        self,
        region: Region,
        offsets: np.ndarray,
        values: np.ndarray,
        by: Storing,
        ins: Instruction,
    ) -> None:
        if self.lets_start:
            self.footprint.write(region, offsets, values.shape[1])

    def bulk_reduced(
        self,
        region: Region,
        offsets: np.ndarray,
        size: int,
        by: Storing,
        ins: Instruction,
    ) -> None:
        if self.lets_start:
            self.footprint.write(region, offsets, size)

    def _check_lane(
        self, warp: int, lane: int, address: int, size: int, write: bool, ins: Instruction
    ) -> None:
        """Tell of an access to what the grids before touch by a lane of a warp that knows of their
        end by a wait of other lanes, with no bar.warp.sync behind it: an advisory, since warps
        execute the wait as one instruction.
        """
        end = address + size
        for before in self.before:
            if before.wrote(address, end) or (write and before.reads(address, end)):
                by = min(self.some_waited.pop(warp))
                self.m.findings.add(
                    "race",
                    f"lane {lane} of {self.m.grid.name_warp(warp)} {'writes' if write else 'reads'}"
                    f" what {before.kernel}, launched before it, touches, and only lane {by} has "
                    "executed griddepcontrol.wait: by the letter, a bar.warp.sync is missing "
                    "between the two lanes",
                    ins,
                    advisory=True,
                )
                return

    # -- what orders the lanes ---------------------------------------------------------------------

    def lanes_met(self, warps: np.ndarray) -> None:
        for warp in warps.tolist() if self.some_waited else ():
            self.some_waited.pop(warp, None)

    def named_passed(self, key: tuple[int, int], warp: int) -> None:
        self.some_waited.pop(warp, None)

    def cluster_passed(self, which: int, warp: int) -> None:
        self.some_waited.pop(warp, None)

    def mbarrier_passed(self, barrier: object, warp: int, lanes: np.ndarray, ins: object) -> None:
        if len(lanes) == 32:
            self.some_waited.pop(warp, None)

    # -- names -------------------------------------------------------------------------------------

    def _by_region(self, addresses: np.ndarray) -> list[tuple[Region, np.ndarray]]:
        found, left = [], np.ones(len(addresses), bool)
        while left.any():
            first = int(np.argmax(left))
            left[first] = False
            if (region := self.m.memory.find(int(addresses[first]))) is not None:
                inside = (addresses >= np.uint64(region.base)) & (addresses < np.uint64(region.end))
                found.append((region, inside))
                left &= ~inside
        return found

    def _check(
        self, warp: int, region: Region, low: int, high: int, write: bool, ins: Instruction
    ) -> None:
        """Report an access that grids which may still run race with."""
        waited = bool(self.clocks.known[warp, self.clocks.grid_slot()])
        who, what = self.m.grid.name_warp(warp), region.description or region.name
        verb = "writes" if write else "reads"
        why = "no griddepcontrol.wait comes before"
        if waited and self.before:
            last = self.before[-1].kernel
            why = f"griddepcontrol.wait waits for {last}, which has not waited for it"
        for before in self.beyond if waited else [g for g in self.before if not g.ended]:
            did = "write" if before.wrote(low, high) else ""
            if write and before.reads(low, high):
                did = did or "read"
            if did:
                self.m.findings.add(
                    "race",
                    f"{who} {verb} {what}, and nothing says that {before.kernel}, launched before "
                    f"it, does not {did} it any more: {why}",
                    ins,
                )
                return
        if not waited and region.base < MODULE_WINDOW:
            others = "neither reads nor writes" if write else "does not write"
            self.m.findings.add(
                "race",
                f"{who} {verb} {what} with no griddepcontrol.wait before: right only behind a "
                f"kernel that {others} it",
                ins,
                advisory=True,
                cause=0,
            )
