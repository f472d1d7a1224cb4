"""The gradient of a weighted sum of rows, out[t] = sum over j of S[t, j] * z[places[t, j]]:

    dz[row] = S * dout[token of the row],  dS = sum over columns of dout[token] * z[row]

S and dS are in the order of the router's entries, of which `order` says for each row which it is.
Rows of no group are not read; their dz and dS are zeros.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, cute
from cutlass.memory import SmemAllocator

from cutex.compile import Argument, Operand
from cutex.kernels.mixture.combine import ARCHS, CTAS, VECTOR, vectors
from cutex.kernels.mixture.gate import THREADS, WARPS, loaded, store, store_sum


class CombineGradient:
    """A CTA computes one row after the other; a thread has 8 columns at a time.

    barrier    arrives                              waits
    0   (CTA)  all threads, each warp having        all; once more before the next row's
               written its part of a row's dS
    """

    archs = ARCHS

    def __init__(self, config: None = None) -> None:
        self.config = config

    @property
    def name(self) -> str:
        return "mixture_combine_gradient"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        """Dout (T, D), z (R, D), s (R), tokens (R), order (R), edges (E), dz (R, D), ds (R)."""
        plain: dict[str, Any] = {"aligned": False, "whole": False}
        return (
            Operand("dout", ("t", "d"), dtype),
            Operand("z", ("r", "d"), dtype),
            Operand("s", ("r",), "fp32", **plain),
            Operand("tokens", ("r",), "int32", **plain),
            Operand("order", ("r",), "int32", **plain),
            Operand("edges", ("e",), "int32", **plain),
            Operand("dz", ("r", "d"), dtype),
            Operand("ds", ("r",), "fp32", **plain),
        )

    @cute.jit
    def __call__(
        self, mDout: cute.Tensor, mZ: cute.Tensor, s: cute.Tensor, tokens: cute.Tensor, *rest
    ) -> None:
        """Launch with dout (T, D), z (R, D), s (R), tokens (R), order (R), edges (E), dz (R, D), ds
        (R), and a stream."""
        order, edges, mDz, ds, stream = rest
        ctas = cutlass.min(cute.size(mZ, mode=[0]), CTAS)
        self.kernel((mDout, mZ, mDz), (s, ds), (tokens, order), edges).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), use_pdl=True, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        matrices: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        factors: tuple[cute.Tensor, cute.Tensor],
        lists: tuple[cute.Tensor, cute.Tensor],
        edges: cute.Tensor,
    ) -> None:
        """Compute all rows."""
        (mDout, mZ, mDz), (s, ds), (tokens, order) = matrices, factors, lists
        thread, _, _ = cute.arch.thread_idx()
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        sSums = SmemAllocator().allocate_tensor(Float32, cute.make_layout(WARPS), byte_alignment=16)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        end, count = edges[cute.size(edges) - 1], cute.size(vectors(mZ, 0), mode=[1])
        zero = cute.make_rmem_tensor(VECTOR, Float32)  # (V)
        zero.fill(0.0)
        for row in cutlass.range(first, cute.size(order), step, unroll=1):
            total, gDz, entry = Float32(0.0), vectors(mDz, row), order[row]  # gDz: (V, NumV)
            if row < end:
                gDout, gZ, scale = vectors(mDout, tokens[row]), vectors(mZ, row), s[entry]
                for v in cutlass.range(thread, count, THREADS, unroll=2):
                    dout, z = loaded(gDout[None, v]), loaded(gZ[None, v])  # (V) each
                    for i in cutlass.range_constexpr(VECTOR):
                        total += dout[i] * z[i]
                        dout[i] = scale * dout[i]
                    store(dout, gDz[None, v])
            else:
                for v in cutlass.range(thread, count, THREADS, unroll=1):
                    store(zero, gDz[None, v])
            store_sum(total, sSums, ds, entry)
