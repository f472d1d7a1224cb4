"""Who knows of whose accesses: vector clocks, and the proxy fence on the way.

Each warp counts its synchronisations; ``known[w, v]`` is how far warp w knows what warp v did,
through barriers, and ``visible[w, v]`` how far the async proxy sees it too, because a
``fence.proxy.async`` stood on the way. ``follows[w, v]`` is how far w only runs after v: a
``barrier.cluster.arrive.relaxed`` orders execution, but of memory it releases just what a fence
released before it. ``ordered[w, v]`` is what w knows by the letter: of tensor memory, by tcgen05's
own model, which asks for a tcgen05.fence on either side (9.7.16.6.3); of a warp, what all of its
lanes did, though only one of them arrived (9.7.13.2), or did so with the scope of its CTA for
another (8.5). An access is ordered after another iff its
warp knows the other's count; this does not depend on the order in which the simulator happened to
run them. The method is that of happens-before race detectors (FastTrack); the rules are PTX ISA
chapter 8 and 9.7.13.5.

What a warp issues asynchronously is done by agents with slots of their own: its tensor-core
operations, its bulk stores and its non-bulk copies, whose counts it learns when it waits for a
group, and releases by a commit. What completes on an mbarrier counts in that barrier's slot: the
number of its phases, learned by those whose wait passes.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine
    from cutex.sim.machine.mbarrier import Made

NEVER = np.iinfo(np.int32).max  # the count of what is not complete
_BARRIERS = 32  # slots to begin with


class Kind(IntEnum):
    """Who acts for a warp."""

    ITSELF = 0
    TENSOR = 1  # wgmma, tcgen05
    BULK = 2  # bulk stores
    COPY = 3  # non-bulk cp.async
    LOAD = 4  # tcgen05.ld
    STORE = 5  # tcgen05.st


class Clocks:
    """Vector clocks of the resident warps; a warp's slot is its number within its cluster, those
    of its other agents follow by kind, those of mbarriers behind them.
    """

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        self.warps = machine.grid.warps_per_cta * machine.grid.cluster_size
        self.barriers: dict[tuple[int, int, int], int] = {}  # rank, offset, which: slot
        width = self.warps * len(Kind) + _BARRIERS
        warps = np.arange(machine.grid.num_warps)
        rank = machine.grid.cta_rank[machine.grid.warp_cta]
        self.slot = rank * machine.grid.warps_per_cta + machine.grid.warp_in_cta
        self._slots: list[int] = self.slot.tolist()
        self.rows = np.zeros((4, machine.grid.num_warps, width), np.int32)
        self.known, self.visible, self.follows, self.ordered = self.rows
        self.usable = np.zeros_like(self.ordered)  # of ``ordered``, what the warp's fence took over
        self.fenced = np.zeros_like(self.rows)  # what a fence of the warp released
        self.known[warps, self.slot] = self.follows[warps, self.slot] = 1

    # -- synchronisation ---------------------------------------------------------------------------

    def give(self, warp: int, relaxed: bool = False, whole: bool = True) -> np.ndarray:
        """What ``warp`` releases, (4, slots); what it does from now on counts as later. ``whole``:
        all of its lanes do.
        """
        given = (self.fenced if relaxed else self.rows)[:, warp].copy()
        given[2:] = self.rows[2:, warp]
        if whole:
            given[3, self.slot[warp]] = given[0, self.slot[warp]]
        self.count(warp)
        return given

    def give_each(self, warps: np.ndarray, whole: np.ndarray) -> dict[int, np.ndarray]:
        """What each of several warps (n,) releases; ``whole`` (n,)."""
        given = self.rows[:, warps].swapaxes(0, 1).copy()  # (n, 4, slots)
        own, of = self.slot[warps][whole], np.flatnonzero(whole)
        given[of, 3, own] = given[of, 0, own]
        self.count(warps)
        return dict(zip(warps.tolist(), given, strict=True))

    def take(self, warp: int, given: np.ndarray | None) -> None:
        """``warp`` acquires what others gave."""
        if given is not None:
            mine = self.rows[:, warp, : given.shape[1]]
            np.maximum(mine, given, out=mine)

    @staticmethod
    def release(given: np.ndarray, slot: int, count: int) -> None:
        """What is given includes the agent's first ``count`` operations: those of a commit."""
        given[[0, 2, 3], slot] = np.maximum(given[[0, 2, 3], slot], count)

    def learn(self, warp: int, slot: int, count: int) -> None:
        """``warp`` has waited for the agent's first ``count`` operations (or phases)."""
        for row in (self.known, self.follows):
            if row.item(warp, slot) < count:
                row[warp, slot] = count

    def count(self, warps: int | np.ndarray) -> None:
        """What these warps do from now on is later."""
        self.known[warps, self.slot[warps]] += 1
        self.follows[warps, self.slot[warps]] += 1

    @staticmethod
    def join(a: np.ndarray | None, b: np.ndarray) -> np.ndarray:
        if a is None:
            return b
        if a.shape != b.shape:  # slots were added in between
            a, b = sorted((a, b), key=lambda given: given.shape[1])
            b = b.copy()
            np.maximum(a, b[:, : a.shape[1]], out=b[:, : a.shape[1]])
            return b
        return np.maximum(a, b)

    def fence_proxy(self, warps: np.ndarray) -> None:
        """fence.proxy.async: all that these warps know becomes visible to the async proxy."""
        self.visible[warps] = np.maximum(self.visible[warps], self.known[warps])
        self.count(warps)

    def fence_release(self, warps: np.ndarray) -> None:
        """A fence that releases to the cluster: relaxed arrivals after it carry what is known."""
        self.fenced[:, warps] = self.rows[:, warps]
        self.count(warps)

    def lanes_meet(self, warps: np.ndarray) -> None:
        """bar.warp.sync: what one lane does from now on comes after what the others did."""
        self.ordered[warps, self.slot[warps]] = self.known[warps, self.slot[warps]]
        self.count(warps)

    # -- mbarriers ---------------------------------------------------------------------------------

    def now(self, warp: int) -> int:
        """The warp's own count."""
        return self.known.item(warp, self._slots[warp])

    def agent(self, kind: Kind, warp: int) -> int:
        """The slot of what acts for the warp."""
        return kind * self.warps + self._slots[warp]

    def barrier_slot(self, cta: int, offset: int, again: bool) -> int:
        """A slot for the mbarrier that is initialised there, perhaps anew."""
        rank, which = int(self.m.grid.cta_rank[cta]), 0
        if again:
            which = 1 + sum(key[:2] == (rank, offset) for key in self.barriers)
        return self._more(rank, offset, which)

    def _more(self, rank: int, offset: int, which: int) -> int:
        """A slot behind those of the warps' agents."""
        key = rank, offset, which
        if key not in self.barriers:
            slot = self.barriers[key] = self.warps * len(Kind) + len(self.barriers)
            if slot == self.rows.shape[2]:
                self._widen()
        return self.barriers[key]

    def acquire_slot(self, warp: int) -> int:
        """The slot of what the warp acquires from other clusters (see cluster_order)."""
        return self._more(-1, -1, int(self.slot[warp]))

    def written_slot(self, warp: int) -> int:
        """The slot of the warp's bulk stores as global memory has them, complete to the last."""
        return self._more(-1, -2, int(self.slot[warp]))

    def grid_slot(self) -> int:
        """The slot of the grids before this one, whose end counts once."""
        return self.barrier_slot(0, 0, False)  # NOTE: no mbarrier lies at 0, which is the system's

    def _widen(self) -> None:
        """Twice as many slots."""
        self.rows, self.fenced = (np.concatenate([a, 0 * a], 2) for a in (self.rows, self.fenced))
        self.known, self.visible, self.follows, self.ordered = self.rows
        self.usable = np.concatenate([self.usable, 0 * self.usable], 1)

    def peer(self, warp: int, slot: int) -> int:
        """The warp for which this slot's agent acts, in the cluster of ``warp``."""
        m = self.m
        rank, inside = divmod(slot % self.warps, m.grid.warps_per_cta)
        own = int(m.grid.warp_cta[warp])
        return inside * m.grid.num_ctas + own - int(m.grid.cta_rank[own]) + rank

    def knows(self, warp: int, made: Made) -> bool:
        """Whether the initialisation of an mbarrier comes before what ``warp`` does now."""
        slot = self.slot[made.warp]
        if made.warp == warp or self.known[warp, slot] >= made.count:
            return True
        return made.fenced is not None and self.follows[warp, slot] >= made.fenced
