"""The gate between a mixture's two products, y = silu(h[:, 0::2]) * h[:, 1::2], and its gradient.

The forward pass of training keeps h alone, not y; the gradient computes y again:

    y = silu(gate) * up,  dS = sum over columns of dy * y,  dh = S * dy * (derivative),  S * y

where S is a router's weight of each row, and dy the gradient of y before S. S and dS are in the
order of the router's entries, of which `order` says for each row which it is. Rows of no group are
neither read nor written; their dS is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.compile import Argument, Operand
from cutex.kernels.mixture.combine import ARCHS, CTAS, VECTOR, vectors

THREADS = 128
WARPS = THREADS // 32


@dataclass(frozen=True)
class GateConfig:
    """The config: whether the kernel computes the gradient."""

    gradient: bool = False


class Gate:
    """A CTA computes one row after the other; a thread has 8 columns of y at a time.

    barrier    arrives                              waits
    0   (CTA)  all threads, each warp having        all; once more before the next row's
               written its part of a row's dS
    """

    archs = ARCHS

    def __init__(self, config: GateConfig) -> None:
        self.config = config

    @property
    def name(self) -> str:
        return "mixture_gate"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        edges = Operand("edges", ("e",), "int32", aligned=False, whole=False)
        h, y = (Operand(name, ("r", size), dtype) for name, size in (("h", "f2"), ("y", "f")))
        if not self.config.gradient:
            return h, y, edges
        s, ds = (Operand(x, ("r",), "fp32", aligned=False, whole=False) for x in ("s", "ds"))
        order = Operand("order", ("r",), "int32", aligned=False, whole=False)
        dy, dh = Operand("dy", ("r", "f"), dtype), Operand("dh", ("r", "f2"), dtype)
        return h, y, edges, s, dy, dh, ds, order

    @cute.jit
    def __call__(self, mH: cute.Tensor, mY: cute.Tensor, edges: cute.Tensor, *rest) -> None:
        """Launch with h (R, 2 F), y (R, F), edges (E), for the gradient s (R), dy (R, F), dh (R,
        2 F), ds (R), order (R), and a stream."""
        *others, stream = rest
        ctas = cutlass.min(cute.size(mH, mode=[0]), CTAS)
        self.kernel(mH, mY, edges, tuple(others)).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), use_pdl=True, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mH: cute.Tensor,
        mY: cute.Tensor,
        edges: cute.Tensor,
        others: tuple[cute.Tensor, ...],
    ) -> None:
        """Compute the rows of all groups."""
        thread, _, _ = cute.arch.thread_idx()
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        sSums = SmemAllocator().allocate_tensor(Float32, cute.make_layout(WARPS), byte_alignment=16)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        end = edges[cute.size(edges) - 1]
        for row in cutlass.range(first, end, step, unroll=1):
            gH, gY = vectors(mH, row, 2 * VECTOR), vectors(mY, row)  # (V, NumV) each
            total = Float32(0.0)
            for v in cutlass.range(thread, cute.size(gY, mode=[1]), THREADS, unroll=1):
                if cutlass.const_expr(self.config.gradient):
                    total += self.gradient(gH[None, v], gY[None, v], row, v, others)
                else:
                    self.forward(gH[None, v], gY[None, v])
            if cutlass.const_expr(self.config.gradient):
                _, _, _, ds, order = others
                store_sum(total, sSums, ds, order[row])
        if cutlass.const_expr(self.config.gradient):
            _, _, _, ds, order = others
            step = step * THREADS
            rest = end + first * THREADS + thread
            for row in cutlass.range(rest, cute.size(order), step, unroll=1):
                ds[order[row]] = Float32(0.0)

    @cute.jit
    def forward(self, gH: cute.Tensor, gY: cute.Tensor) -> None:
        """y from h, 8 columns."""
        h = loaded(gH)  # (2 V)
        y = cute.make_rmem_tensor(VECTOR, Float32)  # (V)
        for i in cutlass.range_constexpr(VECTOR):
            gate = h[2 * i]
            y[i] = gate * sigmoid(gate) * h[2 * i + 1]
        store(y, gY)

    @cute.jit
    def gradient(
        self,
        gH: cute.Tensor,
        gY: cute.Tensor,
        row: Int32,
        v: Int32,
        others: tuple[cute.Tensor, ...],
    ) -> Float32:
        """dh and S * y from h and dy, 8 columns; return their part of dS."""
        s, mDy, mDh, _, order = others
        h, dy = loaded(gH), loaded(vectors(mDy, row)[None, v])  # (2 V), (V)
        scale, total = s[order[row]], Float32(0.0)
        y = cute.make_rmem_tensor(VECTOR, Float32)  # (V)
        dh = cute.make_rmem_tensor(2 * VECTOR, Float32)  # (2 V)
        for i in cutlass.range_constexpr(VECTOR):
            gate, up = h[2 * i], h[2 * i + 1]
            inner = sigmoid(gate)
            activated = gate * inner
            y[i] = activated * up
            total += dy[i] * y[i]
            y[i] = scale * y[i]
            scaled = scale * dy[i]
            dh[2 * i] = scaled * up * (inner + activated * (1.0 - inner))
            dh[2 * i + 1] = scaled * activated
        store(y, gY)
        store(dh, vectors(mDh, row, 2 * VECTOR)[None, v])
        return total


@cute.jit
def store_sum(total: Float32, sSums: cute.Tensor, ds: cute.Tensor, entry: Int32) -> None:
    """Store the sum of all threads' `total`, always added in the same order, as the value of
    `entry`. All threads of a CTA call it."""
    total = cute.arch.warp_reduction(total, lambda x, y: x + y)
    warp = cute.arch.warp_idx()
    if cute.arch.lane_idx() == 0:
        sSums[warp] = total
    cute.arch.sync_threads()
    if warp == 0 and cute.arch.lane_idx() == 0:
        whole = sSums[0]
        for i in cutlass.range_constexpr(1, WARPS):
            whole += sSums[i]
        ds[entry] = whole
    cute.arch.sync_threads()


def sigmoid(x: Float32) -> Float32:
    return cute.arch.rcp_approx(1.0 + cute.math.exp(-x, fastmath=True))


def loaded(gX: cute.Tensor) -> cute.Tensor:
    """A vector of global memory in fp32 registers."""
    count = cute.size(gX)
    rX = cute.make_rmem_tensor(count, gX.element_type)  # (V)
    cute.autovec_copy(gX, rX)
    wide = cute.make_rmem_tensor(count, Float32)  # (V)
    wide.store(rX.load().to(Float32))
    return wide


def store(rX: cute.Tensor, gX: cute.Tensor) -> None:
    """Round fp32 registers and store them."""
    rounded = cute.make_rmem_tensor(cute.size(rX), gX.element_type)  # (V)
    rounded.store(rX.load().to(gX.element_type))
    cute.autovec_copy(rounded, gX)
