"""The roles of the block-scaled kernel: A and B and their scale factors, as the general kernel's
load role takes them; the MMA role; the epilogue role for accumulators that share columns of tensor
memory, and the operation that quantizes a product for the next one.

Each CTA has the factors of its own rows of A, and those of all of B's that the MMA takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Int32, Uint8, cute
from cutlass.cute.nvgpu import cpasync, tcgen05

from cutex.compile import Argument, Operand
from cutex.device.atoms.scale_factors import ROWS, FactorTile
from cutex.device.atoms.tma import TileLoads, load_operand, matrix, tile_loads
from cutex.device.atoms.tmem import fence_after_sync, fence_before_sync
from cutex.device.atoms.umma import UmmaProduct
from cutex.device.epilogue.epilogue_ops import Fragment
from cutex.device.epilogue.sm100.fused_store import FusedTileStore
from cutex.device.pipeline import AccRing, PipelineState, Ring
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.scaled.sm100.config import ScaledTiles
from cutex.kernels.gemm.sm100.epilogue import StoreTiles
from cutex.kernels.gemm.sm100.roles import k_share
from cutex.kernels.quantize.elements import Elements, bits_of, factor_of, multiply
from cutex.problem.scaled.formats import FORMATS
from cutex.schedulers.dispatch import Dispatcher

# ---- loads


def load_elements(
    mX: cute.Tensor, smem_layout: cute.ComposedLayout, pair: bool, unpack: bool
) -> cpasync.TmaInfo:
    """The tensor map that loads tiles of `mX` (rows, K); with `unpack`, its elements of 4 bits into
    a byte each: 16 of them into the first 8 of 16 bytes, as kind::mxf8f6f4 reads them."""
    if not unpack:
        return load_operand(mX, smem_layout, pair)
    rows, k = cute.size(smem_layout, mode=[0]), cute.size(smem_layout, mode=[1])
    group = tcgen05.CtaGroup.TWO if pair else tcgen05.CtaGroup.ONE
    op = cpasync.CopyBulkTensorTileG2SOp(group)
    return cpasync.make_tiled_tma_atom(op, mX, smem_layout, (rows, k), internal_type=Uint8)


class ScaledLoads(NamedTuple):
    """The loads that one CTA's tile needs: of A, B, and the factors of both."""

    parts: tuple[TileLoads, ...]

    @property
    def num_k_tiles(self) -> Int32:
        return self.parts[0].num_k_tiles

    @cute.jit
    def load(self, k_tile: Int32, slot: Int32, full: cute.Pointer) -> None:
        """Start the loads of step `k_tile` into `slot`. A whole warp calls it."""
        for part in self.parts:
            part.load(k_tile, slot, full)


