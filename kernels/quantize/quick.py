"""NVFP4 of whole tiles of bf16 without a NaN.

A factor is a quotient of a quotient, rounded to e4m3. The products of a magnitude with one
constant, rounded slightly too small and slightly too large, give its code without a division,
unless the two codes differ. Elements of a block whose factor is not clamped are below 7, which
rounds to 6, so only elements of other blocks are limited. A thread with a NaN reports it, and its
part is computed again.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cutlass_dsl import dsl_user_op

from cutex.kernels.quantize.config import NVFP4_BLOCK, TILE
from cutex.kernels.quantize.elements import (
    INF_BITS,
    TensorScale,
    as_word,
    bits_of,
    coded_halves,
    columns_of_coded,
    converted,
    float_of,
    larger_halves,
    multiply,
    quotient,
    row_of_coded,
    take,
)
from cutex.kernels.quantize.magnitudes import largest_of
from cutex.kernels.quantize.nvfp4 import OwnScale
from cutex.kernels.quantize.results import THREADS, Results

NEAR = 2.0**-20  # relative, more than the roundings of a factor
# of a block's magnitude over the tensor's factor, where its own is 448: beyond which elements may
# be too large, and what they are limited to then, which is rounded to 6
MOST, LIMIT = 480 * 6.0, 448 * 6.75
LEAST = 6.0 * 2.0**-6  # from which on its own factor is more than the least
WORDS = NVFP4_BLOCK // 2  # of a block
LANES = TILE // NVFP4_BLOCK  # that have a row of a tile


class Bounds(NamedTuple):
    """What magnitudes are compared with and multiplied by, for one tensor's factor."""

    low: Float32
    high: Float32
    least: Int32  # twice as bf16
    most: Int32  # the bits, as fp32
    limit: Int32  # twice as bf16

    @staticmethod
    def of(own: OwnScale) -> Bounds:
        sixth = multiply(own.scale.inverse, Float32(1.0 / 6.0))
        least, most, limit = (
            bits_of(multiply(own.scale.value, Float32(x))) for x in (LEAST, MOST, LIMIT)
        )
        low, high = (multiply(sixth, Float32(1.0 + x)) for x in (-NEAR, NEAR))
        return Bounds(low, high, take(least, least, 0x3232), most, take(limit, limit, 0x3232))


class QuickFactors(NamedTuple):
    """The factors of two blocks: codes, and what elements are multiplied by."""

    codes: tuple[Int32, Int32]
    inverses: tuple[Float32, Float32]
    most: Int32  # the larger magnitude, its bits as fp32

    @staticmethod
    def of(largest: Int32, own: OwnScale, bounds: Bounds) -> QuickFactors:
        """Of two blocks whose largest magnitudes, of any sign, are the halves of a word."""
        largest = larger(largest, bounds.least) & 0x7FFF7FFF
        each = float_of(largest << 16), float_of(largest & ~0xFFFF)
        word = codes_of(each, own.scale, bounds)
        codes = word & 0xFF, word >> 8
        low, high = (own.inverses[code] for code in codes)
        return QuickFactors(codes, (low, high), cutlass.max(*(bits_of(x) for x in each)))


@cute.jit
def codes_of(largest: tuple[Float32, Float32], own: TensorScale, bounds: Bounds) -> Int32:
    """The codes of the factors of two magnitudes, at least the least."""
    word, high = (
        converted("e4m3", multiply(largest[1], by), multiply(largest[0], by))
        for by in (bounds.low, bounds.high)
    )
    if word != high:  # one of them is near a tie
        # NOTE: the other may be anything; beyond the most its code is the largest, or a NaN's,
        # which is computed again, and below it nothing is near the ends of fp32's range
        near = [float_of(cutlass.min(bits_of(x), bounds.most)) for x in largest]
        first, second = (
            quotient(quotient(x, Float32(6.0), Float32(1.0 / 6.0)), own.value, own.inverse)
            for x in near
        )
        word = converted("e4m3", second, first)
    return word


def larger(x: Int32, y: Int32) -> Int32:
    """The larger magnitudes of halves, of any sign."""
    return larger_halves(x, y, "bf16", True)


def coded(words: list[Int32], low: Float32, high: Float32) -> list[Int32]:
    """The codes of pairs (coded_halves), of which none is cut off."""
    halves = [(float_of(x << 16) * low, float_of(x & ~0xFFFF) * high) for x in words]
    return [coded_halves(*pair, limited=False) for pair in halves]


@cute.jit
def limit(held: cute.Tensor, found: QuickFactors, bounds: Bounds) -> None:
    """Limit the elements of two blocks, pairs, if they have to be."""
    if found.most > bounds.most:
        for i in cutlass.range_constexpr(cute.size(held)):
            held[i] = smaller(held[i], bounds.limit)


@dsl_user_op
def smaller(x: Int32, y: Int32, *, loc=None, ip=None) -> Int32:
    """The smaller magnitudes of pairs of bf16, with the signs of x where y has none."""
    return as_word("min.xorsign.abs.bf16x2 $0, $1, $2;", (x, y), loc, ip)


