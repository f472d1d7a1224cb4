"""Stores to global memory by lanes of a warp, for which another of its lanes releases.

A release orders what its own thread did before, and what that thread knows of (PTX ISA 8.8). Of
what other lanes of its warp have stored it knows by a bar.warp.sync or a barrier. Whole warps
execute one instruction after another, so a missing one is an advisory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cutex.sim.hazards.clocks import Clocks
from cutex.sim.machine.batch import Lanes
from cutex.sim.machine.events import Observer
from cutex.sim.machine.memory import Part
from cutex.sim.ptx.program import Instruction, Program
from cutex.sim.ptx.strength import strength

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine


class _Stored(NamedTuple):
    """The lanes (bits) of a warp that have stored since its lanes were last ordered, the warp's
    count at that, and the last such instruction.
    """

    lanes: int
    ordered: int
    instruction: Instruction


def releases(program: Program) -> bool:
    """Whether any access releases to other CTAs."""
    return any(strength(ins.op).releases and strength(ins.op).far for ins in program.code)


class LaneReleases(Observer):
    """The ordinary stores of each warp that its lanes do not know of."""

    def __init__(self, machine: Machine, clocks: Clocks) -> None:
        self.m, self.clocks = machine, clocks
        self.stored: dict[int, _Stored] = {}

    def global_stores(
        self, where: Lanes, values: np.ndarray, parts: Sequence[Part], ins: Instruction
    ) -> None:
        how = strength(ins.op)
        if how.releases and not how.atomic:  # NOTE: an atomic was reported as a load
            self._release(where, ins)
        elif not how.strong:
            for warp, lanes in _by_warp(where):
                before, ordered = self.stored.get(warp), self._ordered(warp)
                if before is not None and before.ordered == ordered:
                    lanes |= before.lanes
                self.stored[warp] = _Stored(lanes, ordered, ins)

    def global_loaded(self, where: Lanes, size: int, ins: Instruction) -> None:
        if strength(ins.op).releases:
            self._release(where, ins)

    def _ordered(self, warp: int) -> int:
        """The warp's count up to which each of its lanes knows of the others."""
        return self.clocks.ordered.item(warp, int(self.clocks.slot[warp]))

    def _release(self, where: Lanes, ins: Instruction) -> None:
        for warp, lanes in _by_warp(where):
            stored = self.stored.get(warp)
            if stored is None or stored.ordered != self._ordered(warp) or warp in self.clocks.met:
                continue
            others = stored.lanes & ~lanes
            if others:
                one, other = (int(x & -x).bit_length() - 1 for x in (lanes, others))
                self.m.findings.add(
                    "race",
                    f"lane {one} of {self.m.grid.name_warp(warp)} releases, and its lane {other} "
                    f"has stored to global memory at PTX line {stored.instruction.line}: by the "
                    "letter, a bar.warp.sync is missing between the two lanes",
                    ins,
                    advisory=True,
                )


def _by_warp(where: Lanes) -> Iterator[tuple[int, int]]:
    """The warps of an access, and their lanes as bits."""
    for warp in np.unique(where.warps).tolist():
        yield warp, sum(1 << lane for lane in set(where.lanes[where.warps == warp].tolist()))
