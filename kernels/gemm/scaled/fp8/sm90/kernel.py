"""The fp8 GEMM with fp32 scale factors of blocks on Hopper: out = ops(A @ B), promoted.

DeepSeek's recipe: e4m3, a factor for each 128 of K in each row of A, and for each 128x128 of B, or
as in A. The roles are the general GEMM's (kernels/gemm/sm90): its load role also loads factors
(device/atoms/factored.py), its MMA role promotes (promote.py; two more, for a share of K, below);
its schedulers, clusters, split K and epilogues are as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.compile import Argument, Operand
from cutex.device.atoms.factored import FactoredOperands, factors_operand
from cutex.device.atoms.mma import SMEM_ALIGN, allocate_slots
from cutex.device.atoms.multicast import AbOperands, SharedRing
from cutex.device.atoms.wgmma import WARPGROUP, Wgmma, WgmmaProduct, wgmma
from cutex.device.epilogue.epilogue_ops import EpilogueOp
from cutex.device.pipeline import Barrier, publish_barriers
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.layouts import FactorLayout, OperandLayout
from cutex.kernels.gemm.scaled.fp8.config import Fp8Config
from cutex.kernels.gemm.scaled.fp8.sm90.promote import Promote, TileFactors, promoted
from cutex.kernels.gemm.signature import GeneralConfig, modes, tile_counts, transposed
from cutex.kernels.gemm.sm90.general import General
from cutex.kernels.gemm.sm90.load import LoadAnnounced
from cutex.kernels.gemm.sm90.mma import MmaRole, PartStore, RoleProduct, Walk
from cutex.kernels.gemm.sm90.shared_k import (
    SUMS_BARRIER,
    VECTOR,
    SplitKApart,
    load_apart,
    thread_vectors,
)
from cutex.problem.scaled.formats import FP32_SCALED, RECIPES
from cutex.schedulers.announced import AnnouncedTiles


@dataclass(frozen=True)
class Fp8Signature(GeneralConfig):
    """A GeneralConfig whose operands have fp32 factors of its tiles' recipe; for PROMOTED, none."""

    tiles: Fp8Config

    @staticmethod
    def of(
        tiles: Fp8Config,
        out: OperandLayout = OperandLayout(whole=True),  # noqa: B008 - frozen
        ops: tuple[EpilogueOp, ...] = (),
    ) -> Fp8Signature:
        """A (M, K) row-major by B (K, N) column-major, or batches of both where out is one."""
        a, b = (
            OperandLayout("e4m3", major, out.batched, scales=FactorLayout(format.block[0]))
            for major, format in zip(("row", "column"), RECIPES[tiles.recipe], strict=True)
        )
        return Fp8Signature(tiles, a, b, out, ops)

    @property
    def factors(self) -> tuple[Operand, ...]:
        """The arguments scale_a and scale_b."""
        return (*self.a.factors("a", "m", "lfa"), *self.b.factors("b", "n", "lfb"))

    def arguments(self) -> tuple[Argument, ...]:
        """The kernel's arguments: a, b, the factors of each, out, and those of the operations."""
        a, b, *rest = super().arguments()
        assert isinstance(a, Operand)
        return (self.tiles.of_rounds(a), b, *self.factors, *rest)


