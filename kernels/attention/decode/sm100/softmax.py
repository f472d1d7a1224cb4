"""Softmax: the four warps of the Blackwell decode kernel that load Q, turn S into P, scale O where
a reference moves, and store it. A thread has a whole row.

Warps none of whose rows exist only keep the barriers going.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from cutex.device.atoms.tmem import fence_after_sync, fence_before_sync
from cutex.device.attention.block_info import Blocks
from cutex.device.attention.mask import Mask
from cutex.device.attention.row_softmax import RowSoftmax
from cutex.device.attention.scores import ScoreOps
from cutex.device.attention.softmax import headroom_of, threshold_of
from cutex.device.attention.tmem_rows import (
    PART,
    ScoreRow,
    columns_of,
    rounded,
    scale_columns,
    scaled_part,
    store_columns,
)
from cutex.device.attention.unit_rows import UnitRows, load_to_smem
from cutex.device.pipeline import PipelineState
from cutex.kernels.attention.decode.out import Out
from cutex.kernels.attention.decode.shared import Shared
from cutex.kernels.attention.decode.sm100.config import Sm100DecodeConfig
from cutex.kernels.attention.decode.sm100.shared import Barriers
from cutex.kernels.attention.decode.splits import Piece

WARP = 32


@dataclass(frozen=True)
class Softmax:
    """The softmax role: P of every block, and the store of O and LSE; a thread has a row."""

    config: Sm100DecodeConfig
    mQ: cute.Tensor
    out: Out
    shared: Shared
    barriers: Barriers
    tmem: cute.Pointer

    @cute.jit
    def run(self) -> None:
        """Compute this CTA's parts one after the other."""
        factors = cute.make_rmem_tensor(cute.make_layout(1), Float32)
        lse = cute.make_rmem_tensor(cute.make_layout(1), Float32)
        self.shared.each_part(
            lambda x, then: self.part(x, (factors, lse), *then),
            (Int32(0), self.barriers.buffers()),
        )

    @cute.jit
    def part(
        self,
        piece: Piece,
        ends: cutlass.Constexpr[tuple[cute.Tensor, cute.Tensor]],
        done: Int32,
        buffer: PipelineState,
    ) -> tuple[Int32, PipelineState]:
        """Compute a part, whose factors and LSE are left in `ends`, and store it. `done`: PVs that
        were started."""
        factors, lse = ends
        rows, blocks = self.shared.rows(piece), self.shared.of_piece(piece)
        exist = cute.arch.warp_idx() * WARP < rows.count
        if blocks.end > blocks.first:
            self.hand_over_q(rows)
            row = self.score_row(rows)
            for i in cutlass.range(blocks.end - blocks.first, unroll=1):
                self.barriers.s_full.wait(buffer.phase, buffer.slot)
                fence_after_sync()
                if exist:
                    self.exponentiate(row, blocks, i, buffer, done, factors)
                fence_before_sync()
                with cute.arch.elect_one():
                    self.barriers.p_full.arrive(buffer.slot)
                buffer.advance()
                done += 1
            self.barriers.wait_output(done - 1)
            fence_after_sync()
            row.softmax.finish((), factors, lse)
        else:
            factors[0], lse[0] = Float32(0.0), -Float32.inf
        self.store(factors[0], lse[0], rows, piece, exist, blocks.end > blocks.first)
        return done, buffer

    @cute.jit
    def hand_over_q(self, rows: UnitRows) -> None:
        """Load Q to smem: the products of the unit before are complete, and its O is read."""
        sQ = self.shared.sQ
        assert sQ is not None
        load_to_smem(self.mQ, rows, sQ[None, None, 0])
        fence_before_sync()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.barriers.q_full.arrive()

    def score_row(self, rows: UnitRows) -> ScoreRow:
        """This thread's row of scores."""
        s, c, args = self.shared, self.config, self.shared.args
        thread, _, _ = cute.arch.thread_idx()
        keys = s.sizes.keys(args, rows.batch)
        lengths = rows.seq_q.length, keys
        mask = Mask(s.info.band, c.tile_n, *lengths, (rows.query(thread),))
        heads = (rows.head_of(thread),)
        ops = ScoreOps(mask, args.scale, args.softcap, None, None, rows.batch, heads)
        threshold = threshold_of(s.sK.element_type, c.rescale_threshold, 15.0)
        headroom = headroom_of(s.sK.element_type, threshold / 2)
        softmax = RowSoftmax.start(ops.unit(), threshold, headroom)
        return ScoreRow(self.tmem, c.tile_n, softmax, ops)

    @cute.jit
    def exponentiate(
        self,
        row: ScoreRow,
        blocks: Blocks,
        i: Int32,
        buffer: PipelineState,
        done: Int32,
        factors: cute.Tensor,
    ) -> None:
        """Turn the scores in `buffer` into probabilities, over them, and scale O where the
        reference moves."""
        c, dtype = self.config, self.shared.sK.element_type
        n_block = blocks.end - 1 - i
        masked = (n_block >= blocks.clean_end) | (n_block < blocks.clean_first)
        column = buffer.slot * c.tile_n
        found = row.search(column, n_block, masked)
        moved = row.softmax.raise_reference(found[0], factors)
        if moved and i > 0:
            self.barriers.wait_output(done - 1)
            fence_after_sync()
            scale_columns(self.tmem, c.o_column, c.head_dim_v, factors[0])

        def store(probabilities: cute.Tensor, part: int) -> None:
            words = cute.recast_tensor(probabilities, Float32)
            store_columns(self.tmem, column + part * cute.size(words), words)

        row.exponentials(column, found, dtype, store)
        cute.arch.fence_view_async_tmem_store()

    # ---- O

    @cute.jit
    def store(
        self,
        factor: Float32,
        lse: Float32,
        rows: UnitRows,
        piece: Piece,
        exist: Boolean,
        computed: Boolean,
    ) -> None:
        """Store a unit that is whole; else store a part, and merge all parts if it is the last."""
        thread, _, _ = cute.arch.thread_idx()
        unit = piece.entry * self.shared.sizes.heads + piece.head
        self.out.announce(piece, unit)
        if exist:
            if piece.parts == 1:
                of_row, more = lse, Float32(1.0)
                if thread < rows.count:
                    of_row, more = self.out.finish_row(lse, rows, thread)
                    self.out.store_lse(of_row, rows, thread)
                self.store_row(factor * more, rows, computed)
            else:
                self.store_part(factor, lse, rows, piece, computed)
        if piece.parts != 1:
            self.out.end_part(rows, piece, unit)

    def columns(
        self, part: cutlass.Constexpr[int], factor: Float32, computed: Boolean
    ) -> cute.Tensor:
        """Part `part` of this thread's row of O (scaled_part)."""
        parts = columns_of(self.tmem, self.config.o_column, self.config.head_dim_v)
        return scaled_part(parts, part, factor, computed)

    @cute.jit
    def store_row(self, factor: Float32, rows: UnitRows, computed: Boolean) -> None:
        thread, _, _ = cute.arch.thread_idx()
        to = self.out.row(rows, cutlass.min(thread, rows.count - 1))
        for part in cutlass.range_constexpr(self.config.head_dim_v // PART):
            values = rounded(self.columns(part, factor, computed), self.out.mO.element_type)
            if thread < rows.count:
                to.store(part * PART, values)

    @cute.jit
    def store_part(
        self, factor: Float32, lse: Float32, rows: UnitRows, piece: Piece, computed: Boolean
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        slot = piece.slot_of(piece.part)
        row = self.out.partials.row(slot, thread)
        of_part = self.out.partials.lse(slot)
        for part in cutlass.range_constexpr(self.config.head_dim_v // PART):
            values = self.columns(part, factor, computed)
            if thread < rows.count:
                row.store(part * PART, values)
        if thread < rows.count:
            of_part[thread] = lse
