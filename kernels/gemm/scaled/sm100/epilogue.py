"""The epilogue of the block-scaled kernel: the role for accumulators that share columns of tensor
memory, and the operation that quantizes a product for the next one."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Uint8, cute

from cutex.compile import Argument, Operand
from cutex.device.atoms.tmem import fence_before_sync
from cutex.device.epilogue.epilogue_ops import Fragment
from cutex.device.epilogue.sm100.fused_store import FusedTileStore
from cutex.device.pipeline import AccRing, PipelineState
from cutex.kernels.gemm.sm100.epilogue import StoreTiles
from cutex.kernels.quantize.elements import Elements, bits_of, factor_of, multiply
from cutex.problem.scaled.formats import FORMATS

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
