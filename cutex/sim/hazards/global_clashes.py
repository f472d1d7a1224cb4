"""Which accesses to global memory race with one that comes now."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.hazards.clocks import Clocks
from cutex.sim.hazards.cluster_order import ClusterOrder
from cutex.sim.hazards.global_marks import ATOMIC, LANE, PLAIN, By, Clash, Records

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine


class GlobalClashes:
    """Compares accesses with earlier ones, of which their bytes have marks: within a cluster by the
    vector clocks, between clusters by their order, by the letter or lenient."""

    clocks: Clocks  # of the resident clusters

    def __init__(
        self, machine: Machine, order: ClusterOrder, lenient: ClusterOrder, records: Records
    ) -> None:
        self.m, self.order, self.lenient, self.records = machine, order, lenient, records

    def clusters(self, warps: np.ndarray) -> np.ndarray:
        """The clusters' numbers in the grid."""
        return self.m.grid.cta_cluster[self.m.grid.warp_cta[warps]]

    def who(self, by: By) -> np.ndarray:
        """The clusters, as records name them."""
        return self.clusters(by.warps) + 1

    def first(
        self, last: np.ndarray, places: np.ndarray, by: By, among: np.ndarray | None = None
    ) -> Clash | None:
        """The first of the places at which the last access is not ordered before this one, of those
        ``among``; None if there is none.
        """
        late = self.late(last, by, among)
        if late is None or not late.any():
            return None
        sure = late & ~self._fenced(last, late, by)
        at = tuple(int(v[0]) for v in np.nonzero(sure if sure.any() else late))
        return Clash(at[0], int(last[at]) >> LANE, int(places[at]), not sure.any())

    def _fenced(self, last: np.ndarray, late: np.ndarray, by: By) -> np.ndarray:
        """Of the accesses ``late``, those that are before this one in the lenient order of
        clusters.
        """
        out = np.zeros(late.shape, bool)
        if self.order.active:
            row, column = np.nonzero(late)
            rec = last[row, column] >> LANE
            warps = by.warps[0 * row if len(by.warps) == 1 else row]
            other = self.records.who[rec] != self.clusters(warps) + 1
            known = ~self._unknown(rec[other], warps[other], self.lenient)
            out[row[other], column[other]] = known
        return out

    def late(
        self, last: np.ndarray, by: By, among: np.ndarray | None = None, alike: bool = False
    ) -> np.ndarray | None:
        """Which of the accesses ``last`` (n, bytes), as marks, are not ordered before this one, and
        race with it; ``alike``: or do not, as both are reads or atomics. None if there are none.
        """
        some = last != 0
        if among is not None:
            some &= among
        if not some.any():
            return None
        row, column = np.nonzero(some)
        rec, r, one = last[row, column] >> LANE, self.records, len(by.warps) == 1
        row_of = 0 * row if one else row
        other = r.who[rec] != self.who(by)[row_of]
        late = other.copy()
        if self.order.active and other.any():
            late[other] = self._unknown(rec[other], by.warps[row_of[other]])
        inside = ~other & (r.slot[rec] != by.slots[row_of])
        if by.clock is not None:  # NOTE: two bulk stores of one thread have no order either
            inside = ~other
        if inside.any():
            slots, counts = r.slot[rec[inside]], r.count[rec[inside]]
            late[inside] = counts > self._known(by, slots, row_of[inside])
        if not alike and by.how.strong:
            kind = r.kind[rec]
            late &= ~((kind != PLAIN) & (~other | (by.how.far & (kind <= ATOMIC))))
        out = np.zeros(last.shape, bool)
        out[row, column] = late
        return out

    def _known(self, by: By, slots: np.ndarray, row: np.ndarray) -> np.ndarray:
        """The counts of these agents that an access of the cluster is ordered after."""
        if by.clock is None:
            return self.clocks.known[by.warps[row], slots]
        inside = slots < len(by.clock)  # NOTE: slots may have been added since
        return np.where(inside, by.clock[np.minimum(slots, len(by.clock) - 1)], 0)

    def _unknown(
        self, rec: np.ndarray, warps: np.ndarray, order: ClusterOrder | None = None
    ) -> np.ndarray:
        """Which of these accesses of other clusters are not ordered before the warps'."""
        order = order or self.order
        r = self.records
        keys = np.stack([warps, r.who[rec].astype(np.int64) - 1, r.slot[rec]])
        found, which = np.unique(keys, axis=1, return_inverse=True)
        limits = np.array([order.known(int(w), int(who), int(slot)) for w, who, slot in found.T])
        return r.count[rec] > limits[which.reshape(-1)]
