"""Stage 1: loads and stores of 16 bytes, four of them a thread under way.

A warp that loads 2 bytes a lane asks for 64 bytes at a time; with four vectors a lane it asks for
2 KB. Rows that do not begin at a multiple of 16 bytes are loaded by the vectors of memory, their
ends by the element; the weights, which then lie across two vectors each, are cut from both.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, cute

from cutex.device.row.columns import Columns
from cutex.kernels.norm.stage0 import Stage0
from cutex.kernels.row.kernel import parts_of


class Stage1(Stage0):
    @cute.jit
    def squares(self, gX: cute.Tensor) -> Float32:
        total = Float32(0)
        columns = Columns.of(self.config.tile, gX)
        for part in cutlass.range(parts_of(self.config.tile, gX), unroll=1):
            x = columns.moved(part).load(gX).load().to(Float32)  # (V, NumV)
            total += (x * x).reduce(cute.ReductionOp.ADD, Float32(0), 0)
        return total

    @cute.jit
    def write(self, gX: cute.Tensor, gY: cute.Tensor, mW: cute.Tensor, rstd: Float32) -> None:
        columns = Columns.of(self.config.tile, gX)
        for part in cutlass.range(parts_of(self.config.tile, gX), unroll=1):
            here = columns.moved(part)
            x = here.load(gX).load().to(Float32)  # (V, NumV)
            weight = here.held(mW).load().to(Float32)  # (V, NumV)
            here.store(here.rounded(x * rstd * weight, gY), gY)
