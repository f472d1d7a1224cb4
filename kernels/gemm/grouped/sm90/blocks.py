"""The grouped fp8 GEMM with fp32 scale factors of blocks on Hopper, promoted as DeepSeek-V3's.

out[rows of e] = ops((A * factors)[rows of e] @ (B * factors)[e]), where each row of A has a factor
for each 128 of K, and each 128x128 of a matrix of B one.

The roles of the grouped kernel (rows.py), whose loads and MMAs are those of the fp8 kernel
(kernels/gemm/scaled/fp8/sm90): factors of A's rows come by TMA from the group's first row on, as A
does; those of B are read from its matrix of all groups'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.arch import arch as arch_named
from cutex.compile import Argument
from cutex.device.atoms.mma import allocate_slots
from cutex.device.atoms.multicast import Cluster
from cutex.device.atoms.tma import AbLoads, TileLoads, load_operand, tile_loads
from cutex.device.atoms.wgmma import Wgmma, wgmma
from cutex.device.pipeline import publish_barriers
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.grouped.config import BlocksConfig
from cutex.kernels.gemm.grouped.fp8_config import PITCH, RowBlocksConfig
from cutex.kernels.gemm.grouped.sm90.memory import GroupMemory
from cutex.kernels.gemm.grouped.sm90.rows import (
    GroupedOperands,
    GroupStore,
    OfGroups,
    drain_stores,
    grid,
)
from cutex.kernels.gemm.grouped.views import GroupOps, loaded_rows, store_operand
from cutex.kernels.gemm.scaled.fp8.sm90.factors import (
    FactoredLoads,
    TileFactors,
    factors_layout,
)
from cutex.kernels.gemm.scaled.fp8.sm90.promote import Promote
from cutex.kernels.gemm.signature import modes
from cutex.kernels.gemm.sm90.general import General
from cutex.kernels.gemm.sm90.load import LoadTiles
from cutex.schedulers.ragged import RaggedTiles, RowGroups
from cutex.schedulers.raster import Raster


class RowFactorLoads(NamedTuple):
    """The loads of the factors of one tile's rows, in parts."""

    parts: tuple[TileLoads, ...]

    @cute.jit
    def load(self, k_tile: Int32, slot: Int32, full: cute.Pointer) -> None:
        for i in cutlass.range_constexpr(len(self.parts)):
            self.parts[i].load(k_tile, slot * len(self.parts) + i, full)


@dataclass(frozen=True)
class RowFactors:
    """The factors of the rows of A, and their slots.

    A group begins anywhere, and TMA at each 16 bytes: a part of a tile's rows is loaded from up to
    3 rows before it on, with PITCH rows more.
    """

    tiles: RowBlocksConfig
    info: cpasync.TmaInfo  # of (M, RestK)
    sF: cute.Tensor  # (partRows + PITCH, 1, PART and SLOT)
    groups: RowGroups

    def loads(self, tile: WorkTile) -> RowFactorLoads:
        """The loads of the factors of a tile's rows."""
        c, begin = self.tiles, self.groups.begins[tile.group]
        first = begin - begin % PITCH + tile.m * c.tile_m
        parts = range(0, c.tile_m, c.part_rows)
        return RowFactorLoads(
            tuple(tile_loads(loaded_rows(self.info, first + i), self.sF, 0) for i in parts)
        )

    def of(self, tile: WorkTile) -> cute.Tensor:
        """The factors of a tile's rows in all slots, (bRows, 1, SLOT)."""
        c, (_, _, pitch) = self.tiles, self.sF.stride
        parts = c.tile_m // c.part_rows
        rows = cute.make_layout((c.part_rows, parts), stride=(1, pitch))
        layout = cute.make_layout(
            (rows.shape, 1, c.num_stages), stride=(rows.stride, 0, parts * pitch)
        )
        start = self.sF.iterator + self.groups.begins[tile.group] % PITCH
        return cute.make_tensor(start, layout)


@dataclass(frozen=True)
class FactoredRows:
    """A and B of groups, with the factors of A's rows."""

    ab: GroupedOperands
    factors: RowFactors

    @property
    def a(self) -> Any:
        return self.ab.a

    @property
    def b(self) -> Any:
        return self.ab.b

    @property
    def num_k_tiles(self) -> Int32:
        return self.ab.num_k_tiles

    @cute.jit
    def loads(self, tile: WorkTile, cluster: cutlass.Constexpr[Cluster]) -> FactoredLoads:
        """The loads that this CTA starts for `tile`: its part of A and B, and all its factors."""
        ab: AbLoads = self.ab.loads(tile, cluster)
        return FactoredLoads(ab.a, ab.b, (self.factors.loads(tile),))


