"""Scores: the warpgroup of the MLA kernel that has the queries, and computes P.

While it computes the exponentials of a block, the tensor cores have the product of P and V of the
block before, whose P is handed over when QK of this block is done.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from cutex.device.atoms.wgmma import Wgmma, WgmmaProduct, round_to
from cutex.device.attention.block_info import Blocks
from cutex.device.attention.guarded_softmax import GuardedSoftmax
from cutex.device.attention.mask import Mask
from cutex.device.attention.scores import ScoreOps
from cutex.device.attention.softmax import rows_of
from cutex.device.pipeline import PipelineState
from cutex.kernels.attention.backward.sm90.scores import write_fragment
from cutex.kernels.attention.decode.out import Out
from cutex.kernels.attention.decode.rows import Rows
from cutex.kernels.attention.decode.splits import Piece
from cutex.kernels.attention.mla.combine import Parts
from cutex.kernels.attention.mla.sm90.shared import CHUNKS, ORDER, WIDTH, Shared


@cute.jit
def rows_of_thread() -> tuple[Int32, Int32]:
    """The two rows of a block that this thread of a warpgroup holds."""
    thread, _, _ = cute.arch.thread_idx()
    row = thread % 128 // 32 * 16 + thread % 32 // 4
    return row, row + 8


@dataclass(frozen=True)
class Scores:
    out: Out
    parts: Parts
    shared: Shared

    @cute.jit
    def run(self) -> None:
        """Compute P of this CTA's parts, one after the other."""
        s = self.shared
        lse = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        splits, place, end = s.begin()
        kv, q = s.kv.consumer(), s.q.consumer()
        at = splits.begin
        while at < end:
            place = s.place(splits, at, place)
            piece = splits.piece(at, place)
            at = piece.after
            if piece.end > piece.first:
                rows, blocks = s.rows(piece), s.of_piece(piece)
                lse.fill(-Float32.inf)
                if blocks.end > blocks.first:
                    s.q.wait_full(q)
                    kv = self.of_blocks(rows, blocks, kv, lse)
                    q.advance()
                self.store_lse(lse, rows, piece)

    @cute.jit
    def of_blocks(
        self, rows: Rows, blocks: Blocks, kv: PipelineState, lse: cute.Tensor
    ) -> PipelineState:
        """Compute P of the blocks of a part, from the last to the first, and LSE."""
        s, c = self.shared, self.shared.config
        dtype = s.sQ.element_type
        mma = Wgmma(c.tile_n, dtype)
        qk = WgmmaProduct(mma, mma.a_slots(s.sQ)[None, None, None, 0], mma.b_slots(s.sKV), None)
        rounded = mma.a_registers(c.tile_n)
        factors = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        factors.fill(1.0)
        ops = self.score_ops(rows)
        slack = min(c.slack, 4.0) if dtype is cutlass.Float16 else c.slack
        softmax = GuardedSoftmax.of(ops.scale_log2(), slack, False)
        softmax.reference.fill(-Float32.inf)
        softmax.sums.fill(0.0)
        block = Block(self.out, s, qk, rounded, factors, ops, softmax, blocks.clean_end)
        count, n_block = blocks.end - blocks.first - 1, blocks.end - 1
        for i in cutlass.range(count, unroll=1):
            kv = block.one(n_block - i, kv)
        rescale = block.compute(blocks.first, kv)
        with cute.arch.elect_one():
            s.q.empty.arrive()
        block.write(rescale, kv.slot)
        softmax.finish((), factors, lse)
        mine, thread, normalisers = rows_of_thread(), cute.arch.thread_idx()[0], s.words.normalisers
        if thread % 4 == 0:
            for r in cutlass.range_constexpr(2):
                normalisers[mine[r], kv.slot] = factors[r]
        block.hand_over(kv.slot)
        kv.advance()
        return kv

    def score_ops(self, rows: Rows) -> ScoreOps:
        s = self.shared
        thread, _, _ = cute.arch.thread_idx()
        mine = rows_of_thread()
        queries, heads = (tuple(f(row) for row in mine) for f in (rows.query, rows.head_of))
        keys = s.sizes.keys(s.passed, rows.batch)
        mask = Mask(s.info.band, s.info.tile_n, rows.seq_q.length, keys, queries, thread % 4)
        return ScoreOps(mask, s.passed.scale, None, None, None, rows.batch, heads)

    @cute.jit
    def store_lse(self, lse: cute.Tensor, rows: Rows, piece: Piece) -> None:
        """Store LSE of a unit, or of a part; and say where its parts are."""
        s = self.shared
        mine, thread = rows_of_thread(), cute.arch.thread_idx()[0]
        if (thread == 0) & (piece.part == 0):
            self.parts.announce(piece.entry * s.sizes.heads + piece.head, piece)
        if thread % 4 == 0:
            for r in cutlass.range_constexpr(2):
                if mine[r] < rows.count:
                    if piece.parts == 1:
                        self.out.store_lse(lse[r], rows, mine[r])
                    else:
                        of_part = self.parts.partials.lse(piece.slot_of(piece.part))
                        of_part[mine[r]] = lse[r]


