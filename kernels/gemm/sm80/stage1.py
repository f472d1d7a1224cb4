"""Stage 1: swizzle. The four chunks of 16 bytes of a row are permuted by XOR with bits 1 and 2 of
the row, so that the same chunk of 8 neighbouring rows is in 8 different places of the banks."""

from __future__ import annotations

from cutex.kernels.gemm.sm80.stage0 import Stage0


class Stage1(Stage0):
    swizzled = True
