"""The grouped GEMM on Hopper to rows by an index: out[index[r]] = ops(A[r] @ B[group of r]), or
added to what is there.

The grouped kernel (rows.py) with another store (device/epilogue/sm90/scattered_store.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.epilogue.scattered_rows import ScatteredRows
from cutex.device.epilogue.sm90.scattered_store import ScatteredStore, scattered_store
from cutex.kernels.gemm.grouped.config import ScatteredConfig
from cutex.kernels.gemm.grouped.sm90.kernel import GroupedKernel, grid
from cutex.kernels.gemm.grouped.sm90.memory import GroupMemory
from cutex.kernels.gemm.grouped.sm90.rows import Cooperative, GroupedOperands, PingPong
from cutex.kernels.gemm.grouped.views import GroupOps, scattered_rows
from cutex.kernels.gemm.signature import modes
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


class GroupedScattered(GroupedKernel):
    """The grouped kernel of A (R, K) and B (E, K, N) that stores to rows by an index. Of barriers
    it has none for slots of sC, which belong to a warp each; the rest is GroupedKernel's."""

    name = "sm90_gemm_grouped_scattered"
    dtypes = "bf16", "fp16"

    # ---- on the host

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mOut: cute.Tensor,
        edges: cute.Tensor,
        index: cute.Tensor,
        *rest,
    ) -> None:
        """Launch with a (R, K), b (E, K, N), out (S, N), edges (E), index (R), the operations'
        arguments, and a stream."""
        c, general = self.tiles, self.general
        *passed, stream = rest
        mA, mB = modes(mA, columns_first=False), modes(mB, columns_first=True)
        k_major = self.config.product.k_major
        a = general.load_operand(mA, c.tile_m, c.cluster_n, k_major[0])
        b = general.load_operand(mB, c.tile_n, c.cluster_m, k_major[1])
        launched = self.kernel(a, b, mOut, edges, index, tuple(passed))
        self.start(launched, grid(c, mA, mB), stream)

    # ---- on the device

    @cute.kernel
    def kernel(
        self,
        a: cpasync.TmaInfo,
        b: cpasync.TmaInfo,
        mOut: cute.Tensor,
        edges: cute.Tensor,
        index: cute.Tensor,
        passed: tuple[Any, ...],
    ) -> None:
        """Run the roles."""
        c, config = self.tiles, self.config
        assert isinstance(config, ScatteredConfig)
        product, kind = config.product, mOut.element_type
        memory = GroupMemory.allocate(
            SmemAllocator(), self.general, (a, b), kind, config.most_groups
        )
        sA, sB, sC, groups, _ = memory
        operands = GroupedOperands(a, b, sA, sB, product.k_major, groups=groups)
        role = (PingPong if c.pingpong else Cooperative)(product, c, self.ragged(groups))
        columns: Int32 = cute.size(b.tma_tensor, mode=[0])
        ops = GroupOps(product.ops, passed, columns)
        store = GroupScatter(mOut, index, sC, config, groups, ops)
        mProduct = cute.make_identity_tensor((cute.size(index), columns))  # (R, N)
        self.run(memory, operands, role, store, edges, mProduct)
