"""The softmax of a whole row per thread, as tensor memory loads return it, two columns at a time.

A row keeps a reference, at least the largest score seen when it was last set, and the sum of
2^(scale * (score - reference)). It need not be the maximum: it is raised, and sum and output are
scaled, only where a score exceeds it by more than `threshold` powers of two (as in
FlashAttention-4).

A block's exponentials may be computed before its maximum is known, with the reference of earlier
blocks. While no score exceeds that by more than the threshold, which `holds` tests, they are the
same as the maximum would have given.

A share of the exponentials is computed on the FMA units (as in FlashAttention-4): for a block of
128 keys at head dim 128, the tensor cores of an sm_100 take as long as MUFU takes for the
exponentials, while the FMA units, eight times as wide, would idle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import cutlass
from cutlass import Boolean, Float32, cute

from cutex.device.atoms.packed import Pair, add2, at_least, exp2_by_fma, fma2, largest
from cutex.device.atoms.scalar import exp2, log2, reciprocal

LN2 = 0.6931471805599453
LOG2_E = 1.4426950408889634
PAIRS = 16  # pairs of columns in one group; `by_fma` of them use the FMA units, the rest MUFU
# powers of two: beyond, the rounding of a scaled reference could be felt in the result
LARGEST_SHIFT = 2.0**12
LEAST_SQUARE = 2.0**-120


@dataclass(frozen=True)
class RowSoftmax:
    """The reference and the sum of a thread's row.

    headroom: powers of two by which exponentials are lowered, so that their products with a large V
    stay as far from the end of float32 as those with a small one. margin: powers of two by which a
    reference is raised above the largest score, except the first time: scores that have grown may
    grow again. by_fma: how many of 16 pairs of columns use the FMA units, for exponents of at most
    127.
    """

    reference: cute.Tensor  # (1) in units of scores; -inf before the first key
    sums: cute.Tensor  # (1)
    lost: cute.Tensor  # (1) what rounding has taken from the largest probabilities, times these
    squares: cute.Tensor  # (1) about the sum of the squares of probabilities
    unit: Float32  # what a score of 1 is as a natural exponent
    scale_log2: Float32  # and in powers of two
    threshold: float  # powers of two by which the maximum may exceed the reference
    headroom: float = 0.0
    margin: float = 0.0
    by_fma: int = 0

    @classmethod
    def start(
        cls, unit: Float32, threshold: float, headroom: float = 0.0, margin: float = 0.0
    ) -> Self:
        """The state before the first block."""
        reference = cute.make_rmem_tensor(cute.make_layout(1), Float32)
        sums = cute.make_rmem_tensor(cute.make_layout(1), Float32)
        lost = cute.make_rmem_tensor(cute.make_layout(1), Float32)
        squares = cute.make_rmem_tensor(cute.make_layout(1), Float32)
        reference[0] = -Float32.inf
        sums[0], lost[0], squares[0] = Float32(0.0), Float32(0.0), Float32(0.0)
        return cls(reference, sums, lost, squares, unit, unit * LOG2_E, threshold, headroom, margin)

    def partly_by_fma(self, share: int) -> Self:
        """A copy that computes `share` of every 16 pairs of exponentials by the FMA units."""
        return replace(self, by_fma=share)

    # ---- the reference

    @cute.jit
    def raise_reference(self, highest: Float32, factors: cute.Tensor) -> Boolean:
        """Raise the reference to the `highest` score of a block, if some row of this warp exceeds
        its own by more than the threshold, and scale the sum by `factors` (1). Returns whether it
        did."""
        # NOTE: NaN, and infinity, as both would give; exponentials by FMA units might not
        self.sums[0] += at_least(highest, 0.0) * 0.0
        above = (highest - self.reference[0]) * self.scale_log2
        raised = cute.arch.vote_any_sync(above > self.threshold)
        goal = self._goal(highest)
        if raised:
            reference = cute.arch.fmax(goal, self.reference[0])
            # NOTE: -inf less -inf; a row without keys keeps its sum of 0
            lowered = self.reference[0] - _finite(reference)
            factors[0] = exp2(lowered * self.scale_log2)
            self.sums[0] *= factors[0]
            self.lost[0] *= factors[0] * factors[0]
            self.squares[0] *= factors[0] * factors[0]
            self.reference[0] = reference
        return raised

    @cute.jit
    def _goal(self, highest: Float32) -> Float32:
        """The new reference: above the largest score by the margin, if it was set before and is
        small enough for the margin to be added exactly."""
        if cutlass.const_expr(self.margin > 0.0):
            grows = (self.reference[0] > -Float32.inf) & self._is_moderate(highest)
            margin = self.margin * reciprocal(self.scale_log2)
            highest = highest + margin if grows else highest
        return highest

    @cute.jit
    def is_tame(self) -> Boolean:
        """Whether `tentative` may be used for this warp's rows: each has a reference, small enough
        that its product with the scale is exact."""
        return cute.arch.vote_all_sync(self._is_moderate(self.reference[0]))

    def _is_moderate(self, score: Float32) -> Boolean:
        scaled = score * self.scale_log2
        return (scaled <= LARGEST_SHIFT) & (scaled >= -LARGEST_SHIFT)

    @cute.jit
    def holds(self, highest: Float32) -> Boolean:
        """Whether no row of this warp exceeds its reference by more than the threshold; `highest`
        is each row's largest score of a block, NaN if any score is."""
        within = (highest - self.reference[0]) * self.scale_log2 <= self.threshold
        return cute.arch.vote_all_sync(within)

    # ---- exponentials

    def exponentials(self, scores: cute.Tensor, columns: tuple[int, int], exact: bool) -> Float32:
        """Replace columns [begin, end) of a part of a row by exponentials; return their sum.
        `exact` is not needed where rows are tame."""
        total: tuple[Float32, ...] = ()
        for c in range(*columns, 2):
            x, pair = self.exponents((scores[c], scores[c + 1]), exact), c // 2
            # evenly spread, so that both units always have some
            by_fma = (pair + 1) * self.by_fma // PAIRS > pair * self.by_fma // PAIRS
            y = exp2_by_fma(x) if by_fma else (exp2(x[0]), exp2(x[1]))
            scores[c], scores[c + 1] = y
            total = add2((total[0], total[1]), y) if total else y
        return total[0] + total[1]

    def exponents(self, scores: Pair, exact: bool) -> Pair:
        """The powers of two of a pair of scores.

        NOTE: if `exact`, the difference of two scores is computed first, which is exact where it
        matters, whatever their size. Subtracted from a product in one multiply-add, it would be off
        by the product's rounding.
        """
        scale = (self.scale_log2,) * 2
        if exact:
            below = (-_finite(self.reference[0]),) * 2
            return fma2(add2(scores, below), scale, (Float32(-self.headroom),) * 2)
        shift = self.reference[0] * self.scale_log2 + self.headroom
        return fma2(scores, scale, (-shift,) * 2)

    @cute.jit
    def count_rounding(
        self,
        highest: Float32,
        total: Float32,
        columns: cutlass.Constexpr[int],
        dtype: cutlass.Constexpr[type[cutlass.Numeric]],
        counts: Boolean | bool,
        exact: cutlass.Constexpr[bool],
    ) -> None:
        """Account for the rounding of the largest probability of a block of `columns` columns and
        sum `total`; 0 unless the block `counts`.

        NOTE: without p_i of a row O would be off by the share p_i^2 / sum of p^2 of its rounding,
        and by something orthogonal to O; dividing by a corrected sum undoes the former. The
        squares: of each block's largest probability, and of twice the mean for the others.
        """
        largest = exp2(self.exponents((highest, highest), exact)[0])
        lost, square = largest * (largest - Float32(dtype(largest))), largest * largest
        self.lost[0] += lost if counts else Float32(0.0)  # NOTE: else they may be NaN
        self.squares[0] += (square if counts else Float32(0.0)) + total * total * (2.0 / columns)

    # ---- the end

    @cute.jit
    def finish(self, sinks: tuple[Float32, ...], factors: cute.Tensor, lse: cute.Tensor) -> None:
        """Finish the row after the last block. Sets `factors` (1), by which the output must be
        multiplied, and `lse` (1), the natural logarithm of the sum; a row without keys gets 0 and
        -inf.

        `sinks` holds the score, natural and scaled, of one more key that has no value; empty if
        there is no such key.
        """
        lifted = 2.0**self.headroom
        share = self.lost[0] * reciprocal(self.squares[0])
        share = share if self.squares[0] > LEAST_SQUARE else Float32(0.0)
        total = self.sums[0] * lifted
        lost = total * share
        highest = _finite(self.reference[0]) * self.unit
        scaled = Float32(1.0)
        if cutlass.const_expr(len(sinks) > 0):
            new = cute.arch.fmax(highest, sinks[0]) if total > 0.0 else sinks[0]
            scaled = exp2((highest - new) * LOG2_E) if total > 0.0 else Float32(0.0)
            # NOTE: -inf less -inf; a row without keys and a sink of -inf has a sum of 0
            total = total * scaled + exp2((sinks[0] - _finite(new)) * LOG2_E)
            highest, lost = new, lost * scaled
        empty = total == 0.0
        factors[0] = Float32(0.0) if empty else scaled * lifted * reciprocal(total - lost)
        lse[0] = -Float32.inf if empty else highest + log2(total) * LN2


def row_max(scores: cute.Tensor, highest: Float32) -> Float32:
    """The largest of `highest` and of a part of a row, (columns), by two chains of maxima of three;
    NaN if one of them is."""
    columns = cute.size(scores)
    a, b = highest, scores[0]
    for c in range(1, columns - 1, 4):
        a = largest(a, scores[c], scores[c + 1])
        if c + 3 < columns:
            b = largest(b, scores[c + 2], scores[c + 3])
    return largest(a, b, scores[columns - 1])


@cute.jit
def _finite(x: Float32) -> Float32:
    return Float32(0.0) if x == -Float32.inf else x
