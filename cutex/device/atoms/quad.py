"""Exchanges between the four lanes that hold a row of a wgmma accumulator."""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

STAGES = (1, ((0, 1), (2, 3))), (2, ((0, 2), (1, 3)))  # lanes apart, and the words exchanged


@cute.jit
def transpose_in_quad(words: cute.Tensor) -> None:
    """Make word i of lane q, of each four lanes, word q of lane i; `words` (4) of 32 bits. A whole
    warp calls it."""
    lane = cute.arch.lane_idx()
    for stage in cutlass.range_constexpr(len(STAGES)):
        apart, pairs = STAGES[stage]
        upper = (lane & apart) != 0
        for n in cutlass.range_constexpr(len(pairs)):
            i, j = pairs[n]
            sent = words[i] if upper else words[j]
            got = Int32(cute.arch.shuffle_sync_bfly(sent, offset=apart))
            words[i], words[j] = (got if upper else words[i]), (words[j] if upper else got)
