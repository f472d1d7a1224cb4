"""Quantization of a matrix, bound by memory: each CTA reads 128 x 128 of x once, and writes what is
asked for of it.

x (M, K) quantized along its rows is an operand (M, K). Quantized along its columns it is one of (K,
M), x transposed: what a product over M reads, such as a weight's gradient. A tile has 128 rows of
each, so its scale factors are whole tiles of the swizzled layout, padding included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.compile import Argument, Operand
from cutex.kernels.quantize.config import TILE, WIDTH, QuantizeConfig
from cutex.kernels.quantize.elements import (
    MAGNITUDE,
    Elements,
    Factor,
    TensorScale,
    bits_of,
    column_codes,
    factor_of,
    float_of,
    halves_of,
    halves_to_odd,
    larger_halves,
    row_codes,
    scaled_halves,
)

THREADS = 256
PAIRS = TILE // 2  # of neighbouring columns, of which a thread has one
SEGMENTS = THREADS // PAIRS  # threads down a column of the tile
SEGMENT = TILE // SEGMENTS  # rows of each


class Quantize:
    """q = x / factors, and the factors, of rows, of columns, or of both.

    A thread reads 16 elements of each 32nd row, or 8 of each 16th, and quantizes them with its
    neighbours; it leaves them in smem, from where it takes 32 rows of two columns.

    smem            bytes
    sX              128 * 128 * (2 or 4), only for columns
    sQ              128 * 128 / 2, or 128 * 128, only for columns that are aligned; or where sX was
    sMax            4 * threads / 32, or with columns in blocks of 128 8 * threads
    """

    archs = ("sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
    dtypes = ("bf16", "fp16", "fp32")

    def __init__(self, config: QuantizeConfig) -> None:
        self.config = config
        self.elements = Elements(config.of.element, config.native)
        self.lanes = TILE // config.width  # threads across a row of the tile
        self.step = THREADS // self.lanes  # rows that all threads read at a time
        self.passes = TILE // self.step

    @property
    def name(self) -> str:
        return f"quantize_{self.config.format}"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        c = self.config
        own = (Operand("tensor_scale", ("one",), "fp32", aligned=False, whole=False),)
        return (
            Operand("x", ("m", "k"), dtype, aligned=c.aligned, whole=c.aligned),
            *(own if c.of.tensor_scale else ()),
            *(self._results("rows", "m", "kp") if c.rows else ()),
            *(self._results("columns", "k", "mp") if c.columns else ()),
        )

    def _results(self, side: str, rows: str, k: str) -> tuple[Operand, Operand]:
        """The elements of one side, as bytes (rows, K), and its factors: by bytes, swizzled (BYTES)
        or plain (rows, K), or fp32 (rows, K) of any strides."""
        data = Operand(f"{side}_data", (rows, k), "uint8", aligned=False, whole=False)
        sizes: tuple[str, ...] = (f"{side}_rows", f"{side}_k")
        if self.config.swizzled:
            sizes = (f"{side}_bytes",)
        kind = "fp32" if self.config.of.scale == "fp32" else "uint8"
        contiguous = -1 if self.config.swizzled else None
        factors = Operand(f"{side}_factors", sizes, kind, contiguous, aligned=False, whole=False)
        return data, factors

    @cute.jit
    def __call__(self, mX: cute.Tensor, *rest) -> None:
        *passed, stream = rest
        down, across = (cute.ceil_div(cute.size(mX, mode=[i]), TILE) for i in range(2))
        self.kernel(mX, tuple(passed)).launch(
            grid=(down * across, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            **self.residency,
        )

    @property
    def residency(self) -> dict[str, int]:
        """What a launch says of the CTAs of an SM."""
        c = self.config
        if not c.resident:
            return {}
        # NOTE: percent of L1; without it the DSL asks a GPU
        return {
            "min_blocks_per_mp": c.resident,
            "preferred_smem_carveout": 100 if c.columns else 25,
        }

    # ---- on the device

    @cute.kernel
    def kernel(self, mX: cute.Tensor, passed: tuple[Any, ...]) -> None:
        c = self.config
        tile, _, _ = cute.arch.block_idx()
        across = cute.ceil_div(cute.size(mX, mode=[1]), TILE)
        row_tile, column_tile = tile // across, tile % across
        own, rest = None, passed
        if cutlass.const_expr(c.of.tensor_scale):
            own, rest = TensorScale.of(passed[0][0]), passed[1:]
        smem = SmemAllocator()
        sMax = smem.allocate_tensor(Int32, cute.make_layout((SEGMENTS, 2, PAIRS)), 16)
        sX: Any = None
        sQ: Any = None
        if cutlass.const_expr(c.columns):
            slot = cute.make_layout((TILE, TILE), stride=(TILE, 1))
            sX = smem.allocate_tensor(mX.element_type, slot, 16)
            if cutlass.const_expr(c.aligned_columns):
                row_words = TILE // self.per_word
                turned = cute.make_layout((TILE, row_words), stride=(row_words, 1))
                if cutlass.const_expr(c.reuses):
                    sQ = cute.make_tensor(cute.recast_ptr(sX.iterator, dtype=Int32), turned)
                else:
                    sQ = smem.allocate_tensor(Int32, turned, 16)
        rX = self.read(mX, row_tile * TILE, column_tile * TILE)  # (bWidth, PASS)
        whole = Int32(0)
        if cutlass.const_expr(c.square):
            whole = self.largest_of_tile(rX, sMax)
        if cutlass.const_expr(c.rows):
            self.quantize_rows(rX, whole, own, row_tile, column_tile, mX, rest[:2])
        if cutlass.const_expr(c.columns):
            at = cute.arch.thread_idx()[0]
            for i in cutlass.range_constexpr(self.passes):
                here = sX[at // self.lanes + i * self.step, None]
                there = cute.local_tile(here, (c.width,), (at % self.lanes,))  # (bWidth)
                cute.autovec_copy(rX[None, i], there)
            cute.arch.sync_threads()
            smem_tiles = sX, sMax, sQ
            self.quantize_columns(smem_tiles, whole, own, row_tile, column_tile, mX, rest[-2:])
            if cutlass.const_expr(c.aligned_columns):
                cute.arch.sync_threads()
                self.store_turned(sQ, row_tile, column_tile, mX, rest[-2])

    @cute.jit
    def read(self, mX: cute.Tensor, first_row: Int32, first_column: Int32) -> cute.Tensor:
        """This thread's elements (bWidth, PASS) of the tile; zeros beyond x."""
        thread = cute.arch.thread_idx()[0]
        rows, columns = mX.shape
        width = self.config.width
        rX = cute.make_rmem_tensor((width, self.passes), mX.element_type)
        rX.fill(0.0)
        first_column += thread % self.lanes * width
        for i in cutlass.range_constexpr(self.passes):
            row = first_row + thread // self.lanes + i * self.step
            # NOTE: under a branch of its own; under one predicate of rows and columns, ptxas starts
            # some loads only when others have been waited for
            if row < rows:
                for j in cutlass.range_constexpr(0, width, WIDTH):
                    column = first_column + j
                    if column < columns:
                        if cutlass.const_expr(self.config.aligned):
                            # both (bVector)
                            vector = cute.local_tile(mX[row, None], (WIDTH,), (column // WIDTH,))
                            to = cute.local_tile(rX[None, i], (WIDTH,), (j // WIDTH,))
                            cute.autovec_copy(vector, to)
                        else:
                            for n in cutlass.range_constexpr(WIDTH):
                                if column + n < columns:
                                    rX[j + n, i] = mX[row, column + n]
        return rX

    @cute.jit
    def largest_of_tile(self, rX: cute.Tensor, sMax: cute.Tensor) -> Int32:
        """The bits of the largest magnitude of the whole tile."""
        thread = cute.arch.thread_idx()[0]
        every = cute.make_tensor(rX.iterator, cute.make_layout(cute.size(rX)))
        largest = vector_magnitude(every, self.config.compares_magnitudes)
        largest = over_lanes(largest, 32)
        if thread % 32 == 0:
            sMax[thread // 32] = largest
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(THREADS // 32):
            largest = cutlass.max(largest, sMax[i])
        return largest

    def factor(self, largest: Int32, own: TensorScale | None) -> Factor:
        c = self.config
        return factor_of(c.of, largest, c.rounding, c.native_e4m3, own)

    @cute.jit
    def quantize_rows(
        self,
        rX: cute.Tensor,
        whole: Int32,
        own: TensorScale | None,
        row_tile: Int32,
        column_tile: Int32,
        mX: cute.Tensor,
        results: tuple[Any, Any],
    ) -> None:
        """Quantize along K, and store elements and factors."""
        c = self.config
        mData, mFactors = results
        thread = cute.arch.thread_idx()[0]
        lane = thread % self.lanes
        group = min(self.lanes, max(1, c.block // c.width))  # threads that share a block
        rows, columns = mX.shape
        column = column_tile * TILE + lane * c.width
        for i in cutlass.range_constexpr(self.passes):
            row = row_tile * TILE + thread // self.lanes + i * self.step
            values = [rX[j, i].to(Float32) for j in range(c.width)]
            largest = whole
            if cutlass.const_expr(not c.square):
                largest = over_lanes(vector_magnitude(rX[None, i], c.compares_magnitudes), group)
            factor = self.factor(largest, own)
            if cutlass.const_expr(self.in_pairs):
                pairs = self.pairs(rX[None, i], [factor, factor])
                words = [row_codes(pairs[j : j + 4]) for j in range(0, len(pairs), 4)]
            else:
                words = self.words(values, factor)
            if row < rows:
                self.store_words(mData, row, column, words, columns, c.aligned)
            code = cutlass.select_((row < rows) & (column < columns), factor.code, Int32(0))
            self.store_factor(mFactors, row, column, code, rows, columns, group)

    @cute.jit
    def quantize_columns(
        self,
        smem_tiles: tuple[cute.Tensor, cute.Tensor, Any],
        whole: Int32,
        own: TensorScale | None,
        row_tile: Int32,
        column_tile: Int32,
        mX: cute.Tensor,
        results: tuple[Any, Any],
    ) -> None:
        """Quantize along M, store the factors, and x transposed, or leave it in smem. A thread has
        SEGMENT rows of two columns, of which no block is shared but those of 128."""
        c = self.config
        sX, sMax, sQ = smem_tiles
        mData, mFactors = results
        thread = cute.arch.thread_idx()[0]
        here, segment = thread % PAIRS, thread // PAIRS
        rows, columns = mX.shape
        column, first = column_tile * TILE + 2 * here, row_tile * TILE + segment * SEGMENT
        at_once = min(c.block, SEGMENT)
        for i in cutlass.range_constexpr(SEGMENT // at_once):
            begin = i * at_once
            rPairs = cute.make_rmem_tensor((2, at_once), sX.element_type)  # (COLUMN, ROW)
            for j in cutlass.range_constexpr(at_once):
                row = sX[segment * SEGMENT + begin + j, None]
                cute.autovec_copy(cute.local_tile(row, (2,), (here,)), rPairs[None, j])
            largest = [whole, whole]
            if cutlass.const_expr(not c.square):
                largest = pair_magnitudes(rPairs, c.compares_magnitudes)
                if cutlass.const_expr(at_once < c.block):
                    for n in cutlass.range_constexpr(2):
                        sMax[segment, n, here] = largest[n]
                    cute.arch.sync_threads()
                    for n in cutlass.range_constexpr(2):
                        for other in cutlass.range_constexpr(SEGMENTS):
                            largest[n] = cutlass.max(largest[n], sMax[other, n, here])
            if cutlass.const_expr(c.reuses and (c.square or at_once == c.block)):
                cute.arch.sync_threads()  # all have read sX; else they have met above
            factors = [self.factor(largest[n], own) for n in range(2)]
            both = self.column_words(rPairs, factors)
            block = first + begin
            for n in cutlass.range_constexpr(2):
                if cutlass.const_expr(c.aligned_columns):
                    self.leave(sQ, 2 * here + n, (segment * SEGMENT + begin), both[n])
                elif column + n < columns:
                    self.store_words(mData, column + n, block, both[n], rows, False)
                there = (column + n < columns) & (block < rows)
                code = cutlass.select_(there, factors[n].code, Int32(0))
                self.store_factor(mFactors, column + n, block, code, columns, rows, 1)

    def column_words(self, rPairs: cute.Tensor, factors: list[Factor]) -> list[list[Int32]]:
        """The words of the elements of two columns, (COLUMN, ROW)."""
        count = cute.size(rPairs, mode=[1])
        if not self.in_pairs:
            return [
                self.words([rPairs[n, j].to(Float32) for j in range(count)], factors[n])
                for n in range(2)
            ]
        flat = cute.make_tensor(rPairs.iterator, cute.make_layout(2 * count))
        pairs = self.pairs(flat, factors)
        eights = [column_codes(pairs[j : j + 8]) for j in range(0, count, 8)]
        return [[pair[n] for pair in eights] for n in range(2)]

    @cute.jit
    def leave(
        self,
        sQ: cute.Tensor,
        column: Int32,
        row: Int32,
        words: cutlass.Constexpr[list[Any]],
    ) -> None:
        """Write the words of a column's elements from `row` on to sQ, up to 16 bytes at a time."""
        at_once = min(4, len(words))
        rWords = cute.make_rmem_tensor(len(words), Int32)
        for i in cutlass.range_constexpr(len(words)):
            rWords[i] = words[i]
        for i in cutlass.range_constexpr(0, len(words), at_once):
            to = self.swizzled(column, row // self.per_word + i)
            there = cute.local_tile(sQ[column, None], (at_once,), (to // at_once,))  # (bWords)
            cute.autovec_copy(cute.local_tile(rWords, (at_once,), (i // at_once,)), there)

    @property
    def in_pairs(self) -> bool:
        """Whether codes are computed in pairs: of e2m1, where no instruction converts to it but one
        compares pairs of integers, as on Hopper."""
        c = self.config
        return c.of.element == "e2m1" and not c.native and c.native_e4m3

    def pairs(self, values: cute.Tensor, factors: list[Factor]) -> list[Int32]:
        """Neighbours as two bf16 with the same e2m1 codes, scaled by two factors. Products of bf16
        with powers of two need no conversion to fp32."""
        count = cute.size(values) // 2
        low, high = (factor.inverse for factor in factors)
        both = [(values[2 * i].to(Float32), values[2 * i + 1].to(Float32)) for i in range(count)]
        if values.element_type is cutlass.BFloat16:
            halves = cute.recast_tensor(values, Int32)
            if self.config.of.scale == "e8m0":
                inverses = halves_of(low, high)
                return [scaled_halves(halves[i], inverses) for i in range(count)]
            # NOTE: one instruction each; as a conversion, the high half takes two
            words = [halves[i] for i in range(count)]
            both = [(float_of(word << 16), float_of(word & ~0xFFFF)) for word in words]
        return [halves_to_odd(x * low, y * high) for x, y in both]

    def words(self, values: list[Any], factor: Factor) -> list[Int32]:
        """The words of the elements of `values`."""
        scaled, step = [v * factor.inverse for v in values], self.per_word
        return [self.elements.pack(scaled[i : i + step]) for i in range(0, len(scaled), step)]

    @property
    def per_word(self) -> int:
        """The elements in a word of 32 bits."""
        return 32 // self.elements.bits

    def swizzled(self, row: Int32, word: Any) -> Any:
        """The place of a word of a row of sQ: units of 16 bytes are permuted by XOR with the number
        of the pair of rows, so that threads, a pair each, write to different banks."""
        units = TILE // self.per_word // 4
        return (word // 4 ^ row // 2 % units) * 4 + word % 4

    @cute.jit
    def store_turned(
        self,
        sQ: cute.Tensor,
        row_tile: Int32,
        column_tile: Int32,
        mX: cute.Tensor,
        mData: cute.Tensor,
    ) -> None:
        """Store the tile of x transposed from smem, neighbouring threads neighbouring units of 16
        bytes."""
        rows, columns = mX.shape
        units = TILE // self.per_word // 4
        for i in cutlass.range_constexpr(TILE * units // THREADS):
            at = cute.arch.thread_idx()[0] + i * THREADS
            row, unit = at // units, at % units
            words = [sQ[row, self.swizzled(row, unit * 4 + n)] for n in range(4)]
            column = column_tile * TILE + row
            if column < columns:
                first = row_tile * TILE + unit * 4 * self.per_word
                self.store_words(mData, column, first, words, rows, True)

    @cute.jit
    def store_words(
        self,
        mData: cute.Tensor,
        row: Int32,
        column: Int32,
        words: cutlass.Constexpr[list[Any]],
        columns: Int32,
        aligned: cutlass.Constexpr[bool],
    ) -> None:
        """Store words of elements of one row from `column` on; those beyond `columns` are left
        out."""
        packed = self.config.packed
        if cutlass.const_expr(aligned):
            rWords = cute.make_rmem_tensor(len(words), Int32)
            for i in cutlass.range_constexpr(len(words)):
                rWords[i] = words[i]
            if column < columns:
                address = mData.iterator.toint() + (
                    cutlass.Int64(row) * mData.stride[0] + column // packed
                )
                to = cute.make_ptr(
                    Int32, address, cute.AddressSpace.gmem, assumed_align=4 * len(words)
                )
                cute.autovec_copy(rWords, cute.make_tensor(to, cute.make_layout(len(words))))
        else:
            for i in cutlass.range_constexpr(4 * len(words)):
                if column + i * packed < columns:
                    byte = words[i // 4] >> (i % 4 * 8)
                    mData[row, column // packed + i] = Int32(byte).to(cutlass.Uint8)

    @cute.jit
    def store_factor(
        self,
        mFactors: cute.Tensor,
        row: Int32,
        column: Int32,
        code: Int32,
        rows: Int32,
        columns: Int32,
        group: cutlass.Constexpr[int],
    ) -> None:
        """Store the factor of the block of `row` that begins at `column`; the first of `group`
        threads does. Swizzled, those of padding are zeros."""
        c = self.config
        block = column // c.block
        first = cute.arch.thread_idx()[0] % group == 0
        if cutlass.const_expr(c.swizzled):
            tiles = cute.ceil_div(columns, 4 * c.block)
            byte = (row // TILE * tiles + block // 4) * 512 + row % 32 * 16 + row % TILE // 32 * 4
            if first & (block // 4 < tiles):
                mFactors[byte + block % 4] = code.to(cutlass.Uint8)
        else:
            there = first & (row < rows) & (column < columns)
            if cutlass.const_expr(c.square):
                there = there & (row % TILE == 0) & (column % TILE == 0)
                row = row // TILE
            if there:
                if cutlass.const_expr(c.of.scale == "fp32"):
                    mFactors[row, block] = float_of(code)
                else:
                    mFactors[row, block] = code.to(cutlass.Uint8)


def magnitude(values: list[Any]) -> Int32:
    """The bits, as fp32, of the largest magnitude; as integers a NaN is above all."""
    return largest_of([bits_of(v.to(Float32)) & MAGNITUDE for v in values], cutlass.max)


def vector_magnitude(rX: cute.Tensor, signed: bool) -> Int32:
    """The same of a vector in registers; those of 16 bits are compared in pairs."""
    if rX.element_type.width == 32:
        return magnitude([rX[i] for i in range(cute.size(rX))])
    words = cute.recast_tensor(rX, Int32)
    every = [words[i] for i in range(cute.size(words))]
    halves = larger_of_halves(every, rX.element_type, signed)
    return magnitude([halves[0], halves[1]])


def pair_magnitudes(rPairs: cute.Tensor, signed: bool) -> list[Int32]:
    """The bits, as fp32, of the largest magnitudes of two columns, (COLUMN, ROW)."""
    count = cute.size(rPairs, mode=[1])
    if rPairs.element_type.width == 32:
        return [magnitude([rPairs[n, j] for j in range(count)]) for n in range(2)]
    words = cute.recast_tensor(rPairs, Int32)
    halves = larger_of_halves([words[j] for j in range(count)], rPairs.element_type, signed)
    return [magnitude([halves[n]]) for n in range(2)]


def larger_of_halves(words: list[Int32], dtype: type[cutlass.Numeric], signed: bool) -> cute.Tensor:
    """The largest magnitudes of the low and of the high halves of words, twice each; `signed`:
    whether the arch compares magnitudes."""
    kind = "bf16" if dtype is cutlass.BFloat16 else "f16"
    # NOTE: of two words: a tensor of one has stride 0, and so its halves
    pair = cute.make_rmem_tensor(2, Int32)
    larger = partial(larger_halves, kind=kind, signed=signed)
    largest = largest_of(words if signed else [word & 0x7FFF7FFF for word in words], larger)
    pair[0] = pair[1] = largest & 0x7FFF7FFF
    return cute.recast_tensor(pair, dtype)


def largest_of(found: list[Any], larger: Callable[[Any, Any], Any]) -> Any:
    """The largest of so many as are a power of two."""
    while len(found) > 1:
        found = [larger(a, b) for a, b in zip(found[::2], found[1::2], strict=True)]
    return found[0]


@cute.jit
def over_lanes(x: Int32, lanes: cutlass.Constexpr[int]) -> Int32:
    """The largest of so many neighbouring lanes, a power of two."""
    step = 1
    while cutlass.const_expr(step < lanes):
        x = cutlass.max(x, cute.arch.shuffle_sync_bfly(x, offset=step))
        step *= 2
    return x
