"""The grouped GEMM on Hopper whose rows of tiles end with narrower ones (schedulers/trimmed.py).

out[rows of e] = A[rows of e] @ B[e], as GroupedRows (rows.py) computes it with ping-pong. A narrow
tile's MMAs have fewer columns, and a mainloop and a store of their own, in registers of their own.
As much of B is loaded for it as for a wide one: narrow tiles are few.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from cutex.device.atoms.multicast import AbOperands, Cluster, SharedRing
from cutex.device.atoms.tma import AbLoads
from cutex.device.atoms.wgmma import Wgmma, WgmmaProduct
from cutex.device.pipeline import OrderedBarrier, PipelineState
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.grouped.sm90.memory import GroupMemory
from cutex.kernels.gemm.grouped.sm90.narrow import first_rows
from cutex.kernels.gemm.grouped.sm90.rows import GroupedOperands, GroupedRows, PingPong
from cutex.kernels.gemm.grouped.trimmed_config import TrimmedConfig
from cutex.kernels.gemm.grouped.views import GroupOps
from cutex.kernels.gemm.signature import tile_counts
from cutex.kernels.gemm.sm90.load import LoadTiles, fill_ring
from cutex.kernels.gemm.sm90.mma import ORDER_BARRIER, RoleProduct, issue
from cutex.schedulers.raster import Raster
from cutex.schedulers.trimmed import Done, TrimmedTiles, TrimPlan


@dataclass(frozen=True)
class TrimmedOperands(GroupedOperands):
    """A (M, K), and B (N, K, E), of whose columns a tile begins where the plan says."""

    plan: Any = None  # TrimPlan

    @cute.jit
    def loads(self, tile: WorkTile, cluster: cutlass.Constexpr[Cluster]) -> AbLoads:
        """The loads that this CTA starts for `tile`, of its group's rows and matrix."""
        first = self.plan.read().first(tile.n)
        mB = cute.domain_offset((first, 0, 0), self.b.tma_tensor)
        b = cpasync.TmaInfo(self.b.atom, mB, self.b.smem_layout)
        operands = GroupedOperands(self.a, b, self.sA, self.sB, self.k_major, groups=self.groups)
        return operands.loads(tile._replace(n=Int32(0)), cluster)


class LoadTrimmed(LoadTiles):
    """The load role of a CTA whose next tile depends on what is done; it prefetches nothing."""

    streams_a = streams_b = False

    @cute.jit
    def run(self, operands: AbOperands, ab: SharedRing, mC: cute.Tensor) -> None:
        scheduler: Any = self.scheduler  # TrimmedTiles
        walk = scheduler.walk(tile_counts(self.tiles, mC))
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        fill = ab.producer()
        wides, narrows = Int32(0), Int32(0)
        for _ in cutlass.range(0, walk.tiles, unroll=1):
            _, tile, done = walk.next(Done(wides, narrows))
            wides, narrows = done
            loads = operands.loads(tile, self.cluster)
            fill = fill_ring(loads, ab, fill, 0, loads.num_k_tiles)
        ab.drain(fill)


class Turn(NamedTuple):
    """One tile of a warpgroup, and which warpgroup may start once it has been issued, if any."""

    tile: WorkTile
    order: OrderedBarrier
    other: Int32
    more: Boolean


@dataclass(frozen=True)
class PingPongTrimmed(PingPong):
    """Two warpgroups alternate tiles, wide and narrow: one stores while the other's wgmma run (as
    in sm90/mma.py, whose NOTE applies here, too)."""

    plan: Any = None  # TrimPlan
    few: Any = None  # a WgmmaProduct of narrow tiles, without accumulators

    @cute.jit
    def run(self, product: RoleProduct) -> None:
        scheduler: Any = self.scheduler  # TrimmedTiles
        walk = scheduler.walk(tile_counts(self.tiles, product.mC))
        order = OrderedBarrier(ORDER_BARRIER)
        mine = cute.arch.warp_idx() // 4
        take = product.ab.consumer()
        wides, narrows = Int32(0), Int32(0)
        if mine == 1:
            order.signal(0)
            take.skip(product.num_k_tiles)
            wides, narrows = walk.skipped(Done(wides, narrows))
        for index in cutlass.range(mine, walk.tiles, 2, unroll=1):
            narrow, tile, done = walk.next(Done(wides, narrows))
            wides, narrows = walk.skipped(done)
            turn = Turn(tile, order, 1 - mine, index + 1 < walk.tiles)
            order.wait(mine)
            if narrow:
                take = self.compute(product, self.few, turn, take)
            else:
                take = self.compute(product, product.mma, turn, take)

    @cute.jit
    def compute(
        self,
        product: RoleProduct,
        mma: WgmmaProduct,
        turn: cutlass.Constexpr[Turn],
        take: PipelineState,
    ) -> PipelineState:
        """Compute and store one tile with the MMAs of its width."""
        ab, tile = product.ab, turn.tile
        acc = mma.mma.accumulator(self.tiles.tile_m, mma.mma.columns)  # (MMA, MMA_M, MMA_N)
        done, take = issue(mma.into(acc), ab, take, product.num_k_tiles)
        if turn.more:
            turn.order.signal(turn.other)
        warpgroup.wait_group(0)
        ab.release(done)
        take.skip(product.num_k_tiles)
        row, step, _ = self.origin(tile)
        column = self.plan.read().first(tile.n) // self.config.epi_columns
        product.epilogue.of(tile.group).store(acc, row, step, column)
        return take


class GroupedTrimmed(GroupedRows):
    """GroupedRows with narrower tiles where the columns end."""

    name = "sm90_gemm_grouped_trimmed"
    dtypes = "bf16", "fp16"
    load_role = LoadTrimmed
    config: TrimmedConfig

    @cute.kernel
    def kernel(
        self,
        a: cpasync.TmaInfo,
        b: cpasync.TmaInfo,
        stored: Any,
        mOut: cute.Tensor,
        edges: cute.Tensor,
        passed: tuple[Any, ...],
    ) -> None:
        """Run the roles."""
        c, product, smem = self.tiles, self.config.product, SmemAllocator()
        most, kind = self.config.most_groups, mOut.element_type
        memory = GroupMemory.allocate(smem, self.general, (a, b), kind, most)
        sA, sB, sC, groups, _ = memory
        plan = TrimPlan.allocate(smem, self.config.widths)
        ab = a, b, sA, sB, product.k_major
        operands: Any = TrimmedOperands(*ab, groups=groups, plan=plan)
        shape = (c.tile_m, c.tile_n), (c.cluster_m, c.cluster_n)
        raster = Raster(c.raster_group, c.raster_along)
        scheduler: Any = TrimmedTiles(raster, *shape, groups, plan)
        few = Wgmma(self.config.narrow, sA.element_type)
        slots = few.a_slots(sA), few.b_slots(first_rows(sB, self.config.narrow))
        of_few = WgmmaProduct(few, *slots, None)
        role = PingPongTrimmed(product, c, scheduler, plan=plan, few=of_few)
        n = cute.size(b.tma_tensor, mode=[0])
        store: Any = self.store(stored, mOut, sC, GroupOps((), passed, n), groups)
        self.run(memory, operands, role, store, edges, self.product_like(stored, mOut, n))
