"""Stage 7: no maximum, so that a row is one stream.

Idea: where references need not be maxima, the maxima need not be computed either. The first blocks
set the references, blocks without a mask keep them, and the sums show at the end whether a row
overflowed; such a tile is computed again, with maxima (as in Hopper's stage 8). Then no column
waits for another: the first 32 become probabilities while the next are loaded, S is read only once,
and PV starts when three quarters of P are complete, while the rest is still S.

Changed since stage 6: `optimistic` and `p_first` (softmax.py: kind "add").

The clean step has 2.7 instructions for each score instead of 3.5, and from S to the first P it is a
quarter of a row instead of two whole ones.
"""

from __future__ import annotations

from dataclasses import replace

from cutex.kernels.attention.forward.sm100.config import Sm100Config
from cutex.kernels.attention.forward.sm100.ladder import Sm100LadderConfig
from cutex.kernels.attention.forward.sm100.stage6 import Stage6


class Stage7(Stage6):
    """Barriers, smem, tensor memory and registers: as in forward.py."""

    number = 7

    def cut(self, config: Sm100LadderConfig) -> Sm100Config:
        before = super().cut(config)
        return replace(before, optimistic=True, p_first=config.tile_n * 3 // 4)
