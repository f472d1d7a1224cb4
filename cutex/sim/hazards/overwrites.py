"""Two clusters that write different bytes to the same place of global memory.

Nothing orders the clusters of a grid but what they tell each other through global memory (PTX ISA
8.7, causality order). Where a kernel has no instruction that could, such a place holds whatever
came last: a race, whichever it was in the order at hand. The same bytes twice are no fault.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from cutex.sim.machine.memory import Region
from cutex.sim.ptx.parse import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

LARGEST = 1 << 26  # bytes of a tensor that is watched: eight bytes are kept for each
# Instructions by which clusters may order what they do: atomics, ordered accesses and fences.
_ORDERS = re.compile(
    r"(atom|red|multimem)\.|(ld|st)\.(acquire|release|relaxed|volatile|mmio)"
    r"|fence\.[\w.]*(gpu|sys)|membar\.(gl|sys)"
)


class Overwrites:
    """Who wrote each byte of the launch's tensors last."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        self.active = not any(
            _ORDERS.match(ins.op) and "shared" not in ins.op for ins in machine.program.code
        )
        # by the region's address: 1 + the number of the cluster in the grid (0: none), PTX line
        self.shadows: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def store(
        self, addresses: np.ndarray, values: np.ndarray, complain: Any, warps: np.ndarray, ins: Any
    ) -> None:
        """As `GlobalMemory.store`, by ``warps`` (n,)."""
        memory = self.m.memory
        if not self.active:
            memory.store(addresses, values, complain)
            return
        owners = self.m.grid.cta_cluster[self.m.grid.warp_cta[warps]]
        alone = len(np.unique(addresses)) == len(addresses) or len(np.unique(owners)) == 1
        for owner in (None,) if alone else np.unique(owners).tolist():
            some = slice(None) if owner is None else owners == owner
            where, new, mine = addresses[some], values[some], owners[some]
            for region, members, offsets in memory.by_region(where, values.shape[1], complain):
                self.note(region, offsets, new[members], mine[members], ins)
            memory.store(where, new, complain)

    def note(
        self,
        region: Region,
        offsets: np.ndarray,
        values: np.ndarray,
        owners: np.ndarray,
        ins: Instruction,
    ) -> None:
        """``values`` (n, size) bytes are about to be written at ``offsets`` (n,) of the region, by
        the clusters ``owners`` (n,) or (1,)."""
        if not self.active or len(region.data) > LARGEST:
            return
        if region.base not in self.shadows:
            size = len(region.data)
            self.shadows[region.base] = np.zeros(size, np.uint32), np.zeros(size, np.uint32)
        who, line = self.shadows[region.base]
        places = offsets[:, None] + np.arange(values.shape[1])
        mine = np.broadcast_to((owners + 1).astype(np.uint32)[:, None], places.shape)
        before = who[places]
        other = (before != 0) & (before != mine) & (region.data[places] != values)
        if other.any():
            at = tuple(int(v[0]) for v in np.nonzero(other))
            place = int(places[at])
            self.m.findings.add(
                "race",
                f"{self._name(int(mine[at]) - 1)} writes byte {place} of "
                f"{region.description or region.name}, and {self._name(int(before[at]) - 1)} wrote "
                f"another value there (PTX line {line[place]}): nothing orders the two",
                ins,
            )
        who[places], line[places] = mine, ins.line

    def _name(self, cluster: int) -> str:
        x, y, z = self.m.grid.coordinates(cluster * self.m.grid.cluster_size)
        what = "CTA" if self.m.grid.cluster_size == 1 else "the cluster of CTA"
        return f"{what} ({x},{y},{z})"
