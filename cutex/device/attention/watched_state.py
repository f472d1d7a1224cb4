"""What the softmax of Hopper's forward keeps of its rows, and how a tile's end uses it.

The rounding of a peaked row's largest probability, `top`, is most of its error. The part of it that
O loses along its own direction is therefore also subtracted from the sum that O is divided by.
(With the maximum as reference, as in other kernels, that probability is 1, and exact.) `top` is 0
where some block was not examined; then only `part`, the largest sum of half a thread's part of a
block, is known.

The result of `finish` depends on the sums alone, never on V: whether products with V have
overflowed is seen in O, rounded. After a reference was raised, the contribution of values of V
below 1e-19 may be 0.
"""

from __future__ import annotations

from ctypes import c_float
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, cute

from cutex.device.atoms.scalar import exp2, fma, log2, power_below, reciprocal
from cutex.device.attention.guarded_softmax import GuardedSoftmax
from cutex.device.attention.row_stats import LN2_REST
from cutex.device.attention.softmax import LN2

LEAST_BELOW, MOST_BELOW = 5.0, 10.0  # powers of two by which the mean of scores is below LSE
OUTWEIGHS = 0.5  # of a row's sum: the least that counts of one that outweighs others
ABOUT_ONE = 1.0 + 2.0**-20  # a root and a sum that differ by less are taken for the same
LEAST_TOP = 2.0**-60  # the largest exponential, below which its square would lose bits
MANY = 32.0  # largest probabilities that have a row's sum: rows of fewer are peaked
FURTHER = 1.4  # times their logarithm, about how far LSE lies above the mean of scores


