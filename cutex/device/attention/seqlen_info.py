"""SeqlenInfo: where the rows of one sequence begin and how many there are.

A side of attention (queries, or keys and values) is dense, (batch, seqlen, heads, D), or ragged:
(total, heads, D), sequence b being rows [cu_seqlens[b], cu_seqlens[b + 1]). On either, seqused[b]
may say that only so many of a sequence's rows count.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute


class SeqlenInfo(NamedTuple):
    """The rows of one sequence on one side (queries, or keys and values)."""

    offset: Int32  # rows before it, where all sequences are one list of rows; else 0
    length: Int32

    def offset64(self) -> Int64:
        """The offset for addresses: rows times a stride may exceed 32 bits."""
        return Int64(self.offset)


class Seqlens(NamedTuple):
    """The lengths of all sequences of one side, as kernel arguments."""

    static: Int32  # the size of mode seqlen, or of mode total
    cu_seqlens: cute.Tensor | None = None  # (batch + 1) int32
    seqused: cute.Tensor | None = None  # (batch) int32

    @property
    def ragged(self) -> bool:
        """Whether other rows may follow a sequence's last one, so that TMA must be given its
        end."""
        return self.cu_seqlens is not None or self.seqused is not None

    def of(self, batch: Int32) -> SeqlenInfo:
        offset, length = Int32(0), Int32(self.static)
        if self.cu_seqlens is not None:
            offset = Int32(self.cu_seqlens[batch])
            length = Int32(self.cu_seqlens[batch + 1]) - offset
        if self.seqused is not None:
            if self.cu_seqlens is None:
                offset = batch * self.static
            length = Int32(self.seqused[batch])
        return SeqlenInfo(offset, length)


@cute.jit
def store_lse(
    mLSE: cute.Tensor, lse: Float32, batch: Int32, head: Int32, seq_q: SeqlenInfo, query: Int32
) -> None:
    """Store the LSE of a query to mLSE (batch, heads, seqlen_q), or (heads, total_q) if ragged."""
    if cutlass.const_expr(cute.rank(mLSE) == 2):
        mLSE[head, seq_q.offset + query] = lse
    else:
        mLSE[batch, head, query] = lse
