"""The grouped fp8 GEMM whose rows of tiles end with narrower ones (schedulers/narrow.py).

out[rows of e] = ops((A * factors)[rows of e] @ (B * factors)[e]), as GroupedBlocks (blocks.py). Of
a narrow tile fewer rows of B are loaded, through a tensor map of their own, into the first rows of
a slot; its MMAs are narrower, with a mainloop of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.factored import FactoredLoads
from cutex.device.atoms.multicast import AbOperands, Cluster, SharedRing
from cutex.device.atoms.tma import matrix, tile_loads
from cutex.device.atoms.wgmma import ROWS, Wgmma, WgmmaProduct
from cutex.device.pipeline import PipelineState
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.grouped.sm90.blocks import (
    FactoredRows,
    GroupedBlocks,
    PromoteRows,
)
from cutex.kernels.gemm.grouped.sm90.kernel import grid
from cutex.kernels.gemm.grouped.sm90.rows import GroupedOperands
from cutex.kernels.gemm.scaled.fp8.sm90.promote import (
    Coming,
    Promotion,
    TileFactors,
)
from cutex.kernels.gemm.signature import modes, tile_counts
from cutex.kernels.gemm.sm90.load import LoadAnnounced
from cutex.kernels.gemm.sm90.mma import RoleProduct
from cutex.schedulers.announced import AnnouncedTiles, HeldTile
from cutex.schedulers.narrow import ColumnPlan, ColumnTiles, EqualShares, NarrowTiles
from cutex.schedulers.order import select
from cutex.schedulers.raster import Raster


class EitherLoads(NamedTuple):
    """The loads of B of a tile, which is wide or narrow."""

    wide: Any  # TileLoads each
    narrow: Any
    is_narrow: Boolean

    @cute.jit
    def load(self, k_tile: Int32, slot: Int32, full: cute.Pointer) -> None:
        if self.is_narrow:
            self.narrow.load(k_tile, slot, full)
        else:
            self.wide.load(k_tile, slot, full)


@dataclass(frozen=True)
class NarrowRows(FactoredRows):
    """A and B of groups with the factors of A's rows; B through two tensor maps."""

    narrow: cpasync.TmaInfo  # of B, for narrow tiles
    plan: ColumnPlan

    @cute.jit
    def loads(self, tile: WorkTile, cluster: cutlass.Constexpr[Cluster]) -> FactoredLoads:
        """The loads that this CTA starts for `tile`."""
        ab, columns = self.ab, self.plan.read()
        number = columns.wide
        whole: Any = ab.loads(tile, cluster)
        mB = matrix(self.narrow, tile._replace(batch=tile.group))
        mB = cpasync.TmaInfo(
            mB.atom,
            cute.domain_offset((number * columns.widest, 0), mB.tma_tensor),
            mB.smem_layout,
        )
        few = tile_loads(mB, first_rows(ab.sB, columns.narrow_width), tile.n - number)
        b = EitherLoads(whole.b, few, columns.is_narrow(tile.n))
        return FactoredLoads(whole.a, b, (self.factors.loads(tile),))


def first_rows(sB: cute.Tensor, rows: int) -> cute.Tensor:
    """The first rows of each slot of sB (bN, bK, SLOT)."""
    return cute.local_tile(sB, (rows, *sB.shape[1:]), (0, 0, 0))  # (rows, bK, SLOT)


@dataclass(frozen=True)
class LoadNarrow(LoadAnnounced):
    """The load role of tiles, some of which bring fewer bytes."""

    plan: Any = None  # ColumnPlan

    @cute.jit
    def run(self, operands: AbOperands, ab: SharedRing, mC: cute.Tensor) -> None:
        walk = self.scheduler.walk(tile_counts(self.tiles, mC))
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        columns: Any = self.plan.read()
        less = (columns.widest - columns.narrow_width) * self.tiles.k_bytes
        fill, reader = ab.producer(), self.announced.reader()
        for _ in cutlass.range(walk.start, walk.end, walk.step, unroll=1):
            tile = self.announced.take(reader)
            loads = operands.loads(tile, self.cluster)
            reader.advance()
            coming = ab.slot_bytes - select(columns.is_narrow(tile.n), less, 0)
            for k_tile in cutlass.range(0, loads.num_k_tiles, unroll=1):
                ab.empty.wait(fill.phase, fill.slot)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(ab.full[fill.slot], coming)
                loads.load(k_tile, fill.slot, ab.full[fill.slot])
                fill.advance()
        ab.drain(fill)


@dataclass(frozen=True)
class NarrowFactors(TileFactors):
    """The factors of a tile that begins at any unit of columns."""

    columns: Any = None  # ColumnTiles

    def first_column(self) -> Int32:
        return self.columns.first(self.tile.n)


