"""Stage 7: exponentials do not wait for the maximum, so that a row is one stream.

Idea: where references need not be maxima, they need not be known first either. A block without a
mask is taken with the reference of those before, and its maximum is searched beside the
exponentials; P is held back, in registers, until the last scores are seen. If a row then exceeds
its reference by too much, S is still whole, and the block is taken again, the maximum first. Else
no column has waited for another: S is read only once, and PV starts when three quarters of P are
complete, while the rest is still S.

Changed since stage 6: `rows` (TentativeRowLoop), and after how many columns of P the second product
starts.

From S to the first P it is one pass over a row instead of two. A softmax thread spills two to four
words: what it knows of its tile and, at head dim 128, its reference, which it reads once a block.
"""

from __future__ import annotations

from dataclasses import replace

from cutex.kernels.attention.forward.sm100.config import Sm100ForwardConfig
from cutex.kernels.attention.forward.sm100.ladder import Sm100LadderConfig
from cutex.kernels.attention.forward.sm100.softmax import TentativeRowLoop
from cutex.kernels.attention.forward.sm100.stage6 import Stage6


class Stage7(Stage6):
    """Barriers, smem, tensor memory and registers: as in forward.py."""

    number = 7
    rows = TentativeRowLoop

    def with_numbers(self, config: Sm100LadderConfig) -> Sm100ForwardConfig:
        return replace(super().with_numbers(config), p_first=config.tile_n * 3 // 4)
