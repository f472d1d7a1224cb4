"""Stage 8: a quarter of the exponentials on FMA units.

Idea: tensor cores double from Hopper to Blackwell, MUFU does not: for two Q tiles and 128 keys both
take 2048 cycles at head dim 128, and at head dim 64 the exponentials take twice as long as the
products. 2^x is also 2^whole, which is an addition to the exponent, times 2^fraction, which is a
polynomial: ten instructions for two columns, on units that are eight times as wide
(FlashAttention-4, after Cody and Waite).

Changed since stage 7: the number of each 16 exponentials by FMA (row_softmax.py, packed.py).

2048 cycles of MUFU become 1536, for 1.4 more instructions for each score: 4.0 instead of 2.7, of
which two softmax warps of a scheduler issue 1032 in the 2048 cycles of a block.
"""

from __future__ import annotations

from dataclasses import replace

from cutex.kernels.attention.forward.sm100.config import Sm100ForwardConfig
from cutex.kernels.attention.forward.sm100.ladder import Sm100LadderConfig
from cutex.kernels.attention.forward.sm100.stage7 import Stage7


class Stage8(Stage7):
    """Barriers, smem, tensor memory and registers: as in forward.py."""

    number = 8

    def with_numbers(self, config: Sm100LadderConfig) -> Sm100ForwardConfig:
        return replace(super().with_numbers(config), by_fma=4)
