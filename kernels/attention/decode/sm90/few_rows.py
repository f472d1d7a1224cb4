"""FewRows: the four warps of a decode kernel with few packed rows.

wgmma multiplies 64 rows, one key block after another; with 8 rows it computes 56 for nothing, and a
block's load, scores and sums follow each other for longer than memory takes to bring the next
block. So each warp processes every fourth block of a part on its own, by mma.sync of 16 rows, and
four blocks are in progress at a time. At the end the warps merge their sums in smem. If there are
registers for it, a warp has two groups of 16 rows, for which a block is loaded and widened once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float16, Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import contiguous_rows_layout
from cutex.device.atoms.scalar import exp2, log2
from cutex.device.atoms.wgmma import round_to
from cutex.device.attention.block_info import Blocks
from cutex.device.attention.lowered_softmax import LoweredSoftmax
from cutex.device.attention.row_store import UNIT, WORDS
from cutex.device.attention.scores import ScoreOps
from cutex.device.attention.softmax import LN2, LOG2_E, rows_of
from cutex.device.attention.unit_rows import UnitRows, units_of
from cutex.device.attention.warp_products import (
    MMA_K,
    Groups,
    NarrowKeys,
    NarrowValues,
    WarpProduct,
)
from cutex.device.pipeline import PipelineState
from cutex.kernels.attention.decode.config import FEW_ROWS, DecodeConfig
from cutex.kernels.attention.decode.launch import kv_slots
from cutex.kernels.attention.decode.sm90.compute import Compute, product_dtype, to_fp16
from cutex.kernels.attention.decode.splits import EntrySpan, Piece, Splits

WARPS, WARP = 4, 32

State = tuple[PipelineState, PipelineState]  # of this warp in the rings of K and of V


class Sums(NamedTuple):
    """O and LSE of each warp in smem, in its lanes' order, sorted by the warps' first blocks."""

    o: cute.Tensor  # (2, lane, unit and row, WARPS)
    lse: cute.Tensor  # (row, lane, WARPS)

    @staticmethod
    def allocate(smem: SmemAllocator, config: DecodeConfig) -> Sums:
        units = config.head_dim_v // UNIT
        o = smem.allocate_tensor(Float32, cute.make_layout((2, WARP, 2 * units, WARPS)), 16)
        lse = smem.allocate_tensor(Float32, cute.make_layout((2, WARP, WARPS)), 16)
        return Sums(o, lse)


@dataclass(frozen=True)
class FewRows(Compute):
    """The computing warps, all with the same rows; `wide` is None. A thread's rows are those of its
    `group`."""

    sums: Sums
    group: int = 0

    @cute.jit
    def run(self) -> None:
        """Process this CTA's parts one after another."""
        s, c, number = self.shared, self.shared.config, cute.arch.warp_idx()
        dtype, groups = product_dtype(c, self.mQ.element_type), self.groups
        qk, pv = self.products()
        q = tuple(cute.make_rmem_tensor(fragment_of_a(c.head_dim), dtype) for _ in groups)
        acc = tuple(pv.accumulator(c.head_dim_v) for _ in groups)
        lse = tuple(cute.make_rmem_tensor(cute.make_layout(2), Float32) for _ in groups)
        k, v = s.k.consumer(), s.v.consumer()
        k.skip(number)
        v.skip(number)
        ahead = tuple(
            cute.make_rmem_tensor(fragment_of_a(c.head_dim), self.mQ.element_type) for _ in groups
        )
        before = Int32(0)  # blocks of the parts before
        source = s.begin() if s.parts is None else None
        piece, found, place = self.first_part(source)
        if cutlass.const_expr(self.has_q_ahead):
            self.load_q_of(piece, ahead)
        while piece.end > piece.first:
            rows, now, blocks = s.rows(piece), piece, found
            if cutlass.const_expr(s.parts is None):
                blocks = s.of_piece(piece)
            if cutlass.const_expr(not self.has_q_ahead):
                self.load_rows(ahead, rows)
            score_ops = tuple(
                x.score_ops(rows, x.taken(ahead[x.group], q[x.group], rows)) for x in groups
            )
            if cutlass.const_expr(s.parts is None):
                piece, found, place = self.part_after(now, source, place)
                if cutlass.const_expr(self.has_q_ahead):
                    self.load_q_of(piece, ahead)
            first = (number + WARPS - before) % WARPS  # of this warp's blocks
            k, v = self.blocks((qk, pv), (q, acc, lse), score_ops, rows, blocks, first, (k, v))
            before = (before + blocks.end - blocks.first) % WARPS
            if cutlass.const_expr(s.parts is not None):
                # NOTE: not before: a part is told when one's last keys are on their way, for which
                # this one's must have been read
                piece, found, place = self.part_after(now, source, place)
                if cutlass.const_expr(self.has_q_ahead):
                    self.load_q_of(piece, ahead)
            for g in cutlass.range_constexpr(len(groups)):
                self.merge(acc[g], lse[g], first, rows.count)
            self.store(acc, lse, rows, now)

    @property
    def groups(self) -> tuple[FewRows, ...]:
        """This role, for each group of 16 rows."""
        return tuple(replace(self, group=g) for g in range(self.shared.config.row_groups))

    @property
    def has_q_ahead(self) -> bool:
        """Whether Q of the next part is loaded during a part: there must be registers for it."""
        c = self.shared.config
        return c.accumulators + c.row_groups * c.head_dim // 4 <= c.most_accumulators

    def first_part(self, source: Any) -> tuple[Piece, Any, Any]:
        """The first part, its blocks if they are told, and where the walk is."""
        s = self.shared
        if s.parts is None:
            splits, span, end = source
            span, piece = self.next_part(splits, splits.begin, end, span)
            return piece, Int32(0), span
        return s.take_part(s.parts.ring.consumer())

    def part_after(self, piece: Piece, source: Any, place: Any) -> tuple[Piece, Any, Any]:
        """As first_part, of the part after `piece`."""
        s = self.shared
        if s.parts is None:
            splits, _, end = source
            span, following = self.next_part(splits, piece.after, end, place)
            return following, Int32(0), span
        return s.take_part(place)

    @cute.jit
    def next_part(
        self, splits: Splits, at: Int32, end: Int32, span: EntrySpan
    ) -> tuple[EntrySpan, Piece]:
        """The first part at position `at` or after it, and its entry; without blocks if there is
        none."""
        s = self.shared
        piece = Piece(*(Int32(0) for _ in Piece._fields))
        while (piece.end <= piece.first) & (at < end):
            span = s.span_at(splits, at, span)
            piece = s.piece(splits, at, span)
            at = piece.after
        return span, piece

    @cute.jit
    def load_q_of(self, piece: Piece, registers: Groups) -> None:
        """Load Q of a part, if there is one."""
        if piece.end > piece.first:
            self.load_rows(registers, self.shared.rows(piece))

    def load_rows(self, registers: Groups, rows: UnitRows) -> None:
        """Load Q of all groups."""
        for of_group in self.groups:
            of_group.load_words(registers[of_group.group], rows)

    @cute.jit
    def taken(self, ahead: cute.Tensor, q: cute.Tensor, rows: UnitRows) -> tuple[Float32, ...]:
        """Move Q from `ahead` to `q`, as the products have it, zeros where there are no rows or
        columns. Returns the powers of two by which its rows are divided, if they are."""
        words = cute.recast_tensor(ahead, Int32)  # ((1, 2, 2), 1, MMA_K)
        units, mine, quad = units_of(self.mQ), self.thread_rows(), cute.arch.lane_idx() % 4
        powers: tuple[Float32, ...] = ()
        for r in cutlass.range_constexpr(2):
            exists = mine[r] < rows.count
            for column in cutlass.range_constexpr(self.shared.config.head_dim // UNIT):
                first, _ = place(column, quad, self.shared.config.fp8)
                at = (0, r, column % 2), 0, column // 2
                words[at] = words[at] if exists & (first < units) else Int32(0)
        if cutlass.const_expr(q.element_type is ahead.element_type):
            q.store(ahead.load())
        else:
            powers = to_fp16(ahead, q)
        return powers

    def products(self) -> tuple[WarpProduct, WarpProduct]:
        """The products with the slots of K and of V."""
        s, c = self.shared, self.shared.config
        dtype, narrow = self.mQ.element_type, 2 if c.fp8 else 1
        kinds: tuple[type[WarpProduct], type[WarpProduct]] = WarpProduct, WarpProduct
        if c.fp8:
            dtype, kinds = Float16, (NarrowKeys, NarrowValues)
        d, dv = (x // narrow for x in c.head_dims)
        rows_k = kv_slots(dtype, c.tile_n, d, c.num_stages)
        sK = cute.make_tensor(cute.recast_ptr(s.sK.iterator, rows_k.inner, dtype), rows_k.outer)
        rows_v = kv_slots(dtype, c.tile_n, dv, c.num_stages)
        transposed = contiguous_rows_layout(dtype, dv, c.tile_n, c.num_stages)
        of_v = cute.recast_ptr(s.sV.iterator, rows_v.inner, dtype)
        sVt = cute.make_tensor(of_v, transposed.outer)  # (DV, bN, SLOT)
        of_k, of_v = kinds
        return of_k.of(sK, k_major=True), of_v.of(sVt, k_major=False)

    def thread_rows(self) -> tuple[Int32, Int32]:
        row = cute.arch.lane_idx() // 4 + self.group * FEW_ROWS
        return row, row + 8

    @cute.jit
    def load_words(self, registers: cute.Tensor, rows: UnitRows) -> None:
        """Load this thread's part of Q, ((2, 2, 2), 1, MMA_K); for e4m3 by four neighbours. Outside
        its rows and columns, other elements of Q."""
        words = cute.recast_tensor(registers, Int32)  # ((1, 2, 2), 1, MMA_K)
        units, mine, quad = units_of(self.mQ), self.thread_rows(), cute.arch.lane_idx() % 4
        last = 2 if self.shared.config.fp8 else 1  # units at a time
        for r in cutlass.range_constexpr(2):
            gQ = rows.words(self.mQ, cutlass.min(mine[r], rows.count - 1))
            for unit in cutlass.range_constexpr(self.shared.config.head_dim // UNIT):
                first, word = place(unit, quad, self.shared.config.fp8)
                found = gQ[cutlass.min(first, units - last) * WORDS + word]
                words[(0, r, unit % 2), 0, unit // 2] = found

    @cute.jit
    def blocks(
        self,
        products: cutlass.Constexpr[tuple[WarpProduct, WarpProduct]],
        registers: cutlass.Constexpr[tuple[Groups, Groups, Groups]],
        score_ops: tuple[ScoreOps, ...],
        rows: UnitRows,
        blocks: Blocks,
        first: Int32,
        state: State,
    ) -> State:
        """Compute O, scaled, and LSE of every fourth block of `blocks`."""
        s, c = self.shared, self.shared.config
        k, v = state
        qk, pv = products
        q, acc, lse = registers
        groups, dtype = len(q), q[0].element_type
        p = tuple(cute.make_rmem_tensor(fragment_of_a(c.tile_n), dtype) for _ in q)
        factors = tuple(cute.make_rmem_tensor(cute.make_layout(2), Float32) for _ in q)
        softmax = tuple(
            LoweredSoftmax.rounding_to(dtype, x.scale_log2(), c.rescale_threshold)
            for x in score_ops
        )
        for g in cutlass.range_constexpr(groups):
            softmax[g].reference.fill(-Float32.inf)
            softmax[g].sums.fill(0.0)
            acc[g].fill(0.0)
        last = blocks.end - 1
        count = (blocks.end - blocks.first - first + WARPS - 1) // WARPS
        for i in cutlass.range(count, unroll=1):
            n_block = last - first - i * WARPS
            acc_s = tuple(qk.accumulator(c.tile_n) for _ in q)
            for g in cutlass.range_constexpr(groups):
                acc_s[g].fill(0.0)
            s.k.wait_full(k)
            qk.add(q, acc_s, k.slot)
            s.k.release(k)
            k.skip(WARPS)
            for g in cutlass.range_constexpr(groups):
                scores = rows_of(acc_s[g])
                score_ops[g].apply(scores, n_block, False)
                clean = (n_block >= blocks.clean_first) & (n_block < blocks.clean_end)
                if (n_block == last) | ~clean:
                    score_ops[g].mask.apply(scores, n_block)
                rescale = softmax[g].next(scores, factors[g])
                round_to(p[g], acc_s[g])
                if rescale:
                    scale(rows_of(acc[g]), factors[g])
            s.v.wait_full(v)
            pv.add(p, acc, v.slot)
            s.v.release(v)
            v.skip(WARPS)
        for g in cutlass.range_constexpr(groups):
            softmax[g].finish((), factors[g], lse[g])
            if cutlass.const_expr(c.fp8):
                for r in cutlass.range_constexpr(2):
                    factors[g][r] *= s.descale(s.args.v_descale, rows)
            scale(rows_of(acc[g]), factors[g])
        return k, v

    @cute.jit
    def merge(self, acc: cute.Tensor, lse: cute.Tensor, number: Int32, count: Int32) -> None:
        """Merge O and LSE of all warps; this one has the blocks from `number` on, and stores its
        `units` of O. A part has the same bits whichever warps had which blocks. Of `count` rows."""
        lane = cute.arch.lane_idx()
        rows = rows_of(acc)
        self.out.sync()  # the sums of the part before have been read
        for r in cutlass.range_constexpr(2):
            self.sums.lse[r, lane, number] = lse[r]
        self.keep(rows, 0, number)
        # NOTE: of a token of up to eight heads the second rows do not exist
        if count > FEW_ROWS * self.group + FEW_ROWS // 2:
            self.keep(rows, 1, number)
        self.out.sync()
        self.add_up(rows, lse, 0)
        if count > FEW_ROWS * self.group + FEW_ROWS // 2:
            self.add_up(rows, lse, 1)

    @cute.jit
    def keep(self, rows: cute.Tensor, r: cutlass.Constexpr[int], number: Int32) -> None:
        """Write this warp's row `r` of O to smem."""
        lane = cute.arch.lane_idx()
        pair = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        for unit in cutlass.range_constexpr(cute.size(rows, mode=[1]) // 2):
            for i in cutlass.range_constexpr(2):
                pair[i] = rows[r, self.column(unit, i)]
            self.sums.o[None, lane, 2 * unit + r, number].store(pair.load())

    @cute.jit
    def add_up(self, rows: cute.Tensor, lse: cute.Tensor, r: cutlass.Constexpr[int]) -> None:
        """Add up all warps' row `r`, of this warp's units."""
        lane = cute.arch.lane_idx()
        lses = tuple(self.sums.lse[r, lane, w] for w in range(WARPS))
        weights, lse[r] = shares_of(lses)
        for i in cutlass.range_constexpr(self.units):
            total = cute.make_rmem_tensor(cute.make_layout(2), Float32)
            total.fill(0.0)
            for w in cutlass.range_constexpr(WARPS):
                of_warp = self.sums.o[None, lane, 2 * (self.first_unit() + i) + r, w].load()
                total.store(total.load() + of_warp * weights[w])
            for j in cutlass.range_constexpr(2):
                rows[r, 2 * i + j] = total[j]

    # ---- O

    @property
    def units(self) -> int:
        """The units of columns of O that a warp stores."""
        return self.shared.config.head_dim_v // UNIT // WARPS

    def first_unit(self) -> Int32:
        return cute.arch.warp_idx() * self.units

    def column(self, unit: int, i: int) -> int:
        """The column of a thread's accumulators that is column i of its two in `unit`."""
        if not self.shared.config.fp8:
            return 2 * unit + i
        tiles = self.shared.config.head_dim_v // UNIT // 2
        return 2 * (unit // 2 + i * tiles) + unit % 2

    @cute.jit
    def store_whole(self, acc: Any, lse: Any, rows: UnitRows) -> None:
        for of_group in self.groups:
            g = of_group.group
            of_group.store_rows(rows_of(acc[g]), lse[g], rows)

    @cute.jit
    def store_part(self, acc: Any, lse: Any, rows: UnitRows, piece: Piece) -> None:
        for of_group in self.groups:
            g = of_group.group
            of_group.store_part_rows(rows_of(acc[g]), lse[g], rows, piece)

    @cute.jit
    def store_rows(self, acc: cute.Tensor, lse: cute.Tensor, rows: UnitRows) -> None:
        """Store O and LSE of this group's rows of a whole unit."""
        lane, dtype, mine = cute.arch.lane_idx(), self.out.mO.element_type, self.thread_rows()
        pair = cute.make_rmem_tensor(cute.make_layout(2), dtype)
        for r in cutlass.range_constexpr(2):
            if mine[r] < rows.count:
                of_row, factor = self.out.finish_row(lse[r], rows, mine[r])
                to = self.out.row(rows, mine[r])
                for unit in cutlass.range_constexpr(self.units):
                    for i in cutlass.range_constexpr(2):
                        pair[i] = dtype(acc[r, 2 * unit + i] * factor)
                    first, word = place(unit, lane % 4, self.shared.config.fp8)
                    to.store_pair(self.first_unit() + first, word, pair)
                if self.keeps_lse():
                    self.out.store_lse(of_row, rows, mine[r])

    @cute.jit
    def store_part_rows(
        self, acc: cute.Tensor, lse: cute.Tensor, rows: UnitRows, piece: Piece
    ) -> None:
        """Store this group's rows of a part."""
        lane, mine, slot = cute.arch.lane_idx(), self.thread_rows(), piece.slot_of(piece.part)
        pair = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        of_part = self.out.partials.lse(slot)
        for r in cutlass.range_constexpr(2):
            if mine[r] < rows.count:
                to = self.out.partials.row(slot, mine[r])
                for unit in cutlass.range_constexpr(self.units):
                    for i in cutlass.range_constexpr(2):
                        pair[i] = acc[r, 2 * unit + i]
                    first, word = place(unit, lane % 4, self.shared.config.fp8)
                    to.store_pair(self.first_unit() + first, word, pair)
                if self.keeps_lse():
                    of_part[mine[r]] = lse[r]

    @staticmethod
    def keeps_lse() -> Boolean:
        """Whether this thread stores the LSE of its rows."""
        return (cute.arch.lane_idx() % 4 == 0) & (cute.arch.warp_idx() == 0)


def place(unit: int, quad: Int32, by_four: bool) -> tuple[int, Int32]:
    """The location of a thread's two columns of `unit`: a unit, and a word after its first.
    `by_four`: the columns of two units are neighbours."""
    return (unit - unit % 2, 2 * quad + unit % 2) if by_four else (unit, quad)


def fragment_of_a(k: int) -> cute.Layout:
    """The registers of an operand A of 16 rows: a pair of columns, rows 8 apart, columns 8 apart;
    blocks of K (PTX ISA, "Matrix Fragments for mma.m16n8k16")."""
    return cute.make_layout(((2, 2, 2), 1, k // MMA_K))


@cute.jit
def scale(rows: cute.Tensor, factors: cute.Tensor) -> None:
    """Multiply `rows` (rows, columns) by their factors."""
    for r in cutlass.range_constexpr(2):
        for c in cutlass.range_constexpr(cute.size(rows, mode=[1])):
            rows[r, c] *= factors[r]


@cute.jit
def shares_of(lses: tuple[Float32, ...]) -> tuple[tuple[Float32, ...], Float32]:
    """The weights of the sums with these LSE, 0 where there is no key, and the LSE of all of them
    together."""
    highest = lses[0]
    for x in lses[1:]:
        highest = cute.arch.fmax(highest, x)
    shift = Float32(0.0) if highest == -Float32.inf else highest
    weights = tuple(exp2((x - shift) * LOG2_E) for x in lses)
    total = weights[0]
    for x in weights[1:]:
        total += x
    empty = total == 0.0
    factor = Float32(0.0) if empty else 1.0 / total
    lse = -Float32.inf if empty else shift + log2(total) * LN2
    return tuple(x * factor for x in weights), lse
