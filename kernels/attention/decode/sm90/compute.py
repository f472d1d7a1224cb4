"""Compute: the warpgroup of the decode kernel that has the queries, and computes O; Widen: those
that widen keys and values of 8 bits to 16 for it.

wgmma takes no two operands of different widths, nor 8 bits of V as it lies in memory. So between
the warp that loads and the warpgroup of the products stand two, for K and for V, that copy each
tile into a slot of 16 bits, while the products of the tile before are under way. Products are of
fp16, to which one conversion leads, two more to bf16; queries in bf16 are divided by a power of two
for each row, which brings its largest to around 2^8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import cutlass
from cutlass import Float16, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import allocate_slots, contiguous_rows_layout
from cutex.device.atoms.scalar import largest_halves, product_of_bf16
from cutex.device.atoms.wgmma import WARPGROUP, Wgmma, WgmmaProduct, pin
from cutex.device.attention.block_info import Blocks
from cutex.device.attention.block_loop import BlockLoop, KeyRings, Products, State
from cutex.device.attention.lowered_softmax import LoweredSoftmax
from cutex.device.attention.mask import Mask
from cutex.device.attention.row_store import UNIT
from cutex.device.attention.scores import ScoreOps
from cutex.device.attention.softmax import rows_of
from cutex.device.attention.unit_rows import UnitRows, load_to_smem, units_of
from cutex.device.pipeline import Barrier, PipelineState, Ring
from cutex.kernels.attention.decode.config import WIDE_SLOTS, DecodeConfig
from cutex.kernels.attention.decode.launch import kv_slots
from cutex.kernels.attention.decode.out import Out
from cutex.kernels.attention.decode.shared import Shared
from cutex.kernels.attention.decode.splits import Piece


@dataclass(frozen=True)
class Compute:
    """The role of the warpgroup that computes both products and the softmax between them."""

    mQ: cute.Tensor
    out: Out
    shared: Shared
    wide: Wide | None  # K and V of 8 bits, widened

    @cute.jit
    def run(self) -> None:
        """Process this CTA's parts one after another."""
        s, c = self.shared, self.shared.config
        dtype = product_dtype(c, self.mQ.element_type)
        tiles: Any = s if self.wide is None else self.wide
        slots = tiles.k.num_slots
        qk_mma = Wgmma(c.tile_n, dtype)
        registers = None if c.q_in_smem else qk_mma.a_registers(c.head_dim)
        a = qk_mma.a_slots(s.sQ)[None, None, None, 0] if c.q_in_smem else registers
        qk = WgmmaProduct(qk_mma, a, qk_mma.b_slots(tiles.sK), None)
        transposed = contiguous_rows_layout(dtype, c.head_dim_v, c.tile_n, slots)
        sVt = cute.make_tensor(tiles.sV.iterator, transposed.outer)  # (DV, bN, SLOT)
        pv_mma = Wgmma(c.columns_of_pv, dtype, b_major=OperandMajorMode.MN)
        acc = pv_mma.accumulator(columns=c.head_dim_v)
        pv = WgmmaProduct(pv_mma, pv_mma.a_registers(c.tile_n), pv_mma.b_slots(sVt), acc)
        state = tiles.k.consumer(), tiles.v.consumer()
        products, rings = Products(qk, pv), KeyRings(tiles.k, tiles.v)
        how = products, rings, registers
        if cutlass.const_expr(s.parts is None):
            s.each_part(lambda x, then: self.part(s.rows(x), x, s.of_piece(x), how, then), state)
        else:
            s.each_told(lambda x, blocks, then: self.part(s.rows(x), x, blocks, how, then), state)

    @cute.jit
    def part(
        self,
        rows: UnitRows,
        piece: Piece,
        blocks: Blocks,
        how: cutlass.Constexpr[tuple[Products, KeyRings, Any]],
        state: State,
    ) -> State:
        """Compute a part, `how` by these products of tiles in these rings, Q in these registers,
        and store it."""
        s, c = self.shared, self.shared.config
        products, rings, registers = how
        pv = products.pv
        factors = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        lse = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        powers = self.load_q(registers, rows)
        score_ops = self.score_ops(rows, powers)
        softmax = LoweredSoftmax.rounding_to(
            pv.a.element_type, score_ops.scale_log2(), c.rescale_threshold
        )
        if blocks.end > blocks.first:
            loop = BlockLoop(products, rings, score_ops, softmax, factors)
            state = loop.run(blocks, None, state, Int32(0), None)
            state = loop.last(state)
            softmax.finish((), factors, lse)
            if cutlass.const_expr(c.fp8):
                for r in cutlass.range_constexpr(2):
                    factors[r] *= s.descale(s.args.v_descale, rows)
            loop.scale_output()
        else:
            pv.acc.fill(0.0)
            lse.fill(-Float32.inf)
        self.store(rows_of(pv.acc), lse, rows, piece)
        return state

    def thread_rows(self) -> tuple[Int32, Int32]:
        """The two rows of a block that this thread holds."""
        thread, _, _ = cute.arch.thread_idx()
        row = thread // 32 * 16 + thread % 32 // 4
        return row, row + 8

    def score_ops(self, rows: UnitRows, powers: tuple[Float32, ...]) -> ScoreOps:
        s = self.shared
        thread, _, _ = cute.arch.thread_idx()
        mine = self.thread_rows()
        queries, heads = (tuple(f(row) for row in mine) for f in (rows.query, rows.head_of))
        keys = s.sizes.keys(s.args, rows.batch)
        mask = Mask(s.info.band, s.info.tile_n, rows.seq_q.length, keys, queries, thread % 4)
        scale = s.args.scale
        if cutlass.const_expr(s.config.fp8):
            scale *= s.descale(s.args.k_descale, rows)
        return ScoreOps(mask, scale, s.args.softcap, None, None, rows.batch, heads, powers=powers)

    # ---- Q

    @cute.jit
    def load_q(self, registers: Any, rows: UnitRows) -> tuple[Float32, ...]:
        """Load Q, zeros where there are no rows or columns: into registers as operand A, or into
        smem. Returns the powers of two by which its rows are divided, if they are."""
        powers: tuple[Float32, ...] = ()
        if cutlass.const_expr(registers is None):
            sQ = self.shared.sQ
            assert sQ is not None
            self.out.sync()  # wgmma of the part before has read it
            load_to_smem(self.mQ, rows, sQ[None, None, 0])
            self.out.sync()
        elif cutlass.const_expr(registers.element_type is self.mQ.element_type):
            self.load_words(registers, rows)
        else:
            held = cute.make_rmem_tensor(registers.layout, self.mQ.element_type)
            self.load_words(held, rows)
            powers = to_fp16(held, registers)
            pin(registers)
        return powers

    @cute.jit
    def load_words(self, registers: cute.Tensor, rows: UnitRows) -> None:
        """Load this thread's part of Q, ((2, 2, 2), 1, MMA_K)."""
        thread, _, _ = cute.arch.thread_idx()
        words = cute.recast_tensor(registers, Int32)  # ((1, 2, 2), 1, MMA_K)
        units = units_of(self.mQ)
        mine = self.thread_rows()
        for r in cutlass.range_constexpr(2):
            exists = mine[r] < rows.count
            gQ = rows.words(self.mQ, cutlass.min(mine[r], rows.count - 1))
            for unit in cutlass.range_constexpr(self.shared.config.head_dim // UNIT):
                word = gQ[cutlass.min(unit, units - 1) * 4 + thread % 4]
                kept = word if exists & (unit < units) else Int32(0)
                words[(0, r, unit % 2), 0, unit // 2] = kept

    # ---- O

    @cute.jit
    def store(self, acc: cute.Tensor, lse: cute.Tensor, rows: UnitRows, piece: Piece) -> None:
        """Store a whole unit; or store a part, and merge all parts if it is the last."""
        unit = piece.entry * self.shared.sizes.heads + piece.head
        self.out.announce(piece, unit)
        if cutlass.const_expr(self.shared.config.whole):
            self.store_whole(acc, lse, rows)
        else:
            if piece.parts > 1:
                self.store_part(acc, lse, rows, piece)
                self.out.end_part(rows, piece, unit)
            else:
                self.store_whole(acc, lse, rows)

    @cute.jit
    def store_whole(self, acc: cute.Tensor, lse: cute.Tensor, rows: UnitRows) -> None:
        thread, _, _ = cute.arch.thread_idx()
        dtype, mine = self.out.mO.element_type, self.thread_rows()
        pair = cute.make_rmem_tensor(cute.make_layout(2), dtype)
        for r in cutlass.range_constexpr(2):
            if mine[r] < rows.count:
                of_row, factor = self.out.finish_row(lse[r], rows, mine[r])
                to = self.out.row(rows, mine[r])
                for unit in cutlass.range_constexpr(self.shared.config.head_dim_v // UNIT):
                    for i in cutlass.range_constexpr(2):
                        pair[i] = dtype(acc[r, 2 * unit + i] * factor)
                    to.store_pair(unit, thread % 4, pair)
                if thread % 4 == 0:
                    self.out.store_lse(of_row, rows, mine[r])

    @cute.jit
    def store_part(self, acc: cute.Tensor, lse: cute.Tensor, rows: UnitRows, piece: Piece) -> None:
        thread, _, _ = cute.arch.thread_idx()
        mine, slot = self.thread_rows(), piece.slot_of(piece.part)
        for r in cutlass.range_constexpr(2):
            if mine[r] < rows.count:
                to = self.out.partials.row(slot, mine[r])
                pair = cute.make_rmem_tensor(cute.make_layout(2), Float32)
                for unit in cutlass.range_constexpr(self.shared.config.head_dim_v // UNIT):
                    for i in cutlass.range_constexpr(2):
                        pair[i] = acc[r, 2 * unit + i]
                    to.store_pair(unit, thread % 4, pair)
                of_part = self.out.partials.lse(slot)
                if thread % 4 == 0:
                    of_part[mine[r]] = lse[r]


# ---- 8-bit caches


MANTISSA, BIAS, INFINITE = 23, 127, 255  # of fp32: bits; exponents of 1 and of infinity
MANTISSA_BF16, NO_SIGNS, TWICE = 7, 0x7FFF7FFF, 0x10001  # of a word of two bf16
LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632  # of two words: selectors of prmt
AIM = 8  # the exponent of the largest query


def product_dtype(config: DecodeConfig, dtype: type[cutlass.Numeric]) -> type[cutlass.Numeric]:
    """The element type of the products for queries of `dtype`."""
    return Float16 if config.fp8 and not config.q_in_smem else dtype


@cute.jit
def to_fp16(held: cute.Tensor, out: cute.Tensor) -> tuple[Float32, Float32]:
    """Round `held`, bf16 and this thread's part of two rows as operand A, to fp16, each row divided
    by a power of two that brings its largest to around 2^AIM; return these. An infinity, or a NaN,
    counts as 2^127.

    NOTE: one for a whole warp would leave nothing of rows beside an infinite or a huge one."""
    words = cute.recast_tensor(held, Int32)  # ((1, 2, 2), 1, MMA_K), rows in the second mode
    largest = [Int32(0), Int32(0)]
    for i in cutlass.range_constexpr(cute.size(words)):
        largest[i % 2] = largest_halves(largest[i % 2], words[i] & NO_SIGNS)
    halves = (Int32(cute.arch.prmt(*largest, x)) for x in (LOW_HALVES, HIGH_HALVES))
    both = largest_halves(*halves)
    for offset in cutlass.range_constexpr(1, 3):  # over the four threads of a row
        both = largest_halves(both, Int32(cute.arch.shuffle_sync_bfly(both, offset=offset)))
    divisors = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    factors = [Int32(0), Int32(0)]
    for r in cutlass.range_constexpr(2):
        exponent = (both >> (16 * r + MANTISSA_BF16)) & INFINITE
        exponent = cutlass.min(cutlass.max(exponent, AIM + 1), INFINITE - 1)
        factors[r] = ((2 * BIAS + AIM - exponent) << MANTISSA_BF16) * TWICE
        cute.recast_tensor(divisors, Int32)[r] = (exponent - AIM) << MANTISSA
    divided = cute.make_rmem_tensor(held.layout, held.element_type)
    to = cute.recast_tensor(divided, Int32)
    for i in cutlass.range_constexpr(cute.size(words)):
        to[i] = product_of_bf16(words[i], factors[i % 2])
    for i in cutlass.range_constexpr(cute.size(held)):
        out[i] = Float16(Float32(divided[i]))
    return divisors[0], divisors[1]


WARPS = 4  # of a warpgroup
WIDENED = 8  # elements that a thread widens at a time: 8 bytes as loaded, 16 after

TileState = tuple[PipelineState, PipelineState]  # of a tile in its ring of 8 bits, and of 16


class Wide(NamedTuple):
    """The widened tiles and their rings, as the products see them."""

    k: Ring
    v: Ring
    sK: cute.Tensor  # (bN, D, SLOT)
    sV: cute.Tensor  # (bN, DV, SLOT)

    @staticmethod
    def tiles(
        smem: SmemAllocator, config: DecodeConfig, dtype: type[cutlass.Numeric]
    ) -> list[cute.Tensor]:
        """The slots of K and of V."""
        return [
            allocate_slots(smem, dtype, kv_slots(dtype, config.tile_n, d, WIDE_SLOTS))
            for d in config.head_dims
        ]

    @staticmethod
    def ring(smem: SmemAllocator, name: str) -> Ring:
        """The ring of K or V, which a warpgroup fills and another empties."""
        full = Barrier.allocate(smem, f"wide {name} full", arrivals=WARPS, slots=WIDE_SLOTS)
        empty = Barrier.allocate(smem, f"wide {name} empty", arrivals=WARPS, slots=WIDE_SLOTS)
        return Ring(WIDE_SLOTS, 0, full, empty)


@dataclass(frozen=True)
class Widen:
    """A warpgroup that widens the tiles of K or of V."""

    shared: Shared
    narrow: Ring
    wide: Ring
    sNarrow: cute.Tensor  # (bN, D, SLOT) 8 bits
    sWide: cute.Tensor  # (bN, D, SLOT) 16 bits

    @classmethod
    def of(cls, shared: Shared, wide: Wide) -> tuple[Self, Self]:
        """The warpgroup for K, and that for V."""
        s = shared
        return cls(s, s.k, wide.k, s.sK, wide.sK), cls(s, s.v, wide.v, s.sV, wide.sV)

    @cute.jit
    def run(self) -> None:
        """Widen the tiles of this CTA's parts in the order in which they are loaded."""
        s, state = self.shared, (self.narrow.consumer(), self.wide.producer())
        if cutlass.const_expr(s.parts is None):
            s.each_part(lambda x, state: self.part(s.of_piece(x), state), state)
        else:
            s.each_told(lambda _, blocks, state: self.part(blocks, state), state)

    @cute.jit
    def part(self, blocks: Blocks, state: TileState) -> TileState:
        """Widen the tiles of a part."""
        for _ in cutlass.range(blocks.end - blocks.first, unroll=1):
            state = self.widen_next(state)
        return state

    @cute.jit
    def widen_next(self, state: TileState) -> TileState:
        """Widen the next tile once it has been loaded and a slot is empty."""
        of_narrow, of_wide = state
        self.narrow.wait_full(of_narrow)
        self.wide.empty.wait(of_wide.phase, of_wide.slot)
        self.widen(self.sNarrow[None, None, of_narrow.slot], self.sWide[None, None, of_wide.slot])
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        self.narrow.release(of_narrow)
        with cute.arch.elect_one():
            self.wide.full.arrive(of_wide.slot)
        of_narrow.advance()
        of_wide.advance()
        return of_narrow, of_wide

    @cute.jit
    def widen(self, narrow: cute.Tensor, wide: cute.Tensor) -> None:
        """Copy `narrow` (bN, D) to `wide`. Every e4m3 value is exact in bf16 and fp16."""
        across = cute.size(narrow, mode=[1]) // WIDENED
        thread, _, _ = cute.arch.thread_idx()
        held = cute.make_rmem_tensor(cute.make_layout(WIDENED), narrow.element_type)
        out = cute.make_rmem_tensor(cute.make_layout(WIDENED), wide.element_type)
        for i in cutlass.range_constexpr(cute.size(narrow) // WIDENED // WARPGROUP):
            index = thread % WARPGROUP + i * WARPGROUP
            row, unit = index // across, index % across
            cute.autovec_copy(cute.local_tile(narrow[row, None], (WIDENED,), (unit,)), held)
            kind = Float16 if wide.element_type is Float16 else Float32
            out.store(held.load().to(kind).to(wide.element_type))
            cute.autovec_copy(out, cute.local_tile(wide[row, None], (WIDENED,), (unit,)))
