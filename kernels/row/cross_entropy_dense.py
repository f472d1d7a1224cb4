"""Cross-entropy of contiguous rows of any length, several of them copied as one run of memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from cutex.device.row.columns import Columns
from cutex.device.row.reduction import Values
from cutex.device.row.words import Words
from cutex.device.stream_order import may_overlap, wait_for_kernel_before
from cutex.kernels.row.cross_entropy import CrossEntropy, CrossEntropyConfig, load_now
from cutex.kernels.row.dense import DenseRun, place
from cutex.kernels.row.kernel import reductions
from cutex.kernels.row.moments import folded, plus
from cutex.kernels.row.softmax import combined, exponentials_by_fma, largest
from cutex.kernels.row.softmax_dense import scores


@dataclass(frozen=True)
class DenseLossesConfig(CrossEntropyConfig):
    """A cross-entropy of dense rows of any length, all of a CTA at one time. The tile's vectors are
    those of all rows of a CTA.

    words: the 32-bit words per thread of a row; the first and last word are partly the neighbouring
    rows'. turns: the rows of a CTA's threads, one after another. apart: see `place`.
    """

    words: int = 1
    turns: int = 1
    apart: bool = False


class CrossEntropyDense(CrossEntropy):
    """The same of dense rows. All rows of a CTA are copied to smem (cp.async)."""

    title = "cross_entropy_dense"

    def how(self, mX: cute.Tensor, stream: Any) -> dict[str, Any]:
        rows = self.tile.rows * self.config.turns
        blocks = cute.ceil_div(cute.size(mX, mode=[0]), rows)
        block = self.tile.num_threads, 1, 1
        return {
            "grid": (blocks, 1, 1), "block": block, "use_pdl": may_overlap(), "stream": stream,
        }  # fmt: skip

    @cute.kernel
    def by_rows(self, mX, mTarget, mLse, mLosses, totals, s, z, ignored) -> None:
        c, tile = self.config, self.tile
        (reduction,) = reductions(tile, 2 + c.smoothed, repeated=c.turns > 1)
        wait_for_kernel_before()
        n = Int32(cute.size(mX, mode=[1]))
        run = DenseRun.fetch(tile, c.turns, mX)
        targets = cute.make_rmem_tensor(c.turns, mTarget.element_type)
        targets.fill(0)
        for turn in cutlass.range_constexpr(c.turns):
            row = place(tile, c.turns, c.apart, turn)
            if self.speaks(row, run.count):
                targets[turn] = load_now(mTarget.iterator + (run.first + row))
        run.wait()
        for turn in cutlass.range_constexpr(c.turns):
            own = place(tile, c.turns, c.apart, turn)
            row = cutlass.min(own, run.count - 1)  # past the last row that one again
            sX, begin = run.smem, run.begin + row * n
            found = combined(reduction, self.of_row(sX, begin, n), turn, c.turns)
            if self.speaks(own, run.count):
                label, target = cute.make_rmem_tensor(1, mX.element_type), targets[turn]
                label.fill(0)
                whole = Columns(tile, n, Int32(0))
                if whole.holds(target.to(cutlass.Int64)):
                    label[0] = sX[begin + Int32(target)]
                options = s, z, ignored
                self.store_loss(
                    found, whole, target, label, (mLse, mLosses), run.first + row, options
                )
        if cutlass.const_expr(totals is not None):
            self.add_up_if_last(mLosses, mTarget, totals, ignored)

    def speaks(self, row: Int32, count: Int32) -> Boolean:
        """Whether this thread is the first of its row, and there is one."""
        return (row < count) & (cute.arch.thread_idx()[0] % self.tile.threads == 0)

    def of_row(self, sX: cute.Tensor, begin: Int32, n: Int32) -> Values:
        """A thread's partial result for its words of the row of n elements at sX[begin]."""
        per = 32 // sX.element_type.width
        words = Words(self.tile.threads, self.config.words, per, begin % per, n)
        rX = scores(words, sX, begin)
        top, x = largest(rX), words.elements(rX)
        e, rest = exponentials_by_fma(x, top)
        sums = [folded(e, plus) * rest]
        if cutlass.const_expr(self.config.smoothed):
            # NOTE: a sum of logits may overflow where their mean does not
            share = Float32(1) / Float32(n)
            sums.append(folded([v * share for v in words.where_held(x)], plus))
        return (top, *sums)
