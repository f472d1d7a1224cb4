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
TOGETHER = 8  # rows that are read before they are added

ARCHS = ("sm_90a", "sm_100a")


@dataclass(frozen=True)
class CombineConfig:
    """The number of experts per token, and whether their outputs have weights."""

    experts: int
    weighted: bool = True


class Combine:
    """A CTA sums THREADS vectors of one token's rows after another; each thread has one. A place
    from the last group's end on counts as nothing: its row is never read.

    NOTE: the rows' vectors are requested TOGETHER at a time before any is added.
    """

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
        units = cute.size(mOut, mode=[0]) * parts_of(mOut)
        ctas = cutlass.min(units, CTAS)
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
        end, parts = edges[cute.size(edges) - 1], parts_of(mOut)
        units = cute.size(mOut, mode=[0]) * parts
        for unit in cutlass.range(first, units, step, unroll=1):
            token = unit // parts
            v = (unit - token * parts) * THREADS + thread
            gOut = vectors(mOut, token)  # (V, NumV)
            if v < cute.size(gOut, mode=[1]):
                total = cute.make_rmem_tensor(VECTOR, Float32)  # (V)
                total.fill(0.0)
                for j in cutlass.range_constexpr(0, self.config.experts, TOGETHER):
                    self.add(total, mZ, v, self.terms(places, weights, token, j, end))
                rounded = cute.make_rmem_tensor(VECTOR, mOut.element_type)  # (V)
                rounded.store(total.load().to(mOut.element_type))
                cute.autovec_copy(rounded, gOut[None, v])

    def terms(
        self,
        places: cute.Tensor,
        weights: tuple[cute.Tensor, ...],
        token: Int32,
        first: int,
        end: Int32,
    ) -> list[tuple[Any, Int32, Float32]]:
        """For up to TOGETHER of a token's experts, from `first` on: whether each has a row, which,
        and its weight."""
        found = []
        for j in range(first, min(first + TOGETHER, self.config.experts)):
            place = places[token, j]
            factor = weights[0][token, j] if self.config.weighted else Float32(1.0)
            found.append((place < end, place, factor))
        return found

    @cute.jit
    def add(
        self,
        total: cute.Tensor,
        mZ: cute.Tensor,
        v: Int32,
        terms: cutlass.Constexpr[list[tuple[Any, Int32, Float32]]],
    ) -> None:
        """Add vector `v` of the rows of `terms` times their weights."""
        read = cute.make_rmem_tensor((VECTOR, len(terms)), mZ.element_type)  # (V, TERM)
        for i in cutlass.range_constexpr(len(terms)):
            there, place, _ = terms[i]
            if there:
                cute.autovec_copy(vectors(mZ, place)[None, v], read[None, i])
        for i in cutlass.range_constexpr(len(terms)):
            there, _, factor = terms[i]
            if there:
                total.store(total.load() + read[None, i].load().to(Float32) * factor)


def parts_of(mOut: cute.Tensor) -> Int32:
    """The parts of a row of mOut (T, D) that a CTA sums at a time."""
    return cute.ceil_div(cute.size(mOut, mode=[1]), VECTOR * THREADS)


def vectors(mX: cute.Tensor, row: Int32, width: int = VECTOR) -> cute.Tensor:
    """A row of mX (rows, columns) as (V, NumV)."""
    return cute.logical_divide(mX[row, None], cute.make_layout(width))
