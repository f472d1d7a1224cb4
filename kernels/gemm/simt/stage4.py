"""Stage 4: a XOR swizzle instead of the padding.

Column k of row r is stored where column k XOR r was: for each r that is a permutation of the 32
banks, and so it is for each k. Nothing is wasted, and a row stays aligned; an address costs one
more instruction. `Swizzle<5, 0, 5>` is this function on the offset: the 5 bits above the lowest 5,
the row, are XORed into these.
"""

from __future__ import annotations

from cutlass import cute

from cutex.kernels.gemm.simt.stage2 import Stage2


class Stage4(Stage2):
    def layout(self) -> cute.ComposedLayout:
        return cute.make_composed_layout(cute.make_swizzle(5, 0, 5), 0, super().layout())
