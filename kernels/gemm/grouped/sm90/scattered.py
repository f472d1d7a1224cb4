"""The grouped GEMM on Hopper to rows by an index: out[index[r]] = ops(A[r] @ B[group of r]), or
added to what is there.

The grouped kernel (rows.py) with another store (device/epilogue/sm90/scattered_store.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, cute

from cutex.device.epilogue.scattered_rows import ScatteredRows
from cutex.device.epilogue.sm90.scattered_store import ScatteredStore, scattered_store
from cutex.kernels.gemm.grouped.config import ScatteredConfig
from cutex.kernels.gemm.grouped.sm90.rows import RowsKernel
from cutex.kernels.gemm.grouped.views import GroupOps, scattered_rows
from cutex.schedulers.ragged import RowGroups


@dataclass(frozen=True)
class GroupScatter:
    """The store of accumulators to rows of out by an index."""

    mOut: cute.Tensor  # (S, N)
    index: cute.Tensor  # (R)
    sC: cute.Tensor  # (64, epiN, SLOT)
    config: ScatteredConfig
    groups: RowGroups
    ops: GroupOps

    def of(self, group: Any) -> ScatteredStore:
        """The store of one group's rows."""
        rows: ScatteredRows = scattered_rows(self, group)
        num_slots = self.config.product.tiles.epi_stages
        return scattered_store(self.sC, num_slots, self.ops.of(self.groups, group), rows)


class GroupedScattered(RowsKernel):
    """The grouped kernel that stores to rows of out (S, N) by an index (R), which it takes after
    the edges. Of barriers it has none for slots of sC, which belong to a warp each."""

    name = "sm90_gemm_grouped_scattered"
    dtypes = "bf16", "fp16"

    def stored(self, mOut: cute.Tensor, passed: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        return passed[0], passed[1:]

    def store(
        self, stored: Any, mOut: cute.Tensor, sC: cute.Tensor, ops: GroupOps, groups: RowGroups
    ) -> GroupScatter:
        assert isinstance(self.config, ScatteredConfig)
        return GroupScatter(mOut, stored, sC, self.config, groups, ops)

    def product_like(self, stored: Any, mOut: cute.Tensor, columns: Int32) -> cute.Tensor:
        return cute.make_identity_tensor((cute.size(stored), columns))  # (R, N)
