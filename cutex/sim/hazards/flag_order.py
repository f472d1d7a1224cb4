"""The order that flags establish between the warps of a cluster.

A release is an access ``.release`` (or ``.acq_rel``), or a fence and a strong write after it; an
acquire is an access ``.acquire``, or a strong read and a fence after it. If the acquire reads what
the release, or an atomic after it, wrote to the same place of global or shared memory, the
acquiring warp is ordered after all that the releasing warp was ordered after (PTX ISA 8.8, 8.9.2).
Without either a flag, relaxed or volatile, orders nothing, nor does one whose access or fence has
the scope of a CTA between warps of two (8.7.1). Between clusters see cluster_order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.hazards.clocks import Clocks
from cutex.sim.hazards.cluster_order import KEPT, ClusterOrder
from cutex.sim.hazards.flag_values import FlagValues, lanes_by_place
from cutex.sim.machine.batch import Lanes
from cutex.sim.machine.events import Observer, SharedBytes
from cutex.sim.machine.memory import Part
from cutex.sim.ptx.flag_tests import only_reads
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

    def __init__(self, machine: Machine, clocks: Clocks, clusters: Sequence[ClusterOrder]) -> None:
        """``clusters``: orders of clusters, of which any may order a load after a flag's value."""
        self.m, self.clocks, self.clusters = machine, clocks, clusters
        self.values = FlagValues(machine)
        self.values.start(clocks)
        # by CTA, or by cluster of which the first CTA's number is negated, and place: the clocks
        # released there, each with the number of the flag's version
        self.released: dict[tuple[int, int], list[tuple[int, np.ndarray]]] = {}
        # by warp, for its CTA alone (True) and for all: the clock that its last fence released
        self.at_fence: dict[tuple[int, bool], np.ndarray] = {}
        # likewise: clocks read since its last fence
        self.observed: dict[tuple[int, bool], np.ndarray] = {}
        # likewise: the clock that it has acquired last
        self.latest: dict[tuple[int, bool], np.ndarray] = {}

    def fenced(self, warps: np.ndarray, lanes: np.ndarray, releases: bool, scope: str) -> None:
        """NOTE: the clocks have to count the fence after this."""
        for warp in warps.tolist():
            self.clocks.take(warp, self.observed.pop((warp, True), None))
            if scope != "cta":
                self.clocks.take(warp, self.observed.pop((warp, False), None))
            if releases:
                row = self.clocks.rows[:, warp].copy()
                self.at_fence |= {(warp, own): row for own in (True, False)[: 1 + (scope != "cta")]}

    def global_loaded(self, where: Lanes, size: int, ins: Instruction) -> None:
        self._access(where, size, False, ins)

    def global_stores(
        self, where: Lanes, values: np.ndarray, parts: Sequence[Part], ins: Instruction
    ) -> None:
        if not strength(ins.op).atomic:  # NOTE: an atomic was both when it loaded
            self._access(where, values.shape[1], True, ins)

    def shared(self, at: SharedBytes, write: bool, ordinary: bool, ins: Instruction) -> None:
        if not ordinary:
            place = at.cta * self.m.smem_bytes + at.offset
            self._access(Lanes(at.warps, at.lanes, -1 - place), at.width, write, ins)

    def _access(self, where: Lanes, size: int, write: bool, ins: Instruction) -> None:
        """Strong accesses; of shared memory negative numbers."""
        how = strength(ins.op)
        if not how.strong:
            return
        for (warp, place), lanes in lanes_by_place(where).items():
            if not write:
                back = self.values.back(self, warp, lanes, place, size, ins)
                self._read(warp, place, how, self.values.newest(place) - back)
                if not how.atomic or place < 0 or only_reads(ins):
                    continue
            self.values.wrote(warp, place, size)
            self._write(warp, place, how)

    def includes(self, warp: int, cluster: int, slot: int, count: int) -> bool:
        """Whether ``warp`` is ordered after an access of that count by a warp of any cluster."""
        if int(self.m.grid.cta_cluster[self.m.grid.warp_cta[warp]]) == cluster:
            return self.clocks.known.item(warp, slot) >= count
        return any(o.active and o.includes(warp, cluster, slot, count) for o in self.clusters)

    def _groups(self, warp: int, place: int, how: Strength) -> list[tuple[bool, tuple[int, int]]]:
        """Those whom the warp orders itself with there: its CTA, and unless the access has that
        scope its cluster; each with the key of `released`.
        """
        grid = self.m.grid
        own = True, (grid.cta_of(warp), place)
        return [own] if how.own else [own, (False, (-1 - grid.first_cta[warp], place))]

    def _read(self, warp: int, place: int, how: Strength, version: int) -> None:
        """A strong read of a version of the flag."""
        for own, key in self._groups(warp, place, how):
            seen = next((c for n, c in reversed(self.released.get(key, ())) if n <= version), None)
            if seen is None:
                continue
            if not how.acquires:
                before = self.observed.get((warp, own))
                self.observed[warp, own] = self.clocks.join(before, seen)
            elif self.latest.get((warp, own)) is not seen:  # else it spins
                self.latest[warp, own] = seen
                self.clocks.take(warp, seen)

    def _write(self, warp: int, place: int, how: Strength) -> None:
        for own, key in self._groups(warp, place, how):
            given = self.clocks.give(warp) if how.releases else self.at_fence.get((warp, own))
            if given is not None:
                released = self.released.setdefault(key, [])
                last = released[-1][1] if released else None
                released.append((self.values.newest(place), self.clocks.join(last, given)))
                if len(released) > KEPT:
                    del released[0]
