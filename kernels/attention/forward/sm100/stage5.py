"""Stage 5: O is scaled only where a reference moves far.

Idea: softmax is the same whatever its scores are compared with, as long as nothing overflows. While
the maximum of a row exceeds its reference by less than 2^8, sums and O stay as they are
(FlashAttention-4's conditional rescaling). After the first block that is nearly always so.

Changed since stage 4: `rescale_threshold`.

It saves moving a row of O from tensor memory to registers and back: 128 multiplications, 4 loads
and 4 stores of 32 columns, and the wait for them, between S and P, where only the other Q tile's
products can hide it. Scaling is then so rare that it needs no warps of its own, such as
FlashAttention-4's correction warps.
"""

from __future__ import annotations

from cutex.kernels.attention.forward.sm100.stage4 import Stage4


class Stage5(Stage4):
    """Barriers, smem and tensor memory: as in stage 3."""

    number = 5

    @property
    def rescale_threshold(self) -> float:
        return 8.0