class QuickTiles(Results):
    """A whole tile, of which each thread has a block of each 32nd row, and two blocks of two
    columns."""

    def is_quick(self, kind: type[cutlass.Numeric]) -> bool:
        """Whether whole tiles of x of that type are computed quickly."""
        c = self.config
        plain = kind is cutlass.BFloat16 and c.of.tensor_scale and not c.native and c.native_e4m3
        return plain and c.aligned and c.swizzled and (c.aligned_columns or not c.columns)

    def is_whole(self, mX: cute.Tensor, row_tile: Int32, column_tile: Int32) -> Boolean:
        """Whether all of a tile is of x."""
        rows, columns = mX.shape
        return ((row_tile + 1) * TILE <= rows) & ((column_tile + 1) * TILE <= columns)

    def block_words(self, sX: cute.Tensor, row: Int32, lane: Int32) -> tuple[cute.Tensor, Int32]:
        """The words of a block of a row, and 1 if its halves are exchanged.

        NOTE: of eight lanes, which read 16 bytes each at a time, four read the second half of
        their block first, so that they read different banks.
        """
        half, turned = WORDS // 2, lane // (LANES // 2)
        units = cute.recast_tensor(sX[row, None], Int32)
        words = cute.make_rmem_tensor(WORDS, Int32)
        for j in range(2):
            unit = cute.local_tile(units, (half,), (2 * lane + (turned ^ j),))
            cute.autovec_copy(unit, cute.local_tile(words, (half,), (j,)))
        return words, turned

    @cute.jit
    def quick_rows(
        self, sX: cute.Tensor, own: OwnScale, bounds: Bounds, place: tuple[Int32, Int32],
        mData: cute.Tensor, sF: cute.Tensor,
    ) -> Boolean:  # fmt: skip
        """Quantize the tile at `place` along K; whether this thread has a NaN."""
        thread, odd = cute.arch.thread_idx()[0], Int32(0)
        first, lane, step = thread // LANES, thread % LANES, THREADS // LANES
        address = mData.iterator.toint() + cutlass.Int64(place[0] * TILE + first) * mData.stride[0]
        address = address + (place[1] * TILE + lane * NVFP4_BLOCK) // 2
        further = cutlass.Int64(mData.stride[0]) * step
        for i in cutlass.range_constexpr(0, TILE // step, 2):
            held = cute.make_rmem_tensor((WORDS, 2), Int32)
            turned = Int32(0)
            for n in cutlass.range_constexpr(2):
                words, turned = self.block_words(sX, first + (i + n) * step, lane)
                for j in cutlass.range_constexpr(WORDS):
                    held[j, n] = words[j]
            both = [[held[j, n] for j in range(WORDS)] for n in range(2)]
            a, b = (largest_of(words, larger) for words in both)
            largest = larger(take(a, b, 0x5410), take(a, b, 0x7632))
            found = QuickFactors.of(largest, own, bounds)
            limit(held, found, bounds)
            odd = cutlass.max(odd, found.most)
            for n in cutlass.range_constexpr(2):
                words = [held[j, n] for j in range(WORDS)]
                pairs = coded(words, found.inverses[n], found.inverses[n])
                low, high = (row_of_coded(pairs[j : j + 4]) for j in (0, 4))
                rWords = cute.make_rmem_tensor(2, Int32)
                rWords[0] = cutlass.select_(turned == 0, low, high)
                rWords[1] = cutlass.select_(turned == 0, high, low)
                to = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=8)
                cute.autovec_copy(rWords, cute.make_tensor(to, cute.make_layout(2)))
                address = address + further
                self.leave_factor(sF, first + (i + n) * step, lane * NVFP4_BLOCK, found.codes[n], 1)
        return odd > INF_BITS

    @cute.jit
    def quick_columns(
        self, sX: cute.Tensor, own: OwnScale, bounds: Bounds, sQ: cute.Tensor, sF: cute.Tensor
    ) -> Boolean:
        """Quantize the tile along M, and leave it in smem; whether this thread has a NaN."""
        thread, odd = cute.arch.thread_idx()[0], Int32(0)
        here, segment = thread % (TILE // 2), thread // (TILE // 2)
        rows = TILE * (TILE // 2) // THREADS
        codes = cute.make_rmem_tensor((2, 2), Int32)  # (COLUMN, BLOCK)
        for i in cutlass.range_constexpr(rows // NVFP4_BLOCK):
            first = segment * rows + i * NVFP4_BLOCK
            words = cute.make_rmem_tensor(NVFP4_BLOCK, Int32)
            for j in cutlass.range_constexpr(NVFP4_BLOCK):
                row = cute.recast_tensor(sX[first + j, None], Int32)
                words[j] = row[here]
            every = [words[j] for j in range(NVFP4_BLOCK)]
            found = QuickFactors.of(largest_of(every, larger), own, bounds)
            limit(words, found, bounds)
            odd = cutlass.max(odd, found.most)
            every = [words[j] for j in range(NVFP4_BLOCK)]
            pairs = coded(every, *found.inverses)
            eights = [columns_of_coded(pairs[j : j + 8]) for j in range(0, NVFP4_BLOCK, 8)]
            for n in cutlass.range_constexpr(2):
                self.leave(sQ, 2 * here + n, first, [pair[n] for pair in eights])
                codes[n, i] = found.codes[n]
        for n in cutlass.range_constexpr(2):  # two blocks of a column are neighbours
            sPairs = cute.recast_tensor(sF, cutlass.Uint16)
            byte = self.factor_byte(2 * here + n, segment * rows)
            sPairs[byte // 2] = (codes[n, 0] | (codes[n, 1] << 8)).to(cutlass.Uint16)
        return odd > INF_BITS
