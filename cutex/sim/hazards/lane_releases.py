"""Stores to global memory by lanes of a warp, for which another of its lanes releases.

A release orders what its own thread did before, and what that thread knows of (PTX ISA 8.8): an
access ``.release``, or a fence and a strong write behind it. Of what other lanes of its warp have
stored it knows by a bar.warp.sync or a barrier. Whole warps execute one instruction after another,
so a missing one is an advisory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cutex.sim.hazards.clocks import Clocks
from cutex.sim.hazards.cluster_order import bits_of
from cutex.sim.machine.batch import Lanes
from cutex.sim.machine.events import Observer
from cutex.sim.machine.memory import Part
from cutex.sim.ptx.flag_tests import only_reads
from cutex.sim.ptx.program import Instruction, Program
from cutex.sim.ptx.strength import is_fence, strength

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine


class _Stored(NamedTuple):
    """The lanes (bits) of a warp that have stored since its lanes were last ordered, the warp's
    count at that, and the last such instruction.
    """

    lanes: int
    ordered: int
    instruction: Instruction


class _Fence(NamedTuple):
    """The lanes (bits) that have executed a warp's last fence, and what others had stored."""

    lanes: int
    stored: _Stored


def releases(program: Program) -> bool:
    """Whether any access, or a fence, releases to other CTAs."""
    code = program.code
    return any(is_fence(x.op) or (strength(x.op).releases and strength(x.op).far) for x in code)


class LaneReleases(Observer):
    """The ordinary stores of each warp that its lanes do not know of."""

    def __init__(self, machine: Machine, clocks: Clocks) -> None:
        self.m, self.clocks = machine, clocks
        self.stored: dict[int, _Stored] = {}
        self.fences: dict[int, _Fence] = {}

    def global_stores(
        self, where: Lanes, values: np.ndarray, parts: Sequence[Part], ins: Instruction
    ) -> None:
        how = strength(ins.op)
        if how.strong and not how.atomic:  # NOTE: an atomic was reported as a load
            self._release(where, ins)
        elif not how.strong:
            for warp, lanes in _by_warp(where):
                before, ordered = self.stored.get(warp), self._ordered(warp)
                if before is not None and before.ordered == ordered:
                    lanes |= before.lanes
                self.stored[warp] = _Stored(lanes, ordered, ins)

    def global_loaded(self, where: Lanes, size: int, ins: Instruction) -> None:
        if strength(ins.op).atomic and not only_reads(ins):
            self._release(where, ins)

    def fenced(self, warps: np.ndarray, lanes: np.ndarray, releases: bool, scope: str) -> None:
        if not releases or scope != "gpu" or not self.stored:
            return
        for warp, by in zip(warps.tolist(), bits_of(lanes), strict=True):
            self.fences.pop(warp, None)
            if (others := self._others(warp, by)) is not None:
                self.fences[warp] = _Fence(by, others)

    def _others(self, warp: int, lanes: int) -> _Stored | None:
        """What other lanes of the warp have stored that these do not know of."""
        stored = self.stored.get(warp)
        if stored is None or stored.ordered != self._ordered(warp) or warp in self.clocks.met:
            return None
        return stored._replace(lanes=stored.lanes & ~lanes) if stored.lanes & ~lanes else None

    def _ordered(self, warp: int) -> int:
        """The warp's count up to which each of its lanes knows of the others."""
        return self.clocks.ordered.item(warp, int(self.clocks.slot[warp]))

    def _release(self, where: Lanes, ins: Instruction) -> None:
        how = strength(ins.op)
        for warp, lanes in _by_warp(where) if how.far else ():
            fence = self.fences.get(warp)
            stored = self._others(warp, lanes) if how.releases else None
            if not how.releases and fence is not None and fence.lanes & lanes:
                stored = self.fences.pop(warp).stored
            if stored is not None:
                one, other = (int(x & -x).bit_length() - 1 for x in (lanes, stored.lanes))
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
