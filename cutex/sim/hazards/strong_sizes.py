"""Atomics and other strong accesses of global or shared memory that overlap in part.

Two strong accesses do not race only where they overlap completely (PTX ISA 8.7.1): an atomic of 64
bits beside one of 32 bits in it, or a flag that one thread sets as 64 bits and another polls as 32,
is a race by the letter. A vector counts as its elements, a packed pair as its halves (8.2.2,
8.2.3).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.hazards.clocks import Clocks
from cutex.sim.hazards.global_marks import LANE, PLAIN, By
from cutex.sim.hazards.global_races import GlobalRaces
from cutex.sim.hazards.smem_marks import Several, Touches
from cutex.sim.hazards.sparse_marks import Marks, marks_of
from cutex.sim.machine.batch import Lanes
from cutex.sim.machine.events import Observer, SharedBytes
from cutex.sim.machine.memory import Part, Region
from cutex.sim.machine.operation import WORD
from cutex.sim.ptx.once import once
from cutex.sim.ptx.program import Instruction, Program
from cutex.sim.ptx.strength import WEAK, Strength, strength

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

_TYPE = re.compile(r"(?:[bsuf]|bf)(8|16|32|64|128)(x2)?")


@lru_cache(maxsize=1024)
def element_bytes(op: str) -> int:
    """The bytes of an element of a strong access, as its opcode gives it; 0 of another one."""
    if not strength(op).strong:
        return 0
    types = [m for part in op.split(".") if (m := _TYPE.fullmatch(part))]
    return int(types[-1][1]) // 8 if types else 0


@once
def sizes(program: Program) -> np.ndarray:
    """By PTX line, the bytes of an element of the strong access of global memory there, or 0."""
    found = np.zeros(max((ins.line for ins in program.code), default=0) + 1, np.int16)
    for ins in program.code:
        if not any(part.startswith("shared") for part in ins.parts):
            found[ins.line] = element_bytes(ins.op)
    return found


@once
def shared_sizes(program: Program) -> frozenset[int]:
    """The bytes of elements of all strong accesses that may be of shared memory."""
    code = (ins for ins in program.code if "global" not in ins.parts)
    return frozenset(element_bytes(ins.op) for ins in code) - {0}


def _tell(machine: Machine, warp: int, what: str, ins: Instruction, size: int, *peer: int) -> None:
    """Report two that overlap in part; ``peer``: the PTX line and the size of the earlier one."""
    line, theirs = peer
    machine.findings.add(
        "race",
        f"{machine.grid.name_warp(warp)} accesses {what} as {8 * size} bits, and PTX line {line} "
        f"as {8 * theirs}: by the letter, atomics and other strong accesses that overlap in part "
        "race, and nothing orders the two",
        ins,
        advisory=True,
        remedy="accesses of one size",
    )


class StrongSizes(Observer):
    """Compares strong accesses with earlier ones that nothing orders before them; it comes before
    `GlobalRaces`, which marks them."""

    def __init__(self, machine: Machine, races: GlobalRaces) -> None:
        self.m, self.races, self.sizes = machine, races, sizes(machine.program)
        self.active = len(set(self.sizes[self.sizes > 0].tolist())) > 1
        self.loads: dict[int, Marks] = {}  # by region: marks of the last strong load

    def global_loaded(self, where: Lanes, size: int, ins: Instruction) -> None:
        if self.active and self.sizes[ins.line] and len(where.addresses):
            region = self.m.memory.find(int(where.addresses[0]))
            if region is None:
                return
            ends = where.addresses + np.uint64(size)
            inside = (where.addresses >= np.uint64(region.base)) & (ends <= np.uint64(region.end))
            mine = where.pick(inside)
            offsets = (mine.addresses - np.uint64(region.base)).astype(np.int64)
            self._check(region, mine, offsets, size, ins)
            if not strength(ins.op).atomic and len(offsets):
                self._keep(region, mine, offsets, size, ins)

    def global_stores(
        self, where: Lanes, values: np.ndarray, parts: Sequence[Part], ins: Instruction
    ) -> None:
        # NOTE: an atomic comes as a load, too
        if self.active and self.sizes[ins.line] and not strength(ins.op).atomic:
            for region, members, offsets in parts:
                self._check(region, where.pick(members), offsets, values.shape[1], ins)

    def _by(self, where: Lanes, how: Strength, ins: Instruction) -> By:
        clocks = self.races.clocks
        slots = clocks.slot[where.warps]
        counts = clocks.known[where.warps, slots]
        return By(where.warps, where.lanes, slots, counts, how, ins.line)

    def _keep(
        self, region: Region, where: Lanes, offsets: np.ndarray, size: int, ins: Instruction
    ) -> None:
        """Mark a strong load."""
        marks = self.loads.get(region.base)
        if marks is None:
            marks = self.loads[region.base] = marks_of(len(region.data), self.races.pages)
        by = self._by(where, strength(ins.op), ins)
        made = self.races.records.add(by, self.races.clashes.who(by), 0 * where.warps)
        marks[offsets[:, None] + np.arange(size)] = made[:, None]

    def _check(
        self, region: Region, where: Lanes, offsets: np.ndarray, size: int, ins: Instruction
    ) -> None:
        """Check an access against the last writes, and one that changes something against loads."""
        how, kept = strength(ins.op), [self.races.writes.get(region.base)]
        if how.atomic or ins.name == "st":
            kept.append(self.loads.get(region.base))
        for marks in kept:
            if marks is not None:
                self._compare(marks, region, where, offsets[:, None] + np.arange(size), ins)

    def _compare(
        self, marks: Marks, region: Region, where: Lanes, places: np.ndarray, ins: Instruction
    ) -> None:
        races, last, mine = self.races, marks[places], self.sizes[ins.line]
        records = last >> LANE
        theirs = self.sizes[races.records.line[records]]
        other = (last != 0) & (races.records.kind[records] != PLAIN)
        other &= (theirs > 0) & (theirs != mine)
        if not other.any():
            return
        clash = races.clashes.first(last, places, self._by(where, WEAK, ins), other)
        if clash is None:
            return
        line = int(races.records.line[clash.earlier])
        what = region.element(int(places[clash.later, 0]))
        warp = int(where.warps[clash.later])
        _tell(self.m, warp, what, ins, int(mine), line, int(self.sizes[line]))


class SharedSizes(Observer):
    """The same for shared memory: compares strong accesses with all earlier ones of other sizes."""

    def __init__(self, machine: Machine, clocks: Clocks) -> None:
        self.m, self.clocks = machine, clocks
        self.active = len(shared_sizes(machine.program)) > 1
        self.shape = machine.grid.num_ctas, machine.smem_bytes // WORD
        # by size, and whether they change something: the warps of each word
        self.seen: dict[tuple[int, bool], Several] = {}
        self.lines: dict[tuple[int, bool, int], int] = {}  # and by slot: the PTX line of the last

    def shared(self, at: SharedBytes, write: bool, ordinary: bool, ins: Instruction) -> None:
        how, size = strength(ins.op), element_bytes(ins.op)
        if not size or (how.atomic and write):
            return  # NOTE: an atomic was recorded when it loaded, as both
        changes, touches = how.atomic or write, Touches.of(at)
        for (theirs, changed), several in self.seen.items():
            if theirs != size and (changes or changed):
                self._check(touches, several, (size, theirs, changed), ins)
        slots = self.clocks.slot[touches.warps]
        if (size, changes) not in self.seen:
            self.seen[size, changes] = Several(self.shape, self.clocks.warps)
        counts = self.clocks.known[touches.warps, slots]
        self.seen[size, changes].add(touches.at, slots, counts, touches.part)
        self.lines |= {(size, changes, s): ins.line for s in set(slots.tolist())}

    def _check(
        self, touches: Touches, several: Several, sizes: tuple[int, int, bool], ins: Instruction
    ) -> None:
        """Check an access against those of another size; ``sizes``: its own, the other, and whether
        those change something."""
        warps, _, cta, word, part = touches
        parts, (size, *theirs) = np.broadcast_to(part, word.shape), sizes
        for k in np.flatnonzero(several.some[cta, word]).tolist():
            place, warp = (int(cta[k]), int(word[k])), int(warps[k])
            counts = several.touching(*place, parts[k])
            unknown = counts > self.clocks.known[warp, : self.clocks.warps]
            unknown[self.clocks.slot[warp]] = False
            if unknown.any():
                line = self.lines[theirs[0], bool(theirs[1]), int(unknown.argmax())]
                what = f"shared memory 0x{place[1] * WORD:x}"
                _tell(self.m, warp, what, ins, size, line, theirs[0])
                return
