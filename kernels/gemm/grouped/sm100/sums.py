"""Sums over the rows of groups on Blackwell: out[e] = A[:, rows of e] @ B[rows of e].

The general kernel's roles (kernels/gemm/sm100) on the tiles of a batch, each of which has its own
number of steps along K; as on Hopper (sm90/sums.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from cutex.arch import arch as arch_named
from cutex.device.atoms.mma import MAJORS
from cutex.device.atoms.tma import AbLoads, PairOperands, load_operand, store_operand
from cutex.device.atoms.umma import Umma, UmmaProduct, umma
from cutex.device.epilogue.epilogue_ops import BoundOps
from cutex.device.epilogue.sm100.fused_store import FusedEpilogueStore
from cutex.device.pipeline import (
    AccRing,
    Ring,
    is_leader,
)
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.grouped.config import SumsConfig
from cutex.kernels.gemm.grouped.sm100.kernel import GroupedKernel
from cutex.kernels.gemm.grouped.sm100.memory import GroupMemory
from cutex.kernels.gemm.grouped.views import summed_operand, summed_rows
from cutex.kernels.gemm.signature import modes, tile_counts, transposed
from cutex.kernels.gemm.sm100.epilogue import StoreTiles
from cutex.kernels.gemm.sm100.general import General, Warp, store_slots
from cutex.kernels.gemm.sm100.roles import Load, Mma
from cutex.schedulers.clc import CTAS
from cutex.schedulers.order import TileCounts
from cutex.schedulers.persistent import StaticPersistent, StaticWalk
from cutex.schedulers.ragged import RaggedTiles, RowGroups
from cutex.schedulers.raster import Raster


@dataclass(frozen=True)
class GroupLoads:
    """The loads of a tile, along its group's rows."""

    ab: AbLoads
    num_k_tiles: Int32

    def load(self, k_tile: Int32, slot: Int32, full: cute.Pointer) -> None:
        self.ab.load(k_tile, slot, full)


@dataclass(frozen=True)
class SummedOperands:
    """A (M, K) and B (N, K), both contiguous in the other mode, through maps of `summed_operand`,
    as a pair loads them."""

    pair: PairOperands
    groups: RowGroups
    tile_k: int

    def prefetch(self) -> None:
        self.pair.prefetch()

    def loads(self, tile: WorkTile) -> GroupLoads:
        """The loads of this CTA's half of the rows of A and of B."""
        span = self.groups.begins[tile.batch], self.groups.ends[tile.batch]
        a, b = summed_rows(self.pair.a, *span), summed_rows(self.pair.b, *span)
        ab = self.pair._replace(a=a, b=b).loads(tile)
        return GroupLoads(ab, self.groups.steps(tile.batch, self.tile_k))


@dataclass(frozen=True)
class MmaOfGroups(Mma):
    """The MMA role, where each tile has the steps along K of its group."""

    groups: RowGroups
    tile_k: int

    @cute.jit
    def run_groups(
        self, mma: UmmaProduct, ab: Ring, acc: AccRing, walk: cutlass.Constexpr[StaticWalk]
    ) -> None:
        take, fill = ab.consumer(), acc.producer()
        ticket = walk.first()
        while ticket.valid:
            steps = self.groups.steps(walk.tile(ticket).batch, self.tile_k)
            take, fill = self.tile(mma, ab, acc, (take, fill), steps)
            ticket = walk.next(ticket)


class GroupedSums(GroupedKernel):
    """The grouped kernel that adds up over the rows of each group."""

    name = "sm100_gemm_grouped_sums"

    def __init__(self, config: SumsConfig) -> None:
        super().__init__(config)
        self.general = General(config.product)  # whose maps it has

    @property
    def scheduler(self) -> StaticPersistent:
        c = self.tiles
        raster = Raster(c.raster_group, c.raster_along)
        num_ctas = c.num_ctas or arch_named(self.arch).num_sms
        return StaticPersistent(raster, (CTAS, 1), num_ctas)

    def counts(self, mOut: cute.Tensor) -> TileCounts:
        """The numbers of tiles of a CTA, half of a pair's each."""
        m, n, batch = tile_counts(self.tiles, mOut)
        return TileCounts(m * CTAS, n, batch)

    # ---- on the host

    @cute.jit
    def __call__(
        self, mA: cute.Tensor, mB: cute.Tensor, mOut: cute.Tensor, edges: cute.Tensor, stream
    ) -> None:
        """Launch with a (M, K), b (K, N), out (E, M, N), edges (E), and a stream."""
        c, general = self.tiles, self.general
        mB, mOut = transposed(mB), modes(mOut, columns_first=False)
        slots = (general.load_slots(mA.element_type, rows, False) for rows in (c.tile_m, c.tile_n))
        a, b = (
            load_operand(summed_operand(mX), layout, pair=True)
            for mX, layout in zip((mA, mB), slots, strict=True)
        )
        out = store_operand(mOut, store_slots(general.config, mOut.element_type))
        launched = self.kernel(a, b, out, edges, cute.size(mA, mode=[1]))
        self.start(launched, self.scheduler.grid(self.counts(mOut)), stream)

    # ---- on the device

    @cute.kernel
    def kernel(
        self,
        a: cpasync.TmaInfo,
        b: cpasync.TmaInfo,
        out: cpasync.TmaInfo,
        edges: cute.Tensor,
        rows: Int32,
    ) -> None:
        """Run the roles. `rows`: of A and B, those of no group included."""
        c, product = self.tiles, self.config.product
        kinds = a.atom.value_type, b.atom.value_type
        memory = GroupMemory.allocate(c, (a, b), out, self.config.most_groups)
        sA, sB, sC, groups, ab, acc, tmem = memory
        tile_k = product.k_elements
        spans = RaggedTiles(Raster(), (tile_k, 1), (1, 1), groups)
        walk = self.scheduler.walk(self.counts(out.tma_tensor))
        warp = cute.arch.warp_idx()
        pointer = self.begin((ab, acc), tmem, spans, edges, (rows, 1))

        instruction = Umma(256, c.tile_n, *kinds, MAJORS[False], MAJORS[False], pair=True)
        mma = umma(instruction, sA, sB, pointer, c.num_acc)
        m, n, _ = out.tma_tensor.shape
        ops = BoundOps((), (), (m, n), transposed=False)
        store = FusedEpilogueStore(out, sC, product.epi_columns, ops)
        operands: Any = SummedOperands(PairOperands(a, b, sA, sB), groups, tile_k)
        if warp == Warp.LOAD:
            Load(c).run(operands, ab, walk)
        elif warp == Warp.MMA:
            if is_leader():
                MmaOfGroups(c, groups, tile_k).run_groups(mma, ab, acc, walk)
        elif warp < Warp.LOAD:
            StoreTiles(c, unrolled=True).run(mma.acc, store, acc, walk)
        self.end(tmem, pointer)
