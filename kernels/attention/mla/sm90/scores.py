"""The warpgroups of the MLA kernel: two for scores and two for values.

Scores: they hold the queries and compute P, each for the blocks in its own slot. While one computes
exponentials, the tensor cores run QK of the other and PV of the block before. Values: each sums
half of O's columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cutex.device import meeting
from cutex.device.atoms.quad import transpose_in_quad
from cutex.device.atoms.scalar import exp2
from cutex.device.atoms.wgmma import WARPGROUP, Wgmma, WgmmaProduct, round_to, write_fragment
from cutex.device.attention.block_info import Blocks
from cutex.device.attention.lowered_softmax import LoweredSoftmax
from cutex.device.attention.mask import Mask
from cutex.device.attention.row_store import UNIT, WORDS
from cutex.device.attention.scores import ScoreOps
from cutex.device.attention.softmax import over_quad, row_max, rows_of
from cutex.device.attention.unit_rows import UnitRows
from cutex.device.pipeline import PipelineState
from cutex.kernels.attention.decode.splits import Piece
from cutex.kernels.attention.mla.combine import MlaOut, words_of
from cutex.kernels.attention.mla.config import CHUNK, CHUNKS, HEAD_DIM, HEAD_DIM_V
from cutex.kernels.attention.mla.sm90.config import SLOTS
from cutex.kernels.attention.mla.sm90.shared import GROUPS, ORDER, SCORES_WARPS, WAVES, Load, Shared

BARRIER = 1  # of the first warpgroup; that of the second follows


@cute.jit
def rows_of_thread() -> tuple[Int32, Int32]:
    """The two rows of a block that this thread of a warpgroup holds."""
    thread, _, _ = cute.arch.thread_idx()
    row = thread % 128 // 32 * 16 + thread % 32 // 4
    return row, row + 8


@dataclass(frozen=True)
class Scores:
    shared: Shared
    load: Load
    group: Int32  # the slot whose blocks this warpgroup has

    @cute.jit
    def run(self) -> None:
        """Compute P of this CTA's parts one after another."""
        s = self.shared
        splits, span, end = s.begin()
        cursor = self.load.next(splits, end, self.load.begin(splits, span))
        kv, q, q_fill = s.kv.consumer(), s.q.consumer(), s.q.producer()
        at = splits.begin
        while at < end:
            span = s.span_at(splits, at, span)
            piece = splits.piece(at, span)
            at = piece.after
            if piece.end > piece.first:
                rows, blocks = s.rows(piece), s.of_piece(piece)
                count = blocks.end - blocks.first
                if count > 0:
                    self.begin_part(piece)
                    self.load.queries(rows, q_fill)
                    s.q.wait_full(q)
                    block = self.block(rows, blocks)
                    for i in cutlass.range(kv.slot ^ self.group, count - 1, SLOTS, unroll=1):
                        block.one(i, self.own(kv, i))
                        cursor = self.load.next(splits, end, cursor)
                    if (kv.slot + count + 1) % SLOTS == self.group:
                        block.last(self.own(kv, count - 1))
                        cursor = self.load.next(splits, end, cursor)
                    else:
                        s.q.release(q)
                    kv.skip(count)
                    q.advance()
                    q_fill.advance()
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def begin_part(self, piece: Piece) -> None:
        """Count a part of several as begun: VALUES have neither the time nor a register."""
        s = self.shared
        if cutlass.const_expr(s.config.meets):  # noqa: SIM102 - known when tracing
            if (cute.arch.thread_idx()[0] == 0) & (piece.parts > 1):
                unit = piece.entry * s.sizes.heads + piece.head
                meeting.begin(words_of(s.config, s.args, unit))

    def own(self, kv: PipelineState, i: Int32) -> PipelineState:
        """The state of block `i` of a part, whose slot is this warpgroup's."""
        state = PipelineState(SLOTS, kv.slot, kv.phase)
        state.skip(i)
        return state

    def block(self, rows: UnitRows, blocks: Blocks) -> Block:
        """The state before a part's first block."""
        s, c, dtype = self.shared, self.shared.config, self.shared.sQ.element_type
        mma = Wgmma(c.tile_n, dtype)
        qk = WgmmaProduct(mma, mma.a_slots(s.sQ)[None, None, None, 0], mma.b_slots(s.sKV), None)
        factors = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        factors.fill(1.0)
        lse = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        ops = self.score_ops(rows)
        softmax = LoweredSoftmax.rounding_to(dtype, ops.scale_log2(), c.rescale_threshold)
        softmax.reference.fill(-Float32.inf)
        softmax.sums.fill(0.0)
        rounded = mma.a_registers(c.tile_n)
        return Block(s, qk, rounded, factors, lse, ops, softmax, blocks, self.group)

    def score_ops(self, rows: UnitRows) -> ScoreOps:
        s = self.shared
        thread, _, _ = cute.arch.thread_idx()
        mine = rows_of_thread()
        queries, heads = (tuple(f(row) for row in mine) for f in (rows.query, rows.head_of))
        keys = s.sizes.keys(s.args, rows.batch)
        mask = Mask(s.info.band, s.info.tile_n, rows.seq_q.length, keys, queries, thread % 4)
        return ScoreOps(mask, s.args.scale, None, None, None, rows.batch, heads)


