"""What lanes ask of global memory: requests of warps, and sectors of 32 bytes.

An access of a warp is one request, which asks for each sector that its lanes touch once (CUDA C++
Best Practices Guide, "Coalesced Access to Global Memory"). Whether a sector then comes from L1, L2
or memory is not counted here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cutex.sim.machine.batch import Lanes
from cutex.sim.machine.events import Observer
from cutex.sim.machine.memory import Part
from cutex.sim.ptx.program import Instruction

SECTOR = 32  # bytes
_BITS = 43  # of a sector's number: addresses have 48


class GlobalSectors(Observer):
    """The requests of all accesses of lanes, and their sectors."""

    def __init__(self) -> None:
        self.requests = self.sectors = 0

    def global_loaded(self, where: Lanes, size: int, ins: Instruction) -> None:
        self._count(where, size)

    def global_stores(
        self, where: Lanes, values: np.ndarray, parts: Sequence[Part], ins: Instruction
    ) -> None:
        self._count(where, values.shape[1])

    def _count(self, where: Lanes, size: int) -> None:
        if not len(where.warps):
            return
        first = where.addresses.astype(np.uint64)
        ends = np.concatenate([first, first + np.uint64(size - 1)]) // np.uint64(SECTOR)
        warps = np.tile(where.warps.astype(np.uint64), 2)
        self.requests += len(np.unique(where.warps))
        self.sectors += len(np.unique(warps << np.uint64(_BITS) | ends))