class Fp8Gemm:
    """A CTA computes tiles of out: a load warp, and warpgroups that run wgmma and promote.

    Barriers and roles are the general kernel's (sm90/general.py); with two warpgroups that
    alternate, those of one arrive at ab.empty[slot], and both meet twice at named barrier 5: before
    sums overwrite the ring, and when they are written (PromoteAlternating). With split_k the
    cluster's barrier is arrived at when a CTA's own barriers are initialised, and waited for before
    sums are sent. Beside its memory:

    smem            bytes
    sFA, sFB        4 * tile_m * num_stages, 4 * tile_n * num_stages, a slot's from a multiple of
                    128 on; only of the sides with a factor for each row
    place           own_sums_bytes: the sums of the other CTAs that share K, behind the barriers

    registers of an MMA thread hold two sets of accumulators: of the tile, tile_m * tile_n / 128 /
    warpgroups, and of one block of K for 64 rows, tile_n / 2.
    """

    arch = "sm_90a"
    dtypes = tuple(FP32_SCALED)

    def __init__(self, config: Fp8Signature) -> None:
        self.config = config
        self.tiles = config.tiles
        self.general = General(config)

    @property
    def name(self) -> str:
        return "sm90_gemm_fp8"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        if dtype != self.tiles.recipe:
            raise ValueError(f"recipe={self.tiles.recipe}: compiled for {dtype}")
        return self.config.arguments()

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, *rest) -> None:
        """Launch with a (M, K), b (K, N), their factors, if blocks have some, out (M, N), each with
        L first where batched, the operations' arguments and a stream."""
        count = len(self.config.factors)
        scales: Any = tuple(modes(x, False) for x in rest[:count]) if count else (None, None)
        mOut, passed, stream = modes(rest[count], False), tuple(rest[count + 1 : -1]), rest[-1]
        self.launch(modes(mA, False), modes(mB, True), scales, mOut, passed, stream)

    @cute.jit
    def launch(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        scales: tuple[Any, Any],
        mOut: cute.Tensor,
        passed: tuple[Any, ...],
        stream,
    ) -> None:
        """Launch with mA (M, K), mB (N, K), mOut (M, N), each with L last where batched."""
        c, g = self.tiles, self.general
        if cutlass.const_expr(c.swap_ab):
            mA, mB, mOut, scales = mB, mA, transposed(mOut), scales[::-1]
        a = g.load_operand(mA, c.tile_m, c.cluster_n, True)
        b = g.load_operand(mB, c.tile_n, c.cluster_m, True)
        factors = tuple(
            factors_operand(mS, rows, c.num_stages, vector)
            for mS, rows, vector in zip(scales, (c.tile_m, c.tile_n), c.vectors, strict=True)
        )
        out, rows, passed = g.stored(mOut, passed)
        g.start(self.kernel(a, b, factors, out, rows, passed), mOut, stream)

    @cute.kernel
    def kernel(
        self,
        a: cpasync.TmaInfo,
        b: cpasync.TmaInfo,
        factors: tuple[Any, Any],
        out: Any,
        rows: cute.Tensor | None,
        passed: tuple[Any, ...],
    ) -> None:
        """Run the roles; the arguments are the general kernel's, and the factors of both sides."""
        c, g = self.tiles, self.general
        kinds = a.atom.value_type, b.atom.value_type
        smem = SmemAllocator()
        sA = allocate_slots(smem, kinds[0], a.smem_layout)  # (bM, bK, SLOT)
        sB = allocate_slots(smem, kinds[1], b.smem_layout)  # (bN, bK, SLOT)
        mOut, sC = out, None
        if cutlass.const_expr(self.config.out.tma):
            mOut = out.tma_tensor
            sC = allocate_slots(smem, out.atom.value_type, out.smem_layout)  # (64, epiN, SLOT)
        slots: Any = tuple(
            allocate_slots(smem, Float32, factor.smem_layout) if vector else None
            for factor, vector in zip(factors, c.vectors, strict=True)
        )  # (bRows, 1, SLOT) each
        mProduct = g.config.product(mOut)
        readers = 4 * c.readers
        ab = SharedRing.of_cluster(smem, "ab", c.num_stages, c.stage_bytes, readers, g.cluster)
        held = sums = None
        if cutlass.const_expr(g.preloaded is not None):
            held = Barrier.allocate(smem, "held", arrivals=1, slots=g.num_slots)
        if cutlass.const_expr(c.split_k > 1):
            sums = Barrier.allocate(smem, "sums", arrivals=1)
        place = sA
        if cutlass.const_expr(c.split_k > 1):
            size = c.own_sums_bytes // 4
            place = smem.allocate_tensor(Float32, cute.make_layout(size), SMEM_ALIGN)
        operands = FactoredOperands(AbOperands(a, b, sA, sB), factors, slots)
        load: Any = g.load_role
        announced: Any = None
        if cutlass.const_expr(c.announced):
            fields = ("m", "n", "batch") if self.config.out.batched else ("m", "n")
            announced = AnnouncedTiles.allocate(smem, fields, g.mma_warps.count + 1)
            load = LoadAnnounced(c, g.cluster, g.scheduler, announced)
        mma_role = self.mma_role(place, sums, factors, slots, announced)
        warp = cute.arch.warp_idx()
        if warp == g.load_warps.first:
            load.start(operands, mProduct)
        barriers = tuple(x for x in (ab, held, sums) if x is not None)
        if cutlass.const_expr(announced is not None):
            barriers = *barriers, *announced.barriers
        publish_barriers(barriers, cluster=g.cluster.size > 1)
        if warp >= self.general.load_warps.first:
            self.general.give_registers()
            if warp == self.general.load_warps.first:
                load_apart(partial(load.run, operands, ab, mProduct), c.split_k > 1)
            if cutlass.const_expr(announced is not None):  # noqa: SIM102 - known when tracing
                if warp == self.general.load_warps.first + 1:
                    self.announce(announced, mProduct)
        else:
            self.general.take_registers()
            mma = wgmma(Wgmma(c.tile_n, *kinds, warpgroups=c.readers), sA, sB)
            epilogue = self.epilogue(out, sC, rows, mProduct, passed, held)
            mma_role.run(RoleProduct(mma, ab, epilogue, operands.num_k_tiles, mProduct))
            epilogue.drain()

    def announce(self, announced: AnnouncedTiles, mProduct: cute.Tensor) -> None:
        """Look up this CTA's tiles. One warp calls it."""
        announced.announce(self.general.scheduler.walk(tile_counts(self.tiles, mProduct)))

    def epilogue(self, out: Any, sC: Any, rows: Any, mProduct: Any, passed: Any, held: Any) -> Any:
        """The epilogue store of this thread's warpgroup, or of its warp."""
        bound = self.config.bind(mProduct, passed)
        return self.general.epilogue(out, sC, rows, bound, held)

    def mma_role(
        self,
        place: cute.Tensor,
        sums: Barrier | None,
        factors: tuple[Any, Any],
        slots: tuple[Any, Any],
        announced: AnnouncedTiles | None,
    ) -> MmaRole:
        g = self.general
        what = g.config, self.tiles, g.scheduler
        if sums is not None:
            return PromoteSplitK(*what, g.cluster, sums, place, factors, slots)
        if self.tiles.alternating:
            return PromoteAlternating(*what, factors, slots, place)
        return Promote(*what, factors, slots, announced=announced)