class PromoteRows(OfGroups, Promote):
    """All warpgroups compute a tile of a group, promoting, and store it to the group's rows."""

    def factors_of(self, tile: WorkTile) -> TileFactors:
        of_rows, mScale = self.factors  # mScale (E, RestN, RestK)
        mine = of_rows.info, mScale[tile.group, None, None]
        return TileFactors(self.tiles, mine, (of_rows.of(tile), None), tile)


class GroupedBlocks:
    """A CTA computes tiles of groups: a load warp, and up to three warpgroups that run wgmma and
    promote.

    Barriers, smem and registers are those of GroupedRows (rows.py), and of smem besides

    smem            bytes
    sFA             640 for each 128 of tile_m, or 384 for 64, times num_stages
    """

    arch = "sm_90a"
    dtypes = ("e4m3",)

    def __init__(self, config: BlocksConfig) -> None:
        if reason := config.why_not(arch_named(self.arch)):
            raise ValueError(reason)
        assert isinstance(config.product.tiles, RowBlocksConfig)  # why_not has refused every other
        self.config, self.tiles = config, config.product.tiles
        if self.tiles.one_tile or self.tiles.box_rows:
            raise ValueError(f"{self.tiles}: {self.name} loops over whole tiles")
        self.general = General(config.product)  # whose warps, registers and maps it has

    @property
    def name(self) -> str:
        return "sm90_gemm_grouped_blocks"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return self.config.arguments()

    # ---- on the host

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mScaleA: cute.Tensor,
        mScaleB: cute.Tensor,
        mOut: cute.Tensor,
        edges: cute.Tensor,
        *rest,
    ) -> None:
        """Launch with a (M, K), b (E, K, N), their factors (M, K / 128) and (E, N / 128, K / 128),
        out (M, N), edges (E), the operations' arguments, and a stream."""
        c, general = self.tiles, self.general
        *passed, stream = rest
        mB = modes(mB, columns_first=True)
        a = general.load_operand(mA, c.tile_m, c.cluster_n, True)
        b = general.load_operand(mB, c.tile_n, c.cluster_m, True)
        slots = factors_layout(c.part_rows + PITCH, c.num_stages * (c.tile_m // c.part_rows))
        factors = load_operand(mScaleA, slots), mScaleB
        out = store_operand(mOut, general.epilogue_slots(mOut.element_type))
        self.kernel((a, b, out), factors, mOut, edges, tuple(passed)).launch(
            grid=grid(c, mA, mB),
            block=(general.num_threads, 1, 1),
            cluster=(c.cluster_m, c.cluster_n, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    # ---- on the device

    @cute.kernel
    def kernel(
        self,
        maps: tuple[cpasync.TmaInfo, ...],
        factors: tuple[Any, Any],
        mOut: cute.Tensor,
        edges: cute.Tensor,
        passed: tuple[Any, ...],
    ) -> None:
        """Run the roles on A, B and out, and the factors of both sides."""
        c, product, general = self.tiles, self.config.product, self.general
        a, b, out = maps
        cluster, smem = general.cluster, SmemAllocator()
        memory = GroupMemory.allocate(smem, general, (a, b, out), self.config.most_groups)
        sA, sB, sC, groups, ab = memory
        sF = allocate_slots(smem, Float32, factors[0].smem_layout)  # (partRows + PITCH, 1, SLOT)
        of_rows = RowFactors(c, factors[0], sF, groups)
        shape = (c.tile_m, c.tile_n), (c.cluster_m, c.cluster_n)
        scheduler: Any = RaggedTiles(Raster(c.raster_group, c.raster_along), *shape, groups)
        operands: Any = FactoredRows(GroupedOperands(a, b, sA, sB, groups=groups), of_rows)
        mProduct = product.product(mOut)
        rows, columns = (cute.size(mProduct, mode=[i]) for i in range(2))
        n = cute.size(b.tma_tensor, mode=[0])
        load = LoadTiles(c, cluster, scheduler)
        warp = cute.arch.warp_idx()
        if warp == self.general.load_warps.first:
            load.start(operands, mProduct)
            cute.arch.griddepcontrol_wait()
            scheduler.fill(edges, rows, columns, self.config.padded)
        publish_barriers((ab,), cluster=cluster.size > 1, with_data=True)

        if warp >= self.general.load_warps.first:
            self.general.give_registers()
            if warp == self.general.load_warps.first:
                load.run(operands, ab, mProduct)
        else:
            self.general.take_registers()
            kinds = a.atom.value_type, b.atom.value_type
            mma = wgmma(Wgmma(c.tile_n, *kinds, warpgroups=c.mma_warpgroups), sA, sB)
            store = GroupStore(out, sC, c.epi_stages, groups, GroupOps(product.ops, passed, n))
            role = PromoteRows(product, c, scheduler, (of_rows, factors[1]), (None, None))
            role.run(mma, ab, store, operands.num_k_tiles, mProduct)
            drain_stores()
