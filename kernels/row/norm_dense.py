"""Norms of contiguous rows of any length, several of them treated as one run of memory.

A CTA's rows are copied to and from smem by whole gmem vectors, so there are two partial ends for
all its rows together. In smem, thread t of T holds words t, t + T, t + 2T and so on, counted from
the 32-bit word in which the row starts: a thread's columns are the same in all its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute

from cutex.device.row.columns import Columns
from cutex.device.row.words import Words
from cutex.kernels.row.dense import DenseRun
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

    @cute.kernel
    def kernel(
        self, mX: cute.Tensor, mY: cute.Tensor, optional: dict[str, cute.Tensor], eps: Float32
    ) -> None:
        c, tile = self.config, self.tile
        sums = reductions(tile, *c.reduced, repeated=True)[0]
        rows, n = (Int32(cute.size(mX, mode=[i])) for i in range(2))
        run = DenseRun.fetch(tile, c.turns, mX)
        own = Int32(cute.arch.thread_idx()[0] // tile.threads)
        per = 32 // mX.element_type.width
        # NOTE: the same in all turns, since an even number of rows lies between them
        words = Words(tile.threads, c.words, per, (run.begin + own * n) % per, n)
        norm = NormByWords.of(c, words, optional, sums, n)
        run.wait()
        for turn in cutlass.range(c.turns, unroll=1):
            row = turn * tile.rows + own
            exists, begin = row < run.count, run.begin + row * n
            mean, rstd = norm(run.smem, begin, exists, eps, turn, c.turns)
            if exists:
                this = ThisRow(run.first + row, rows)
                found = Normed(this, Columns(tile, n, Int32(0)), None, None, mean, rstd)
                self.store_rest(found, optional)
        cute.arch.sync_threads()
        run.store(mY)
