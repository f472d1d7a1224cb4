"""Quantization of a matrix, bound by memory: each CTA reads 128 x 128 of x once, and writes what is
asked for of it.

x (M, K) quantized along its rows is an operand (M, K). Quantized along its columns it is one of (K,
M), x transposed: what a product over M reads, such as a weight's gradient. A tile has 128 rows of
each, so its scale factors are whole tiles of the swizzled layout, padding included.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.compile import Argument, Operand
from cutex.kernels.quantize.config import TILE, WIDTH, QuantizeConfig
from cutex.kernels.quantize.elements import (
    CODED,
    Elements,
    Factor,
    coded_halves,
    column_codes,
    columns_of_coded,
    factor_of,
    float_of,
    halves_of,
    multiply,
    row_codes,
    row_of_coded,
    scaled_halves,
)
from cutex.kernels.quantize.magnitudes import over_lanes, pair_magnitudes, vector_magnitude
from cutex.kernels.quantize.nvfp4 import CODES, OwnScale
from cutex.kernels.quantize.results import THREADS, Results

PAIRS = TILE // 2  # of neighbouring columns, of which a thread has one
SEGMENTS = THREADS // PAIRS  # threads down a column of the tile
SEGMENT = TILE // SEGMENTS  # rows of each


class Quantize(Results):
    """q = x / factors, and the factors, of rows, of columns, or of both.

    A thread reads 16 elements of each 32nd row, or 8 of each 16th, and quantizes them with its
    neighbours; it leaves them in smem, from where it takes 32 rows of two columns.

    smem            bytes
    sX              128 * 128 * (2 or 4), only for columns
    sQ              128 * 128 / 2, or 128 * 128, only for columns that are aligned; or where sX was
    sMax            8 * threads, only of blocks of 128
    sF              128 * 128 / block, a byte for each factor of a side, where they are swizzled;
                    512 for each side where they are fp32 of 1x128, with columns
    inverses        4 * 128, only of NVFP4
    """

    archs: tuple[str, ...] = ("sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")

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
            use_pdl=self.overlaps,
            stream=stream,
            **self.residency,
        )

    @property
    def overlaps(self) -> bool:
        """Whether CTAs may start before the kernel before them ends, which may write x or read
        results' memory, and let the next one's start: the archs that can (PTX ISA, griddepcontrol:
        sm_90) convert to e4m3, too."""
        return self.config.native_e4m3

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
        if cutlass.const_expr(self.overlaps):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        tile, _, _ = cute.arch.block_idx()
        across = cute.ceil_div(cute.size(mX, mode=[1]), TILE)
        row_tile, column_tile = tile // across, tile % across
        own, rest = None, passed
        if cutlass.const_expr(c.of.tensor_scale):
            own, rest = passed[0][0], passed[1:]
        smem = SmemAllocator()
        sMax = self.allocate_magnitudes(smem)
        sX: Any = None
        sQ: Any = None
        if cutlass.const_expr(c.columns):
            slot = cute.make_layout((TILE, TILE), stride=(TILE, 1))
            sX = smem.allocate_tensor(mX.element_type, slot, 16)
            sQ = self.turned(self.allocate_turned(smem), sX)
        sF = self.allocate_factors(smem)
        rX = self.read(mX, row_tile, column_tile)  # (bWidth, PASS)
        if cutlass.const_expr(own is not None):  # which loads need not wait for
            inverses = smem.allocate_tensor(Float32, cute.make_layout(CODES), 16)
            own = OwnScale.of(own, inverses)
            own.write_inverses(self.in_pairs)
            if cutlass.const_expr(c.rows):
                cute.arch.sync_threads()
        whole = Int32(0)
        if cutlass.const_expr(c.square):
            whole = self.largest_of_tile(rX, sMax)
        if cutlass.const_expr(c.rows):
            self.quantize_rows(rX, whole, own, row_tile, column_tile, mX, rest[:2], sF)
        if cutlass.const_expr(c.columns):
            at = cute.arch.thread_idx()[0]
            for i in cutlass.range_constexpr(self.passes):
                here = sX[at // self.lanes + i * self.step, None]
                if cutlass.const_expr(self.swaps(sX)):
                    for j in cutlass.range_constexpr(2):
                        unit = self.unit_of(at % self.lanes * 2 + j)
                        vector = cute.local_tile(rX[None, i], (WIDTH,), (j,))
                        cute.autovec_copy(vector, cute.local_tile(here, (WIDTH,), (unit,)))
                else:
                    there = cute.local_tile(here, (c.width,), (at % self.lanes,))  # (bWidth)
                    cute.autovec_copy(rX[None, i], there)
            cute.arch.sync_threads()
            smem_tiles = sX, sMax, sQ, sF
            self.quantize_columns(smem_tiles, whole, own, row_tile, column_tile, mX, rest[-2:])
        if cutlass.const_expr(sF is not None or (c.columns and c.aligned_columns)):
            cute.arch.sync_threads()
        self.store_rest(sQ, sF, row_tile, column_tile, mX, rest)

    def swaps(self, sX: cute.Tensor) -> bool:
        """Whether units of 16 bytes are swapped in the second half of a row of sX, so that threads
        that write each second unit write to different banks."""
        return sX.element_type.width == 16 and self.config.width == 2 * WIDTH

    def unit_of(self, unit: Int32) -> Int32:
        """Where a row of sX, of 16 units, has unit `unit` if it swaps them."""
        return unit ^ unit // 8

    def allocate_magnitudes(self, smem: SmemAllocator) -> Any:
        """Where threads leave the largest magnitudes of their parts of blocks of 128; else None."""
        if self.config.block < TILE:
            return None
        return smem.allocate_tensor(Int32, cute.make_layout((SEGMENTS, 2, PAIRS)), 16)

    @cute.jit
    def read(self, mX: cute.Tensor, row_tile: Int32, column_tile: Int32) -> cute.Tensor:
        """This thread's elements (bWidth, PASS) of the tile; zeros beyond x."""
        thread = cute.arch.thread_idx()[0]
        rows, columns = mX.shape
        width = self.config.width
        rX = cute.make_rmem_tensor((width, self.passes), mX.element_type)
        first_row, lane = row_tile * TILE + thread // self.lanes, thread % self.lanes
        whole = (row_tile + 1) * TILE <= rows and (column_tile + 1) * TILE <= columns
        if cutlass.const_expr(self.config.aligned) and whole:
            gX = cute.local_tile(mX, (TILE, width), (row_tile, column_tile * self.lanes + lane))
            for i in cutlass.range_constexpr(self.passes):
                for j in cutlass.range_constexpr(width // WIDTH):
                    row = gX[thread // self.lanes + i * self.step, None]
                    vector = cute.local_tile(row, (WIDTH,), (j,))
                    cute.autovec_copy(vector, cute.local_tile(rX[None, i], (WIDTH,), (j,)))
        else:
            self.read_part(mX, first_row, column_tile * TILE + lane * width, rX)
        return rX

    @cute.jit
    def read_part(
        self, mX: cute.Tensor, first_row: Int32, first_column: Int32, rX: cute.Tensor
    ) -> None:
        """Read what there is of a tile."""
        rows, columns = mX.shape
        width = self.config.width
        rX.fill(0.0)
        for i in cutlass.range_constexpr(self.passes):
            row = first_row + i * self.step
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

    def row_vector(self, rX: cute.Tensor, i: int) -> cute.Tensor:
        """This thread's elements of pass `i` in registers."""
        return rX[None, i]

    def factors_of(self, largest: list[Int32], own: OwnScale | None) -> list[Factor]:
        """The factors of blocks whose largest magnitudes have the bits `largest`."""
        c = self.config
        if own is None:
            return [factor_of(c.of, bits, c.rounding, c.native_e4m3, None) for bits in largest]
        return own.factors(largest, c.native_e4m3)

    @cute.jit
    def quantize_rows(
        self,
        rX: cute.Tensor,
        whole: Int32,
        own: OwnScale | None,
        row_tile: Int32,
        column_tile: Int32,
        mX: cute.Tensor,
        results: tuple[Any, Any],
        sF: Any,
    ) -> None:
        """Quantize along K, and store elements and factors."""
        c = self.config
        mData, mFactors = results
        thread = cute.arch.thread_idx()[0]
        lane = thread % self.lanes
        group = min(self.lanes, max(1, c.block // c.width))  # threads that share a block
        rows, columns = mX.shape
        column = column_tile * TILE + lane * c.width
        factors: list[Factor] = []
        vectors: list[cute.Tensor] = []
        for i in cutlass.range_constexpr(self.passes):
            if cutlass.const_expr(i % 2 == 0):  # two passes, neither of which waits for the other
                vectors = [self.row_vector(rX, j) for j in (i, i + 1)]
                largest = [whole, whole]
                if cutlass.const_expr(not c.square):
                    largest = [
                        over_lanes(vector_magnitude(x, c.compares_magnitudes), group)
                        for x in vectors
                    ]
                factors = self.factors_of(largest, own)
            factor, vector = factors[i % 2], vectors[i % 2]
            row = row_tile * TILE + thread // self.lanes + i * self.step
            if cutlass.const_expr(self.in_pairs):
                pairs = self.pairs(vector, [factor, factor], own)
                exact = self.exact_pairs(vector)
                codes = row_codes if exact else row_of_coded
                words = [codes(pairs[j : j + 4]) for j in range(0, len(pairs), 4)]
                if cutlass.const_expr(exact):
                    words = [factor.of_e2m1(word) for word in words]
            else:
                words = self.words(floats(vector), factor)
            if row < rows:
                self.store_words(mData, row, column, words, columns, c.aligned)
            code = cutlass.select_((row < rows) & (column < columns), factor.code, Int32(0))
            if cutlass.const_expr(c.swizzled):
                here = thread // self.lanes + i * self.step
                self.leave_factor(sF[None, 0], here, lane * c.width, code, group)
            elif cutlass.const_expr(self.gathers):
                if thread % group == 0:
                    sF[thread // self.lanes + i * self.step, 0] = float_of(code)
            else:
                self.store_factor(mFactors, row, column, code, rows, columns, group)

    @cute.jit
    def quantize_columns(
        self,
        smem_tiles: tuple[cute.Tensor, Any, Any, Any],
        whole: Int32,
        own: OwnScale | None,
        row_tile: Int32,
        column_tile: Int32,
        mX: cute.Tensor,
        results: tuple[Any, Any],
    ) -> None:
        """Quantize along M, store the factors, and x transposed, or leave it in smem. A thread has
        SEGMENT rows of two columns, of which no block is shared but those of 128."""
        c = self.config
        sX, sMax, sQ, sF = smem_tiles
        mData, mFactors = results
        thread = cute.arch.thread_idx()[0]
        here, segment = thread % PAIRS, thread // PAIRS
        rows, columns = mX.shape
        column, first = column_tile * TILE + 2 * here, row_tile * TILE + segment * SEGMENT
        at_once = min(c.block, SEGMENT)
        for i in cutlass.range_constexpr(SEGMENT // at_once):
            begin = i * at_once
            rPairs = cute.make_rmem_tensor((2, at_once), sX.element_type)  # (COLUMN, ROW)
            pair = here
            if cutlass.const_expr(self.swaps(sX)):
                pair = self.unit_of(here // 4) * 4 + here % 4
            for j in cutlass.range_constexpr(at_once):
                row = sX[segment * SEGMENT + begin + j, None]
                cute.autovec_copy(cute.local_tile(row, (2,), (pair,)), rPairs[None, j])
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
            factors = self.factors_of(largest, own)
            both = self.column_words(rPairs, factors, own)
            block = first + begin
            for n in cutlass.range_constexpr(2):
                if cutlass.const_expr(c.aligned_columns):
                    self.leave(sQ, 2 * here + n, (segment * SEGMENT + begin), both[n])
                elif column + n < columns:
                    self.store_words(mData, column + n, block, both[n], rows, False)
                there = (column + n < columns) & (block < rows)
                code = cutlass.select_(there, factors[n].code, Int32(0))
                if cutlass.const_expr(c.swizzled):
                    side = sF[None, int(c.rows)]
                    self.leave_factor(side, 2 * here + n, segment * SEGMENT + begin, code, 1)
                elif cutlass.const_expr(self.gathers):
                    if segment == 0:
                        sF[2 * here + n, int(c.rows)] = float_of(code)
                else:
                    self.store_factor(mFactors, column + n, block, code, columns, rows, 1)

    def column_words(
        self, rPairs: cute.Tensor, factors: list[Factor], own: OwnScale | None
    ) -> list[list[Int32]]:
        """The words of the elements of two columns, (COLUMN, ROW)."""
        count = cute.size(rPairs, mode=[1])
        flat = cute.make_tensor(rPairs.iterator, cute.make_layout(2 * count))
        if not self.in_pairs:
            each = floats(flat)
            return [self.words(each[n::2], factors[n]) for n in range(2)]
        pairs = self.pairs(flat, factors, own)
        codes = column_codes if self.exact_pairs(rPairs) else columns_of_coded
        eights = [codes(pairs[j : j + 8]) for j in range(0, count, 8)]
        each = [[pair[n] for pair in eights] for n in range(2)]
        if not self.exact_pairs(rPairs):
            return each
        return [[factors[n].of_e2m1(word) for word in each[n]] for n in range(2)]

    @property
    def in_pairs(self) -> bool:
        """Whether codes are computed in pairs: of e2m1, where no instruction converts to it but one
        compares pairs of integers, as on Hopper."""
        c = self.config
        return c.of.element == "e2m1" and not c.native and c.native_e4m3

    def exact_pairs(self, values: cute.Tensor) -> bool:
        """Whether `pairs` are two bf16: products with powers of two, which are exact."""
        return values.element_type is cutlass.BFloat16 and self.config.of.scale == "e8m0"

    def pairs(
        self, values: cute.Tensor, factors: list[Factor], own: OwnScale | None
    ) -> list[Int32]:
        """Neighbours scaled by two factors: two bf16 (exact_pairs), or their codes
        (coded_halves)."""
        kind, (low, high) = values.element_type, (factor.inverse for factor in factors)
        if self.exact_pairs(values):
            inverses = halves_of(low, high)
            return [scaled_halves(word, inverses) for word in words_of(values)]
        if own is not None and kind is cutlass.BFloat16:
            each = halves_as_floats([scaled_halves(x, own.coded_halves) for x in words_of(values)])
        else:
            each = floats(values)
        # NOTE: of fp16 beside a factor that is far all products are 0, whatever is lost
        if own is not None and kind is Float32:
            each = [multiply(x, own.coded) for x in each]
        if own is None:
            low, high = (multiply(x, Float32(CODED)) for x in (low, high))
        both = zip(each[::2], each[1::2], strict=True)
        return [coded_halves(x * low, y * high) for x, y in both]

    def words(self, values: list[Any], factor: Factor) -> list[Int32]:
        """The words of the elements of `values`."""
        scaled, step = [v * factor.inverse for v in values], self.per_word
        return [self.elements.pack(scaled[i : i + step]) for i in range(0, len(scaled), step)]


def words_of(values: cute.Tensor) -> list[Int32]:
    """Neighbours of 16 bits in words."""
    words = cute.recast_tensor(values, Int32)
    return [words[i] for i in range(cute.size(words))]


def halves_as_floats(words: list[Int32]) -> list[Float32]:
    """The two bf16 of each word. One instruction each; as a conversion, the high half takes two."""
    return [float_of(x) for word in words for x in (word << 16, word & ~0xFFFF)]


def floats(values: cute.Tensor) -> list[Float32]:
    """Values in fp32."""
    if values.element_type is cutlass.BFloat16:
        return halves_as_floats(words_of(values))
    return [values[i].to(Float32) for i in range(cute.size(values))]
