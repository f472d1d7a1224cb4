"""Vector clocks: which accesses each warp is ordered after, with or without a proxy fence.

Each warp counts its synchronisations; ``known[w, v]`` is the count of warp v up to which warp w is
ordered after it, through barriers, and ``visible[w, v]`` the count up to which the async proxy is,
too, because a ``fence.proxy.async`` was on the way. ``follows[w, v]`` is the count after which w
runs: a ``barrier.cluster.arrive.relaxed`` orders execution, but of memory it releases only what an
earlier fence released. ``ordered[w, v]`` is the strict order of the ISA: for tensor memory, by
tcgen05's own model, which requires a tcgen05.fence on either side (9.7.16.6.3); for a warp, the
accesses of all of its lanes, though only one of them arrived (9.7.13.2), or arrived with the scope
of its CTA for another (8.5). ``caused[w, v]`` is what ``follows`` is, and what came before the
issue of an asynchronous operation for whose bytes the warp has waited: it orders when things
happen, and no memory (see mbarrier_phases).

An access is ordered after another iff its warp's clock includes the other's count; this does not
depend on the order in which the simulator ran them. The method is that of happens-before race
detectors (FastTrack); the rules are PTX ISA chapter 8 and 9.7.13.5.

The asynchronous operations of a warp are executed by agents with slots of their own: its
tensor-core operations, its bulk stores and its non-bulk copies. The warp acquires their counts when
it waits for a group, and releases them by a commit. Operations that complete on an mbarrier count
in that barrier's slot: the number of its phases, acquired by the warps whose wait passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.machine.events import Observer
from cutex.sim.machine.operation import Kind

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

NEVER = np.iinfo(np.int32).max  # the count of an operation that is not complete
_BARRIERS = 32  # slots for mbarriers at the start


class Clocks(Observer):
    """The vector clocks of the resident warps; a warp's slot is its number within its cluster,
    followed by the slots of its other agents, by kind, and then those of mbarriers.
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
        self.rows = np.zeros((5, machine.grid.num_warps, width), np.int32)
        self.known, self.visible, self.follows, self.ordered, self.caused = self.rows
        self.usable = np.zeros_like(self.ordered)  # the part of ``ordered`` that a fence took over
        self.released = np.zeros_like(self.rows)  # the clock that a fence of the warp released
        for row in (self.known, self.follows, self.caused):
            row[warps, self.slot] = 1
        # by warp: lanes (bits) that met by bar.warp.sync, not all, and the warp's count at the last
        self.met: dict[int, dict[int, int]] = {}
        # by warp: its count after the last such meeting, and before the first in a row
        self.partly: dict[int, tuple[int, int]] = {}
        self.copies = any(ins.op.startswith("cp.async.c") for ins in machine.program.code)
        self.relaxes = any("arrive.relaxed" in ins.op for ins in machine.program.code)

    # -- synchronisation ---------------------------------------------------------------------------

    def give(self, warp: int, relaxed: bool = False, whole: bool = True) -> np.ndarray:
        """The clock that ``warp`` releases, (5, slots); its later accesses get a higher count.
        ``whole``: whether all of its lanes release.
        """
        given = (self.released if relaxed else self.rows)[:, warp].copy()
        given[2:] = self.rows[2:, warp]
        if whole:
            own = self._of_lanes(self.slot[warp])
            given[3, own] = given[0, own]
        self.count(warp)
        return given

    def _of_lanes(self, slots: np.ndarray) -> np.ndarray:
        """The slots of these warps, and of their copies: lanes know of their own until all meet."""
        if not self.copies:
            return slots
        return np.stack([slots, slots + Kind.COPY * self.warps])

    def give_each(self, warps: np.ndarray, whole: np.ndarray) -> dict[int, np.ndarray]:
        """The clock that each of several warps (n,) releases; ``whole`` (n,)."""
        given = self.rows[:, warps].swapaxes(0, 1).copy()  # (n, 5, slots)
        own, of = self._of_lanes(self.slot[warps][whole]), np.flatnonzero(whole)
        given[of, 3, own] = given[of, 0, own]
        self.count(warps)
        return dict(zip(warps.tolist(), given, strict=True))

    def take(self, warp: int, given: np.ndarray | None) -> None:
        """Let ``warp`` acquire the clock that others gave."""
        if given is not None:
            mine = self.rows[:, warp, : given.shape[1]]
            np.maximum(mine, given, out=mine)

    @staticmethod
    def release(given: np.ndarray, slot: int, count: int) -> None:
        """Include the agent's first ``count`` operations in ``given``: those of a commit."""
        given[[0, 2, 3, 4], slot] = np.maximum(given[[0, 2, 3, 4], slot], count)

    def waited(self, warps: Sequence[int], kind: Kind, numbers: Sequence[int]) -> None:
        """Order each warp after its operations of a kind."""
        for warp, number in zip(warps, numbers, strict=True):
            self.learn(warp, self.agent(kind, warp), number)

    def waited_writes(self, warp: int, number: int) -> None:
        """Order it after what its bulk stores have written."""
        self.learn(warp, self.written_slot(warp), number)

    def learn(self, warp: int, slot: int, count: int) -> None:
        """Order ``warp`` after the agent's first ``count`` operations (or phases), for which it has
        waited.
        """
        if self.known.item(warp, slot) >= count:
            return  # NOTE: the others include what is known
        for row in (self.known, self.follows, self.caused):
            if row.item(warp, slot) < count:
                row[warp, slot] = count

    def count(self, warps: int | np.ndarray) -> None:
        """Give later accesses of these warps a higher count."""
        slots = self.slot[warps]
        self.known[warps, slots] += 1
        self.follows[warps, slots] += 1
        self.caused[warps, slots] += 1

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

    def proxy_fenced(self, warps: np.ndarray) -> None:
        """Everything ordered before these warps becomes visible to the async
        proxy.
        """
        self.visible[warps] = np.maximum(self.visible[warps], self.known[warps])
        self.count(warps)

    def fenced(self, warps: np.ndarray, lanes: np.ndarray, releases: bool, scope: str) -> None:
        """Later relaxed arrivals carry the present clock, if the fence releases it to the
        cluster.
        """
        if not releases:
            return
        if scope != "cta":
            self.released[:, warps] = self.rows[:, warps]
        self.count(warps)

    def lanes_met(self, warps: np.ndarray) -> None:
        """Each lane's later accesses are ordered after the others' earlier ones."""
        own = self._of_lanes(self.slot[warps])
        self.ordered[warps, own] = self.known[warps, own]
        self.count(warps)

    def some_lanes_met(self, warp: int, lanes: int) -> None:
        """Those lanes' later accesses are ordered after each other's earlier ones."""
        now = self.now(warp)
        self.met.setdefault(warp, {})[lanes] = now
        first = self.partly.get(warp, (0, 0))
        self.count(warp)
        self.partly[warp] = now + 1, first[1] if first[0] == now else now

    def synchronised(self, warps: np.ndarray) -> np.ndarray:
        """The counts from which on the whole of each warp has not synchronised, (n,)."""
        out = self.known[warps, self.slot[warps]]
        for warp, (now, first) in self.partly.items():
            out[(warps == warp) & (out == now)] = first
        return out

    def lanes_have_met(
        self, warps: np.ndarray, lanes: np.ndarray, others: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        """Whether a bar.warp.sync of some lanes of their warp orders ``lanes`` after what
        ``others`` did at these counts, (n,) each.
        """
        out = np.zeros(len(warps), bool)
        for warp, meetings in self.met.items():
            for mask, count in meetings.items():
                named = mask >> np.arange(32) & 1
                both = named[lanes] & named[others]
                out |= (warps == warp) & (both != 0) & (counts <= count)
        return out

    # -- mbarriers ---------------------------------------------------------------------------------

    def now(self, warp: int) -> int:
        """The warp's own count."""
        return self.known.item(warp, self._slots[warp])

    def agent(self, kind: Kind, warp: int) -> int:
        """The slot of the warp's agent of this kind."""
        return kind * self.warps + self._slots[warp]

    def barrier_slot(self, cta: int, offset: int, again: bool) -> int:
        """A slot for the mbarrier that is initialised there, perhaps for another time."""
        rank, which = int(self.m.grid.cta_rank[cta]), 0
        if again:
            which = 1 + sum(key[:2] == (rank, offset) for key in self.barriers)
        return self._more(rank, offset, which)

    def _more(self, rank: int, offset: int, which: int) -> int:
        """A slot after those of the warps' agents."""
        key = rank, offset, which
        if key not in self.barriers:
            slot = self.barriers[key] = self.warps * len(Kind) + len(self.barriers)
            if slot == self.rows.shape[2]:
                self._widen()
        return self.barriers[key]

    def acquire_slot(self, warp: int, lenient: bool = False) -> int:
        """The slot that counts the warp's acquires from other clusters (see cluster_order)."""
        return self._more(-1, -3 if lenient else -1, int(self.slot[warp]))

    def written_slot(self, warp: int) -> int:
        """The slot of the warp's bulk stores, counted up to the last that is complete in global
        memory.
        """
        return self._more(-1, -2, int(self.slot[warp]))

    def grid_slot(self) -> int:
        """The slot of the grids before this one, whose end has count 1."""
        return self.barrier_slot(0, 0, False)  # NOTE: no mbarrier is at 0, which is the system's

    def _widen(self) -> None:
        """Double the number of slots."""
        self.rows, self.released = (
            np.concatenate([a, 0 * a], 2) for a in (self.rows, self.released)
        )
        self.known, self.visible, self.follows, self.ordered, self.caused = self.rows
        self.usable = np.concatenate([self.usable, 0 * self.usable], 1)

    def of_cta(self, warp: int) -> slice:
        """The slots of the warps of its CTA."""
        per = self.m.grid.warps_per_cta
        first = self._slots[warp] // per * per
        return slice(first, first + per)

    def peer(self, warp: int, slot: int) -> int:
        """The warp whose agent has this slot, in the cluster of ``warp``."""
        m = self.m
        rank, inside = divmod(slot % self.warps, m.grid.warps_per_cta)
        own = int(m.grid.warp_cta[warp])
        return inside * m.grid.num_ctas + own - int(m.grid.cta_rank[own]) + rank
