"""The grouped block-scaled GEMM on Blackwell: out[rows of e] = ops((A * factors)[rows of e] @
(B * factors)[e]), MXFP8, MXFP4, NVFP4, or fp8 with fp4.

The roles of the block-scaled kernel (kernels/gemm/scaled/sm100) on the tiles of ragged groups, as
the grouped kernel walks them (rows.py). Factors of A are in chunks of 128 rows of one group: each
group begins with a chunk of its own, as torch's scaled_grouped_mm has them, and a table says with
which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import allocate_slots
from cutex.device.atoms.scale_factors import ROWS
from cutex.device.atoms.tma import matrix, tile_loads
from cutex.device.atoms.tmem import Tmem
from cutex.device.pipeline import AccRing, PairRing, is_leader
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.grouped.config import ScaledRowsConfig
from cutex.kernels.gemm.grouped.sm100.kernel import GroupedKernel
from cutex.kernels.gemm.grouped.sm100.rows import GroupStore
from cutex.kernels.gemm.grouped.views import GroupOps, loaded_rows, store_operand
from cutex.kernels.gemm.scaled.sm100.general import Scaled, Warp
from cutex.kernels.gemm.scaled.sm100.roles import (
    ScaledLoads,
    ScaledMma,
    ScaledOperands,
    load_elements,
)
from cutex.kernels.gemm.scaled.sm100.signature import ScaledConfig, unpacked
from cutex.kernels.gemm.signature import modes, tile_counts
from cutex.kernels.gemm.sm100.general import store_slots
from cutex.kernels.gemm.sm100.roles import Load
from cutex.schedulers.clc import CTAS
from cutex.schedulers.ragged import RowGroups


@dataclass(frozen=True)
class GroupedOperands:
    """A (M, K), and B (N, K, E), with the factors of both, as a pair loads them."""

    scaled: ScaledOperands
    groups: RowGroups

    def prefetch(self) -> None:
        self.scaled.prefetch()

    @cute.jit
    def loads(self, tile: WorkTile) -> ScaledLoads:
        """The loads of this CTA's half of the rows of A and of B, and of their factors."""
        x, group = self.scaled, tile.group
        a, b, factors_a, factors_b = x.maps
        a = loaded_rows(a, self.groups.begins[group])
        n_tile = x.ctas * tile.n + cute.arch.block_idx_in_cluster() % x.ctas
        of_a, of_b = x.factors
        return ScaledLoads(
            (
                tile_loads(a, x.sA, tile.m),
                tile_loads(matrix(b, tile._replace(batch=group)), x.sB, n_tile),
                of_a.loads(factors_a, x.sFA, self.groups.chunks[group] + tile.m, 0),
                of_b.loads(factors_b, x.sFB, tile.n * x.tile_n // ROWS, group),
            )
        )


class GroupedBlocks(GroupedKernel):
    """The grouped kernel whose factors tensor cores read.

    Barriers, smem and tensor memory are those of Scaled (scaled/sm100/general.py), without its
    scheduler's; and of smem the tables of groups, 16 * most_groups + 4 bytes.
    """

    name = "sm100_gemm_grouped_blocks"
    dtypes = ("e4m3", "e5m2", "e2m1", "uint8")  # A's elements

    def __init__(self, config: ScaledRowsConfig) -> None:
        super().__init__(config)
        assert isinstance(config.product, ScaledConfig)  # why_not has refused every other
        self.product, self.tiles = config.product, config.product.tiles
        self.scaled = Scaled(self.product)  # whose maps, memory and product it has

    # ---- on the host

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mOut: cute.Tensor,
        mFA: cute.Tensor,
        mFB: cute.Tensor,
        edges: cute.Tensor,
        *rest,
    ) -> None:
        """Launch with a (M, K), b (E, K, N), out (M, N), the factors of a (1, RestRows, RestK,
        WORDS) and of b (E, ..), edges (E), the operations' arguments, and a stream."""
        c, scaled = self.tiles, self.scaled
        *passed, stream = rest
        kinds, k_major = scaled.element_types(), self.product.k_major
        mA = unpacked(modes(mA, columns_first=False), kinds[0])
        mB = unpacked(modes(mB, columns_first=True), kinds[1])
        unpack = [x.width == 4 and self.product.kind.bits == 8 for x in kinds]
        a = load_elements(mA, scaled.load_slots(c.tile_m, k_major[0]), True, unpack[0])
        b = load_elements(mB, scaled.load_slots(c.tile_n, k_major[1]), True, unpack[1])
        of_a, of_b = scaled.factor_tiles()
        factors_a = of_a.load_operand(mFA, c.num_stages, True)
        factors_b = of_b.load_operand(mFB, c.num_stages, True)
        out = store_operand(mOut, store_slots(scaled.config, mOut.element_type))
        launched = self.kernel((a, b, factors_a, factors_b), out, mOut, edges, tuple(passed))
        self.start(launched, self.grid(mA, mB), stream)

    # ---- on the device

    @cute.kernel
    def kernel(
        self,
        maps: tuple[cpasync.TmaInfo, ...],
        out: cpasync.TmaInfo,
        mOut: cute.Tensor,
        edges: cute.Tensor,
        passed: tuple[Any, ...],
    ) -> None:
        """Run the roles on A, B, and their factors."""
        c: Any = self.tiles  # ScaledTiles
        product, scaled = self.product, self.scaled
        smem = SmemAllocator()
        slots = scaled.allocate_operands(smem, maps)
        sC = allocate_slots(smem, mOut.element_type, out.smem_layout)  # (128, epiN, SLOT)
        groups = RowGroups.allocate(smem, self.config.most_groups, with_chunks=True)
        ab = PairRing.allocate(smem, "ab", c.num_stages, product.loaded_bytes, consumers=1)
        acc = AccRing.of(smem, 1 if c.overlap else c.num_acc, readers=CTAS * Warp.LOAD)
        epilogue = scaled.epilogue_role(smem)
        tmem = Tmem.allocate(smem, c.acc_columns + c.factor_columns, pair=True)
        scheduler = self.ragged(groups)
        mProduct = product.product(mOut)
        sizes = cute.size(mProduct, mode=[0]), cute.size(mProduct, mode=[1])
        warp = cute.arch.warp_idx()
        pointer = self.begin((ab, acc), tmem, scheduler, edges, sizes)
        dispatch = scheduler.walk(tile_counts(c, mProduct))

        mma = scaled.product(slots, pointer)
        operands: Any = GroupedOperands(slots, groups)
        ops = GroupOps(product.ops, passed, cute.size(maps[1].tma_tensor, mode=[0]))
        store: Any = GroupStore(out, sC, product.epi_columns, groups, ops)
        if warp == Warp.LOAD:
            Load(c).run(operands, ab, dispatch)
        elif warp == Warp.MMA:
            if is_leader():
                k = cute.size(maps[0].tma_tensor, mode=[1])
                ScaledMma(c).run(mma, ab, acc, k, dispatch)
        elif warp < Warp.LOAD:
            epilogue.run(mma.acc, store, acc, dispatch)
        self.end(tmem, pointer)
