"""Norms of contiguous rows of any length, several of them treated as one run of memory.

A CTA's rows are copied to and from smem by whole gmem vectors, so there are two partial ends for
all its rows together. In smem, thread t of T holds words t, t + T, t + 2T and so on, counted from
the 32-bit word in which the row starts: a thread's columns are the same in all its rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.row import in_smem
from cutex.device.row.columns import Columns
from cutex.device.row.tile import VECTOR_BYTES, RowTile
from cutex.device.row.words import Words
from cutex.kernels.row.kernel import ThisRow, reductions
from cutex.kernels.row.norm import Normed
from cutex.kernels.row.norm_by_words import NormByWords
from cutex.kernels.row.norm_in_turns import InTurnsConfig, NormInTurns


@dataclass(frozen=True)
class DenseConfig(InTurnsConfig):
    """A norm of dense rows of any length. The tile's vectors are those of all rows of a CTA.

    words: the 32-bit words per thread of a row; the first and last word are partly the neighbouring
    rows'.
    """

    words: int = 1


class NormDense(NormInTurns):
    """The norm of dense rows, without a residual. All rows of a CTA are copied to smem (cp.async)
    before the first is processed; the norm overwrites the row there."""

    title = "norm_dense"

    def __init__(self, config: DenseConfig) -> None:
        super().__init__(config)
        tile = config.tile
        if tile.rows % 2:
            raise ValueError("a CTA has an even number of dense rows at one time")

    @property
    def chunk(self) -> RowTile:
        """The tile of all rows of a CTA, as one."""
        return replace(self.tile, rows=1, threads=self.tile.num_threads)

    @cute.kernel
    def kernel(
        self, mX: cute.Tensor, mY: cute.Tensor, optional: dict[str, cute.Tensor], eps: Float32
    ) -> None:
        c, tile, chunk = self.config, self.tile, self.chunk
        sums = reductions(tile, *c.reduced, repeated=True)[0]
        slots = cute.make_layout(chunk.threads * chunk.vectors * chunk.width)
        sX = SmemAllocator().allocate_tensor(mX.element_type, slots, VECTOR_BYTES)
        first = Int32(cute.arch.block_idx()[0] * (tile.rows * c.turns))
        rows, n = (Int32(cute.size(mX, mode=[i])) for i in range(2))
        count = cutlass.min(rows - first, tile.rows * c.turns)
        gX, gY = (run(m, first, count) for m in (mX, mY))
        columns = Columns.of(chunk, gX)
        between = (first > 0) & (first + count < rows) & (n >= chunk.width)
        in_smem.fetch(columns, gX, sX, between)
        shift = Int32(cute.arch.thread_idx()[0] * chunk.width) - columns.first
        own = Int32(cute.arch.thread_idx()[0] // tile.threads)
        per = 32 // mX.element_type.width
        # NOTE: the same in all turns, since an even number of rows lies between them
        words = Words(tile.threads, c.words, per, (shift + own * n) % per, n)
        norm = NormByWords.of(c, words, optional, sums, n)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        for turn in cutlass.range(c.turns, unroll=1):
            row = turn * tile.rows + own
            exists, begin = row < count, shift + row * n
            mean, rstd = norm(sX, begin, exists, eps, turn, c.turns)
            if exists:
                this = ThisRow(first + row, rows)
                found = Normed(this, Columns(tile, n, Int32(0)), None, None, mean, rstd)
                self.store_rest(found, optional)
        cute.arch.sync_threads()
        in_smem.store(columns, sX, gY)


def run(mX: cute.Tensor, first: Int32, count: Int32) -> cute.Tensor:
    """`count` rows of the dense mX (M, N), from the first on, as one (count * N)."""
    return cute.make_tensor(
        mX[first, None].iterator, cute.make_layout(count * Int32(cute.size(mX, mode=[1])))
    )
