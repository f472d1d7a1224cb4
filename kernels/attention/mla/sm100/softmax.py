"""Softmax: the four warps of the Blackwell MLA kernel that turn S into P, scale O where a reference
moves, and store it.

A pair's MMA of 128 rows leaves a CTA 64 rows, half of whose columns are in the lanes from 64 on: so
two threads have a row, with 64 keys and half of O's columns each. They tell each other the largest
score of each block, and their sums in the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute

from cutex.device.atoms.tmem import fence_after_sync, fence_before_sync
from cutex.device.attention.block_info import Blocks
from cutex.device.attention.mask import Mask
from cutex.device.attention.row_softmax import RowSoftmax
from cutex.device.attention.row_store import UNIT, RoundedRow
from cutex.device.attention.scores import ScoreOps
from cutex.device.attention.softmax import headroom_of, threshold_of
from cutex.device.attention.tmem_rows import (
    PART,
    ScoreRow,
    columns_of,
    rounded,
    scale_columns,
    scaled_part,
)
from cutex.device.attention.unit_rows import UnitRows
from cutex.device.pipeline import PipelineState
from cutex.kernels.attention.decode.out import Out, Parts
from cutex.kernels.attention.decode.splits import Piece
from cutex.kernels.attention.mla.sm100.config import CTA_ROWS, CTAS, DIMS, KEYS_OF_CTA
from cutex.kernels.attention.mla.sm100.shared import BUFFERS, THREADS, Shared

COLUMNS = DIMS // CTAS  # of O, in a row of tensor memory, for each half
BARRIER = 1  # the first of the named barriers of warps that have the same rows


@dataclass(frozen=True)
class Softmax:
    """The softmax role: P of every block, and the store of O and LSE; two threads have a row."""

    out: Out
    parts: Parts
    shared: Shared
    tmem: cute.Pointer

    @cute.jit
    def run(self) -> None:
        """Compute this CTA's rows of the pair's parts, one after the other."""
        factors = cute.make_rmem_tensor(cute.make_layout(1), Float32)
        lse = cute.make_rmem_tensor(cute.make_layout(1), Float32)
        self.shared.each_part(
            lambda x, then: self.part(x, (factors, lse), *then),
            (Int32(0), self.shared.barriers.buffers()),
        )

    @cute.jit
    def part(
        self,
        piece: Piece,
        ends: cutlass.Constexpr[tuple[cute.Tensor, cute.Tensor]],
        o_phase: Int32,
        buffer: PipelineState,
    ) -> tuple[Int32, PipelineState]:
        """Compute a part, whose factors and LSE are left in `ends`, and store it."""
        s, (factors, lse) = self.shared, ends
        rows, blocks = s.own_rows(piece), s.of_piece(piece)
        factors[0], lse[0] = Float32(0.0), -Float32.inf
        if blocks.end > blocks.first:
            row = self.score_row(rows)
            for i in cutlass.range(blocks.end - blocks.first, unroll=1):
                s.barriers.s_full.wait(buffer.phase, buffer.slot)
                fence_after_sync()
                if i > 0:
                    self.block(row, blocks, i, buffer, o_phase, factors)
                    o_phase ^= 1
                else:
                    self.block(row, blocks, i, buffer, None, factors)
                fence_before_sync()
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    s.barriers.p_full.arrive_at_leader()
                buffer.advance()
            s.barriers.o_full.wait(o_phase)
            o_phase ^= 1
            fence_after_sync()
            total = row.softmax.sums
            total[0] += self.other(total[0], BUFFERS)
            row.softmax.finish((), factors, lse)
        self.store(factors[0], lse[0], rows, piece, blocks.end > blocks.first)
        return o_phase, buffer

    @property
    def half(self) -> Int32:
        """Which half of the columns this thread has."""
        thread, _, _ = cute.arch.thread_idx()
        return thread // CTA_ROWS

    @property
    def row(self) -> Int32:
        """This thread's row."""
        thread, _, _ = cute.arch.thread_idx()
        return thread % CTA_ROWS

    @cute.jit
    def other(self, x: Float32, place: Int32 | int) -> Float32:
        """What the thread with the other half of this row has given. Two calls, one after the
        other, have different places: the barrier of the second one orders what the first reads
        and the next one writes."""
        thread, _, _ = cute.arch.thread_idx()
        halves = self.shared.halves
        halves[thread, place] = x
        warps = cute.arch.warp_idx() % 2
        cute.arch.barrier(barrier_id=BARRIER + warps, number_of_threads=THREADS // 2)
        return halves[thread ^ CTA_ROWS, place]

    def score_row(self, rows: UnitRows) -> ScoreRow:
        """This thread's part of a row of scores."""
        s, args = self.shared, self.shared.args
        keys = s.sizes.keys(args, rows.batch)
        mask = Mask(s.info.band, KEYS_OF_CTA, rows.seq_q.length, keys, (rows.query(self.row),))
        heads = (rows.head_of(self.row),)
        ops = ScoreOps(mask, args.scale, None, None, None, rows.batch, heads)
        threshold = threshold_of(s.sK.element_type, s.config.rescale_threshold, 15.0)
        headroom = headroom_of(s.sK.element_type, threshold / 2)
        softmax = RowSoftmax.start(ops.unit(), threshold, headroom)
        return ScoreRow(self.tmem, KEYS_OF_CTA, softmax, ops)

    @cute.jit
    def block(
        self,
        row: ScoreRow,
        blocks: Blocks,
        i: Int32,
        buffer: PipelineState,
        o_phase: cutlass.Constexpr[Int32 | None],
        factors: cute.Tensor,
    ) -> None:
        """Turn the scores in `buffer` into probabilities in smem, and scale O, whose PV of the
        block before ends phase `o_phase`, where the reference moves."""
        s, c, dtype = self.shared, self.shared.config, self.shared.sK.element_type
        n_block = blocks.end - 1 - i
        masked = (n_block >= blocks.clean_end) | (n_block < blocks.clean_first)
        column = buffer.slot * KEYS_OF_CTA
        highest, first = row.search(column, CTAS * n_block + self.half, masked)
        highest = cute.arch.fmax(highest, self.other(highest, buffer.slot))
        moved = row.softmax.raise_reference(highest, factors)
        if cutlass.const_expr(o_phase is not None):
            s.barriers.o_full.wait(o_phase)
            if moved:
                fence_after_sync()
                for half in cutlass.range_constexpr(2):
                    scale_columns(self.tmem, c.o_column + half * COLUMNS, COLUMNS, factors[0])
        row.exponentials(column, (highest, first), dtype, self.write)
        cute.arch.fence_view_async_tmem_store()
        cute.arch.fence_view_async_shared()

    def write(self, probabilities: cute.Tensor, part: int) -> None:
        """Write a part of this thread's row of P."""
        units = PART // UNIT
        sP = self.shared.sP[self.row, None, 0]
        for j in range(units):
            # (bUnit)
            to = cute.local_tile(sP, (UNIT,), (self.half * (CTA_ROWS // UNIT) + part * units + j,))
            cute.autovec_copy(cute.local_tile(probabilities, (UNIT,), (j,)), to)

    # ---- O

    @cute.jit
    def store(
        self,
        factor: Float32,
        lse: Float32,
        rows: UnitRows,
        piece: Piece,
        computed: cutlass.Boolean,
    ) -> None:
        """Store this thread's columns of a unit that is whole, or of a part; and say where the
        unit's parts are."""
        s, row = self.shared, self.row
        thread, _, _ = cute.arch.thread_idx()
        rank = cute.arch.block_idx_in_cluster()
        if (thread + rank == 0) & (piece.part == 0):
            self.parts.announce(piece.entry * s.sizes.heads + piece.head, piece)
        exists, whole = row < rows.count, piece.parts == 1
        of_unit = rank * CTA_ROWS + row
        if exists & (self.half == 0):
            if whole:
                self.out.store_lse(lse, rows, row)
            else:
                of_unit_lse = self.parts.partials.lse(piece.slot_of(piece.part))
                of_unit_lse[of_unit] = lse
        words = rows.words(self.out.mO, cutlass.min(row, cutlass.max(rows.count - 1, 0)))
        of_row = RoundedRow(words, None)
        of_part = self.parts.partials.row(cutlass.max(piece.slot_of(piece.part), 0), of_unit)
        for half in cutlass.range_constexpr(2):
            first = half * DIMS + self.half * COLUMNS
            for part in cutlass.range_constexpr(COLUMNS // PART):
                values = self.columns(half * (COLUMNS // PART) + part, factor, computed)
                column = first + part * PART
                if exists & whole:
                    of_row.store(column, rounded(values, self.out.mO.element_type))
                elif exists:
                    of_part.store(column, values)

    def columns(
        self, part: cutlass.Constexpr[int], factor: Float32, computed: cutlass.Boolean
    ) -> cute.Tensor:
        """Part `part` of this thread's columns of O (scaled_part)."""
        parts = columns_of(self.tmem, self.shared.config.o_column, 2 * COLUMNS)
        return scaled_part(parts, part, factor, computed)
