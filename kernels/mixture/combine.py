"""The sum of each token's expert outputs: out[t] = sum over j of weights[t, j] * z[places[t, j]].

The outputs of experts are stored one group after the other, and gathered here: each row of out is
written once, its terms are added in the order of j, in fp32, so that the result is deterministic
(SonicMoE, arXiv 2512.14080).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from cutex.compile import Argument, Bound, Operand

THREADS = 128
CTAS = 132 * 16  # at most, a row each at a time
VECTOR = 8  # elements of 16 bytes

ARCHS = ("sm_90a", "sm_100a")


@dataclass(frozen=True)
class CombineConfig:
    """The config: the experts of a token, and whether their outputs have weights."""

    experts: int
    weighted: bool = True


class Combine:
    """A CTA sums up one token's rows after the other; a thread has 8 columns at a time. A place
    from the last group's end on counts nothing: its row is never read."""

    archs = ARCHS

    def __init__(self, config: CombineConfig) -> None:
        self.config = config

    @property
    def name(self) -> str:
        return "mixture_combine"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        plain: dict[str, Any] = {"aligned": False, "whole": False}
        each = (Bound("j", self.config.experts, self.config.experts),)
        weights = Operand("weights", ("t", "j"), "fp32", **plain)
        return (
            Operand("z", ("r", "d"), dtype),
            Operand("places", ("t", "j"), "int32", bounds=each, **plain),
            Operand("edges", ("e",), "int32", **plain),
            Operand("out", ("t", "d"), dtype),
            *((weights,) if self.config.weighted else ()),
        )

    @cute.jit
    def __call__(
        self, mZ: cute.Tensor, places: cute.Tensor, edges: cute.Tensor, mOut: cute.Tensor, *rest
    ) -> None:
        """Launch with z (R, D), places (T, J), edges (E), out (T, D), weights (T, J), a stream."""
        *weights, stream = rest
        ctas = cutlass.min(cute.size(mOut, mode=[0]), CTAS)
        self.kernel(mZ, places, edges, mOut, tuple(weights)).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), use_pdl=True, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mZ: cute.Tensor,
        places: cute.Tensor,
        edges: cute.Tensor,
        mOut: cute.Tensor,
        weights: tuple[cute.Tensor, ...],
    ) -> None:
        """Sum up."""
        thread, _, _ = cute.arch.thread_idx()
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        end = edges[cute.size(edges) - 1]
        for token in cutlass.range(first, cute.size(mOut, mode=[0]), step, unroll=1):
            gOut = vectors(mOut, token)  # (V, NumV)
            for v in cutlass.range(thread, cute.size(gOut, mode=[1]), THREADS, unroll=1):
                total = cute.make_rmem_tensor(VECTOR, Float32)  # (V)
                total.fill(0.0)
                for j in cutlass.range_constexpr(self.config.experts):
                    place = places[token, j]
                    if place < end:
                        factor = Float32(1.0)
                        if cutlass.const_expr(self.config.weighted):
                            factor = weights[0][token, j]
                        self.add(total, vectors(mZ, place)[None, v], factor)
                rounded = cute.make_rmem_tensor(VECTOR, mOut.element_type)  # (V)
                rounded.store(total.load().to(mOut.element_type))
                cute.autovec_copy(rounded, gOut[None, v])

    @cute.jit
    def add(self, total: cute.Tensor, gZ: cute.Tensor, factor: Float32) -> None:
        """Add a vector of z times a factor."""
        rZ = cute.make_rmem_tensor(VECTOR, gZ.element_type)  # (V)
        cute.autovec_copy(gZ, rZ)
        total.store(total.load() + rZ.load().to(Float32) * factor)


def vectors(mX: cute.Tensor, row: Int32, width: int = VECTOR) -> cute.Tensor:
    """A row of mX (rows, columns) as (V, NumV)."""
    return cute.logical_divide(mX[row, None], cute.make_layout(width))
