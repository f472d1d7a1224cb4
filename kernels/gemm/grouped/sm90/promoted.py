"""The grouped fp8 GEMM on Hopper with fp32 sums: out[rows of e] = ops(A[rows of e] @ B[e]).

The rows' kernel (rows.py) with the MMA role of blocks (blocks.py): sums of each 128 of K leave the
tensor cores, which keep 13 bits of a sum; factors of rows and of columns are the epilogue's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cutlass import cute
from cutlass.memory import SmemAllocator

from cutex.device.atoms.wgmma import ROWS
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.grouped.sm90.blocks import PromoteRows, announced_tiles
from cutex.kernels.gemm.grouped.sm90.rows import GroupedRows, GroupStore
from cutex.kernels.gemm.grouped.views import GroupOps
from cutex.kernels.gemm.scaled.fp8.sm90.promote import TileFactors
from cutex.schedulers.announced import AnnouncedTiles
from cutex.schedulers.ragged import RowGroups


@dataclass(frozen=True)
class PromoteSums(PromoteRows):
    """PromoteRows without factors: sums of blocks are added up as they are."""

    of_rows: Any = None  # RowGroups

    @property
    def groups(self) -> RowGroups:
        return self.of_rows

    def factors_of(self, tile: WorkTile) -> TileFactors:
        return TileFactors(self.tiles, self.factors, self.slots, tile)


class GroupedPromoted(GroupedRows):
    """GroupedRows that promotes; tiles are looked up by a warp of their own."""

    name = "sm90_gemm_grouped_promoted"
    dtypes = ("e4m3",)

    def announced_tiles(self, smem: SmemAllocator) -> AnnouncedTiles:
        return announced_tiles(smem, self.general)

    def store(
        self, stored: Any, mOut: cute.Tensor, sC: cute.Tensor, ops: GroupOps, groups: RowGroups
    ) -> GroupStore:
        found = super().store(stored, mOut, sC, ops, groups)
        return replace(found, at_once=self.tiles.warpgroup_rows == ROWS)

    def role(self, groups: RowGroups, announced: Any) -> PromoteSums:
        c: Any = self.tiles  # RowBlocksConfig
        what, none = (self.config.product, c, self.ragged(groups)), (None, None)
        return PromoteSums(*what, none, none, announced=announced, of_rows=groups)