# ---- roles for a share of K


@dataclass(frozen=True)
class PromoteSplitK(SplitKApart):
    """A CTA promotes a share of one tile's K, and exchanges fp32 sums (sm90/shared_k.py)."""

    tiles: Fp8Config
    factors: tuple[Any, Any]
    slots: tuple[Any, Any]

    def compute(self, mma: WgmmaProduct, ab: SharedRing, walk: Walk, count: Int32) -> None:
        cute.arch.griddepcontrol_wait()  # the kernel before may write shared factors
        factors = TileFactors(self.tiles, self.factors, self.slots, walk.tile_at(walk.start))
        promoted(mma, ab, ab.consumer(), factors, walk.split * count, count)


# ---- warpgroups that alternate
#
# The MMA role of two warpgroups that compute one tile together, each every second block of K.
#
# A small tile's wgmma take no longer than what stands between them: the wait for a slot, their own
# latency, and the additions of the block before. With a warpgroup for every second block these hide
# under the other's wgmma. At the end each has sums of all rows, and leaves the other those of every
# second part of the tile in the smem where the ring was (docs/facts/scaled.md#fp8-alternating).


@dataclass(frozen=True)
class PromoteAlternating(Promote):
    """Two warpgroups promote alternate blocks of one tile, and store alternate parts."""

    sA: cute.Tensor  # (bM, bK, SLOT), where the ring begins

    @cute.jit
    def run(self, product: RoleProduct) -> None:
        mma, ab, epilogue, num_k_tiles, mC = product
        walk = self.scheduler.walk(tile_counts(self.tiles, mC))
        cute.arch.griddepcontrol_wait()  # the kernel before may write shared factors
        tile = walk.tile_at(walk.start)
        promoted(mma, ab, ab.consumer(), self.factors_of(tile), 0, num_k_tiles)
        self.add_up(mma, epilogue, tile)

    def origin(self, tile: WorkTile) -> tuple[Int32, int, Int32]:
        """The first row of a tile, the step to the next 64, and the first column, all in parts of
        64 x epiN: each warpgroup has all rows."""
        c = self.tiles
        return tile.m * (c.tile_m // 64), 1, tile.n * (c.tile_n // self.config.epi_columns)

    @cute.jit
    def add_up(self, mma: WgmmaProduct, epilogue: PartStore, tile: WorkTile) -> None:
        """Leave the other warpgroup the sums of its parts, add the other's sums to this one's
        parts, and store them."""
        mine = cute.arch.warp_idx() // 4
        parts = epilogue.parts(mma.acc)  # (V, PART)
        size, num_parts = cute.size(parts, mode=[0]), cute.size(parts, mode=[1])
        place = self.place(size, num_parts)
        # NOTE: then both have read the whole ring
        cute.arch.barrier(barrier_id=SUMS_BARRIER, number_of_threads=2 * WARPGROUP)
        for part in cutlass.range_constexpr(num_parts):
            if mine != part % 2:
                cute.autovec_copy(thread_vectors(parts[None, part]), place[None, None, part])
        cute.arch.barrier(barrier_id=SUMS_BARRIER, number_of_threads=2 * WARPGROUP)
        row, step, column = self.origin(tile)
        per_row = self.tiles.tile_n // self.config.epi_columns
        for part in cutlass.range_constexpr(num_parts):
            turn = part // 2
            if mine == part % 2:
                total = cute.make_rmem_tensor(place.shape[:2], Float32)  # (VECTOR, NumVectors)
                here = thread_vectors(parts[None, part])  # (VECTOR, NumVectors)
                total.store(here.load() + place[None, None, part].load())
                if cutlass.const_expr(turn == 0 or self.tiles.epi_stages == 1):
                    epilogue.wait(0)
                values = cute.make_tensor(total.iterator, cute.make_layout(size))
                slot = turn % self.tiles.epi_stages
                where = row + part // per_row * step, column + part % per_row
                epilogue.store_part(values, slot, *where)

    def place(self, size: int, num_parts: int) -> cute.Tensor:
        """This thread's place (VECTOR, NumVectors, PART) for sums, in the smem where the ring
        was."""
        thread, _, _ = cute.arch.thread_idx()
        first = cute.recast_ptr(self.sA.iterator, dtype=Float32).align(4 * VECTOR)
        shape = VECTOR, size // VECTOR, num_parts, WARPGROUP
        stride = 1, VECTOR * WARPGROUP, size * WARPGROUP, VECTOR
        layout = cute.make_layout(shape, stride=stride)
        return cute.make_tensor(first, layout)[None, None, None, thread % WARPGROUP]
