"""The epilogue of the kernels by mma.sync: operations on the sums, and stores from registers."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from cutex.device.epilogue.epilogue_ops import BoundOps, Fragment
from cutex.kernels.gemm.sm80.mma import WarpProduct

PAIR = 2  # neighbours of a row that a thread holds


@cute.jit
def store(
    product: WarpProduct,
    mOut: cute.Tensor,
    bound: BoundOps,
    corner: tuple[Int32, Int32],
    batch: Int32 | int,
    by_pairs: cutlass.Constexpr,
) -> None:
    """Run the operations on 16 rows of this warp's sums at a time, and store them to mOut (M, N)
    of `batch`, two neighbours at a time if `by_pairs`: if these are whole 4 or 8 bytes."""
    acc, coordinates = product.acc, product.tCcC
    columns = tuple(
        corner[1] + coordinates[(pair, 0), 0, n][1]
        for n in range(cute.size(acc, mode=[2]))
        for pair in range(PAIR)
    )
    for m in cutlass.range_constexpr(cute.size(acc, mode=[1])):
        rows = tuple(corner[0] + coordinates[(0, low), m, 0][0] for low in range(2))
        values = cute.make_rmem_tensor((2, len(columns)), Float32)  # (R, C)
        for low in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(len(columns)):
                values[low, i] = acc[(i % PAIR, low), m, i // PAIR]
        x = bound.apply(Fragment(values, rows, columns, batch, bound.bounds, PAIR))
        if cutlass.const_expr(by_pairs and x.run >= PAIR):
            _store_pairs(x, mOut)
        else:
            bound.store_elements(x, mOut)


@cute.jit
def _store_pairs(x: Fragment, mOut: cute.Tensor) -> None:
    for r in cutlass.range_constexpr(len(x.rows)):
        for c in cutlass.range_constexpr(0, len(x.columns), PAIR):
            if x.rows[r] < x.bounds[0] and x.columns[c] < x.bounds[1]:
                pair = cute.make_rmem_tensor(PAIR, mOut.element_type)
                for i in cutlass.range_constexpr(PAIR):
                    pair[i] = x.values[r, c + i].to(mOut.element_type)
                at = mOut.iterator + cute.crd2idx((x.rows[r], x.columns[c]), mOut.layout)
                size = PAIR * mOut.element_type.width // 8
                cute.autovec_copy(pair, cute.make_tensor(at.align(size), cute.make_layout(PAIR)))
