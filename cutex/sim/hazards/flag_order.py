"""The order that flags establish between the warps of a cluster.

A release is an access ``.release`` (or ``.acq_rel``), or a fence and a strong write after it; an
acquire is an access ``.acquire``, or a strong read and a fence after it. If the acquire reads what
the release, or an atomic after it, wrote to the same place of global or shared memory, the
acquiring warp is ordered after all that the releasing warp was ordered after (PTX ISA 8.8, 8.9.2).
Without either a flag, relaxed or volatile, orders nothing. Between clusters see cluster_order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.hazards.clocks import Clocks
from cutex.sim.machine.batch import Lanes
from cutex.sim.machine.events import Observer, SharedBytes
from cutex.sim.machine.memory import Part
from cutex.sim.ptx.once import once
from cutex.sim.ptx.program import Instruction, Program
from cutex.sim.ptx.strength import Strength, is_fence, is_near_fence, strength

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine


@once
def has_flags(program: Program) -> bool:
    """Whether any instruction releases or acquires."""
    return any(
        is_fence(ins.op) or is_near_fence(ins.op) or strength(ins.op)[2:4] != (False, False)
        for ins in program.code
    )


class FlagOrder(Observer):
    """The flags of the resident clusters."""

    def __init__(self, machine: Machine, clocks: Clocks) -> None:
        self.m, self.clocks = machine, clocks
        self.released: dict[Hashable, np.ndarray] = {}  # by place: a clock
        self.at_fence: dict[int, np.ndarray] = {}  # by warp: the clock that its last fence released
        self.observed: dict[int, np.ndarray] = {}  # by warp: clocks read since its last fence
        self.latest: dict[int, np.ndarray] = {}  # by warp: the clock that it has acquired last

    def fenced(self, warps: np.ndarray, releases: bool, scope: str) -> None:
        """NOTE: the clocks have to count the fence after this."""
        for warp in warps.tolist():
            self.clocks.take(warp, self.observed.pop(warp, None))
            if releases:
                self.at_fence[warp] = self.clocks.rows[:, warp].copy()

    def global_loaded(self, where: Lanes, size: int, ins: Instruction) -> None:
        self._access(where.warps, where.addresses, False, strength(ins.op))

    def global_stores(
        self, where: Lanes, values: np.ndarray, parts: Sequence[Part], ins: Instruction
    ) -> None:
        self._access(where.warps, where.addresses, True, strength(ins.op))

    def shared(self, at: SharedBytes, write: bool, ordinary: bool, ins: Instruction) -> None:
        if not ordinary:
            place = at.cta * self.m.smem_bytes + at.offset
            self._access(at.warps, -1 - place, write, strength(ins.op))

    def _access(self, warps: np.ndarray, places: np.ndarray, write: bool, how: Strength) -> None:
        """Strong accesses; of shared memory negative numbers."""
        if not how.strong:
            return
        pairs: Iterable[tuple[int, int]] = set(zip(warps.tolist(), places.tolist(), strict=True))
        for warp, place in pairs:
            key = self.m.grid.first_cta[warp], place
            if write:
                self._write(warp, key, how)
            else:
                self._read(warp, key, how)
                if how.atomic and place >= 0:  # NOTE: one that changes nothing stores nothing
                    self._write(warp, key, how)

    def _read(self, warp: int, key: Hashable, how: Strength) -> None:
        seen = self.released.get(key)
        if seen is None:
            return
        if not how.acquires:
            self.observed[warp] = self.clocks.join(self.observed.get(warp), seen)
        elif self.latest.get(warp) is not seen:  # else it spins
            self.latest[warp] = seen
            self.clocks.take(warp, seen)

    def _write(self, warp: int, key: Hashable, how: Strength) -> None:
        given = self.clocks.give(warp) if how.releases else self.at_fence.get(warp)
        if given is not None:
            self.released[key] = self.clocks.join(self.released.get(key), given)
