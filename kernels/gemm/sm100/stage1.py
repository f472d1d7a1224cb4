"""Stage 1: 128-byte swizzle, and a tile twice as wide.

Idea: let a row of the smem tile be 128 bytes and permute its eight 16-byte units by the row's
number. The eight rows of a core matrix are still in different banks, and now a TMA box is the
whole tile: two TMA instructions for each 64 of K instead of sixteen, each row a full 128-byte line.

Changed since stage 0: `swizzle`, and the default tile, 128x256: 85 FLOP for each byte through L2
instead of 64, and the MMA reads 96 bytes of smem in a cycle instead of 128, all that the port
delivers.

Expect two to three times stage 0: 48 KB come in some 900 cycles from L2, the MMA takes 512. They
still take turns.
"""

from __future__ import annotations

from cutex.kernels.gemm.sm100.stage0 import Stage0


class Stage1(Stage0):
    """The kernel of stage 1: its barriers and its memory.

    smem      bytes                                       tmem   columns
    sA        tile_m * k_bytes               16384     acc    tile_n    256
    sB        tile_n * k_bytes               32768
    barriers  16, and 4 for the address of tmem
    """

    number = 1
    swizzle = 128
