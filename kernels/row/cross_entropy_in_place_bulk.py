"""Cross-entropy whose gradient overwrites the logits, of long dense rows that come and go by bulk
copies, to CTAs that stay and draw the rows that they take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from cutex.compile import Argument
from cutex.device.pipeline import publish_barriers
from cutex.device.row.bulk import BulkRing
from cutex.device.row.reduction import RowReduction
from cutex.device.row.words import Words
from cutex.kernels.row.by_tickets import DRAWN, END, FOREVER
from cutex.kernels.row.cross_entropy import LN_2, SCALARS, apart, load_now, one
from cutex.kernels.row.kernel import launch_of_groups, matrix, reductions, row_vector
from cutex.kernels.row.moments import folded, plus
from cutex.kernels.row.softmax import above, combined, exp
from cutex.kernels.row.softmax_bulk import exponentials, scores
from cutex.kernels.row.softmax_by_tickets import RowsTicketsConfig, SoftmaxByTickets


@dataclass(frozen=True)
class InPlaceTicketsConfig(RowsTicketsConfig):
    """Rows by bulk copies whose losses are asked for, too."""

    smoothed: bool = False
    target: str = "int32"  # its dtype
    reduction: str = "none"


class Label(NamedTuple):
    """Whether a row counts, whether its target is a class, and the column of that in this CTA's
    part, which it may be outside of."""

    ignored: Boolean
    is_class: Boolean
    column: Int32


class InPlaceByTickets(SoftmaxByTickets):
    """What CrossEntropyInPlace computes."""

    title = "cross_entropy_in_place_by_tickets"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        c = self.config
        *_, groups = super().operands(dtype)
        return (
            matrix("x", dtype, c.tile), row_vector("target", c.target), row_vector("losses"),
            *((one("count"),) if c.reduction == "mean" else ()), DRAWN, *SCALARS, groups,
        )  # fmt: skip

    @cute.jit
    def __call__(self, mX: cute.Tensor, mTarget: cute.Tensor, mLosses: cute.Tensor, *rest) -> None:
        *count, mDrawn, s, z, ignored, groups, stream = rest
        options = {"s": s, "z": z, "ignored": ignored}
        if cutlass.const_expr(self.config.reduction == "mean"):
            options["count"] = count[0]
        how = launch_of_groups(self.tile, self.config.resident, groups, stream)
        self.kernel(mX, (mTarget, mLosses), options, mDrawn, groups).launch(**how)

    @cute.kernel
    def kernel(
        self, mX: cute.Tensor, of_rows: tuple, options: dict[str, Any], mDrawn: cute.Tensor,
        groups: Int32,
    ) -> None:  # fmt: skip
        c, tile, dense = self.config, self.tile, self.dense
        places = self.places()
        (reduction,) = reductions(tile, 3 + c.smoothed, repeated=True, by_cta=True)
        ring = BulkRing.allocate(mX.element_type, dense.elements(mX.element_type.width), c.slots)
        publish_barriers((ring.full,))
        tickets = self.tickets(mX, mDrawn, groups)
        drawn = self.first_ones(mX, ring, places, tickets)
        words = dense.words(mX, tickets.chunk(tickets.own))
        turn = Int32(0)
        ring.wait(turn)
        row = places[turn]
        while row != END:
            label = self.label(mX, of_rows[0], row, options["ignored"])
            self.loss(mX, words, (ring, reduction), label, (row, turn), of_rows[1], options)
            drawn = self.leave((mX, mX), row, ring, places, tickets, drawn, turn)
            turn += 1
            ring.wait(turn)
            row = places[turn]
        self.end(tickets, drawn[0])

    def label(self, mX: cute.Tensor, mTarget: cute.Tensor, row: Int32, ignored: Int32) -> Label:
        """The target of a row."""
        n, target = Int32(cute.size(mX, mode=[1])), load_now(mTarget.iterator + row)
        is_class = (target >= 0) & (target < n)
        column = Int32(target) - self.dense.column(n)
        return Label(
            target == ignored, is_class, Int32(cutlass.select_(is_class, column, Int32(-1)))
        )

    @cute.jit
    def loss(
        self, mX: cute.Tensor, words: Words, given: tuple[BulkRing, RowReduction], label: Label,
        place: tuple[Int32, Int32], mLosses: cute.Tensor, options: dict[str, Any],
    ) -> None:  # fmt: skip
        """Overwrite a row in its slot with its gradient, and store its loss. place: the row and the
        turn."""
        c, dense, (ring, reduction), (row, turn) = self.config, self.dense, given, place
        slot, begin, n = ring[turn], dense.begin(mX, row), Int32(cute.size(mX, mode=[1]))
        s, z = options["s"], options["z"]
        x = scores(dense, words, slot, begin)
        own, e = exponentials(x)
        sums = [folded(e, plus), self.logit(slot, begin, words, label)]
        if cutlass.const_expr(c.smoothed):
            sums.append(share_of_mean(words, x, n))
        top, total, logit, *more = combined(reduction, (own, *sums), turn, Int32(FOREVER))
        log_total = cute.math.log2(total) * LN_2
        lse = above(top) + log_total
        loss = apart(above(top), logit, more[0] if c.smoothed else None, s) + log_total
        loss += z * lse * lse
        scale = Float32(1)
        if cutlass.const_expr(c.reduction == "mean"):
            scale = scale / options["count"][0]
        nothing = Float32(cutlass.select_(label.is_class, Float32(0), Float32.nan))
        scale, loss = scale + nothing, loss + nothing
        # 0 in a thread whose logits are all -inf, whatever the others' are
        factor = exp(own - above(top)) / total * (1 + 2 * z * lse) * scale
        less, by = s / Float32(n) * scale, (1 - s) * scale
        found, place, step = [], label.column - words.column(0), words.threads * words.per
        for i, v in enumerate(e):
            word, element = divmod(i, words.per)
            here = place == word * step + element
            found.append(v * factor - cutlass.select_(here, less + by, less))
        if label.ignored:  # also where a logit is inf or NaN
            found = [Float32(0)] * len(found)
        dense.keep(words, found, slot, begin, 0)
        if (cute.arch.thread_idx()[0] == 0) & self.is_first():
            mLosses[row] = Float32(cutlass.select_(label.ignored, Float32(0), loss))

    @cute.jit
    def logit(self, slot: cute.Tensor, begin: Int32, words: Words, label: Label) -> Float32:
        """The target's logit in thread 0 of the CTA whose part it is in; 0 in all others."""
        found = Float32(0)
        here = (label.column >= 0) & (label.column < words.n)
        if here & (cute.arch.thread_idx()[0] == 0):
            found = slot[begin + label.column].to(Float32)
        return found


def share_of_mean(words: Words, x: list[Float32], n: Int32) -> Float32:
    """What this thread's logits contribute to the mean of a row of n.

    NOTE: a sum of logits may overflow where their mean does not, and lse - inf would be NaN."""
    share, total = Float32(1) / Float32(n), Float32(0)
    for i, v in enumerate(x):
        word, element = divmod(i, words.per)
        if words.is_edge(word):
            v = Float32(cutlass.select_(words.holds(word, element), v, Float32(0)))
        total += v * share
    return total
