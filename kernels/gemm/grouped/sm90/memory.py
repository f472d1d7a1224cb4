"""The shared memory of a grouped kernel's CTA on Hopper."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import allocate_slots
from cutex.device.atoms.multicast import SharedRing
from cutex.kernels.gemm.sm90.general import General
from cutex.schedulers.ragged import RowGroups


class GroupMemory(NamedTuple):
    """The slots of A, B and out, the tables of groups, and the barriers of the ring."""

    sA: cute.Tensor  # (bM, bK, SLOT)
    sB: cute.Tensor  # (bN, bK, SLOT)
    sC: cute.Tensor  # (64, epiN, SLOT)
    groups: RowGroups
    ab: SharedRing

    @staticmethod
    def allocate(
        smem: SmemAllocator,
        general: General,
        maps: tuple[cpasync.TmaInfo, cpasync.TmaInfo],
        out_dtype: type[cutlass.Numeric],
        most_groups: int,
    ) -> GroupMemory:
        """Allocate what the tensor maps of A and B load, slots for parts of out, and the rest."""
        c = general.tiles
        sA, sB = (allocate_slots(smem, x.atom.value_type, x.smem_layout) for x in maps)
        sC = allocate_slots(smem, out_dtype, general.epilogue_slots(out_dtype))
        groups = RowGroups.allocate(smem, most_groups)
        readers = 4 if c.pingpong else general.mma_warps.count
        cluster = general.cluster
        ab = SharedRing.of_cluster(smem, "ab", c.num_stages, c.stage_bytes, readers, cluster)
        return GroupMemory(sA, sB, sC, groups, ab)
