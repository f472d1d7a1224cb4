"""Atomics and other strong accesses of global memory that overlap in part.

Two strong accesses do not race only where they overlap completely (PTX ISA 8.7.1): an atomic of 64
bits beside one of 32 bits in it, or a flag that one thread sets as 64 bits and another polls as 32,
is a race by the letter. A vector counts as its elements, a packed pair as its halves (8.2.2,
8.2.3).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.hazards.global_marks import LANE, PLAIN, By
from cutex.sim.hazards.global_races import LARGEST, GlobalRaces
from cutex.sim.machine.batch import Lanes
from cutex.sim.machine.events import Observer
from cutex.sim.machine.memory import Part, Region
from cutex.sim.ptx.once import once
from cutex.sim.ptx.program import Instruction, Program
from cutex.sim.ptx.strength import WEAK, strength

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

_TYPE = re.compile(r"(?:[bsuf]|bf)(8|16|32|64|128)(x2)?")


@once
def sizes(program: Program) -> np.ndarray:
    """By PTX line, the bytes of an element of the strong access of global memory there, or 0."""
    found = np.zeros(max((ins.line for ins in program.code), default=0) + 1, np.int16)
    for ins in program.code:
        if strength(ins.op).strong and not any(p.startswith("shared") for p in ins.parts):
            types = [m for part in ins.parts if (m := _TYPE.fullmatch(part))]
            found[ins.line] = int(types[-1][1]) // 8 if types else 0
    return found


class StrongSizes(Observer):
    """Compares strong accesses with earlier ones that nothing orders before them; it comes before
    `GlobalRaces`, which marks them."""

    def __init__(self, machine: Machine, races: GlobalRaces) -> None:
        self.m, self.races, self.sizes = machine, races, sizes(machine.program)
        self.active = races.active and len(set(self.sizes[self.sizes > 0].tolist())) > 1

    def global_loaded(self, where: Lanes, size: int, ins: Instruction) -> None:
        if self.active and self.sizes[ins.line] and len(where.addresses):
            region = self.m.memory.find(int(where.addresses[0]))
            if region is None or region.base not in self.races.writes:
                return
            ends = where.addresses + np.uint64(size)
            inside = (where.addresses >= np.uint64(region.base)) & (ends <= np.uint64(region.end))
            mine = where.pick(inside)
            offsets = (mine.addresses - np.uint64(region.base)).astype(np.int64)
            self._check(region, mine, offsets, size, ins)

    def global_stores(
        self, where: Lanes, values: np.ndarray, parts: Sequence[Part], ins: Instruction
    ) -> None:
        # NOTE: an atomic comes as a load, too
        if self.active and self.sizes[ins.line] and not strength(ins.op).atomic:
            for region, members, offsets in parts:
                if region.base in self.races.writes and len(region.data) <= LARGEST:
                    self._check(region, where.pick(members), offsets, values.shape[1], ins)

    def _check(
        self, region: Region, where: Lanes, offsets: np.ndarray, size: int, ins: Instruction
    ) -> None:
        races = self.races
        places = offsets[:, None] + np.arange(size)
        last = races.writes[region.base][places]
        records, mine = last >> LANE, self.sizes[ins.line]
        theirs = self.sizes[races.records.line[records]]
        other = (last != 0) & (races.records.kind[records] != PLAIN)
        other &= (theirs > 0) & (theirs != mine)
        if not other.any():
            return
        clocks = races.clocks
        slots = clocks.slot[where.warps]
        counts = clocks.known[where.warps, slots]
        by = By(where.warps, where.lanes, slots, counts, WEAK, ins.line)
        clash = races.clashes.first(last, places, by, other)
        if clash is None:
            return
        line = int(races.records.line[clash.earlier])
        who = self.m.grid.name_warp(int(where.warps[clash.later]))
        self.m.findings.add(
            "race",
            f"{who} accesses {region.element(int(offsets[clash.later]))} as {8 * int(mine)} bits, "
            f"and PTX line {line} as {8 * int(self.sizes[line])}: by the letter, atomics and other "
            "strong accesses that overlap in part race, and nothing orders the two",
            ins,
            advisory=True,
            remedy="accesses of one size",
        )