@dataclass(frozen=True)
class ScaledOperands:
    """The tensor maps of A, B and their factors, and the slots of this CTA."""

    maps: tuple[cpasync.TmaInfo, ...]  # A, B, factors of A, of B
    sA: cute.Tensor  # (bM / ctas, bK, SLOT)
    sB: cute.Tensor  # (bN / ctas, bK, SLOT)
    sFA: cute.Tensor  # (WORDS, STEPS, ROWS, SLOT)
    sFB: cute.Tensor  # (WORDS, STEPS, ROWS, SLOT)
    factors: tuple[FactorTile, FactorTile]
    tile_n: int
    ctas: int  # that share a tile

    def prefetch(self) -> None:
        """Prefetch the tensor maps."""
        for operand in self.maps:
            cpasync.prefetch_descriptor(operand.atom)

    @cute.jit
    def loads(self, tile: WorkTile) -> ScaledLoads:
        """The loads of this CTA's rows of A and B; `tile.m` counts tiles of one CTA, `tile.n` those
        of all that share it."""
        a, b, factors_a, factors_b = self.maps
        n_tile = tile.n
        if cutlass.const_expr(self.ctas > 1):
            n_tile = self.ctas * tile.n + cute.arch.block_idx_in_cluster() % self.ctas
        of_a, of_b = self.factors
        return ScaledLoads(
            (
                tile_loads(matrix(a, tile), self.sA, tile.m),
                tile_loads(matrix(b, tile), self.sB, n_tile),
                of_a.loads(factors_a, self.sFA, tile.m, tile.batch),
                of_b.loads(factors_b, self.sFB, tile.n * self.tile_n // ROWS, tile.batch),
            )
        )


# ---- MMA


@dataclass(frozen=True)
class ScaledMma:
    """The MMA role: for each step of K, one warp copies its factors to tensor memory and starts its
    MMAs, which the tensor core runs in this order.

    NOTE: nothing beyond K is multiplied. What TMA fills in there is 0, but factors that only pad a
    chunk may be anything, and 0 times a NaN is NaN.
    """

    tiles: ScaledTiles

    @cute.jit
    def run(
        self,
        mma: UmmaProduct,
        ab: Ring,
        acc: AccRing,
        k: Int32,
        dispatch: cutlass.Constexpr[Dispatcher],
    ) -> None:
        c = self.tiles
        take, fill = ab.consumer(), acc.producer()
        factors, pair = mma.factors, mma.mma.pair
        assert factors is not None
        num_k_tiles = k_share(c, cute.ceil_div(k, c.k_elements))
        ticket = dispatch.first()
        while ticket.valid:
            tile = dispatch.tile(ticket)
            full = acc.acquire(fill)
            fence_after_sync()
            of_tile = factors.of_columns(tile.n * c.tile_n % ROWS)
            into = mma.into(self.filled(fill))._replace(factors=of_tile)
            left = k - tile.split * num_k_tiles * c.k_elements
            whole = cutlass.max(0, cutlass.min(num_k_tiles, left // c.k_elements))
            for k_tile in cutlass.range(whole, unroll=1):
                ab.wait_full(take)
                factors.copy(take.slot, pair)
                into.issue(take.slot, accumulate=k_tile > 0)
                mma.commit(ab.empty[take.slot])
                take.advance()
            for k_tile in cutlass.range(whole, num_k_tiles, unroll=1):
                # NOTE: a share of K may be wholly beyond its end; its sum is then 0, of one MMA
                rest = cutlass.max(1, left - k_tile * c.k_elements)
                ab.wait_full(take)
                factors.copy(take.slot, pair)
                into.issue_first(take.slot, k_tile > 0, cute.ceil_div(rest, mma.mma.k))
                mma.commit(ab.empty[take.slot])
                take.advance()
            mma.commit(full)
            fill.advance()
            ticket = dispatch.next(ticket)

    def filled(self, fill: PipelineState) -> Int32:
        """The accumulator that is filled next."""
        return fill.phase ^ 1 if self.tiles.overlap else fill.slot


# ---- epilogue


MAGNITUDE = 0x7FFFFFFF  # of a float's bits
CHUNK = (32, 4)  # rows of a chunk as (row mod 32, row div 32), and 4 factors


@dataclass(frozen=True)
class StoreOverlapped(StoreTiles):
    """StoreTiles for two accumulators of which the first ends with columns that the second begins
    with. These are read first, and the next tile's MMAs start while the rest is read.

    NOTE: the ring has one slot, whose phases are the two accumulators in turn: a tile may start
    when the columns that it shares with the tile before are free; the rest of its accumulator was
    read before that tile's.
    """

    shared_parts: int  # sub-tiles with shared columns

    def taken(self, take: PipelineState) -> Int32:
        return take.phase

    def part(self, turn: Int32 | int, take: PipelineState, num_parts: int) -> Int32:
        """The sub-tile that is read at `turn`: of the first accumulator the last one first."""
        last = num_parts - 1
        return (1 - take.phase) * (last - 2 * turn) + turn

    @cute.jit
    def store_unrolled(self, store: FusedTileStore, acc: AccRing, take: PipelineState) -> None:
        parts = store.parts
        following = parts.start_load(self.part(0, take, parts.num_parts))
        for turn in cutlass.range_constexpr(parts.num_parts):
            tTR_rAcc = following
            parts.wait_loads()
            if cutlass.const_expr(turn == self.shared_parts - 1):
                fence_before_sync()
                acc.release(take)
            if cutlass.const_expr(turn < parts.num_parts - 1):
                following = parts.start_load(self.part(turn + 1, take, parts.num_parts))
            store.store(tTR_rAcc, turn, self.part(turn, take, parts.num_parts))

    @cute.jit
    def store_in_loop(self, store: FusedTileStore, acc: AccRing, take: PipelineState) -> None:
        parts = store.parts
        following = parts.start_load(self.part(0, take, parts.num_parts))
        for turn in cutlass.range(parts.num_parts, unroll=1):
            parts.wait_loads()
            tTR_rAcc = cute.make_rmem_tensor_like(following)
            tTR_rAcc.store(following.load())
            if turn == self.shared_parts - 1:
                fence_before_sync()
                acc.release(take)
            if turn < parts.num_parts - 1:
                parts.start_load_into(following, self.part(turn + 1, take, parts.num_parts))
            store.store_next(tTR_rAcc, turn, self.part(turn, take, parts.num_parts))


@dataclass(frozen=True)
class QuantizeRows:
    """x / factor, with a factor for each block of columns, which is written to the swizzled factors
    (L, RestRows, RestColumns, 128 words) of the result; it is rounded when it is stored, or of fp4
    here, two columns to a byte. The last operation, on rows whose columns are one thread's. NVFP4
    is relative to the result's own factor, which is given.

    Bit by bit `cutex.quantize` of x: what a last block lacks counts as zero. Factors beyond the
    result are left as they are.
    """

    format: str = "mxfp8"
    rounding: str = "floor"

    def arguments(self) -> tuple[Argument, ...]:
        sizes = ("l_factors", "chunks_rows", "chunks_columns", "words")
        factors = Operand("out_factors", sizes, "int32")
        own = Operand("out_scale", ("one",), "fp32", aligned=False, whole=False)
        return (factors, own) if FORMATS[self.format].tensor_scale else (factors,)

    @property
    def halves(self) -> bool:
        """Whether two columns share a byte of the result."""
        return FORMATS[self.format].element == "e2m1"

    @property
    def block(self) -> int:
        return FORMATS[self.format].block[1]

    def apply(self, x: Fragment, mFactors: cute.Tensor, *own: cute.Tensor) -> Fragment | None:
        of = FORMATS[self.format]
        of_tensor = own[0][0] if own else None
        for first in range(0, len(x.columns), self.block):
            largest = Int32(0)
            for c in range(first, first + self.block):
                size = bits_of(x.values[0, c]) & MAGNITUDE
                inside = x.columns[c] < x.bounds[1]
                largest = cutlass.max(largest, cutlass.select_(inside, size, Int32(0)))
            factor = factor_of(of, largest, self.rounding, True, of_tensor)
            for c in range(first, first + self.block):
                x.values[0, c] = multiply(x.values[0, c], factor.inverse)
            self.store(x, mFactors, x.columns[first], factor.code)
        return self.in_bytes(x) if self.halves else None

    def in_bytes(self, x: Fragment) -> Fragment:
        """x rounded to fp4, two neighbouring columns to a byte, the first in the low bits."""
        rows, columns = x.shape
        values = cute.make_rmem_tensor((rows, columns // 2), Uint8)  # (R, C / 2)
        elements = Elements("e2m1", native=True)
        for c in range(columns // 2):
            values[0, c] = elements.pair(x.values[0, 2 * c], x.values[0, 2 * c + 1]).to(Uint8)
        halves = tuple(c // 2 for c in x.columns[::2])
        bounds = x.bounds[0], x.bounds[1] // 2
        return x._replace(values=values, columns=halves, bounds=bounds, run=x.run // 2)

    @cute.jit
    def store(self, x: Fragment, mFactors: cute.Tensor, column: Int32, code: Int32) -> None:
        """Store the factor of the block of x's row that begins with `column`."""
        row, block = x.rows[0], column // self.block
        if row < x.bounds[0] and column < x.bounds[1]:
            mBytes = cute.recast_tensor(mFactors, Uint8)  # (L, RestRows, RestColumns, 512)
            low, count = CHUNK
            rows = low * count
            byte = row % low * 16 + row % rows // low * count + block % count
            mBytes[x.batch, row // rows, block // count, byte] = code.to(Uint8)
