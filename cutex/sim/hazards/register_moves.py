"""The rules of setmaxnreg (PTX ISA 9.7.19.5): all warps of a warpgroup execute it, with the same
count, and between two of them they synchronise.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cutex.sim.hazards.clocks import Clocks
from cutex.sim.machine.events import Observer
from cutex.sim.machine.machine import registers_at_start
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

WARPS = 4  # of a warpgroup


class _Move(NamedTuple):
    """A setmaxnreg of a warp, and the warp's count then."""

    registers: int
    when: int
    instruction: Instruction


class RegisterMoves(Observer):
    """The setmaxnreg of the warps of all resident CTAs."""

    def __init__(self, machine: Machine, clocks: Clocks) -> None:
        self.m, self.clocks = machine, clocks
        self.moves: dict[int, list[_Move]] = defaultdict(list)  # by warp

    def registers_set(self, warp: int, registers: int, ins: Instruction) -> None:
        mine = self.moves[warp]
        number, name = len(mine), self.m.grid.name_warp
        for peer in self._group(warp):
            theirs = self.moves[peer]
            if number < len(theirs) and theirs[number].registers != registers:
                self._add(
                    f"{name(warp)} executes setmaxnreg with {registers} registers, {name(peer)} of "
                    f"its warpgroup with {theirs[number].registers} at "
                    f"{theirs[number].instruction.where()}: all four warps take the same count",
                    ins,
                )
                break
            if number and not self._after(warp, peer, number - 1):
                self._add(
                    f"{name(warp)} executes setmaxnreg again, and nothing says that {name(peer)} "
                    "of its warpgroup has executed the one before, at "
                    f"{mine[-1].instruction.where()}: between two the warpgroup has to synchronise",
                    ins,
                    "a barrier of the warpgroup's warps between the two setmaxnreg",
                )
                break
        held, whence = self._held(mine)
        more = registers - held if held else 0
        if more > 0 if "dec" in ins.parts else more < 0:
            self._add(
                f"{name(warp)} has {held} registers, {whence}, and {ins.op} gives it {registers}: "
                ".dec takes no more than it has, .inc no fewer",
                ins,
            )
        mine.append(_Move(registers, self.clocks.now(warp), ins))

    def warps_left(self, warps: np.ndarray) -> None:
        """Report warps that return and have not executed what others of their warpgroup have."""
        for warp in warps.tolist():
            for peer in self._group(warp):
                left = self.moves[peer][len(self.moves[warp]) :]
                if not left:
                    continue
                name = self.m.grid.name_warp
                self._add(
                    f"{name(peer)} executes setmaxnreg, and {name(warp)} of its warpgroup returns "
                    "without: all four warps have to execute it",
                    left[0].instruction,
                )
                break

    def _held(self, moves: list[_Move]) -> tuple[int, str]:
        """The registers per thread of a warp, and why; 0 if they are not known: a CTA of few
        threads starts with what the kernel needs.
        """
        if moves:
            return moves[-1].registers, f"by the setmaxnreg at {moves[-1].instruction.where()}"
        warps, ctas = self.m.grid.warps_per_cta, self.m.program.ctas_per_sm
        start = registers_at_start(warps, ctas) if 32 * warps * ctas > 256 else 0
        return start, f"as CTAs of {32 * warps} threads start with"

    def _group(self, warp: int) -> list[int]:
        """The other warps of its warpgroup."""
        grid = self.m.grid
        inside, cta = divmod(warp, grid.num_ctas)
        first = inside // WARPS * WARPS
        group = range(first, min(first + WARPS, grid.warps_per_cta))
        return [i * grid.num_ctas + cta for i in group if i != inside]

    def _after(self, warp: int, peer: int, number: int) -> bool:
        """Whether the warp is ordered after the peer's setmaxnreg of this number."""
        theirs = self.moves[peer]
        known = self.clocks.follows[warp, self.clocks.slot[peer]]
        return number < len(theirs) and bool(known >= theirs[number].when)

    def _add(self, message: str, ins: Instruction, remedy: str = "") -> None:
        self.m.findings.add("setmaxnreg", message, ins, remedy=remedy)
