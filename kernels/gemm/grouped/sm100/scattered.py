"""The grouped GEMM on Blackwell to rows by an index: out[index[r]] = ops(A[r] @ B[group of r]), or
added to what is there.

The grouped kernel (rows.py) with another store (device/epilogue/sm100/scattered_store.py), which
takes no smem.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from cutex.device.atoms.mma import MAJORS
from cutex.device.atoms.tma import PairOperands, load_operand
from cutex.device.atoms.umma import Umma, umma
from cutex.device.epilogue.sm100.scattered_store import ScatteredTileStore, scattered_tile_store
from cutex.device.pipeline import is_leader
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.grouped.config import ScatteredConfig
from cutex.kernels.gemm.grouped.sm100.kernel import GroupedKernel
from cutex.kernels.gemm.grouped.sm100.memory import GroupMemory
from cutex.kernels.gemm.grouped.sm100.rows import GroupedOperands
from cutex.kernels.gemm.grouped.views import GroupOps, scattered_rows
from cutex.kernels.gemm.signature import modes, tile_counts
from cutex.kernels.gemm.sm100.epilogue import StoreTiles
from cutex.kernels.gemm.sm100.general import General, Warp
from cutex.kernels.gemm.sm100.roles import Load, Mma
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


class GroupedScattered(GroupedKernel):
    """The grouped kernel of A (R, K) and B (E, K, N) that stores to rows by an index: GroupedKernel
    without sC, and so without its barrier 1."""

    name = "sm100_gemm_grouped_scattered"
    dtypes = "bf16", "fp16"

    def __init__(self, config: ScatteredConfig) -> None:
        super().__init__(config)
        self.general = General(config.product)  # whose maps it has

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
        a_k, b_k = self.config.product.k_major
        a = load_operand(mA, general.load_slots(mA.element_type, c.tile_m, a_k), pair=True)
        b = load_operand(mB, general.load_slots(mB.element_type, c.tile_n, b_k), pair=True)
        launched = self.kernel(a, b, mOut, edges, index, tuple(passed))
        self.start(launched, self.grid(mA, mB), stream)

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
        c, config, product = self.tiles, self.config, self.config.product
        assert isinstance(config, ScatteredConfig)
        kinds = a.atom.value_type, b.atom.value_type
        memory = GroupMemory.allocate(c, (a, b), None, self.config.most_groups)
        sA, sB, _, groups, ab, acc, tmem = memory
        scheduler = self.ragged(groups)
        sizes: Any = cute.size(index), cute.size(b.tma_tensor, mode=[0])  # (R, N)
        warp = cute.arch.warp_idx()
        pointer = self.begin((ab, acc), tmem, scheduler, edges, sizes)
        dispatch = scheduler.walk(tile_counts(c, cute.make_identity_tensor(sizes)))

        a_major, b_major = (MAJORS[k_major] for k_major in product.k_major)
        instruction = Umma(256, c.tile_n, *kinds, a_major, b_major, pair=True)
        mma = umma(instruction, sA, sB, pointer, c.num_acc)
        ops = GroupOps(product.ops, passed, sizes[1])
        store: Any = GroupScatter(mOut, index, config, groups, ops)
        operands: Any = GroupedOperands(PairOperands(a, b, sA, sB), groups)
        if warp == Warp.LOAD:
            Load(c).run(operands, ab, dispatch)
        elif warp == Warp.MMA:
            if is_leader():
                num_k_tiles = cute.ceil_div(cute.size(a.tma_tensor, mode=[1]), product.k_elements)
                Mma(c).run(mma, ab, acc, num_k_tiles, dispatch)
        elif warp < Warp.LOAD:
            StoreTiles(c, unrolled=product.ops == ()).run(mma.acc, store, acc, dispatch)
        self.end(tmem, pointer)
