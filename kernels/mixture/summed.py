"""Sums of rows by an index: out[i] is the sum of the rows whose index is i, as `listed` has them.

Terms are added in fp32 in an order that depends on the index alone, so that the result is
deterministic. Lists of more than LONG rows are added up by many CTAs: their places in the order are
divided at multiples of CHUNK, a first launch sums the rows between two of these, and the second
adds these sums to those of the rows before and after them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from cutex.compile import Argument, Bound, Operand
from cutex.kernels.mixture.combine import ARCHS, CTAS, THREADS, TOGETHER, VECTOR, parts_of, vectors
from cutex.schedulers.order import select

CHUNK = 64
LONG = 2 * CHUNK


@dataclass(frozen=True)
class SummedConfig:
    """Whether the kernel sums the chunks of long lists, or all lists."""

    chunks: bool


class Summed:
    """A CTA sums one list's, or one chunk's, rows after another, THREADS vectors of them at a time;
    each thread has one.

    NOTE: the rows' vectors are requested TOGETHER at a time before any is added.
    """

    archs = ARCHS

    def __init__(self, config: SummedConfig) -> None:
        self.config = config

    @property
    def name(self) -> str:
        return "mixture_summed"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        """Rows (R, D), index, order (R), spans (S, 2), sums (C, D) of chunks, out (S, D)."""
        plain: dict[str, Any] = {"aligned": False, "whole": False}
        return (
            Operand("rows", ("r", "d"), dtype),
            Operand("index", ("r",), "int32", **plain),
            Operand("order", ("r",), "int32", **plain),
            Operand("spans", ("s", "two"), "int32", bounds=(Bound("two", 2, 2),), **plain),
            Operand("sums", ("c", "d"), "fp32"),
            Operand("out", ("s", "d"), dtype),
        )

    @cute.jit
    def __call__(
        self,
        mRows: cute.Tensor,
        index: cute.Tensor,
        order: cute.Tensor,
        spans: cute.Tensor,
        mSums: cute.Tensor,
        mOut: cute.Tensor,
        stream: Any,
    ) -> None:
        """Launch."""
        mTo = mSums if self.config.chunks else mOut
        units = cute.size(mTo, mode=[0]) * parts_of(mTo)
        self.kernel(mRows, index, order, spans, mSums, mOut).launch(
            grid=(cutlass.min(units, CTAS), 1, 1),
            block=(THREADS, 1, 1),
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mRows: cute.Tensor,
        index: cute.Tensor,
        order: cute.Tensor,
        spans: cute.Tensor,
        mSums: cute.Tensor,
        mOut: cute.Tensor,
    ) -> None:
        """Sum up."""
        mTo = mSums if self.config.chunks else mOut
        thread, _, _ = cute.arch.thread_idx()
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        parts, count = parts_of(mTo), cute.size(vectors(mTo, 0), mode=[1])
        units = cute.size(mTo, mode=[0]) * parts
        for unit in cutlass.range(first, units, step, unroll=1):
            row = unit // parts
            v = (unit - row * parts) * THREADS + thread
            of_list = self.places(index, order, spans, row)
            if of_list.there and v < count:
                total = of_list.sum(mRows, order, mSums, v)
                rounded = cute.make_rmem_tensor(VECTOR, mTo.element_type)  # (V)
                rounded.store(total.load().to(mTo.element_type))
                cute.autovec_copy(rounded, vectors(mTo, row)[None, v])

    @cute.jit
    def places(
        self, index: cute.Tensor, order: cute.Tensor, spans: cute.Tensor, row: Int32
    ) -> Places:
        """What is added up for a row of the result."""
        if cutlass.const_expr(self.config.chunks):
            begin = row * CHUNK
            value = index[order[begin]]
            end = spans[value, 1]
            long = end - spans[value, 0] > LONG
            return Places(long and begin + CHUNK <= end, begin, Int32(CHUNK), Int32(0))
        begin, end = spans[row, 0], spans[row, 1]
        middle = cute.ceil_div(begin, CHUNK) * CHUNK
        skipped = select(end - begin > LONG, end // CHUNK * CHUNK - middle, 0)
        return Places(cutlass.Boolean(True), begin, end - begin - skipped, skipped)


@dataclass(frozen=True)
class Places:
    """The places, in the order of `listed`, of a list's rows: `count` from `begin` on, but without
    the `skipped` whole chunks' after the first multiple of CHUNK."""

    there: Any
    begin: Int32
    count: Int32
    skipped: Int32

    @cute.jit
    def sum(
        self, mRows: cute.Tensor, order: cute.Tensor, mSums: cute.Tensor, v: Int32
    ) -> cute.Tensor:
        """The sum of vector `v` of all rows, (V)."""
        total = cute.make_rmem_tensor(VECTOR, Float32)  # (V)
        total.fill(0.0)
        middle = cute.ceil_div(self.begin, CHUNK)
        read = cute.make_rmem_tensor((VECTOR, TOGETHER), mRows.element_type)  # (V, TERM)
        for at in cutlass.range(0, self.count, TOGETHER, unroll=1):
            rows = [self.row(order, at + i) for i in range(TOGETHER)]
            for i in cutlass.range_constexpr(TOGETHER):
                if at + i < self.count:
                    cute.autovec_copy(vectors(mRows, rows[i])[None, v], read[None, i])
            for i in cutlass.range_constexpr(TOGETHER):
                if at + i < self.count:
                    total.store(total.load() + read[None, i].load().to(Float32))
        for chunk in cutlass.range(middle, middle + self.skipped // CHUNK, unroll=4):
            chunk_sum = cute.make_rmem_tensor(VECTOR, Float32)  # (V)
            cute.autovec_copy(vectors(mSums, chunk)[None, v], chunk_sum)
            total.store(total.load() + chunk_sum.load())
        return total

    def row(self, order: cute.Tensor, i: Int32) -> Int32:
        """The i-th row, or the last one."""
        place = self.begin + cutlass.min(i, self.count - 1)
        beyond = place >= cute.ceil_div(self.begin, CHUNK) * CHUNK
        return order[place + select(beyond, self.skipped, 0)]
