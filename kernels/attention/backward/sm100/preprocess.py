"""Preprocess on Blackwell: LSE and delta of a row as one more step of K of the products S and dP.

    [Q, lse_0, lse_1, lse_2, delta_0, delta_1, delta_2] of a row, 16 bits each

where lse_0 + lse_1 + lse_2 = LSE / scale and delta_0 + ... = delta, to 24 bits. Keys have -1 in the
first three places for S, in the last three for dP, so that tensor cores subtract both, and nobody
reads them.
"""

from __future__ import annotations

import cutlass
from cutlass import BFloat16, Float32, Int32, cute

from cutex.device.attention.softmax import LOG2_E
from cutex.kernels.attention.backward import preprocess
from cutex.kernels.attention.backward.signature import KernelArgs
from cutex.kernels.attention.backward.sm100.config import FOLDED, TERMS, Sm100BackwardConfig

LARGEST = 2.0**127  # P of a row with this LSE is 0; the largest power of two of bf16


class Preprocess(preprocess.Preprocess):
    config: Sm100BackwardConfig

    @cute.jit
    def keep(
        self, stats: cute.Tensor, place: Int32, lse: Float32, delta: Float32, args: KernelArgs
    ) -> None:
        if cutlass.const_expr(not self.config.folded):
            stats[place] = lse
            stats[self.config.tile_m + place] = delta
        else:
            terms = cute.make_rmem_tensor(cute.make_layout(FOLDED), BFloat16)
            terms.fill(0.0)
            for first, x in ((0, lse / (args.scale * LOG2_E)), (TERMS, delta)):
                rest = cutlass.min(cutlass.max(x, Float32(-LARGEST)), Float32(LARGEST))
                rest = rest if x == x else x  # NaN stays
                for i in cutlass.range_constexpr(TERMS):
                    terms[first + i] = rest.to(BFloat16)
                    rest -= terms[first + i].to(Float32)
            words = cute.recast_tensor(terms, Float32)  # (FOLDED / 2)
            rows = cute.logical_divide(stats, cute.make_layout(FOLDED // 2))
            cute.autovec_copy(words, rows[None, place])
