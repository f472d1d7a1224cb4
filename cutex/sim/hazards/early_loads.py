"""Loads of tensor memory that come before the MMA whose result they should have.

Where nobody waits for an MMA, warps may load its result before it is even issued. What an observer
of accesses sees is an MMA that overwrites what was loaded, which tells the story backwards: the
load is at fault, and the barrier that it should have waited for is one that the MMA's warp commits
to later. So such loads are reported when their CTA ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

Cell = tuple[int, int, int]  # CTA, 16 lanes, column


class EarlyLoads:
    """The cells of tensor memory that something has written, and those loaded before that."""

    def __init__(self, machine: Machine, shape: tuple[int, int, int]) -> None:
        self.m = machine
        self.filled, self.loaded_early = np.zeros(shape, bool), np.zeros(shape, bool)
        self.commits: dict[int, dict[tuple[int, int], None]] = {}  # by warp: mbarriers, in order
        # by warp and PTX line of a load: the warp of the MMA, what it is, its instruction, and a
        # column
        self.found: dict[tuple[int, int], tuple[int, str, Instruction, int]] = {}

    def accessed(self, at: tuple[int, slice, slice], write: bool) -> None:
        """A tcgen05.st or ld of these cells."""
        if write:
            self.filled[at] = True
        else:
            self.loaded_early[at] = ~self.filled[at]

    def committed(self, barrier: tuple[int, int], warp: int) -> None:
        """A tcgen05.commit of `warp`."""
        commits = self.commits.setdefault(warp, {})
        commits.pop(barrier, None)
        commits[barrier] = None

    def raced(
        self, cell: Cell, reader: int, line: int, warp: int, what: str, ins: Instruction
    ) -> None:
        """`what` of `warp` overwrites what `reader` has loaded at a PTX line, in no order."""
        if self.loaded_early[cell] and reader != warp and ins.name == "tcgen05":
            self.found.setdefault((reader, line), (warp, what, ins, cell[2]))

    def warps_left(self, warps: np.ndarray) -> None:
        """Tell the early loads of a CTA whose last warps these are."""
        m = self.m
        for cta in np.unique(m.grid.warp_cta[warps]).tolist():
            if m.live[cta :: m.grid.num_ctas].any():
                continue
            for (reader, line), found in list(self.found.items()):
                if m.grid.cta_of(reader) == cta:
                    self._tell(reader, line, *found)
                    del self.found[reader, line]

    def _tell(
        self, reader: int, line: int, warp: int, what: str, ins: Instruction, column: int
    ) -> None:
        m = self.m
        load = next(i for i in m.program.code if i.line == line)
        waited = m.last_wait[reader]
        unwaited = [b for b in self.commits.get(warp, ()) if b not in waited]
        name = m.mbarriers.name(*unwaited[-1]) if unwaited else ""
        m.findings.add(
            "race",
            f"{load.op.partition('.sync')[0]} of {m.grid.name_warp(reader)} reads tensor memory "
            f"column {column} before {what} of {m.grid.name_warp(warp)} at {ins.where()} has "
            "written it, and nothing that this warp has waited for says that it has"
            + (f"; it completes on {name}, on which this warp never waited" if name else ""),
            load,
            remedy=f"a wait, by this warp or one that it waits for, for the phase of {name}"
            if name
            else "a wait for a later commit of the warp that issues the MMA",
        )
