"""The memory of a grouped kernel's pair of CTAs on Blackwell."""

from __future__ import annotations

from typing import NamedTuple

from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import allocate_slots
from cutex.device.atoms.tmem import Tmem
from cutex.device.pipeline import AccRing, PairRing
from cutex.kernels.gemm.sm100.config import Sm100Config
from cutex.kernels.gemm.sm100.general import Warp
from cutex.schedulers.clc import CTAS
from cutex.schedulers.ragged import RowGroups


class GroupMemory(NamedTuple):
    """The slots of A, B and out, the tables of groups, the rings' barriers, and tensor memory."""

    sA: cute.Tensor  # (bM / 2, bK, SLOT)
    sB: cute.Tensor  # (bN / 2, bK, SLOT)
    sC: cute.Tensor | None  # (128, epiN, SLOT)
    groups: RowGroups
    ab: PairRing
    acc: AccRing
    tmem: Tmem

    @staticmethod
    def allocate(
        tiles: Sm100Config,
        maps: tuple[cpasync.TmaInfo, cpasync.TmaInfo],
        out: cpasync.TmaInfo | None,
        most_groups: int,
    ) -> GroupMemory:
        """Allocate what the tensor maps of A and B load and that of out, if there is one, stores,
        and the rest."""
        c, smem = tiles, SmemAllocator()
        sA, sB = (allocate_slots(smem, x.atom.value_type, x.smem_layout) for x in maps)
        sC = None if out is None else allocate_slots(smem, out.atom.value_type, out.smem_layout)
        groups = RowGroups.allocate(smem, most_groups)
        ab = PairRing.allocate(smem, "ab", c.num_stages, c.stage_bytes, consumers=1)
        acc = AccRing.of(smem, c.num_acc, readers=CTAS * Warp.LOAD)
        tmem = Tmem.allocate(smem, columns=c.tile_n * c.num_acc, pair=True)
        return GroupMemory(sA, sB, sC, groups, ab, acc, tmem)