@dataclass(frozen=True)
class PromoteNarrow(PromoteRows):
    """All warpgroups compute a tile, wide or narrow, and store it to its group's rows."""

    plan: Any = None  # ColumnPlan
    narrow: Any = None  # a WgmmaProduct without accumulators
    columns: Any = None  # ColumnTiles, once it is known

    def factors_of(self, tile: WorkTile) -> NarrowFactors:
        f = super().factors_of(tile)
        return NarrowFactors(f.tiles, f.factors, f.slots, f.tile, columns=self.columns)

    @cute.jit
    def run_announced(
        self, product: RoleProduct, announced: cutlass.Constexpr[AnnouncedTiles]
    ) -> None:
        role = replace(self, columns=self.plan.read())
        role.run_planned(product, announced)

    @cute.jit
    def run_planned(
        self, product: RoleProduct, announced: cutlass.Constexpr[AnnouncedTiles]
    ) -> None:
        """Compute and store this CTA's tiles as they are announced."""
        mma, _, _, _, mC = product
        walk = self.scheduler.walk(tile_counts(self.tiles, mC))
        cute.arch.griddepcontrol_wait()  # the kernel before may write shared factors
        take, reader = product.ab.consumer(), announced.reader()
        end = walk.end  # NOTE: once, as it takes two divisions
        if walk.start < end:
            following = HeldTile.of(announced.take(reader))
            reader.advance()
            ahead = self.factors_of(following.tile).ahead(0)
            for index in cutlass.range(walk.start, end, walk.step, unroll=1):
                tile, more = following.tile, index + walk.step < end
                factors = self.factors_of(tile)
                coming = Coming(self, factors, announced, reader, following, ahead, more)
                if self.columns.is_narrow(tile.n):
                    take = self.compute(coming, product, self.narrow, tile, take)
                else:
                    take = self.compute(coming, product, mma, tile, take)
                if more:
                    reader.advance()

    @cute.jit
    def compute(
        self,
        coming: cutlass.Constexpr[Coming],
        product: RoleProduct,
        mma: WgmmaProduct,
        tile: WorkTile,
        take: PipelineState,
    ) -> PipelineState:
        """Compute and store one tile with the MMAs of its width."""
        width, c = mma.mma.columns, self.tiles
        part = mma.mma.accumulator(ROWS * c.readers, width)  # (MMA, 1, MMA_N)
        acc = mma.mma.accumulator(c.tile_m, width)  # (MMA, MMA_M, MMA_N)
        acc.fill(0.0)
        held = cute.make_rmem_tensor(cute.size(coming.ahead), Float32)
        promotion = Promotion(mma.into(acc), product.ab, coming.factors, part, held, 1)
        take = promotion.at_boundary(coming.promote, take, product.num_k_tiles)
        row, step, _ = self.origin(tile)
        column = self.columns.first(tile.n) // self.config.epi_columns
        self.store_of(product.epilogue, tile).store(acc, row, step, column)
        return take


class GroupedNarrow(GroupedBlocks):
    """GroupedBlocks with narrower tiles where the columns end, of CTAs alone with 64 rows a
    warpgroup."""

    name = "sm90_gemm_grouped_narrow"

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
        *rest: Any,
    ) -> None:
        """Launch with the arguments of GroupedBlocks."""
        *passed, stream = rest
        mB = modes(mB, columns_first=True)
        maps, factors = self.maps_of(mA, mB, (mScaleA, mScaleB), mOut)
        narrow = self.general.load_operand(mB, self.narrow_width, 1, True)
        launched = self.kernel(maps, narrow, factors, mOut, edges, tuple(passed))
        self.start(launched, grid(self.tiles, mA, mB), stream)

    @property
    def narrow_width(self) -> int:
        """The columns of a narrow tile."""
        return ColumnTiles(self.tiles.tile_n, 0, 0).narrow_width

    # ---- on the device

    @cute.kernel
    def kernel(
        self,
        maps: tuple[cpasync.TmaInfo, ...],
        narrow: cpasync.TmaInfo,
        factors: tuple[Any, Any],
        mOut: cute.Tensor,
        edges: cute.Tensor,
        passed: tuple[Any, ...],
    ) -> None:
        """Run the roles on A, B and out, and the factors of both sides."""
        c: Any = self.tiles  # RowBlocksConfig
        a, b, _ = maps
        smem = SmemAllocator()
        memory, of_rows = self.memory_of(smem, maps, factors)
        sA, sB, _, groups, _ = memory
        plan = ColumnPlan.allocate(smem, c.tile_n)
        ab = GroupedOperands(a, b, sA, sB, groups=groups)
        operands = NarrowRows(ab, of_rows, narrow, plan)
        tiles = self.announced_tiles(smem)
        raster = Raster(c.raster_group, c.raster_along)
        scheduler: Any = NarrowTiles(raster, (c.tile_m, c.tile_n), (1, 1), groups, plan)
        of_both = (of_rows, factors[1]), (None, None)
        few = Wgmma(self.narrow_width, sA.element_type, warpgroups=c.readers)
        slots = few.a_slots(sA), few.b_slots(first_rows(sB, self.narrow_width))
        product = self.config.product
        role = PromoteNarrow(
            product,
            c,
            scheduler,
            *of_both,
            announced=tiles,
            plan=plan,
            narrow=WgmmaProduct(few, *slots, None),
        )
        store = self.store_of(maps, memory, passed)
        self.run(memory, operands, role, store, edges, product.product(mOut), tiles)

    def announced_load(self, scheduler: Any, announced: AnnouncedTiles) -> LoadNarrow:
        return LoadNarrow(self.tiles, self.general.cluster, scheduler, announced, scheduler.plan)

    def announce(self, announced: AnnouncedTiles, walk: EqualShares) -> None:
        walk.announce(announced)
