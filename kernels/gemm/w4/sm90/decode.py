"""The GEMM with a packed 4-bit weight for up to 8 rows of x on Hopper: out = ops(x @ W^T).

Decoding is limited by memory and, next, by the instructions that widen codes, with too few warps to
hide their latency. So every warp works for itself: it bulk-copies blocks of its rows of weight, and
x for the same K, into a ring of its own, and starts the next copy as soon as it has read a slot.
There is no load warp, and no warp waits for another until the warps' sums are added up. A tile has
at most 32 rows, so that all SMs have work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp, MmaF16BF16Op
from cutlass.memory import SmemAllocator

from cutex.compile import Argument
from cutex.device.atoms.bulk import load_bulk
from cutex.device.atoms.mma import allocate_slots
from cutex.device.atoms.tma import load_operand, tile_loads
from cutex.device.epilogue.epilogue_ops import BoundOps, Fragment
from cutex.device.pipeline import Barrier, PipelineState, publish_barriers
from cutex.kernels.gemm.w4.fragments import (
    K_OF_MMA,
    WORDS,
    Factors,
    Fragments,
    prefetch_bulk,
    words_of,
)
from cutex.kernels.gemm.w4.signature import W4Signature
from cutex.kernels.gemm.w4.sm90.decode_config import ALIGN, COLUMNS, ROWS, W4DecodeConfig
from cutex.problem.w4.layout import BLOCK_K, CODE_WORDS, HALVES, PAIRS, STRIP

LANES = 32
K_OF_LOAD = 2 * K_OF_MMA  # of x that one ldmatrix of four matrices brings to 8 columns
AHEAD = 2  # blocks of each warp that L2 loads before the kernel before this one ends
X_WIDTH = 64  # elements in the 128 bytes of an atom's row
CHAINS = 2  # of products of a tile, since one that adds to its sums waits for the one before


@dataclass(frozen=True)
class Slots:
    """A warp's ring, and what it loads into it: its rows of weight blocks, and x.

    A slot of weight has the codes (WORD, LANE, ROW_TILE, HALF), then scales, then zeros (GROUP,
    PAIR of a ROW_TILE).
    """

    tiles: W4DecodeConfig
    words: cute.Tensor  # (WORD, SLOT)
    sX: cute.Tensor  # (bN, bK, SLOT of all warps)
    first: Int32  # of these, this warp's
    full: cute.Pointer  # the barrier of the warp's slot 0
    mW: cute.Tensor  # (STRIP, RestK, WORDS)
    x: Any  # (M, K), of which the first row; or the tensor map of more rows
    row: Int32  # the first of the weight's, of this CTA

    @property
    def num_blocks(self) -> Int32:
        return Int32(cute.size(self.mW, mode=[1]))

    def block(self, block: Int32) -> cute.Pointer:
        """A block in global memory, of this CTA's strip."""
        return self.mW[self.row // STRIP, block, None].iterator

    def parts(self) -> list[tuple[Int32 | int, int]]:
        """The location and length of the words of a block that this CTA loads, in the order of a
        slot."""
        c, of = self.tiles, self.tiles.format
        if c.tile_m == STRIP:
            return [(0, c.weight_bytes // 4)]
        share = self.row % STRIP // ROWS  # of the four of a strip
        codes = CODE_WORDS // HALVES // (STRIP // ROWS)
        found = [
            (half * (CODE_WORDS // HALVES) + share * codes, c.code_words // HALVES)
            for half in range(HALVES)
        ]
        factors = PAIRS // (STRIP // ROWS) * of.groups
        for i in range(bool(of.group) + of.zeros):
            found.append((CODE_WORDS + i * of.factor_words + share * factors, c.factor_words))
        return found

    @cute.jit
    def prefetch(self, first: Int32) -> None:
        """Have L2 load this warp's first blocks of weight, from `first` on.

        NOTE: should the kernel before still write them, it writes to L2, where the loads find them.
        """
        c = self.tiles
        with cute.arch.elect_one():
            for ahead in cutlass.range_constexpr(AHEAD):
                if first + ahead * c.warps < self.num_blocks:
                    there = self.block(first + ahead * c.warps)
                    for at, words in self.parts():
                        prefetch_bulk(there + at, 4 * words)

    @cute.jit
    def load(self, block: Int32, slot: Int32 | int) -> None:
        """Start the loads of a block into a slot. A whole warp calls it."""
        c, full = self.tiles, self.full + slot
        x_bytes = c.x_bytes
        if cutlass.const_expr(c.tile_n == 1):
            x_bytes = 2 * cutlass.min(cute.size(self.x, mode=[1]) - block * BLOCK_K, BLOCK_K)
        to, there = self.words[None, slot].iterator, self.block(block)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, c.weight_bytes + x_bytes)
            begin = 0
            for at, words in self.parts():
                load_bulk(to + begin, there + at, Int32(4 * words), full)
                begin += words
            if cutlass.const_expr(c.tile_n == 1):
                row = self.sX[0, None, self.first + slot]
                load_bulk(row.iterator, self.x.iterator + block * BLOCK_K, x_bytes, full)
        if cutlass.const_expr(c.tile_n > 1):
            rows = cute.make_tensor(self.sX.iterator, x_layout(c, c.tile_n).outer)
            tile_loads(self.x, rows, Int32(0)).load(block, self.first + slot, full)

    @cute.jit
    def end_x(self, block: Int32, slot: Int32) -> None:
        """Write zeros past the end of K, in the last block of a row that no tensor map bounds."""
        if cutlass.const_expr(self.tiles.tile_n == 1):
            k, row = cute.size(self.x, mode=[1]), self.sX[0, None, self.first + slot]
            if k < (block + 1) * BLOCK_K:
                first = k - block * BLOCK_K + cute.arch.lane_idx()
                for at in cutlass.range(first, BLOCK_K, LANES, unroll=1):
                    row[at] = row.element_type(0.0)
                cute.arch.sync_warp()


@dataclass(frozen=True)
class RowTiles(Fragments):
    """What a lane reads of its warp's slots, where a strip's part is a tile of 16 rows."""

    row_tiles: int = 1
    code_words: int = 0  # of a slot
    factor_words: int = 0

    @property
    def words_of_group(self) -> int:
        """The words of codes that share scales."""
        return (self.format.group or BLOCK_K) // K_OF_MMA

    def lane_codes(self, tile: int, half: int, slot: Int32) -> cute.Tensor:
        """A lane's words of half a block (WORD)."""
        layout = cute.make_layout((WORDS, LANES, self.row_tiles, HALVES))
        there = cute.make_tensor(self.sW[None, slot].iterator, layout)
        held = cute.make_rmem_tensor(cute.make_layout(WORDS), Int32)
        cute.autovec_copy(there[None, cute.arch.lane_idx(), tile, half], held)
        return held

    def lane_factors(self, tile: int, slot: Int32) -> Factors:
        """A lane's scales and zeros of a block."""
        first = self.code_words, self.code_words + self.factor_words
        has = self.format.group, self.format.zeros
        return Factors(
            *(
                self.lane_words(at, tile, slot) if x else None
                for at, x in zip(first, has, strict=True)
            )
        )

    def lane_words(self, first: int, tile: int, slot: Int32) -> cute.Tensor:
        """A lane's words (GROUP) out of those from word `first` of a slot on."""
        groups = self.format.groups
        layout = cute.make_layout((groups, LANES // 4, self.row_tiles))
        there = cute.make_tensor(self.sW[None, slot].iterator + first, layout)
        held = cute.make_rmem_tensor(cute.make_layout(groups), Int32)
        cute.autovec_copy(there[None, cute.arch.lane_idx() // 4, tile], held)
        return held


def x_layout(tiles: W4DecodeConfig, rows: int) -> cute.ComposedLayout:
    """The slots of x (rows, bK, SLOT) in atoms of tile_n rows of 128 bytes, swizzled by address.
    All columns of the MMA are these rows, again and again."""
    held, num_slots = tiles.tile_n, tiles.num_stages * tiles.warps
    shape = (held, rows // held), (X_WIDTH, BLOCK_K // X_WIDTH), num_slots
    stride = (X_WIDTH, 0), (1, held * X_WIDTH), held * BLOCK_K
    return cute.make_composed_layout(
        cute.make_swizzle(3, 4, 3), 0, cute.make_layout(shape, stride=stride)
    )


def overlapping(mX: cute.Tensor, rows: int) -> cute.Tensor:
    """x (M, K) as `rows` rows: its first half of so many, and its last.

    NOTE: rows of a TMA box that are out of bounds take longer than those that are loaded twice
    (docs/facts/scaled.md#tma-out-of-bounds).
    """
    half, (m, k) = rows // 2, mX.shape
    step = mX.stride[0]
    layout = cute.make_layout(((half, 2), k), stride=((step, (m - half) * step), mX.stride[1]))
    return cute.make_tensor(mX.iterator, layout)


class W4Decode:
    """CTAs compute tile_m rows of the weight by all rows of x; its warps have every so many blocks
    of K.

    barrier            arrives                                    waits
    full[warp, slot]   1: a lane of the warp, and the bytes of    the warp, before it reads the
                       weight and of x                            slot
    0 (CTA)            all threads: barriers are initialised;     all
                       their last slot is read; their sums are
                       in smem

    smem               bytes
    ring, sX           stage_bytes * num_stages * warps; then in ring the warps' sums
    full               8 * num_stages * warps
    """

    arch = "sm_90a"
    dtypes = ("bf16", "fp16")

    def __init__(self, config: W4Signature) -> None:
        assert isinstance(config.tiles, W4DecodeConfig)
        self.config, self.tiles = config, config.tiles

    @property
    def name(self) -> str:
        return "sm90_gemm_w4_decode"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        if dtype != self.config.dtype:
            raise ValueError(f"x={self.config.dtype}: compiled for {dtype}")
        return self.config.arguments()

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW: cute.Tensor, mOut: cute.Tensor, *rest) -> None:
        """Launch with x (M, K), the packed weight (STRIP, RestK, WORDS), out (M, N), the
        operations' arguments and a stream."""
        mW = words_of(mW)
        *passed, stream = rest
        c, x = self.tiles, mX
        if cutlass.const_expr(c.tile_n > 1):
            x = load_operand(overlapping(mX, c.tile_n), x_layout(c, c.tile_n))
        self.kernel(x, mW, mOut, tuple(passed)).launch(
            grid=(cute.ceil_div(cute.size(mOut, mode=[1]), c.tile_m), 1, 1),
            block=(c.num_threads, 1, 1),
            min_blocks_per_mp=c.resident,
            preferred_smem_carveout=100,  # percent; else the DSL asks a GPU
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: Any, mW: cute.Tensor, mOut: cute.Tensor, passed: tuple[Any, ...]) -> None:
        """x: (M, K), or its tensor map."""
        c, smem = self.tiles, SmemAllocator()
        sX = self.allocate_x(smem, x)  # (bN, bK, SLOT)
        layout = cute.make_layout((c.slot_words, c.num_stages, c.warps))
        ring = smem.allocate_tensor(Int32, layout, ALIGN)  # (WORDS, SLOT, WARP)
        full = Barrier.allocate(smem, "full", arrivals=1, slots=c.num_stages * c.warps)
        warp, tile = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.block_idx()[0]
        first, row = warp * c.num_stages, Int32(tile * c.tile_m)
        slots = Slots(c, ring[None, None, warp], sX, first, full.ptr + first, mW, x, row)
        slots.prefetch(warp)
        if cutlass.const_expr(c.tile_n > 1):
            cpasync.prefetch_descriptor(x.atom)
        if cutlass.const_expr(not c.next_behind):
            cute.arch.griddepcontrol_launch_dependents()
        publish_barriers((full,))
        cute.arch.griddepcontrol_wait()
        acc = self.product(slots, warp)
        self.weights(slots).unscale(acc)
        cute.arch.sync_threads()
        sums = self.sums(ring)
        self.keep(acc, sums[None, None, warp])
        cute.arch.sync_threads()
        bound = self.config.general.bind(self.config.general.product(mOut), passed)
        self.store(sums, bound, mOut, row)

    def allocate_x(self, smem: SmemAllocator, x: Any) -> cute.Tensor:
        """The slots of x for all warps (bN, bK, SLOT), swizzled; with one row, all columns of the
        MMA are that row."""
        c = self.tiles
        num_slots = c.num_stages * c.warps
        if c.tile_n > 1:
            return allocate_slots(smem, x.atom.value_type, x_layout(c, COLUMNS))
        row = smem.allocate_tensor(x.element_type, cute.make_layout((BLOCK_K, num_slots)), ALIGN)
        layout = cute.make_layout((COLUMNS, BLOCK_K, num_slots), stride=(0, 1, BLOCK_K))
        return cute.make_tensor(row.iterator, layout)

    # ---- mainloop

    @cute.jit
    def product(self, slots: Slots, warp: Int32) -> cute.Tensor:
        """This warp's sums (MMA, ROW_TILE) over its blocks of K."""
        c, blocks = self.tiles, slots.num_blocks
        acc = cute.make_rmem_tensor(cute.make_layout(((2, 2), c.row_tiles)), Float32)
        acc.fill(0.0)
        for ahead in cutlass.range_constexpr(c.num_stages):
            if warp + ahead * c.warps < blocks:
                slots.load(warp + ahead * c.warps, ahead)
        if cutlass.const_expr(c.next_behind):
            cute.arch.griddepcontrol_launch_dependents()
        take = PipelineState(c.num_stages, Int32(0), Int32(0))
        for turn in cutlass.range(cute.ceil_div(blocks - warp, c.warps), unroll=1):
            block = warp + turn * c.warps
            cute.arch.mbarrier_wait(slots.full + take.slot, take.phase)
            slots.end_x(block, take.slot)
            self.add(slots, take.slot, acc)
            cute.arch.sync_warp()  # its lanes have read the slot
            if block + c.num_stages * c.warps < blocks:
                slots.load(block + c.num_stages * c.warps, take.slot)
            take.advance()
        return acc

    def add(self, slots: Slots, slot: Int32, acc: cute.Tensor) -> None:
        """acc (MMA, ROW_TILE) += the block in a slot."""
        c, kind, weights = self.tiles, slots.sX.element_type, self.weights(slots)
        mma = cute.make_tiled_mma(
            MmaF16BF16Op(kind, Float32, (ROWS, COLUMNS, K_OF_MMA)),
            (1, 1, 1),
            permutation_mnk=(ROWS, COLUMNS, K_OF_LOAD),
        )
        tCrB = self.x_registers(mma, slots.sX[None, None, slots.first + slot])  # (MMA, 1, MMA_K)
        for tile in range(c.row_tiles):
            self.add_tile(mma, weights, (tile, slot), tCrB, acc[None, tile])

    def weights(self, slots: Slots) -> RowTiles:
        """What a lane reads of its warp's slots."""
        c, kind = self.tiles, slots.sX.element_type
        parts = c.row_tiles, c.code_words, c.factor_words
        return RowTiles(slots.words, c.format, kind, c.format.kind == "int4", True, *parts)

    def x_registers(self, mma: cute.TiledMma, sX: cute.Tensor) -> cute.Tensor:
        """The MMA's operand B (MMA, 1, MMA_K) of a block of x (bN, bK)."""
        lane = cute.arch.lane_idx()
        tCrB = mma.make_fragment_B(mma.get_slice(lane).partition_B(sX))
        load = cute.make_copy_atom(LdMatrix8x8x16bOp(False, 4), sX.element_type)
        s2r = cute.make_tiled_copy_B(load, mma)
        cute.copy(s2r, s2r.get_slice(lane).partition_S(sX), s2r.retile(tCrB))
        return tCrB

    def add_tile(
        self, mma: cute.TiledMma, weights: RowTiles, which: tuple[int, Int32],
        tCrB: cute.Tensor, acc: cute.Tensor,
    ) -> None:  # fmt: skip
        """acc (MMA) += a tile of 16 rows in a slot, times x (MMA, 1, MMA_K). For integers, scales
        multiply a group's sums, which are fewer than its weights."""
        tile, slot = which
        factors = weights.lane_factors(tile, slot)
        words = BLOCK_K // K_OF_MMA
        count = weights.words_of_group if weights.scales_sums else words
        one = cute.make_layout(((2, 2), 1, 1))  # (MMA, 1, 1)
        chains = [cute.make_rmem_tensor(one, Float32) for _ in range(CHAINS)]
        for half in range(HALVES):
            registers = cute.make_layout(((2, 2, 2), 1, WORDS))
            tCrA = cute.make_rmem_tensor(registers, weights.kind)  # (MMA, 1, MMA_K)
            weights.widen(weights.lane_codes(tile, half, slot), factors, half, tCrA)
            for i in range(WORDS):
                word = half * WORDS + i
                sums = chains[word % CHAINS]
                if word % count < CHAINS:
                    sums.fill(0.0)
                cute.gemm(mma, sums, tCrA[None, None, i], tCrB[None, None, word], sums)
                if (word + 1) % count == 0:
                    self.add_group(weights, factors, word // count, chains, acc)

    def add_group(
        self, weights: RowTiles, factors: Factors, group: int, chains: list[cute.Tensor],
        acc: cute.Tensor,
    ) -> None:  # fmt: skip
        """acc (MMA) += the sums of a group, times its scales if weights are not."""
        scales: Any = [1.0, 1.0]
        if weights.scales_sums and weights.format.group:
            scales = weights.both(factors.scales[group])
        for i in range(cute.size(acc)):
            acc[i] = acc[i] + (chains[0][i] + chains[1][i]) * scales[i // 2]

    # ---- sums of all warps

    def sums(self, ring: cute.Tensor) -> cute.Tensor:
        """The warps' sums in smem (ROW, COLUMN, WARP)."""
        c = self.tiles
        shape, columns = (c.tile_m, c.tile_n, c.warps), c.sums_columns
        layout = cute.make_layout(shape, stride=(columns, 1, c.tile_m * columns))
        return cute.make_tensor(cute.recast_ptr(ring.iterator, dtype=Float32), layout)

    @cute.jit
    def keep(self, acc: cute.Tensor, sums: cute.Tensor) -> None:
        """Write this warp's sums (MMA, ROW_TILE) to its own (ROW, COLUMN).

        Of an mma.sync's sums a lane has two neighbours of a row and two of the row 8 below (PTX
        ISA, "Matrix Fragments for mma.m16n8k16").
        """
        c, lane = self.tiles, cute.arch.lane_idx()
        for tile in cutlass.range_constexpr(c.row_tiles):
            for i in cutlass.range_constexpr(4):
                row, column = tile * ROWS + lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2
                if cutlass.const_expr(c.tile_n == COLUMNS):
                    sums[row, column] = acc[i, tile]
                elif cutlass.const_expr(c.tile_n > 1):
                    if column < c.tile_n:
                        sums[row, column] = acc[i, tile]
                elif cutlass.const_expr(i % 2 == 0) and column == 0:
                    sums[row, 0] = acc[i, tile]

    @cute.jit
    def store(self, sums: cute.Tensor, bound: BoundOps, mOut: cute.Tensor, first: Int32) -> None:
        """Add up the warps' sums in a fixed order, run the operations, and store to mOut (M, N)
        from column `first` on."""
        c, thread = self.tiles, Int32(cute.arch.thread_idx()[0])
        count = c.tile_m * (bound.bounds[0] if c.tile_n > 1 else 1)
        for turn in cutlass.range(cute.ceil_div(count, c.num_threads), unroll=1):
            at = turn * c.num_threads + thread
            if at < count:
                row, column = at % c.tile_m, at // c.tile_m
                place = column
                if cutlass.const_expr(c.tile_n > 1):  # noqa: SIM102 - known when tracing
                    if column >= c.tile_n // 2:  # as `overlapping` has them
                        place = column + c.tile_n - bound.bounds[0]
                total = Float32(0.0)
                for warp in cutlass.range_constexpr(c.warps):
                    total = total + sums[row, place, warp]
                values = cute.make_rmem_tensor((1, 1), Float32)
                values[0, 0] = total
                x = Fragment(values, (column,), (first + row,), 0, bound.bounds, 1, own=True)
                bound.store_elements(bound.apply(x), mOut)
