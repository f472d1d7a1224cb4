"""The gate of products whose first half of columns gates the second, as transformers stores them:
y = silu(h[:, :F]) * h[:, F:], and its gradient dh. Rows of no group are neither read nor
written."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute

from cutex.compile import Argument, Operand
from cutex.kernels.mixture.combine import ARCHS, CTAS, VECTOR, vectors
from cutex.kernels.mixture.gate import THREADS, loaded, sigmoid, store


@dataclass(frozen=True)
class HalvesConfig:
    """The config: whether the kernel computes the gradient."""

    gradient: bool = False


class Halves:
    """A CTA computes one row after the other; a thread has 8 columns of y at a time."""

    archs = ARCHS

    def __init__(self, config: HalvesConfig) -> None:
        self.config = config

    @property
    def name(self) -> str:
        return "mixture_halves"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        h, y = Operand("h", ("r", "f2"), dtype), Operand("y", ("r", "f"), dtype)
        edges = Operand("edges", ("e",), "int32", aligned=False, whole=False)
        return (h, y, edges, Operand("dh", ("r", "f2"), dtype))[: 4 if self.config.gradient else 3]

    @cute.jit
    def __call__(self, mH: cute.Tensor, mY: cute.Tensor, edges: cute.Tensor, *rest) -> None:
        """Launch with h (R, 2 F), y (R, F), which for the gradient is that of y, edges (E), dh (R,
        2 F) for the gradient, and a stream."""
        *dh, stream = rest
        ctas = cutlass.min(cute.size(mH, mode=[0]), CTAS)
        self.kernel(mH, mY, edges, tuple(dh)).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), use_pdl=True, stream=stream
        )

    @cute.kernel
    def kernel(
        self, mH: cute.Tensor, mY: cute.Tensor, edges: cute.Tensor, dh: tuple[cute.Tensor, ...]
    ) -> None:
        """Compute the rows of all groups."""
        thread, _, _ = cute.arch.thread_idx()
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        end = edges[cute.size(edges) - 1]
        for row in cutlass.range(first, end, step, unroll=1):
            gH, gY = vectors(mH, row), vectors(mY, row)  # (V, 2 NumV), (V, NumV)
            half = cute.size(gY, mode=[1])
            for v in cutlass.range(thread, half, THREADS, unroll=1):
                if cutlass.const_expr(self.config.gradient):
                    (mDh,) = dh
                    self.gradient(gH, gY[None, v], vectors(mDh, row), v, half)
                else:
                    self.forward(gH, gY[None, v], v, half)

    @cute.jit
    def forward(self, gH: cute.Tensor, gY: cute.Tensor, v: Int32, half: Int32) -> None:
        """y from h, 8 columns."""
        gates, ups = loaded(gH[None, v]), loaded(gH[None, v + half])  # (V) each
        y = cute.make_rmem_tensor(VECTOR, Float32)  # (V)
        for i in cutlass.range_constexpr(VECTOR):
            y[i] = gates[i] * sigmoid(gates[i]) * ups[i]
        store(y, gY)

    @cute.jit
    def gradient(
        self, gH: cute.Tensor, gDy: cute.Tensor, gDh: cute.Tensor, v: Int32, half: Int32
    ) -> None:
        """dh from h and dy, 8 columns of each half."""
        gates, ups, dy = loaded(gH[None, v]), loaded(gH[None, v + half]), loaded(gDy)  # (V) each
        of_gates, of_ups = (cute.make_rmem_tensor(VECTOR, Float32) for _ in range(2))  # (V) each
        for i in cutlass.range_constexpr(VECTOR):
            inner = sigmoid(gates[i])
            activated = gates[i] * inner
            of_gates[i] = dy[i] * ups[i] * (inner + activated * (1.0 - inner))
            of_ups[i] = dy[i] * activated
        store(of_gates, gDh[None, v])
        store(of_ups, gDh[None, v + half])
