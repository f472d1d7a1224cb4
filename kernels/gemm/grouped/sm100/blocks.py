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

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.arch import arch as arch_named
from cutex.compile import Argument
from cutex.device.atoms.mma import allocate_slots
from cutex.device.atoms.scale_factors import ROWS
from cutex.device.atoms.tma import matrix, tile_loads
from cutex.device.atoms.tmem import Tmem, fence_after_sync
from cutex.device.pipeline import AccRing, PairRing, is_leader, publish_barriers, sync_cluster
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.grouped.config import ScaledRowsConfig
from cutex.kernels.gemm.grouped.sm100.rows import GroupStore
from cutex.kernels.gemm.grouped.views import GroupOps, loaded_rows, store_operand
from cutex.kernels.gemm.scaled.sm100.general import Scaled, Warp
from cutex.kernels.gemm.scaled.sm100.operands import ScaledLoads, ScaledOperands, load_elements
from cutex.kernels.gemm.scaled.sm100.roles import ScaledMma
from cutex.kernels.gemm.scaled.sm100.signature import ScaledConfig, unpacked
from cutex.kernels.gemm.signature import modes, tile_counts
from cutex.kernels.gemm.sm100.roles import Load
from cutex.schedulers.clc import CTAS
from cutex.schedulers.ragged import RaggedTiles, RowGroups
from cutex.schedulers.raster import Raster, clusters


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


class GroupedBlocks:
    """A pair of CTAs computes tiles of groups: in each CTA a load warp, an MMA warp, four that
    store, and one idle.

    Barriers, smem and tensor memory are those of Scaled (scaled/sm100/general.py), without its
    scheduler's; and of smem the tables of groups, 16 * most_groups + 4 bytes.
    """

    arch = "sm_100a"
    dtypes = ("e4m3", "e5m2", "e2m1", "uint8")  # A's elements
    num_threads = Warp.END * 32

    def __init__(self, config: ScaledRowsConfig) -> None:
        if reason := config.why_not(arch_named(self.arch)):
            raise ValueError(reason)
        assert isinstance(config.product, ScaledConfig)  # why_not has refused every other
        self.config, self.product, self.tiles = config, config.product, config.product.tiles
        self.scaled = Scaled(self.product)  # whose maps, memory and product it has

    @property
    def name(self) -> str:
        return "sm100_gemm_grouped_blocks"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return self.config.arguments()

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
        out = store_operand(mOut, scaled.epilogue_slots(mOut.element_type))
        at_once = (c.num_ctas or arch_named(self.arch).num_sms) // CTAS
        down = cute.size(mA, mode=[0]) // c.tile_m + cute.size(mB, mode=[2])
        across = clusters(cute.size(mB, mode=[0]), c.tile_n)
        self.kernel((a, b, factors_a, factors_b), out, mOut, edges, tuple(passed)).launch(
            grid=(CTAS, 1, cutlass.min(max(1, at_once), down * across)),
            block=(self.num_threads, 1, 1),
            cluster=(CTAS, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

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
        c, product, scaled = self.tiles, self.product, self.scaled
        smem = SmemAllocator()
        slots = scaled.allocate_operands(smem, maps)
        sC = allocate_slots(smem, mOut.element_type, out.smem_layout)  # (128, epiN, SLOT)
        groups = RowGroups.allocate(smem, self.config.most_groups, with_chunks=True)
        ab = PairRing.allocate(smem, "ab", c.num_stages, product.loaded_bytes, consumers=1)
        acc = AccRing.of(smem, 1 if c.overlap else c.num_acc, readers=CTAS * Warp.LOAD)
        epilogue = scaled.epilogue_role(smem)
        tmem = Tmem.allocate(smem, c.acc_columns + c.factor_columns, pair=True)
        raster = Raster(c.raster_group, c.raster_along)
        scheduler = RaggedTiles(raster, (c.tile_m // CTAS, c.tile_n), (CTAS, 1), groups)
        mProduct = product.product(mOut)
        rows, columns = (cute.size(mProduct, mode=[i]) for i in range(2))
        warp = cute.arch.warp_idx()
        if warp == Warp.MMA:
            tmem.acquire()
        if warp == Warp.LOAD:
            cute.arch.griddepcontrol_wait()
            scheduler.fill(edges, rows, columns, self.config.padded)
        publish_barriers((ab, acc), cluster=True, with_data=True)
        pointer = tmem.pointer()
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
        sync_cluster()
        if warp == Warp.MMA:
            fence_after_sync()
            tmem.free(pointer)
