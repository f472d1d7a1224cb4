"""Stage 0: two passes over a row, a CTA for each.

The sum of squares, then the results: each a loop over the row, an element a thread. x is read
twice, though from L2 where rows are short enough.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from cutex.compile import Argument, Operand, Scalar
from cutex.device.row.reduction import add
from cutex.kernels.norm import ARCHS
from cutex.kernels.row.kernel import column_vector, matrix, reductions
from cutex.kernels.row.ladder import PassesConfig


class Stage0:
    """y = x / sqrt(mean of x^2 + eps) * weight, of each row of x (M, N)."""

    archs = ARCHS
    dtypes = ("bf16", "fp16", "fp32")

    def __init__(self, config: PassesConfig) -> None:
        self.config = config

    @property
    def name(self) -> str:
        return f"norm_{type(self).__name__.lower()}"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        x, y, weight = self.tensors(dtype)
        return x, y, weight, Scalar("eps")

    def tensors(self, dtype: str) -> tuple[Operand, ...]:
        if self.config.vectors:
            tile = self.config.tile
            rows = (matrix(name, dtype, tile) for name in "xy")
            return (*rows, column_vector("weight", dtype, tile))
        rows = (Operand(name, ("m", "n"), dtype, aligned=False, whole=False) for name in "xy")
        return (*rows, Operand("weight", ("n",), dtype, aligned=False, whole=False))

    @cute.jit
    def __call__(self, mX: cute.Tensor, mY: cute.Tensor, mW: cute.Tensor, eps, stream) -> None:
        self.kernel(mX, mY, mW, eps).launch(
            grid=(cute.size(mX, mode=[0]), 1, 1), block=(self.config.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mY: cute.Tensor, mW: cute.Tensor, eps: Float32) -> None:
        (over_cta,) = reductions(self.config.tile, 1)
        row = cute.arch.block_idx()[0]
        gX, gY = mX[row, None], mY[row, None]  # (N)
        (squares,) = over_cta((self.squares(gX),), add)
        self.write(gX, gY, mW, cute.math.rsqrt(squares / Float32(cute.size(gX)) + eps))

    @cute.jit
    def squares(self, gX: cute.Tensor) -> Float32:
        """The sum of squares of this thread's elements of a row."""
        total = Float32(0)
        first, threads = cute.arch.thread_idx()[0], self.config.threads
        for column in cutlass.range(first, cute.size(gX), threads):
            x = gX[column].to(Float32)
            total += x * x
        return total

    @cute.jit
    def write(self, gX: cute.Tensor, gY: cute.Tensor, mW: cute.Tensor, rstd: Float32) -> None:
        threads = self.config.threads
        for column in cutlass.range(Int32(cute.arch.thread_idx()[0]), cute.size(gX), threads):
            y = gX[column].to(Float32) * rstd * mW[column].to(Float32)
            gY[column] = y.to(gY.element_type)