@dataclass(frozen=True)
class Block:
    """The steps of a warpgroup over the blocks of a part.

    The warpgroups alternate: before its exponentials, each takes over the references that the other
    had at the block before. Each keeps its own sums; the one with the last block adds both.
    """

    shared: Shared
    qk: WgmmaProduct
    rounded: cute.Tensor  # P as operand A has it, ((2, 2, 2), 1, MMA_K)
    factors: cute.Tensor  # (2)
    lse: cute.Tensor  # (2)
    ops: ScoreOps
    softmax: LoweredSoftmax
    blocks: Blocks
    group: Int32

    @property
    def count(self) -> Int32:
        return self.blocks.end - self.blocks.first

    @property
    def warp(self) -> Int32:
        """This warp's number in its warpgroup."""
        return cute.arch.warp_idx() % SCORES_WARPS

    @cute.jit
    def one(self, i: Int32, kv: PipelineState) -> None:
        """Compute P of block `i`, not the last, and hand it over."""
        softmax, words = self.softmax, self.shared.words
        acc = self.scores(i, kv)
        rescale = self.take_turn(acc, i, kv)
        self.pass_turn()
        softmax.add_exactly(rows_of(acc))
        round_to(self.rounded, acc)
        self.write(rescale)
        if i == self.count - 2:
            for r in cutlass.range_constexpr(2):
                total = over_quad(softmax.sums[r], lambda x, y: x + y)
                self.note(words.sums, r, total)
        self.hand_over()

    @cute.jit
    def last(self, kv: PipelineState) -> None:
        """Compute P of the last block and LSE, and hand P over with the factors for O."""
        s, softmax, i = self.shared, self.softmax, self.count - 1
        acc = self.scores(i, kv)
        with cute.arch.elect_one():
            s.q.empty.arrive()
        rescale = self.take_turn(acc, i, kv)
        softmax.add_exactly(rows_of(acc))
        round_to(self.rounded, acc)
        self.write(rescale)
        if i > 0:
            self.add_other_sums(kv)
        self.pass_turn()  # NOTE: not before the other's sums are read
        softmax.finish((), self.factors, self.lse)
        for r in cutlass.range_constexpr(2):
            self.note(s.words.normalisers, r, self.factors[r])
            self.note(s.words.lse, r, self.lse[r])
        self.hand_over()

    @cute.jit
    def scores(self, i: Int32, kv: PipelineState) -> cute.Tensor:
        """Compute the scores of block `i` after those of the block before: both at once would take
        as long, and leave the tensor cores idle during both's exponentials."""
        acc, products = self.qk.mma.accumulator(), self.shared.products
        products.wait(self.phase_before(kv), 1 - self.group)
        self.issue(acc, kv)
        warpgroup.wait_group(0)
        with cute.arch.elect_one():
            products.arrive(self.group)
        n_block = self.blocks.end - 1 - i
        if n_block >= self.blocks.clean_end:
            self.ops.apply(rows_of(acc), n_block, True)
        return acc

    @cute.jit
    def take_turn(self, acc: cute.Tensor, i: Int32, kv: PipelineState) -> Boolean:
        """Raise the references from those of the block before; returns whether O so far must be
        multiplied by factors."""
        softmax, words = self.softmax, self.shared.words
        other, mine = 1 - self.group, rows_of_thread()
        highest = [softmax.over_row(row_max(rows_of(acc), r), cute.arch.fmax) for r in range(2)]
        self.shared.turn.wait(self.phase_before(kv), other * SCORES_WARPS + self.warp)
        for r in cutlass.range_constexpr(2):
            reference = words.references[mine[r], other] if i > 0 else -Float32.inf
            softmax.sums[r] *= self.ratio(softmax.reference[r], reference)
            softmax.set_reference(r, reference)
        rescale = softmax.raise_references(highest, self.factors)
        for r in cutlass.range_constexpr(2):
            self.note(words.references, r, softmax.reference[r])
        return rescale

    @cute.jit
    def pass_turn(self) -> None:
        """Let the other warpgroup's warp of the same rows take its turn."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.shared.turn.arrive(self.group * SCORES_WARPS + self.warp)

    def phase_before(self, kv: PipelineState) -> Int32:
        """The phase of the other slot's block before the one of `kv`."""
        return kv.phase ^ Int32(self.group == 0)

    @cute.jit
    def ratio(self, reference: Float32, to: Float32) -> Float32:
        """The factor that converts sums relative to one reference to another."""
        finite = Float32(0.0) if to == -Float32.inf else to
        return exp2((reference - finite) * self.softmax.scale_log2)

    @cute.jit
    def note(self, words: cute.Tensor, r: cutlass.Constexpr[int], x: Float32) -> None:
        """Write the values known to the four threads of a row into this slot of `words`."""
        if cute.arch.thread_idx()[0] % 4 == 0:
            words[rows_of_thread()[r], self.group] = x

    @cute.jit
    def add_other_sums(self, kv: PipelineState) -> None:
        """Add the sums of the other warpgroup, which it wrote before it handed over its last P."""
        s, softmax = self.shared, self.softmax
        other, mine, words = 1 - self.group, rows_of_thread(), self.shared.words
        s.p_full.wait(self.phase_before(kv), other)
        for r in cutlass.range_constexpr(2):
            reference = words.references[mine[r], other]
            sums = words.sums[mine[r], other] * self.ratio(reference, softmax.reference[r])
            softmax.sums[r] += sums if cute.arch.thread_idx()[0] % 4 == 0 else Float32(0.0)

    @cute.jit
    def issue(self, acc: cute.Tensor, kv: PipelineState) -> None:
        """Start QK of the block in a slot, wave by wave as they come."""
        warpgroup.fence()
        tiled_mma = self.qk.mma.tiled()
        steps = CHUNK // self.qk.mma.k
        for i in cutlass.range_constexpr(CHUNKS * steps):
            if cutlass.const_expr(i * WAVES % (CHUNKS * steps) == 0):
                self.shared.kv.wait_full(kv, i * WAVES // (CHUNKS * steps))
            tiled_mma.set(warpgroup.Field.ACCUMULATE, i > 0)
            operands = self.qk.k_block(self.qk.a, ORDER[i // steps] * steps + i % steps, kv.slot)
            cute.gemm(tiled_mma, acc, *operands, acc)
        warpgroup.commit_group()

    @cute.jit
    def write(self, rescale: Boolean) -> None:
        """Write P, and the factors for O so far."""
        # all warps have read the chunk whose place P takes
        cute.arch.barrier(barrier_id=BARRIER + self.group, number_of_threads=WARPGROUP)
        write_fragment(self.rounded, self.qk.mma, self.shared.sP[None, None, self.group])
        words = self.shared.words
        if cute.arch.lane_idx() == 0:
            words.rescale[self.warp, self.group] = Int32(rescale)
        if rescale:
            for r in cutlass.range_constexpr(2):
                self.note(words.factors, r, self.factors[r])
        cute.arch.fence_view_async_shared()

    @cute.jit
    def hand_over(self) -> None:
        """Arrive for this warp: P and its words are written."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.shared.p_full.arrive(self.group)


# ---- values
#
# The two warpgroups that sum up half of the columns of O each. O of 64 rows and 512 columns in fp32
# is half of the registers of an SM. A warpgroup has 256 columns, 128 registers a thread; P comes
# through smem.


COLUMNS = HEAD_DIM_V // 2  # of a warpgroup
PARTS = len(GROUPS)  # of these columns, one after the other


@dataclass(frozen=True)
class Values:
    out: MlaOut
    shared: Shared
    half: Int32  # 0: the first columns, 1: the last

    @cute.jit
    def run(self) -> None:
        """Compute these columns of O for this CTA's parts one after another."""
        pv = self.product()
        ends = tuple(cute.make_rmem_tensor(cute.make_layout(2), Float32) for _ in range(2))
        kv = self.shared.kv.consumer()
        self.shared.each_part(lambda x, then: self.part(x, pv, ends, then), kv)

    @cute.jit
    def part(
        self,
        piece: Piece,
        pv: cutlass.Constexpr[WgmmaProduct],
        ends: cutlass.Constexpr[tuple[cute.Tensor, cute.Tensor]],
        kv: PipelineState,
    ) -> PipelineState:
        """Compute these columns of a part, with its factors and LSE in `ends`, and store them."""
        (factors, lse), rows, blocks = ends, self.shared.rows(piece), self.shared.of_piece(piece)
        pv.acc.fill(0.0)
        factors.fill(1.0)
        lse.fill(-Float32.inf)
        if blocks.end > blocks.first:
            kv = self.sum(pv, blocks.end - blocks.first, kv, ends)
        self.store(pv.acc, factors, rows, piece)
        self.end(lse, rows, piece)
        return kv

    def product(self) -> WgmmaProduct:
        """O += P V for these columns."""
        s, c, dtype = self.shared, self.shared.config, self.shared.sKV.element_type
        # NOTE: of a wgmma of 256 columns ptxas says that it needs 154 registers before setmaxnreg
        mma = Wgmma(COLUMNS // PARTS, dtype, b_major=OperandMajorMode.MN)
        # NOTE: rows of keys in atoms of 8 x 64, those of the same columns behind each other, are
        # V^T with contiguous rows (contiguous_rows_layout), of which these are some
        column = c.tile_n * CHUNK
        layout = cute.make_layout(
            ((CHUNK, COLUMNS // CHUNK), (8, c.tile_n // 8), (1, SLOTS)),
            stride=((1, column), (CHUNK, 8 * CHUNK), (0, c.tile_n * HEAD_DIM)),
        )
        first = s.sKV.iterator + self.half * (COLUMNS // CHUNK * column)
        sVt = cute.make_tensor(first, layout)  # (DV / 2, bN, SLOT)
        a = mma.a_slots(s.sP)
        return WgmmaProduct(mma, a, mma.b_slots(sVt), mma.accumulator(columns=COLUMNS))

    @cute.jit
    def sum(
        self,
        pv: WgmmaProduct,
        count: Int32,
        kv: PipelineState,
        ends: cutlass.Constexpr[tuple[cute.Tensor, cute.Tensor]],
    ) -> PipelineState:
        """Add `count` blocks; set the final factors of O, and LSE."""
        for _ in cutlass.range(count - 1, unroll=1):
            self.add(pv, kv, None)
            kv.advance()
        self.add(pv, kv, ends)
        kv.advance()
        return kv

    @cute.jit
    def add(
        self,
        pv: WgmmaProduct,
        kv: PipelineState,
        ends: cutlass.Constexpr[tuple[cute.Tensor, cute.Tensor] | None],
    ) -> None:
        """Add a block once its P has been written; the last one sets `ends`, the factors and
        LSE."""
        words, mine = self.shared.words, rows_of_thread()
        self.shared.p_full.wait(kv.phase, kv.slot)
        if cutlass.const_expr(ends is not None):
            for r in cutlass.range_constexpr(2):
                ends[0][r] = words.normalisers[mine[r], kv.slot]
                ends[1][r] = words.lse[mine[r], kv.slot]
        if words.rescale[cute.arch.warp_idx() % 4, kv.slot] != 0:
            o = rows_of(pv.acc)
            for r in cutlass.range_constexpr(2):
                o[r, None].store(o[r, None].load() * words.factors[mine[r], kv.slot])
        for part in cutlass.range_constexpr(PARTS):
            # (MMA, 1, MMA_K, SLOT), (MMA, MMA_M, 1)
            b = cute.logical_divide(pv.b, (None, 1, None, None))[None, (None, part), None, None]
            acc = cute.logical_divide(pv.acc, (None, None, 1))[None, None, (None, part)]
            WgmmaProduct(pv.mma, pv.a, b, acc).issue(kv.slot, accumulate=True)
        for part in cutlass.range_constexpr(PARTS):
            warpgroup.wait_group(PARTS - 1 - part)
            self.shared.kv.release(kv, part)

    # ---- O

    @cute.jit
    def store(self, acc: cute.Tensor, factors: cute.Tensor, rows: UnitRows, piece: Piece) -> None:
        """Store these columns of a whole unit, or of a part."""
        o = rows_of(acc)
        for r in cutlass.range_constexpr(2):
            o[r, None].store(o[r, None].load() * factors[r])
        if piece.parts == 1:
            self.store_whole(o, rows)
        else:
            self.store_part(o, rows, piece)

    @cute.jit
    def store_whole(self, o: cute.Tensor, rows: UnitRows) -> None:
        """Store rows of O, 16 bytes per lane: of each four units of columns, a lane starts with one
        word each and ends with one whole unit."""
        thread, _, _ = cute.arch.thread_idx()
        mine, first = rows_of_thread(), self.half * (COLUMNS // UNIT)
        held = cute.make_rmem_tensor(cute.make_layout(2 * WORDS), self.out.mO.element_type)
        words = cute.recast_tensor(held, Int32)
        for r in cutlass.range_constexpr(2):
            gO = rows.words(self.out.mO, cutlass.min(mine[r], rows.count - 1))
            for group in cutlass.range_constexpr(COLUMNS // UNIT // WORDS):
                for i in cutlass.range_constexpr(2 * WORDS):
                    held[i] = held.element_type(o[r, 2 * WORDS * group + i])
                transpose_in_quad(words)
                unit = first + WORDS * group + thread % WORDS
                if mine[r] < rows.count:
                    to = (gO.iterator + unit * WORDS).align(16)
                    cute.make_tensor(to, cute.make_layout(WORDS)).store(words.load())

    @cute.jit
    def store_part(self, o: cute.Tensor, rows: UnitRows, piece: Piece) -> None:
        thread, _, _ = cute.arch.thread_idx()
        slot, first = piece.slot_of(piece.part), self.half * (COLUMNS // UNIT)
        mine = rows_of_thread()
        pair = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        for r in cutlass.range_constexpr(2):
            if mine[r] < rows.count:
                to = self.out.partials.row(slot, mine[r])
                for unit in cutlass.range_constexpr(COLUMNS // UNIT):
                    for i in cutlass.range_constexpr(2):
                        pair[i] = o[r, 2 * unit + i]
                    to.store_pair(first + unit, thread % 4, pair)

    # ---- the end of a part

    @cute.jit
    def end(self, lse: cute.Tensor, rows: UnitRows, piece: Piece) -> None:
        """Store LSE of a unit, or of a part, and count the part: whoever counts the last one merges
        all, or all who have waited for it do, unless another kernel does."""
        s, thread, counts = self.shared, cute.arch.thread_idx()[0], Int32(0)
        unit = piece.entry * s.sizes.heads + piece.head
        if cutlass.const_expr(s.config.meets):
            counts = self.out.counts(piece, unit)  # on its way while the part is being written
        if self.half == 0:
            self.store_lse(lse, rows, piece)
            if cutlass.const_expr(s.config.combined):  # noqa: SIM102 - known when tracing
                if (thread % WARPGROUP == 0) & (piece.part == 0):
                    self.out.parts.announce(unit, piece)
        if cutlass.const_expr(not s.config.combined):  # noqa: SIM102 - known when tracing
            if piece.parts > 1:
                if cutlass.const_expr(s.config.meets):
                    self.out.meet(rows, piece, unit, counts)
                else:
                    self.out.count_part(rows, piece, unit)

    @cute.jit
    def store_lse(self, lse: cute.Tensor, rows: UnitRows, piece: Piece) -> None:
        """Store LSE of a whole unit, or of a part."""
        mine = rows_of_thread()
        if cute.arch.thread_idx()[0] % 4 == 0:
            for r in cutlass.range_constexpr(2):
                if mine[r] < rows.count:
                    if piece.parts == 1:
                        self.out.store_lse(lse[r], rows, mine[r])
                    else:
                        of_part = self.out.partials.lse(piece.slot_of(piece.part))
                        of_part[mine[r]] = lse[r]
