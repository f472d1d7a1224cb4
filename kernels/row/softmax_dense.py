"""Softmax of contiguous rows of any length, several of them copied as one run of memory."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute

from cutex.compile import Argument
from cutex.device.row.reduction import RowReduction
from cutex.device.row.tile import WARP, RowTile
from cutex.device.row.words import Words
from cutex.kernels.row.dense import DenseRun, place
from cutex.kernels.row.kernel import RowKernel, matrix, reductions
from cutex.kernels.row.moments import folded, plus
from cutex.kernels.row.softmax import above, combined, exp, exponentials_by_fma, largest


@dataclass(frozen=True)
class DenseRowsConfig:
    """How dense rows of any length are processed, all of a CTA at one time. The tile's vectors are
    those of all rows of a CTA.

    words: the 32-bit words per thread of a row; the first and last word are partly the neighbouring
    rows'. turns: the rows of a CTA's threads, one after another. apart: see `place`.
    """

    tile: RowTile
    words: int
    turns: int = 1
    apart: bool = False


class SoftmaxDense(RowKernel):
    """y = exp(x - max) / sum of exp(x - max) of dense rows. All rows of a CTA are copied to smem
    (cp.async), overwritten there, and stored by vectors."""

    title = "softmax_dense"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return tuple(matrix(name, dtype, self.tile) for name in ("x", "y"))

    @cute.jit
    def __call__(self, mX: cute.Tensor, mY: cute.Tensor, stream) -> None:
        rows = self.tile.rows * self.config.turns
        blocks = cute.ceil_div(cute.size(mX, mode=[0]), rows)
        self.kernel(mX, mY).launch(
            grid=(blocks, 1, 1), block=(self.tile.num_threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mY: cute.Tensor) -> None:
        c, tile = self.config, self.tile
        (reduction,) = reductions(tile, 2, repeated=c.turns > 1)
        n = Int32(cute.size(mX, mode=[1]))
        run = DenseRun.fetch(tile, c.turns, mX)
        own = [place(tile, c.turns, c.apart, turn) for turn in range(c.turns)]
        # past the last row that one again
        starts = [run.begin + cutlass.min(row, run.count - 1) * n for row in own]
        per = 32 // mX.element_type.width
        words = [Words(tile.threads, c.words, per, begin % per, n) for begin in starts]
        run.wait()
        found = [
            self.of_row(reduction, words[turn], run.smem, starts[turn], turn)
            for turn in range(c.turns)
        ]
        # a word that two rows share is read by both: nobody stores before all have read
        if cutlass.const_expr(tile.threads <= WARP):  # else they have met to combine their sums
            cute.arch.sync_threads()
        for turn in cutlass.range_constexpr(c.turns):
            if own[turn] < run.count:
                words[turn].store(found[turn], run.smem, starts[turn])
        cute.arch.sync_threads()
        run.store(mY)

    def of_row(
        self, reduction: RowReduction, words: Words, sX: cute.Tensor, begin: Int32, turn: int
    ) -> cute.Tensor:
        """This thread's results of the row at sX[begin]."""
        rX = scores(words, sX, begin)
        own_top = largest(rX)
        e, rest = exponentials_by_fma(words.elements(rX), own_top)
        values = own_top, folded(e, plus) * rest
        top, total = combined(reduction, values, turn, self.config.turns)
        factor = exp(own_top - above(top)) * rest * cute.arch.rcp_approx(total)
        rE = cute.make_rmem_tensor(len(e), Float32)
        for i in range(len(e)):
            rE[i] = e[i] * factor
        rY = cute.make_rmem_tensor(len(e), sX.element_type)
        rY.store(rE.load().to(sX.element_type))
        return rY


def scores(words: Words, sX: cute.Tensor, begin: Int32) -> cute.Tensor:
    """This thread's elements of the row at sX[begin]; -inf outside the row."""
    rX = cute.make_rmem_tensor(words.count * words.per, sX.element_type)
    rX.fill(-Float32.inf)
    rWords, own = cute.recast_tensor(rX, Int32), words.own_words(sX, begin)
    for word in range(words.count):
        if words.is_edge(word):
            mask = words.mask(word)
            rWords[word] = (words.begun(own, word) & mask) | (rWords[word] & ~mask)
        else:
            rWords[word] = own[word]
    return rX
