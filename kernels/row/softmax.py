"""Softmax of rows, each read once, and its gradient."""

from __future__ import annotations

import functools
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from cutex.compile import Argument
from cutex.device.atoms.scalar import exp2, fma, larger_pair
from cutex.device.row.columns import Columns
from cutex.device.row.reduction import RowReduction, Values, add, lanes
from cutex.device.row.tile import WARP
from cutex.device.row.words import halves
from cutex.device.stream_order import wait_for_kernel_before
from cutex.kernels.row.kernel import (
    LOG2_E,
    RowKernel,
    ThisRow,
    launch_of,
    matrix,
    meet,
    reductions,
    row_of,
)

LOW_BITS = 0x7FFFFFFF
LARGE = 2.0**30


def exp(x: Any) -> Any:
    """The exponential, by MUFU."""
    return cute.math.exp2(x * LOG2_E, fastmath=True)


def above(top: Float32) -> Float32:
    """The reference that scores are taken relative to: their maximum, or 0 where all are -inf."""
    return cutlass.select_(top == -Float32.inf, Float32(0), top)


def largest(rX: cute.Tensor) -> Float32:
    """The largest element of rX; those of 16 bits two at a time. NaN counts for less than any."""
    if rX.element_type is Float32:
        return functools.reduce(cute.arch.fmax, (rX[i] for i in range(cute.size(rX))))
    rWords = cute.recast_tensor(rX, Int32)
    larger = functools.partial(larger_pair, dtype=rX.element_type)
    word = functools.reduce(larger, (rWords[i] for i in range(cute.size(rWords))))
    return cute.arch.fmax(*halves(word, rX.element_type))


def exponentials_by_fma(x: list[Float32], own: Float32) -> tuple[list[Float32], Float32]:
    """2^(x log2(e) - m) by a multiply-add and MUFU, of which m is that of the maximum of x,
    rounded; and the factor, near 1, that makes them the exponentials relative to the maximum."""
    top = above(own)
    # NOTE: up to here m is at most 64 off. Numbers below a larger one are so by 64 or more, and
    # their exponentials nothing beside it, to whatever base
    is_product = cute.arch.fmax(top, -top) < LARGE
    by = Float32(cutlass.select_(is_product, Float32(LOG2_E), Float32(1)))
    shift = top * by
    return [exp2(fma(v, by, -shift)) for v in x], exp2(-fma(top, by, -shift))


def merged(x: Values, y: Values) -> Values:
    """The maximum of two sets of scores, and the sum of their exponentials relative to it."""
    top = cute.arch.fmax(x[0], y[0])
    shift = above(top)
    return top, sum(s * exp(t - shift) for t, s in (x, y))


def combined(
    reduction: RowReduction, values: Values, turn: Int32 | int = 0, turns: Int32 | int = 1
) -> Values:
    """The maximum of a row's scores, the sum of their exponentials relative to it, and other sums,
    from those of its threads; called like `reduction`."""
    group = min(reduction.tile.threads, WARP)
    own, total, *more = values
    top = highest(own, group)
    values = lanes((total * exp(own - above(top)), *more), add, group)
    return reduction.of_warps((top, *values), gathered, turn, turns)


def gathered(found: list[Values], group: int) -> Values:
    """The same of the values of warps, each lane of a group having some."""
    top = highest(functools.reduce(cute.arch.fmax, (own for own, *_ in found)), group)
    parts = [(total * exp(own - above(top)), *more) for own, total, *more in found]
    return top, *lanes(functools.reduce(add, parts), add, group)


def highest(x: Float32, group: int) -> Float32:
    """The maximum over `group` neighbouring lanes; NaN may count for less or more than any."""
    if group < WARP:
        return lanes((x,), lambda a, b: (cute.arch.fmax(a[0], b[0]),), group)[0]
    # one instruction, for integers: of negative numbers all bits but the sign are turned round
    word = Float32(x).bitcast(Int32)
    found = cute.arch.warp_redux_sync(word ^ ((word >> 31) & LOW_BITS), "max")
    return (found ^ ((found >> 31) & LOW_BITS)).bitcast(Float32)


class Softmax(RowKernel):
    """y = exp(x - max) / sum of exp(x - max), in one pass: each thread's exponentials are relative
    to its own maximum until those of the row are combined."""

    title = "softmax"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return matrix("x", dtype, self.config), matrix("y", dtype, self.config)

    @cute.jit
    def __call__(self, mX: cute.Tensor, mY: cute.Tensor, stream) -> None:
        self.kernel(mX, mY).launch(**launch_of(self.config, mX, stream))

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mY: cute.Tensor) -> None:
        tile = self.config
        (reduction,) = reductions(tile, 2, later=True, by_cta=True)
        this = ThisRow.of(tile, mX)
        columns = Columns.of(tile, this(mX))
        wait_for_kernel_before()
        rX = row_of(mX, this, columns, -Float32.inf)  # (V, NumV)
        meet(tile)
        x = rX.load().to(Float32)
        own = x.reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
        e = exp(x - above(own))
        total = e.reduce(cute.ReductionOp.ADD, Float32(0), 0)
        top, total = combined(reduction, (own, total))
        # NOTE: not of above(own): where a thread has only -inf, and the row's maximum is far below
        # 0, that would be inf, and 0 times it NaN
        factor = exp(own - above(top)) * cute.arch.rcp_approx(total)
        if this.exists:
            columns.store(columns.rounded(e * factor, mY), this(mY))


class SoftmaxBackward(RowKernel):
    """dx = y * (dy - sum of y * dy)."""

    title = "softmax_backward"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return tuple(matrix(name, dtype, self.config) for name in ("y", "dy", "dx"))

    @cute.jit
    def __call__(self, mY: cute.Tensor, mdY: cute.Tensor, mdX: cute.Tensor, stream) -> None:
        self.kernel(mY, mdY, mdX).launch(**launch_of(self.config, mY, stream))

    @cute.kernel
    def kernel(self, mY: cute.Tensor, mdY: cute.Tensor, mdX: cute.Tensor) -> None:
        tile = self.config
        (reduction,) = reductions(tile, 1)
        this = ThisRow.of(tile, mY)
        columns = Columns.of(tile, this(mY))
        wait_for_kernel_before()
        y = row_of(mY, this, columns).load().to(Float32)  # (V, NumV)
        dy = row_of(mdY, this, columns).load().to(Float32)  # (V, NumV)
        (total,) = reduction(((y * dy).reduce(cute.ReductionOp.ADD, Float32(0), 0),), add)
        if this.exists:
            columns.store(columns.rounded(y * (dy - total), mdX), this(mdX))
