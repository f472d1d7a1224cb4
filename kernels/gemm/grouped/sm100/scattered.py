"""The grouped GEMM on Blackwell to rows by an index: out[index[r]] = ops(A[r] @ B[group of r]), or
added to what is there.

The grouped kernel (rows.py) with another store (device/epilogue/sm100/scattered_store.py), which
takes no smem.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, cute

from cutex.device.epilogue.sm100.scattered_store import ScatteredTileStore, scattered_tile_store
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.grouped.config import ScatteredConfig
from cutex.kernels.gemm.grouped.sm100.rows import RowsKernel
from cutex.kernels.gemm.grouped.views import GroupOps, scattered_rows
from cutex.schedulers.ragged import RowGroups


@dataclass(frozen=True)
class GroupScatter:
    """The store of accumulators to rows of out by an index."""

    mOut: cute.Tensor  # (S, N)
    index: cute.Tensor  # (R)
    config: ScatteredConfig
    groups: RowGroups
    ops: GroupOps

    def prefetch(self) -> None:
        """Do nothing: no tensor map stores."""

    def tile(self, tAcc: cute.Tensor, tile: WorkTile, row_tile: Int32) -> ScatteredTileStore:
        """The store of tAcc (128, bN), of the 128 rows of block `row_tile` of the tile's group."""
        ops = self.ops.of(self.groups, tile.group)
        rows, columns = scattered_rows(self, tile.group), self.config.product.epi_columns
        return scattered_tile_store(tAcc, tile, row_tile, columns, ops, rows)


class GroupedScattered(RowsKernel):
    """The grouped kernel that stores to rows of out (S, N) by an index (R), which it takes after
    the edges: without sC, and so without barrier 1."""

    name = "sm100_gemm_grouped_scattered"
    dtypes = "bf16", "fp16"
    slots_of_out = False

    def stored(self, mOut: cute.Tensor, passed: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        return passed[0], passed[1:]

    def product_like(self, stored: Any, mOut: cute.Tensor, columns: Int32) -> cute.Tensor:
        return cute.make_identity_tensor((cute.size(stored), columns))  # (R, N)

    def store(
        self, stored: Any, mOut: cute.Tensor, sC: Any, ops: GroupOps, groups: RowGroups
    ) -> GroupScatter:
        assert isinstance(self.config, ScatteredConfig)
        return GroupScatter(mOut, stored, self.config, groups, ops)
