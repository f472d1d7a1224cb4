"""The grouped GEMM on Hopper in tiles of equal width: out[rows of e] = ops(A[rows of e] @ B[e]).

wgmma computes rows in units of 64 and columns in units of 8. Here a group's rows are its columns,
and the columns of B its rows; so a group is divided into tiles of one width (schedulers/level.py)
with little padding. A router's groups of some 512 rows waste 2.5 % instead of the 12 % of 128-row
tiles, and at the power limit that is time.

- TMA loads as many rows as the widest tile has; wgmma reads those of this width.
- The number of columns is part of wgmma's instruction: each width has an instruction, and a
mainloop, of its own, in registers of its own (level_mma.py).
- Groups with wider tiles come first, and some have more tiles than they need, so that the last
round is full (schedulers/packed.py).
- out is stored through a view in which a tile's rows end where the tile does, as in other kernels a
group's rows do (views.py).
- With a gate, 16 columns of B are loaded as 8 gates and the 8 columns that they gate, one each per
thread (views.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.arch import arch as arch_named
from cutex.device.atoms.mma import allocate_slots
from cutex.device.atoms.multicast import AbOperands, Cluster, SharedRing
from cutex.device.atoms.tma import AbLoads
from cutex.device.epilogue.sm90.fused_store import fused_store
from cutex.device.epilogue.sm90.paired_store import paired_slots, paired_store
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.grouped.config import LevelConfig
from cutex.kernels.gemm.grouped.sm90.kernel import GroupedKernel
from cutex.kernels.gemm.grouped.sm90.level_mma import Cooperative, LevelProducts, PingPong
from cutex.kernels.gemm.grouped.sm90.memory import GroupMemory
from cutex.kernels.gemm.grouped.views import (
    GroupOps,
    column_operand,
    loaded_rows,
    pairs_apart,
    stored_columns,
)
from cutex.kernels.gemm.signature import modes
from cutex.kernels.gemm.sm90.general import General
from cutex.kernels.gemm.sm90.load import LoadTiles
from cutex.schedulers.packed import LevelPlan, PackedTiles
from cutex.schedulers.ragged import RowGroups
from cutex.schedulers.raster import Raster


@dataclass(frozen=True)
class LevelGroups:
    """The groups of rows, and how they are divided into tiles."""

    groups: RowGroups  # by their places
    plan: LevelPlan

    def group(self, tile: WorkTile) -> Any:
        """The group of a tile, which has a place."""
        return self.plan.group(tile.group)

    def width(self, tile: WorkTile) -> Any:
        return self.plan.width(tile.group, tile.n)

    def rows(self, tile: WorkTile) -> tuple[Any, Any]:
        """The first row of a tile, and the row after its last; both are the same where a group has
        tiles that it does not need."""
        begin, end = self.groups.begins[tile.group], self.groups.ends[tile.group]
        first = cutlass.min(begin + self.plan.first(tile.group, tile.n), end)
        return first, cutlass.min(first + self.width(tile), end)


@dataclass(frozen=True)
class LevelOperands(AbOperands):
    """B (N, K, E) as operand A of the MMA, and A (M, K) as its operand B."""

    level: Any = None  # LevelGroups

    @cute.jit
    def loads(self, tile: WorkTile, cluster: cutlass.Constexpr[Cluster]) -> AbLoads:
        """The loads that this CTA starts for `tile`, of its group's matrix and rows."""
        first, _ = self.level.rows(tile)
        rows = loaded_rows(self.b, first)
        operands = AbOperands(self.a, rows, self.sA, self.sB, self.k_major)
        return operands.loads(tile._replace(batch=self.level.group(tile), n=Int32(0)), cluster)


class LoadLevel(LoadTiles):
    """The load role; it prefetches nothing for tiles that are not known yet."""

    streams_a = streams_b = False


@dataclass(frozen=True)
class LevelStore:
    """The store of accumulators to the rows of tiles."""

    out: cpasync.TmaInfo  # of column_operand
    sC: cute.Tensor  # (64, epiN, SLOT); half the rows after a gate
    num_slots: int
    level: LevelGroups
    ops: GroupOps

    def of(self, tile: WorkTile) -> Any:
        """The store of one tile."""
        first, end = self.level.rows(tile)
        out = stored_columns(self.out, first, end)
        ops = self.ops.of_columns(self.level.group(tile), first, end)
        if ops.gated:
            return paired_store(out, self.sC, self.num_slots, ops, end - first)
        return fused_store(out, self.sC, self.num_slots, False, ops, None)


