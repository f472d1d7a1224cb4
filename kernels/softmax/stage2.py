"""Stage 2: loads and stores of 16 bytes, four of them a thread under way.

A warp that loads 2 bytes a lane asks for 64 bytes at a time; the latency of memory then needs more
warps than an SM has. With four vectors a lane it asks for 2 KB, and what a thread has in registers
is relative to one maximum, so that rescaling costs two exponentials a part and not one an element.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, cute

from cutex.device.row.columns import Columns
from cutex.device.row.reduction import RowReduction, Values
from cutex.kernels.row.kernel import parts_of
from cutex.kernels.row.softmax import above, exp, merged
from cutex.kernels.softmax.stage1 import Stage1


class Stage2(Stage1):
    @cute.jit
    def statistics(self, gX: cute.Tensor, over_cta: list[RowReduction]) -> Values:
        found = -Float32.inf, Float32(0)
        columns = Columns.of(self.config.tile, gX)
        for part in cutlass.range(parts_of(self.config.tile, gX), unroll=1):
            x = columns.moved(part).load(gX, -Float32.inf).load().to(Float32)  # (V, NumV)
            own = x.reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
            total = exp(x - above(own)).reduce(cute.ReductionOp.ADD, Float32(0), 0)
            found = merged(found, (own, total))
        return over_cta[0](found, merged)

    @cute.jit
    def write(self, gX: cute.Tensor, gY: cute.Tensor, top: Float32, factor: Float32) -> None:
        columns = Columns.of(self.config.tile, gX)
        for part in cutlass.range(parts_of(self.config.tile, gX), unroll=1):
            here = columns.moved(part)
            x = here.load(gX).load().to(Float32)  # (V, NumV)
            here.store(here.rounded(exp(x - above(top)) * factor, gY), gY)