@dataclass(frozen=True)
class WatchedState(GuardedSoftmax):
    """A GuardedSoftmax that keeps the largest exponentials, with probabilities in bf16."""

    top: Any = None  # (rows) the largest exponential of a row, or of a thread's part of it
    squares: Any = None  # (rows) squares of the sums of a thread's parts of blocks, added up
    part: Any = None  # (rows) the largest sum of half a thread's part of a block, `top` being 0
    best: Any = None  # (rows) the largest score that `guard` has found, or 0, if none is positive
    peaked: Any = None  # (1) whether the last block's scores are; None if it need not be known
    blocks: Int32 | int = 1  # in which these rows' keys come
    raised_at: Any = None  # (1) the step in which `guard` last raised references; None: unknown
    unit: Float32 | None = None  # what a score of 1 is as a natural exponent
    usual_unit: float = 0.0  # the same, exactly, where `unit` is this number, rounded
    truncated: float = 0.0  # the share of scores that the product has truncated
    begins: int = 0  # exponentials of a thread's part of a row that `guard` begins with

    rounded: ClassVar[type[cutlass.Numeric]] = BFloat16  # probabilities
    # NOTE: sums and O are scaled by what shifts, as they are rounded, differ by
    large: ClassVar[float] = 2.0**15
    most: ClassVar[float] = 2.0**124  # the largest valid sum
    alone: ClassVar[float] = 2.0**-13  # share of others in a row whose error is that of one key

    @cute.jit
    def finish(
        self,
        sinks: tuple[Float32, ...],
        factors: cute.Tensor,
        lse: cute.Tensor,
        low: Any = None,
    ) -> Boolean:
        """Softmax's `finish`. Rows whose sums are usual need no correction. `low` (rows): what
        rounding takes from LSE."""
        totals = [self.over_row(self.sums[r], lambda x, y: x + y) for r in range(self.rows)]
        lost, valid = [Float32(0.0), Float32(0.0)], Boolean(True)
        missing, further = [Float32(0.0), Float32(0.0)], [Float32(0.0), Float32(0.0)]
        if self._is_unusual(totals):
            lost, valid, numbers = self._lost(totals)
            if cutlass.const_expr(self.truncated > 0.0 and len(sinks) == 0):
                missing, further = self._missing(numbers)
            for r in cutlass.range_constexpr(self.rows):
                valid = valid & (totals[r] <= self.most)
                if cutlass.const_expr(self.shift is not None):
                    valid = valid & ~self._is_large(r)
        for r in cutlass.range_constexpr(self.rows):
            total, highest, scaled = totals[r], self.reference_log2(r), Float32(1.0)
            if cutlass.const_expr(len(sinks) > 0):
                total, highest, scaled = self.with_sink(total, highest, sinks[r])
            factors[r] = self.normaliser(total - lost[r] * scaled, scaled)
            beyond = Float32(0.0) if len(sinks) > 0 else self._beyond_ln2()
            known = self.truncated > 0.0 and len(sinks) == 0
            of_peaked = (missing[r], further[r]) if known else ()
            whole, small = self.log_terms(total, highest, beyond, *of_peaked)
            lse[r] = -Float32.inf if total == 0.0 else whole * LN2 + small
            if cutlass.const_expr(low is not None):
                lost_of_lse = fma(whole, Float32(LN2), -lse[r]) + small
                low[r] = Float32(0.0) if total == 0.0 else lost_of_lse
            if cutlass.const_expr(self.shift is None and len(sinks) == 0):  # noqa: SIM102
                if self._is_large(r):  # the shift may exceed fp32's range where the score does not
                    lse[r] = self.reference[r] * (self.scale_of(r) * LN2) + log2(total) * LN2
                    if cutlass.const_expr(low is not None):
                        low[r] = Float32(0.0)
        return valid

    @cute.jit
    def _is_unusual(self, totals: list[Float32]) -> Boolean:
        """Whether a row of this warp has a large sum or reference, one key that outweighs all
        others, or a known largest exponential. Decided by one vote."""
        unusual = self.top[0] + self.top[1] > 0.0
        for r in cutlass.range_constexpr(self.rows):
            if cutlass.const_expr(self.part is not None):
                unusual = unusual | (self.part[r] > OUTWEIGHS * totals[r])
            unusual = unusual | ~(totals[r] <= self.most)  # NOTE: so is NaN
            if cutlass.const_expr(self.shift is not None):
                unusual = unusual | (cute.arch.fmax(self.shift[r], -self.shift[r]) > self.large)
        return cute.arch.vote_any_sync(unusual)

    @cute.jit
    def _lost(self, totals: list[Float32]) -> tuple[list[Float32], Boolean, list[Float32]]:
        """For each row, the correction of its sum that brings O nearest to what it would be without
        the rounding of the largest probability p: the share p^2 / sum of p_i^2 of what O loses by
        it. Also whether that is known, as far as it matters, and how many times p is in the row's
        sum (infinity if p is not known).

        NOTE: sums of parts, less their mean, have about the squares of the p_i. Rows are processed
        side by side and decided by one vote: this is on the critical path at a tile's end.
        """
        tops = [self.over_row(self.top[r], cute.arch.fmax) for r in range(self.rows)]
        squares = [self.over_row(self.squares[r], lambda x, y: x + y) for r in range(self.rows)]
        per_part = reciprocal(Float32(4 * self.blocks))  # a thread's parts of a row
        lost, known, unseen = [Float32(0.0)] * self.rows, Boolean(True), Boolean(False)
        numbers = [Float32(0.0)] * self.rows
        for r in cutlass.range_constexpr(self.rows):
            top, scale = tops[r], reciprocal(tops[r])
            number = totals[r] * scale  # of largest probabilities that have that sum
            numbers[r] = number
            spread = squares[r] * scale * scale - number * (number * per_part)
            share = number * reciprocal(cute.arch.fmax(spread, 1.0))
            rounding = top - Float32(self.rounded(top))
            lost[r] = share * rounding if top > LEAST_TOP else Float32(0.0)
            unseen = unseen | (top <= 0.0)
        if cutlass.const_expr(self.shift is not None):  # noqa: SIM102 - known when tracing
            if cute.arch.vote_any_sync(unseen):
                for r in cutlass.range_constexpr(self.rows):
                    by_one, known_of_one = self._lost_by_one(r, totals[r], squares[r])
                    lost[r] = lost[r] if tops[r] > 0.0 else by_one
                    known = known & ((tops[r] > 0.0) | known_of_one)
        return lost, known, numbers

    @cute.jit
    def _missing(self, numbers: list[Float32]) -> tuple[list[Float32], list[Float32]]:
        """The share of scores that tensor cores have truncated, of rows that are peaked: whose sums
        are worth few, `numbers`, of their largest probabilities. How far the mean of these rows'
        scores, each with its probability, lies below LSE."""
        missing, further = [Float32(0.0), Float32(0.0)], [Float32(0.0), Float32(0.0)]
        for r in cutlass.range_constexpr(self.rows):
            is_peaked = numbers[r] < MANY
            missing[r] = Float32(self.truncated * LN2) if is_peaked else Float32(0.0)
            further[r] = FURTHER * log2(numbers[r]) if is_peaked else Float32(0.0)
        return missing, further

    @cute.jit
    def _lost_by_one(
        self, r: cutlass.Constexpr[int], total: Float32, squares: Float32
    ) -> tuple[Float32, Boolean]:
        """`_lost` for a row whose `top` is 0: nothing, unless one probability outweighs its part of
        a block. It is then the largest part's sum, less the mean of the other parts.

        NOTE: the others seldom exceed that mean by half, but they may be none where few keys are
        elsewhere; where `squares` were kept, `_largest_part` is too large. Where the rounding is
        smaller, as for the reference's own probability, nothing is lost; where it changes within
        that uncertainty (a tie), nothing is known, which matters only where the others are so `few`
        that O has no other error."""
        largest = self.over_row(self.part[r], cute.arch.fmax)
        guarded, few = squares > 0.0, total - largest < self.alone * total
        parts = Float32(4 * self.blocks) if guarded else Float32(8 * self.blocks)
        rest = (total - largest) * reciprocal(parts)
        one = largest - rest
        below = one - rest * 0.5 - (one * (ABOUT_ONE - 1.0) if guarded else 0.0)
        least, most = (Float32(self.rounded(x)) for x in (below, largest))
        rounding = one - least
        counts = (least == most) & (cute.arch.fmax(rounding, -rounding) > 2.0 * rest)
        lost = total * reciprocal(one) * rounding
        lost = lost if counts & (one > OUTWEIGHS * total) else Float32(0.0)
        return lost, (least == most) | ~few

    @cute.jit
    def _beyond_ln2(self) -> Float32:
        """The natural exponent of one power of two of scores, minus ln 2: the rounding of
        `scale_log2`, and of `unit` before it."""
        beyond = Float32(0.0)
        if cutlass.const_expr(self.unit is not None):
            beyond = fma(self.scale_log2, Float32(-LN2), self.unit)
            rounded = c_float(self.usual_unit).value
            if cutlass.const_expr(rounded != self.usual_unit):
                rest = Float32(self.usual_unit - rounded)
                beyond += rest if self.unit == Float32(rounded) else Float32(0.0)
            beyond *= reciprocal(self.scale_log2)
        return beyond

    @staticmethod
    @cute.jit
    def log_terms(
        total: Float32,
        highest: Float32,
        beyond: Float32 | float = 0.0,
        missing: Any = None,
        further: Any = None,
    ) -> tuple[Float32, Float32]:
        """Two terms, the first times ln 2, of the LSE of a row whose sum is `total` times
        2^highest, where a power of two of scores is ln 2 + `beyond`. What is `missing` of scores, a
        share of their mean, is added: the mean, each with its probability, lies about `further`
        powers below LSE.

        NOTE: a reference far above all scores plus a logarithm as far below 0 would cost bits.
        """
        power = power_below(total)
        fraction = log2(total * exp2(-power))
        whole = highest + power
        # NOTE: what that addition has rounded, exact whichever of the two is larger
        added = whole - highest
        rest = (highest - (whole - added)) + (power - added) + fraction
        # the mean of scores, each with its probability, is that far below LSE if all are equal
        below = cute.arch.fmin(cute.arch.fmax(power, LEAST_BELOW), MOST_BELOW)
        small = rest * LN2 + (whole - below) * beyond + below * LN2_REST
        if cutlass.const_expr(missing is not None):
            small += (whole - further) * missing
        return whole, small
