"""The entries of an index by their value: a stable radix sort in one launch, a pass for each 8 bits
of the values (counting.py).

spans[i] then says which part of `order` has the entries of value i, in their own order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from cutex.compile import Argument, Bound, Operand
from cutex.device.pipeline import sync_cluster
from cutex.kernels.mixture.combine import ARCHS
from cutex.kernels.mixture.counting import (
    AHEAD,
    CTAS,
    THREADS,
    WARP,
    alike,
    before,
    clear,
    count,
    first_rows,
    share_of,
    tables,
)

BITS = 8  # of a value, by which a pass sorts
BUCKETS = 1 << BITS
MOST_PASSES = 4


@dataclass(frozen=True)
class ListedConfig:
    """The number of passes: values are below 256 to its power."""

    passes: int


class Listed:
    """A cluster sorts all entries, the lowest bits of their values first.

    barrier    arrives                                        waits
    0 (CTA)    all threads: the table being zero, counted,    all
               the sums of warps written, rows known
    (cluster)  all threads: their CTA's counts being written, all
               the order of a pass, spans being zero

    smem       bytes
    table      4 * WARPS * BUCKETS
    sums       4 * WARPS
    """

    archs = ARCHS
    dtypes = ("int32", "int64")

    def __init__(self, config: ListedConfig) -> None:
        self.config = config

    @property
    def name(self) -> str:
        return "mixture_listed"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        """Index (R) of `dtype`; order (R) and spans (S, 2), of each value its first place in order
        and the one after its last; other (R) and totals (CTAS, BUCKETS), which hold orders and
        counts meanwhile."""
        plain: dict[str, Any] = {"aligned": False, "whole": False}
        counts = Bound("ctas", CTAS, CTAS), Bound("buckets", BUCKETS, BUCKETS)
        two = (Bound("two", 2, 2),)
        return (
            Operand("index", ("r",), dtype, **plain),
            Operand("order", ("r",), "int32", **plain),
            Operand("spans", ("s", "two"), "int32", bounds=two, **plain),
            Operand("other", ("r",), "int32", **plain),
            Operand("totals", ("ctas", "buckets"), "int32", bounds=counts, **plain),
        )

    @cute.jit
    def __call__(
        self,
        index: cute.Tensor,
        order: cute.Tensor,
        spans: cute.Tensor,
        other: cute.Tensor,
        totals: cute.Tensor,
        stream: Any,
    ) -> None:
        """Launch."""
        self.kernel(index, order, spans, other, totals).launch(
            grid=(CTAS, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(CTAS, 1, 1),
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        index: cute.Tensor,
        order: cute.Tensor,
        spans: cute.Tensor,
        other: cute.Tensor,
        totals: cute.Tensor,
    ) -> None:
        """Sort by one digit after the other, then write where values begin and end."""
        table, sums = tables(BUCKETS)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        start = cta * THREADS + thread
        for i in cutlass.range(start, cute.size(spans, mode=[0]), CTAS * THREADS, unroll=1):
            spans[i, 0], spans[i, 1] = Int32(0), Int32(0)
        orders, passes = (order, other), self.config.passes
        for p in cutlass.range_constexpr(passes):
            read = None if p == 0 else orders[(passes - p) % 2]
            self.sort(index, read, orders[(passes - 1 - p) % 2], p * BITS, (table, sums, totals))
            sync_cluster()
        for i in cutlass.range(start, cute.size(index), CTAS * THREADS, unroll=1):
            value = Int32(index[order[i]])
            if i == cute.size(index) - 1:
                spans[value, 1] = i + 1
            if i == 0:
                spans[value, 0] = i
            else:
                last = Int32(index[order[i - 1]])
                if last != value:
                    spans[value, 0] = i
                    spans[last, 1] = i

    @cute.jit
    def sort(
        self,
        index: cute.Tensor,
        read: Any,
        write: cute.Tensor,
        shift: cutlass.Constexpr[int],
        scratch: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
    ) -> None:
        """Sort entries in the order of `read`, or their own, by 8 bits of their values."""
        table, sums, totals = scratch
        clear(table)
        cute.arch.sync_threads()
        first, share = share_of(cute.size(index))
        mine = table[cute.arch.warp_idx(), None]  # (BUCKETS)
        for i in cutlass.range(0, share, AHEAD, unroll=1):
            found = self.entries(index, read, first + i * WARP, shift)
            for u in cutlass.range_constexpr(AHEAD):
                _, bucket, valid = found[u]
                if i + u < share:
                    count(mine, bucket, alike(bucket, valid, BITS), valid)
        cute.arch.sync_threads()
        first_rows(table, sums, totals)
        cute.arch.sync_threads()
        for i in cutlass.range(0, share, AHEAD, unroll=1):
            found = self.entries(index, read, first + i * WARP, shift)
            for u in cutlass.range_constexpr(AHEAD):
                entry, bucket, valid = found[u]
                if i + u < share:
                    lanes = alike(bucket, valid, BITS)
                    row = mine[bucket] + before(lanes)
                    count(mine, bucket, lanes, valid)
                    if valid:
                        write[row] = entry

    def entries(
        self, index: cute.Tensor, read: Any, first: Int32, shift: int
    ) -> list[tuple[Int32, Int32, Any]]:
        """Of this lane's AHEAD places, `first` plus its lane and then WARP apart: the entry, the
        bucket of its value, and whether there is one."""
        size, found = cute.size(index), []
        for i in range(AHEAD):
            place = first + i * WARP + cute.arch.lane_idx()
            known = cutlass.min(place, size - 1)
            entry = known if read is None else read[known]
            found.append((entry, place < size))
        return [
            (entry, (Int32(index[entry]) >> shift) & (BUCKETS - 1), valid) for entry, valid in found
        ]
