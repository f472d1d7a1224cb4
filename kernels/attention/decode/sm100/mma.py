"""Mma: the warp of the Blackwell decode kernel that starts S = Q K^T and O += P V.

QK of a block is started before PV of the block before, so that the tensor cores compute it during
that block's softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode

from cutex.device.atoms.mma import contiguous_rows_layout
from cutex.device.atoms.tmem import fence_after_sync
from cutex.device.atoms.umma import Umma, UmmaProduct, commit
from cutex.device.pipeline import PipelineState
from cutex.kernels.attention.decode.shared import Shared
from cutex.kernels.attention.decode.sm100.config import ROWS, Sm100DecodeConfig
from cutex.kernels.attention.decode.sm100.shared import Barriers
from cutex.kernels.attention.decode.splits import Piece


@dataclass(frozen=True)
class Mma:
    """The MMA role: S = Q K^T and O += P V of every block."""

    config: Sm100DecodeConfig
    shared: Shared
    barriers: Barriers
    tmem: cute.Pointer

    @cute.jit
    def run(self) -> None:
        """Start the products of this CTA's parts."""
        s, c, dtype = self.shared, self.config, self.shared.sK.element_type
        qk_mma = Umma(ROWS, c.tile_n, dtype)
        assert s.sQ is not None
        tSrQ = qk_mma.a_slots(s.sQ)[None, None, None, 0]  # (MMA, MMA_M, MMA_K)
        qk = UmmaProduct(qk_mma, tSrQ, qk_mma.b_slots(s.sK), qk_mma.accumulator(self.tmem))
        pv_mma = Umma(ROWS, c.head_dim_v, dtype, b_major=OperandMajorMode.MN)
        transposed = contiguous_rows_layout(dtype, c.head_dim_v, c.tile_n, c.num_stages)
        sVt = cute.make_tensor(s.sV.iterator, transposed.outer)  # (DV, bN, SLOT)
        acc_o = pv_mma.accumulator(self.tmem + c.o_column)
        pv = UmmaProduct(pv_mma, None, pv_mma.b_slots(sVt), acc_o)
        of_k, of_v = ((ring.consumer(), self.barriers.buffers()) for ring in (s.k, s.v))
        s.each_part(lambda x, then: self.part(x, (qk, pv), *then), (Int32(0), *of_k, *of_v))

    @cute.jit
    def part(
        self,
        piece: Piece,
        products: cutlass.Constexpr[tuple[UmmaProduct, UmmaProduct]],
        q_phase: Int32,
        k: PipelineState,
        to_score: PipelineState,
        v: PipelineState,
        to_add: PipelineState,
    ) -> tuple[Int32, PipelineState, PipelineState, PipelineState, PipelineState]:
        """Start the products of a part's blocks."""
        (qk, pv), blocks = products, self.shared.of_piece(piece)
        count = blocks.end - blocks.first
        if count > 0:
            self.barriers.q_full.wait(q_phase)
            q_phase ^= 1
            fence_after_sync()
            for i in cutlass.range(count + 1, unroll=1):
                if i < count:
                    k, to_score = self.scores(qk, k, to_score)
                if i > 0:
                    v, to_add = self.outputs(pv, v, to_add, i > 1)
        return q_phase, k, to_score, v, to_add

    @cute.jit
    def scores(
        self, qk: cutlass.Constexpr[UmmaProduct], k: PipelineState, buffer: PipelineState
    ) -> tuple[PipelineState, PipelineState]:
        """Start QK of a block into a buffer of S."""
        b, ring = self.barriers, self.shared.k
        ring.wait_full(k)
        qk.at(buffer.slot * self.config.tile_n).issue(k.slot, accumulate=False)
        commit(b.s_full[buffer.slot], pair=False)
        commit(ring.empty[k.slot], pair=False)
        k.advance()
        buffer.advance()
        return k, buffer

    @cute.jit
    def outputs(
        self,
        pv: cutlass.Constexpr[UmmaProduct],
        v: PipelineState,
        buffer: PipelineState,
        accumulate: cutlass.Boolean,
    ) -> tuple[PipelineState, PipelineState]:
        """Start PV of a block, whose P is in a buffer."""
        b, ring, c = self.barriers, self.shared.v, self.config
        ring.wait_full(v)
        b.p_full.wait(buffer.phase, buffer.slot)
        fence_after_sync()
        tOrP = pv.mma.a_tmem(self.tmem, buffer.slot * c.tile_n, c.tile_n)
        pv.of(tOrP).issue(v.slot, accumulate)
        commit(b.o_full[buffer.slot], pair=False)
        commit(ring.empty[v.slot], pair=False)
        v.advance()
        buffer.advance()
        return v, buffer