class GroupedLevel(GroupedKernel):
    """A CTA computes tiles of groups: a load warp, and two warpgroups that run wgmma, alternately
    or each for its half of a tile.

    Barriers, registers and smem are those of GroupedKernel (kernel.py), with the rows of A as B's
    and the reverse.
    """

    name = "sm90_gemm_grouped_level"
    dtypes = "bf16", "fp16"
    load_role = LoadLevel

    def __init__(self, config: LevelConfig) -> None:
        if reason := config.why_not(arch_named(self.arch)):
            raise ValueError(reason)
        self.config, self.tiles, self.widths = config, config.tiles, config.widths
        self.halves = config.halves
        # NOTE: the general kernel takes no gate here, whose columns are an MMA's rows
        self.general = General(replace(config.product, ops=()))

    @cute.jit
    def __call__(
        self, mA: cute.Tensor, mB: cute.Tensor, mOut: cute.Tensor, edges: cute.Tensor, *rest
    ) -> None:
        """Launch with a (M, K), b (E, K, N), out (M, N), edges (E), the operations' arguments, and
        a stream."""
        c, general, product = self.tiles, self.general, self.config.product
        *passed, stream = rest
        mRows, mB = modes(mA, columns_first=False), modes(mB, columns_first=True)
        n = cute.size(mB, mode=[0])
        slots = general.epilogue_slots(mOut.element_type)
        if cutlass.const_expr(product.gated):
            mB = pairs_apart(mB, self.halves)
            slots = paired_slots(mOut.element_type, c.epi_n, general.num_slots)
        a = general.load_operand(mB, c.tile_m, c.cluster_n, general.config.k_major[0])
        b = general.load_operand(mRows, c.tile_n, c.cluster_m, general.config.k_major[1])
        out = column_operand(mOut, slots)
        launched = self.kernel(a, b, out, edges, Int32(n), tuple(passed))
        clusters = arch_named(self.arch).num_sms if not c.num_ctas else c.num_ctas
        clusters //= c.cluster_m * c.cluster_n
        self.start(launched, (c.cluster_m, c.cluster_n, Int32(max(1, clusters))), stream)

    @cute.kernel
    def kernel(
        self,
        a: cpasync.TmaInfo,
        b: cpasync.TmaInfo,
        out: cpasync.TmaInfo,
        edges: cute.Tensor,
        columns: Int32,
        passed: tuple[Any, ...],
    ) -> None:
        """Run the roles."""
        c, product, smem = self.tiles, self.config.product, SmemAllocator()
        sA, sB = (allocate_slots(smem, x.atom.value_type, x.smem_layout) for x in (a, b))
        sC = allocate_slots(smem, a.atom.value_type, out.smem_layout)
        groups = RowGroups.allocate(smem, self.config.most_groups)
        plan = LevelPlan.allocate(smem, self.config.most_groups, self.widths)
        ring = c.num_stages, c.stage_bytes, 4 * c.row_warpgroups
        ab = SharedRing.of_cluster(smem, "ab", *ring, self.general.cluster)
        level = LevelGroups(groups, plan)
        k_major = self.general.config.k_major
        operands: Any = LevelOperands(a, b, sA, sB, k_major, level=level)
        shape = (c.tile_m, c.tile_n), (c.cluster_m, c.cluster_n)
        raster = Raster(c.raster_group, c.raster_along)
        scheduler: Any = PackedTiles(raster, *shape, groups, self.widths, plan)
        role = (PingPong if c.pingpong else Cooperative)(product, c, scheduler, level=level)
        store = LevelStore(out, sC, c.epi_stages, level, GroupOps(product.ops, passed, columns))
        mProduct = cute.make_identity_tensor((columns, cute.size(b.tma_tensor, mode=[0])))
        self.run(GroupMemory(sA, sB, sC, groups, ab), operands, role, store, edges, mProduct)

    def sizes(self, mProduct: cute.Tensor) -> tuple[Int32, Int32]:
        return cute.size(mProduct, mode=[1]), cute.size(mProduct, mode=[0])

    def product(self, sA: cute.Tensor, sB: cute.Tensor) -> LevelProducts:
        """A warpgroup's products, one for each width."""
        return LevelProducts.of(self.general, self.widths, sA, sB)
