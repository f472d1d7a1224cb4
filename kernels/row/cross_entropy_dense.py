"""Cross-entropy of contiguous rows of any length, several of them copied as one run of memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.row import in_smem
from cutex.device.row.columns import Columns
from cutex.device.row.reduction import Values
from cutex.device.row.tile import VECTOR_BYTES, RowTile
from cutex.device.row.words import Words
from cutex.kernels.row.cross_entropy import CrossEntropy, CrossEntropyConfig, load_now
from cutex.kernels.row.dense import place
from cutex.kernels.row.kernel import reductions
from cutex.kernels.row.moments import folded, plus
from cutex.kernels.row.norm_dense import run
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

    @property
    def chunk(self) -> RowTile:
        """The tile of all rows of a CTA, as one."""
        return replace(self.tile, rows=1, threads=self.tile.num_threads)

    def how(self, mX: cute.Tensor, stream: Any) -> dict[str, Any]:
        rows = self.tile.rows * self.config.turns
        blocks = cute.ceil_div(cute.size(mX, mode=[0]), rows)
        return {"grid": (blocks, 1, 1), "block": (self.tile.num_threads, 1, 1), "stream": stream}

    @cute.kernel
    def by_rows(self, mX, mTarget, mLse, mLosses, totals, s, z, ignored) -> None:
        c, tile, chunk = self.config, self.tile, self.chunk
        (reduction,) = reductions(tile, 2 + c.smoothed, repeated=c.turns > 1)
        slots = cute.make_layout(chunk.threads * chunk.vectors * chunk.width)
        sX = SmemAllocator().allocate_tensor(mX.element_type, slots, VECTOR_BYTES)
        first = Int32(cute.arch.block_idx()[0] * (tile.rows * c.turns))
        rows, n = (Int32(cute.size(mX, mode=[i])) for i in range(2))
        count = cutlass.min(rows - first, tile.rows * c.turns)
        gX = run(mX, first, count)
        columns = Columns.of(chunk, gX)
        between = (first > 0) & (first + count < rows) & (n >= chunk.width)
        in_smem.fetch(columns, gX, sX, between)
        targets = cute.make_rmem_tensor(c.turns, mTarget.element_type)
        targets.fill(0)
        for turn in cutlass.range_constexpr(c.turns):
            row = place(tile, c.turns, c.apart, turn)
            if self.speaks(row, count):
                targets[turn] = load_now(mTarget.iterator + (first + row))
        # of the chunk's first element, in sX
        begin = Int32(cute.arch.thread_idx()[0] * chunk.width) - columns.first
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        for turn in cutlass.range_constexpr(c.turns):
            own = place(tile, c.turns, c.apart, turn)
            row = cutlass.min(own, count - 1)  # past the last row that one again
            found = combined(reduction, self.of_row(sX, begin + row * n, n), turn, c.turns)
            if self.speaks(own, count):
                label, target = cute.make_rmem_tensor(1, mX.element_type), targets[turn]
                label.fill(0)
                whole = Columns(tile, n, Int32(0))
                if whole.holds(target.to(cutlass.Int64)):
                    label[0] = sX[begin + row * n + Int32(target)]
                options = s, z, ignored
                self.store_loss(found, whole, target, label, (mLse, mLosses), first + row, options)
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
