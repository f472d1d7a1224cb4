"""Stores of registers to global memory, several neighbours of a row at a time."""

from __future__ import annotations

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import CopyUniversalOp


@cute.jit
def store_vectors(
    rX: cute.Tensor, gX: cute.Tensor, cX: cute.Tensor, bounds: cute.Coord, width: cutlass.Constexpr
) -> None:
    """Store rX to gX, `width` elements at a time, where cX, the global coordinate, is in bounds.

    All three have one shape; consecutive elements are neighbours in a row, and a vector that starts
    in bounds must end in bounds.
    """
    vectors = cute.make_layout((width, cute.size(rX) // width))
    rX = cute.composition(rX, vectors)  # (V, NumV)
    gX = cute.composition(gX, vectors)  # (V, NumV)
    cX = cute.composition(cX, vectors)  # (V, NumV)
    store = cute.make_copy_atom(
        CopyUniversalOp(), gX.element_type, num_bits_per_copy=width * gX.element_type.width
    )
    for v in cutlass.range(cute.size(rX, mode=[1]), unroll_full=True):
        if cute.elem_less(cX[0, v], bounds):
            cute.copy(store, rX[None, v], gX[None, v])
