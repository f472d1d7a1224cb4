"""Values: a warpgroup of the MLA kernel that sums up half of the columns of O.

O of 64 rows and 512 columns in fp32 is half of the registers of an SM. A warpgroup has 256 columns,
128 registers a thread; P comes through smem.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cutex.device.atoms.quad import transpose_in_quad
from cutex.device.atoms.wgmma import Wgmma, WgmmaProduct
from cutex.device.attention.row_store import UNIT, WORDS
from cutex.device.attention.softmax import rows_of
from cutex.device.pipeline import PipelineState
from cutex.kernels.attention.decode.out import Out, Parts
from cutex.kernels.attention.decode.shared import Rows
from cutex.kernels.attention.decode.splits import Piece
from cutex.kernels.attention.mla.config import CHUNK, HEAD_DIM, HEAD_DIM_V
from cutex.kernels.attention.mla.sm90.config import SLOTS
from cutex.kernels.attention.mla.sm90.scores import rows_of_thread
from cutex.kernels.attention.mla.sm90.shared import GROUPS, Shared

COLUMNS = HEAD_DIM_V // 2  # of a warpgroup
PARTS = len(GROUPS)  # of these columns, one after the other


@dataclass(frozen=True)
class Values:
    out: Out
    parts: Parts
    shared: Shared
    half: Int32  # 0: the first columns, 1: the last

    @cute.jit
    def run(self) -> None:
        """Compute these columns of O of this CTA's parts, one after the other."""
        s = self.shared
        pv = self.product()
        factors = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        splits, span, end = s.begin()
        kv = s.kv.consumer()
        at = splits.begin
        while at < end:
            span = s.span_at(splits, at, span)
            piece = splits.piece(at, span)
            at = piece.after
            if piece.end > piece.first:
                rows, blocks = s.rows(piece), s.of_piece(piece)
                pv.acc.fill(0.0)
                factors.fill(1.0)
                if blocks.end > blocks.first:
                    kv = self.sum(pv, blocks.end - blocks.first, kv, factors)
                self.store(pv.acc, factors, rows, piece)

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
        self, pv: WgmmaProduct, count: Int32, kv: PipelineState, factors: cute.Tensor
    ) -> PipelineState:
        """Add `count` blocks; set the factors that O has to be multiplied by in the end."""
        for _ in cutlass.range(count - 1, unroll=1):
            self.add(pv, kv, None)
            kv.advance()
        self.add(pv, kv, factors)
        kv.advance()
        return kv

    @cute.jit
    def add(
        self, pv: WgmmaProduct, kv: PipelineState, factors: cutlass.Constexpr[cute.Tensor | None]
    ) -> None:
        """Add a block, once its P is there; with `factors`, the last."""
        words, mine = self.shared.words, rows_of_thread()
        self.shared.p_full.wait(kv.phase, kv.slot)
        if cutlass.const_expr(factors is not None):
            for r in cutlass.range_constexpr(2):
                factors[r] = words.normalisers[mine[r], kv.slot]
        if words.rescale[cute.arch.warp_idx() % 4, kv.slot] != 0:
            o = rows_of(pv.acc)
            for r in cutlass.range_constexpr(2):
                o[r, None].store(o[r, None].load() * words.factors[mine[r], kv.slot])
        for part in cutlass.range_constexpr(PARTS):
            b = cute.logical_divide(pv.b, (None, 1, None, None))[None, (None, part), None, None]
            acc = cute.logical_divide(pv.acc, (None, None, 1))[None, None, (None, part)]
            WgmmaProduct(pv.mma, pv.a, b, acc).issue(kv.slot, accumulate=True)
        for part in cutlass.range_constexpr(PARTS):
            warpgroup.wait_group(PARTS - 1 - part)
            self.shared.kv.release(kv, part)

    # ---- O

    @cute.jit
    def store(self, acc: cute.Tensor, factors: cute.Tensor, rows: Rows, piece: Piece) -> None:
        """Store these columns of a unit that is whole, or of a part."""
        o = rows_of(acc)
        for r in cutlass.range_constexpr(2):
            o[r, None].store(o[r, None].load() * factors[r])
        if piece.parts == 1:
            self.store_whole(o, rows)
        else:
            self.store_part(o, rows, piece)

    @cute.jit
    def store_whole(self, o: cute.Tensor, rows: Rows) -> None:
        """Store rows of O, 16 bytes a lane: of each four units of columns, of which a lane has a
        word each, it gets one as a whole."""
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
    def store_part(self, o: cute.Tensor, rows: Rows, piece: Piece) -> None:
        thread, _, _ = cute.arch.thread_idx()
        slot, first = piece.slot_of(piece.part), self.half * (COLUMNS // UNIT)
        mine = rows_of_thread()
        pair = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        for r in cutlass.range_constexpr(2):
            if mine[r] < rows.count:
                to = self.parts.partials.row(slot, mine[r])
                for unit in cutlass.range_constexpr(COLUMNS // UNIT):
                    for i in cutlass.range_constexpr(2):
                        pair[i] = o[r, 2 * unit + i]
                    to.store_pair(first + unit, thread % 4, pair)