@dataclass(frozen=True)
class Block:
    """The steps of a part."""

    out: Out
    shared: Shared
    qk: WgmmaProduct
    rounded: cute.Tensor  # P as operand A has it, ((2, 2, 2), 1, MMA_K)
    factors: cute.Tensor  # (2)
    ops: ScoreOps
    softmax: GuardedSoftmax
    clean_end: Int32  # blocks from this one on need a mask

    @cute.jit
    def compute(self, n_block: Int32, kv: PipelineState) -> Boolean:
        """Compute P of a block, and whether O so far has to be multiplied by factors."""
        acc = self.qk.mma.accumulator()
        self.issue(acc, kv)
        warpgroup.wait_group(0)
        return self.exponentials(acc, n_block)

    @cute.jit
    def one(self, n_block: Int32, kv: PipelineState) -> PipelineState:
        """Compute P of a block, and hand it over."""
        rescale = self.compute(n_block, kv)
        self.write(rescale, kv.slot)
        self.hand_over(kv.slot)
        kv.advance()
        return kv

    @cute.jit
    def exponentials(self, acc: cute.Tensor, n_block: Int32) -> Boolean:
        """Turn the scores of a block into P, in `rounded`; return whether O so far has to be
        multiplied by factors."""
        scores = rows_of(acc)
        if n_block >= self.clean_end:
            self.ops.apply(scores, n_block, True)
        rescale = self.softmax.next(scores, self.factors)
        round_to(self.rounded, acc)
        return rescale

    @cute.jit
    def issue(self, acc: cute.Tensor, kv: PipelineState) -> None:
        """Start QK of the block in a slot, wave by wave as they come."""
        warpgroup.fence()
        tiled_mma = self.qk.mma.tiled()
        steps, waves = WIDTH // self.qk.mma.k, self.shared.kv.waves
        for i in cutlass.range_constexpr(CHUNKS * steps):
            if cutlass.const_expr(i * waves % (CHUNKS * steps) == 0):
                self.shared.kv.wait_full(kv, i * waves // (CHUNKS * steps))
            tiled_mma.set(warpgroup.Field.ACCUMULATE, i > 0)
            operands = self.qk.k_block(self.qk.a, ORDER[i // steps] * steps + i % steps, kv.slot)
            cute.gemm(tiled_mma, acc, *operands, acc)
        warpgroup.commit_group()

    @cute.jit
    def write(self, rescale: Boolean, slot: Int32) -> None:
        """Write P of a slot, and what O so far has to be multiplied by."""
        self.out.sync()  # all warps have read the chunk whose place P takes
        write_fragment(self.rounded, self.qk.mma, self.shared.sP[None, None, slot])
        words, thread = self.shared.words, cute.arch.thread_idx()[0]
        of_warps, of_rows = words.rescale, words.factors
        if cute.arch.lane_idx() == 0:
            of_warps[cute.arch.warp_idx() % 4, slot] = Int32(rescale)
        if rescale & (thread % 4 == 0):
            mine = rows_of_thread()
            for r in cutlass.range_constexpr(2):
                of_rows[mine[r], slot] = self.factors[r]
        cute.arch.fence_view_async_shared()

    @cute.jit
    def hand_over(self, slot: Int32) -> None:
        """Arrive for this warp: P of a slot and its words are written."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.shared.p_full.arrive(slot)
