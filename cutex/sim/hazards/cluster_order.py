"""The order of clusters, through atomics, fences and ordered accesses of global memory.

A release is an access ``.release`` (or ``.acq_rel``), or a fence of the whole GPU and a strong
write after it; an acquire is an access ``.acquire``, or a strong read and a fence after it. If the
acquire reads the value of the release, or of an atomic after it on the same place, the acquiring
warp is ordered after everything that the releasing warp was ordered after (PTX ISA 8.8, 8.9.2).
Without either an atomic orders nothing.

By the letter the fence is one of the thread that writes, or reads, strongly. A fence of each thread
before a barrier, behind which one thread counts up, and one of each behind the barrier that tells
of its count, is as common, and works: a fence waits until what its thread wrote is performed. That
is the ``lenient`` order: what only it allows is an advisory.

Counts are those of the vector clocks, which belong to a cluster; so the clocks that a warp acquires
from other clusters are kept separately, and the clocks of its own cluster count its acquires.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cutex.sim.hazards.clocks import Clocks
from cutex.sim.machine.events import Observer
from cutex.sim.ptx.program import Program
from cutex.sim.ptx.strength import Strength, is_fence, strength

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

ClusterClock = dict[
    int, np.ndarray
]  # a clock: by cluster of the grid, counts of its agents, by slot


KEPT = 64  # writes of a place that are kept


class _At(NamedTuple):
    """A clock, the count of the warp that has it from which on another is ordered after it, and
    the lanes (bits) of the warp that have it by the letter.
    """

    clock: ClusterClock
    since: int
    lanes: int


def _releases(program: Program) -> bool:
    """Whether any instruction releases to other clusters, or acquires from them."""
    return any(
        is_fence(ins.op) or (strength(ins.op).far and strength(ins.op)[2:4] != (False, False))
        for ins in program.code
    )


def orders_clusters(program: Program) -> bool:
    """Whether the program's clusters may communicate, or order their accesses, through global
    memory.
    """
    return any(
        (strength(ins.op).far or is_fence(ins.op) or ins.name == "multimem")
        and "shared" not in ins.op
        for ins in program.code
    )


class ClusterOrder(Observer):
    """The order of a grid's clusters; costs nothing if no instruction could order them."""

    def __init__(self, machine: Machine, lenient: bool = False) -> None:
        """``lenient``: fences count for the threads that are ordered after or before them."""
        self.m, self.lenient = machine, lenient
        self.active = _releases(machine.program)
        # by address: the clocks released there, after each of the last writes, and before any
        self.released: dict[int, list[ClusterClock]] = {}

    def start(self, clocks: Clocks) -> None:
        """Begin with other resident clusters."""
        self.clocks = clocks
        # by warp: the clock that its last fence released, of lanes that have executed no later one
        self.at_fence: dict[int, list[_At]] = {}
        # by warp: clocks read strongly since its last fence, and its count at the last
        self.observed: dict[int, _At] = {}
        self.acquired: dict[int, list[ClusterClock]] = {}  # by warp: its clock after each acquire
        self.latest: dict[int, ClusterClock] = {}  # by warp: the clock that it has acquired last

    def fenced(self, warps: np.ndarray, lanes: np.ndarray, releases: bool, scope: str) -> None:
        """NOTE: the clocks have to count the fence after this."""
        if not self.active or scope != "gpu":
            return
        for warp, by in zip(warps.tolist(), bits_of(lanes), strict=True):
            observed = {w: [at] for w, at in self.observed.items()}
            if (seen := self._before(observed, warp, by)) is not None:
                self._acquire(warp, seen)
                if not self.lenient:  # else other threads' fences behind a barrier count as well
                    del self.observed[warp]
            if releases:
                others = [at._replace(lanes=at.lanes & ~by) for at in self.at_fence.get(warp, ())]
                mine = _At(self._now(warp), self.clocks.now(warp) + 1, by)
                self.at_fence[warp] = [at for at in others if at.lanes and not self.lenient] + [
                    mine
                ]

    def read(self, warp: int, address: int, how: Strength, lanes: int, back: int = 0) -> None:
        """A strong read by these lanes (bits) of what the last write left, or one so many before
        it."""
        if (all_seen := self.released.get(address)) is None or not all_seen[-1 - back]:
            return
        seen = all_seen[-1 - back]
        if how.acquires:
            if self.latest.get(warp) is not seen:  # else it spins
                self.latest[warp] = seen
                self._acquire(warp, seen)
        else:
            before = self.observed.get(warp, _At({}, 0, 0))
            clock = _joined(before.clock, seen)
            self.observed[warp] = _At(clock, self.clocks.now(warp), before.lanes | lanes)

    def write(self, warp: int, address: int, how: Strength, lanes: int) -> None:
        """A strong write by these lanes: the clock released there before is kept, as with an
        atomic."""
        given = self._now(warp) if how.releases else self._before(self.at_fence, warp, lanes)
        if how.releases and not self.lenient:
            self.clocks.count(warp)
        released = self.released.setdefault(address, [{}])
        released.append(released[-1] if given is None else _joined(released[-1], given))
        if len(released) > KEPT:
            del released[0]

    def _before(self, each: dict[int, list[_At]], warp: int, lanes: int) -> ClusterClock | None:
        """The warp's own clock in ``each``, of one of these lanes; if lenient, of any, with those
        of warps that it is ordered after.
        """
        if not self.lenient:
            mine = reversed(each.get(warp, ()))
            return next((at.clock for at in mine if at.lanes & lanes), None)
        out: ClusterClock | None = None
        for other, (*_, at) in each.items():
            if self.m.grid.first_cta[other] != self.m.grid.first_cta[warp]:
                continue
            if self.clocks.known[warp, self.clocks.slot[other]] >= at.since or other == warp:
                out = _joined(out or {}, at.clock)
        return out

    def known(self, warp: int, cluster: int, slot: int, clock: np.ndarray | None = None) -> int:
        """The count of an agent of another cluster up to which ``warp`` is ordered after it; was,
        with the ``clock`` that it had then.
        """
        row = self._foreign(warp, clock).get(cluster)
        return int(row[slot]) if row is not None and slot < len(row) else 0

    def includes(self, warp: int, cluster: int, slot: int, count: int) -> bool:
        """Whether ``warp`` is ordered after an access of that count by a warp of any cluster."""
        if int(self.m.grid.cta_cluster[self.m.grid.warp_cta[warp]]) == cluster:
            return self.clocks.known.item(warp, slot) >= count
        return self.known(warp, cluster, slot) >= count

    def clocks_of_others(self, warp: int) -> ClusterClock:
        """The clocks of other clusters that ``warp`` has."""
        return dict(self._foreign(warp)) if self.active else {}

    def _now(self, warp: int) -> ClusterClock:
        m = self.m
        own = int(m.grid.cta_cluster[m.grid.warp_cta[warp]])
        return {**self._foreign(warp), own: self.clocks.known[warp].copy()}

    def _foreign(self, warp: int, clock: np.ndarray | None = None) -> ClusterClock:
        """The clocks of other clusters that ``warp`` has, through acquires of its cluster that
        precede it, or preceded its ``clock`` of then.
        """
        m, out = self.m, dict[int, np.ndarray]()
        if clock is None:
            clock = self.clocks.known[warp]
        first = m.grid.first_cta[warp]
        for other, steps in self.acquired.items():
            if m.grid.first_cta[other] != first:
                continue
            slot = self.clocks.acquire_slot(other, self.lenient)
            count = int(clock[slot]) if slot < len(clock) else 0
            if count:
                out = _joined(out, steps[count - 1])
        return out

    def _acquire(self, warp: int, what: ClusterClock) -> None:
        steps = self.acquired.setdefault(warp, [])
        before = steps[-1] if steps else {}
        after = _joined(before, what)
        if after is not before:
            steps.append(after)
            self.clocks.learn(warp, self.clocks.acquire_slot(warp, self.lenient), len(steps))


def bits_of(lanes: np.ndarray) -> list[int]:
    """Lanes, (warps, 32), as bits."""
    return [int(x) for x in lanes @ (1 << np.arange(32))]


def _joined(a: ClusterClock, b: ClusterClock) -> ClusterClock:
    """The join of both clocks; ``a`` itself if ``b`` adds nothing."""
    out = a
    for cluster, row in b.items():
        mine = out.get(cluster)
        if mine is row:
            continue
        if mine is not None and len(mine) >= len(row) and (mine[: len(row)] >= row).all():
            continue
        if mine is not None:
            row, mine = sorted((row, mine), key=len, reverse=True)
            row = row.copy()
            np.maximum(row[: len(mine)], mine, out=row[: len(mine)])
        if out is a:
            out = dict(a)
        out[cluster] = row
    return out
