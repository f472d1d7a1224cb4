"""Stage 0: three passes over a row, a CTA for each.

The maximum, the sum of exponentials relative to it, then the results: each a loop over the row, an
element a thread. x is read three times, though from L2 where rows are short enough.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from cutex.compile import Argument, Operand
from cutex.device.row.reduction import RowReduction, Values, add
from cutex.kernels.row.kernel import matrix, reductions
from cutex.kernels.row.ladder import PassesConfig
from cutex.kernels.row.softmax import above, exp
from cutex.kernels.softmax import ARCHS


class Stage0:
    """y = exp(x - max) / sum of exp(x - max), of each row of x (M, N)."""

    archs = ARCHS
    dtypes = ("bf16", "fp16", "fp32")
    counts: tuple[int, ...] = (1, 1)  # values of each reduction over the CTA

    def __init__(self, config: PassesConfig) -> None:
        self.config = config

    @property
    def name(self) -> str:
        return f"softmax_{type(self).__name__.lower()}"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        if self.config.vectors:
            return matrix("x", dtype, self.config.tile), matrix("y", dtype, self.config.tile)
        return tuple(Operand(n, ("m", "n"), dtype, aligned=False, whole=False) for n in "xy")

    @cute.jit
    def __call__(self, mX: cute.Tensor, mY: cute.Tensor, stream) -> None:
        self.kernel(mX, mY).launch(
            grid=(cute.size(mX, mode=[0]), 1, 1), block=(self.config.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mY: cute.Tensor) -> None:
        over_cta = reductions(self.config.tile, *self.counts)
        row = cute.arch.block_idx()[0]
        gX, gY = mX[row, None], mY[row, None]  # (N)
        top, total = self.statistics(gX, over_cta)
        self.write(gX, gY, top, cute.arch.rcp_approx(total))

    @cute.jit
    def statistics(self, gX: cute.Tensor, over_cta: list[RowReduction]) -> Values:
        """The maximum of a row, and the sum of its exponentials relative to it."""
        thread, threads = cute.arch.thread_idx()[0], self.config.threads
        top = -Float32.inf
        for column in cutlass.range(thread, cute.size(gX), threads):
            top = cute.arch.fmax(top, gX[column].to(Float32))
        (top,) = over_cta[0]((top,), highest)
        total = Float32(0)
        for column in cutlass.range(thread, cute.size(gX), threads):
            total += exp(gX[column].to(Float32) - above(top))
        (total,) = over_cta[1]((total,), add)
        return top, total

    @cute.jit
    def write(self, gX: cute.Tensor, gY: cute.Tensor, top: Float32, factor: Float32) -> None:
        threads = self.config.threads
        for column in cutlass.range(Int32(cute.arch.thread_idx()[0]), cute.size(gX), threads):
            e = exp(gX[column].to(Float32) - above(top))
            gY[column] = (e * factor).to(gY.element_type)


def highest(x: Values, y: Values) -> Values:
    return (cute.arch.fmax(x[0], y[0]),)
