"""Who knows of whose accesses to tensor memory by tcgen05.ld and st: the vector clocks of `clocks`.

Shadow memory remembers, for each column of 16 lanes, the last warp that stored there and the last
that loaded, with their counts. An MMA or a copy that is issued must come after both; what it does
itself is looked at while it is in flight (PTX ISA 9.7.16.6.4.4: waits and fences order threads).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.ptx.parse import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine
    from cutex.sim.machine.operation import Rectangle

_LANES = 16  # of a unit: half of what a warp may touch
_UNITS, _COLUMNS = 128 // _LANES, 512


class TmemShadow:
    """By CTA, 16 lanes and column."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        shape = (machine.grid.num_ctas, _UNITS, _COLUMNS)
        self.writer, self.reader = np.zeros(shape, np.int16), np.zeros(shape, np.int16)  # slots
        self.written, self.read = np.zeros(shape, np.int32), np.zeros(shape, np.int32)  # 0: none
        self.line = np.zeros(shape, np.int32)  # of the last store in the PTX

    def access(self, warp: int, place: Rectangle, write: bool, what: str, ins: Instruction) -> None:
        """A tcgen05.ld or st of ``warp``."""
        self._check(warp, place, write, what, ins)
        at, clocks = _units(place), self.m.clocks
        who, when = (self.writer, self.written) if write else (self.reader, self.read)
        who[at], when[at] = clocks.slot[warp], clocks.now(warp)
        if write:
            self.line[at] = ins.line

    def issue(self, warp: int, place: Rectangle, write: bool, what: str, ins: Instruction) -> None:
        """An operation of the tensor cores by ``warp``; ``write``: it overwrites the place."""
        self._check(warp, place, write, what, ins)
        if write:
            self.forget(place)

    def forget(self, place: Rectangle) -> None:
        at = _units(place)
        self.written[at] = self.read[at] = 0

    def _check(self, warp: int, place: Rectangle, write: bool, what: str, ins: Instruction) -> None:
        at, clocks = _units(place), self.m.clocks
        known, own = clocks.known[warp], clocks.slot[warp]
        others = [(self.writer, self.written, "stored")]
        if write:
            others.append((self.reader, self.read, "loaded"))
        for who, when, did in others:
            other, count = who[at], when[at]
            unknown = (count > known[other]) & (other != own)
            if unknown.any():
                unit, column = (int(v[0]) for v in np.nonzero(unknown))
                peer = clocks.peer(warp, int(other[unit, column]))
                line = f" at PTX line {self.line[at][unit, column]}" if did == "stored" else ""
                self.m.findings.add(
                    "race",
                    f"{what} of {self.m.grid.name_warp(warp)} {'overwrites' if write else 'reads'} "
                    f"tensor memory column {place.low + column}, which "
                    f"{self.m.grid.name_warp(peer)} {did}{line}: no barrier orders the two",
                    ins,
                )


def _units(place: Rectangle) -> tuple[int, slice, slice]:
    lanes = slice(place.lane // _LANES, -(-place.lane_end // _LANES))
    return place.cta, lanes, slice(place.low, place.high)
