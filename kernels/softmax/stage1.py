"""Stage 1: the maximum and the sum in one pass.

Each thread's sum is relative to the largest score that it has seen: where a larger one comes, the
sum is scaled by the exponential of the difference. Threads merge pairs of (maximum, sum) by the
same rule. x is read twice instead of three times, for one more exponential an element.

Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, cute

from cutex.device.row.reduction import RowReduction, Values
from cutex.kernels.row.softmax import merged
from cutex.kernels.softmax.stage0 import Stage0


class Stage1(Stage0):
    counts = (2,)

    @cute.jit
    def statistics(self, gX: cute.Tensor, over_cta: list[RowReduction]) -> Values:
        found = -Float32.inf, Float32(0)
        first, threads = cute.arch.thread_idx()[0], self.config.threads
        for column in cutlass.range(first, cute.size(gX), threads):
            found = merged(found, (gX[column].to(Float32), Float32(1)))
        return over_cta[0](found, merged)
