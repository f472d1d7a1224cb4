"""Mma: the warp of the leader of a pair that starts S = Q K^T and O += P V for both CTAs.

QK of a block is started before PV of the block before, so that the tensor cores compute it during
that block's softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode

from cutex.device.atoms.tmem import fence_after_sync
from cutex.device.atoms.umma import Umma, UmmaProduct, commit
from cutex.device.pipeline import PipelineState
from cutex.kernels.attention.mla.config import CHUNKS
from cutex.kernels.attention.mla.sm100.config import BOX, DIMS, KEYS_OF_CTA, ROWS
from cutex.kernels.attention.mla.sm100.shared import Shared

HALVES = 2  # of O's columns
STEPS = BOX // 16  # of K of a slot of V


@dataclass(frozen=True)
class Mma:
    shared: Shared
    tmem: cute.Pointer

    @cute.jit
    def run(self) -> None:
        """Start the products of this pair's parts."""
        s, c, dtype = self.shared, self.shared.config, self.shared.sK.element_type
        qk_mma = Umma(ROWS, c.tile_n, dtype, pair=True)
        tSrQ = qk_mma.a_slots(s.sQ)  # (MMA, MMA_M, MMA_K, CHUNK)
        qk = UmmaProduct(qk_mma, tSrQ, qk_mma.b_slots(s.sK), qk_mma.accumulator(self.tmem))
        pv_mma = Umma(ROWS, DIMS, dtype, b_major=OperandMajorMode.MN, pair=True)
        tOrP = pv_mma.a_slots(s.sP)[None, None, None, 0]  # (MMA, MMA_M, MMA_K)
        acc_o = pv_mma.accumulator(self.tmem + c.o_column)
        pv = UmmaProduct(pv_mma, tOrP, pv_mma.b_slots(s.sVt), acc_o)
        splits, span, end = s.begin()
        kv, q, buffer = s.kv.consumer(), s.q.consumer(), s.barriers.buffers()
        p_phase = Int32(0)
        at = splits.begin
        while at < end:
            span = s.span_at(splits, at, span)
            piece = splits.piece(at, span)
            at = piece.after
            if piece.end > piece.first:
                blocks = s.of_piece(piece)
                count = blocks.end - blocks.first
                if count > 0:
                    s.q.wait_full(q)
                    for i in cutlass.range(count + 1, unroll=1):
                        if i < count:
                            kv = self.scores(qk, kv, buffer)
                            buffer.advance()
                        if i == count - 1:
                            commit(s.q.empty[0], pair=True)
                        if i > 0:
                            s.barriers.p_full.wait(p_phase)
                            p_phase ^= 1
                            kv = self.outputs(pv, kv, i > 1)
                    q.advance()

    @cute.jit
    def scores(
        self, qk: cutlass.Constexpr[UmmaProduct], kv: PipelineState, buffer: PipelineState
    ) -> PipelineState:
        """Start QK of a block into a buffer of S, chunk by chunk."""
        s = self.shared
        into = qk.at(buffer.slot * KEYS_OF_CTA)
        for chunk in cutlass.range_constexpr(CHUNKS):
            s.kv.wait_full(kv)
            fence_after_sync()
            into.of(qk.a[None, None, None, chunk]).issue(kv.slot, accumulate=chunk > 0)
            commit(s.kv.empty[kv.slot], pair=True)
            kv.advance()
        commit(s.barriers.s_full[buffer.slot], pair=True)
        return kv

    @cute.jit
    def outputs(
        self, pv: cutlass.Constexpr[UmmaProduct], kv: PipelineState, accumulate: Boolean
    ) -> PipelineState:
        """Start PV of a block, half by half of O's columns, 32 keys at a time."""
        s = self.shared
        fence_after_sync()
        parts = cute.logical_divide(pv.a, (None, None, STEPS))
        for half in cutlass.range_constexpr(HALVES):
            into = pv.at(half * (DIMS // 2))
            for group in cutlass.range_constexpr(s.config.tile_n // BOX):
                s.kv.wait_full(kv)
                product = into.of(parts[None, None, (None, group)])
                product.issue(kv.slot, accumulate if group == 0 else True)
                commit(s.kv.empty[kv.slot], pair=True)
                kv.advance()
        commit(s.barriers.o_full[0], pair=True)
        return kv
