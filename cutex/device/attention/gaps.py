"""Zeros for rows that belong to no sequence.

Packed sequences may have rows before, between and behind them, and of a batch entry only some may
be used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from cutex.device.attention.seqlen_info import Seqlens

VECTOR = 8  # elements of 16 bits in one store


@dataclass(frozen=True)
class Gaps:
    """The CTAs that zero such rows; most find none, and end."""

    ctas: int
    threads: int  # of a CTA

    @cute.jit
    def clear(
        self, side: Seqlens, tensors: tuple[Any, ...], num_sequences: Int32, worker: Int32
    ) -> None:
        """Zero the rows of a side between sequences, and before and after all, in contiguous
        tensors, as thread `worker` of all CTAs. Each lane looks at one gap at a time."""
        lane = cute.arch.lane_idx()
        packed = side.cu_seqlens is not None
        for begin in cutlass.range(0, num_sequences + packed, 32, unroll=1):
            first, end = self.gap(side, num_sequences, begin + lane)
            gaps = cute.arch.vote_ballot_sync(end > first)
            for j in cutlass.range(32, unroll=1):
                if (gaps >> j) & 1 == 1:
                    of = cute.arch.shuffle_sync(first, j), cute.arch.shuffle_sync(end, j)
                    for mX in tensors:
                        clear_rows(mX, *of, worker, self.ctas * self.threads)

    @cute.jit
    def gap(self, side: Seqlens, num_sequences: Int32, number: Int32) -> tuple[Int32, Int32]:
        """The rows of gap `number`: packed, those before sequence `number`, or behind all; else
        those behind the used ones of batch entry `number`. None past the last gap."""
        first, end = Int32(0), Int32(0)
        starts: Any = side.cu_seqlens
        if cutlass.const_expr(starts is not None):
            if number <= num_sequences:
                end = Int32(side.static)
                if number < num_sequences:
                    end = Int32(starts[number])
                if number > 0:
                    before = side.of(number - 1)
                    first = before.offset + before.length
        elif number < num_sequences:
            used = side.of(number)
            first, end = used.offset + used.length, used.offset + side.static
        return first, end


@cute.jit
def clear_rows(mX: cute.Tensor, first: Int32, end: Int32, worker: Int32, workers: int) -> None:
    """Zero rows `first` to `end` of the contiguous mX (.., rows, heads, D), of all batch entries
    one after the other: the share of thread `worker`."""
    heads, columns = (cute.size(mX, mode=[cute.rank(mX) - i]) for i in (2, 1))
    width = Int64(heads) * columns
    zeros = cute.make_rmem_tensor(cute.make_layout(VECTOR), mX.element_type)
    zeros.fill(0.0)
    at, stop = first * width + worker * VECTOR, end * width
    while at < stop:
        place = mX.iterator + cute.assume(at, divby=VECTOR)
        cute.autovec_copy(zeros, cute.make_tensor(place, cute.make_layout(VECTOR)))
        at += workers * VECTOR
