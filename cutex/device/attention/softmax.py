"""The online softmax of the rows that a thread holds, in base 2.

Scores arrive in blocks of columns. Each row keeps a reference, the largest score seen when it was
last set, and the sum of 2^(scale * (score - reference)). When a block raises the maximum, the sum
so far is scaled down (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention).

The reference need not be the maximum: as long as the maximum exceeds it by less than `threshold`
powers of two, the exponentials stay below 2^threshold, which fp32 sums and 16-bit probabilities
hold as well as ones below 1; so a warp whose rows all stay within it leaves sums and outputs as
they are (FlashAttention-4's conditional rescaling).

Nor need the maximum be computed. Scores of one row seldom spread further than bf16's exponent
reaches, so `add` takes the reference of the blocks before as it is and looks for no larger score;
`finish` detects from the sums whether any overflowed, and such rows are computed again with `next`.
(Like the unified maximum of FlashDecoding++, arXiv 2311.01282, with a reference per row.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import cutlass
from cutlass import Boolean, Float32, cute

from cutex.device.atoms.scalar import exp2, log2, reciprocal

LN2 = 0.6931471805599453
VALID_SUM = 2.0**30  # largest valid sum of exponentials; times V, far below the fp32 maximum
LOG2_E = 1.4426950408889634


def threshold_of(dtype: type[cutlass.Numeric], powers: float, of_fp16: float) -> float:
    """The rescale threshold in powers of two: `powers`, or at most `of_fp16` where P is float16,
    whose range ends at 2^16."""
    return min(powers, of_fp16) if dtype is cutlass.Float16 else powers


def headroom_of(dtype: type[cutlass.Numeric], powers: float) -> float:
    """The powers of two by which exponentials are lowered, so that their products with a large V
    stay as far from the end of float32 as those with a small one: `powers`, but none where P is
    float16, which is coarse far below 1; V ends at 2^16 there."""
    return 0.0 if dtype is cutlass.Float16 else powers


def rows_of(acc: cute.Tensor) -> cute.Tensor:
    """A thread's part of a wgmma accumulator, ((2, 2, N/8), 1, 1), as (rows, columns): (2, N/4)."""
    columns = cute.size(acc) // 4
    return cute.make_tensor(acc.iterator, cute.make_layout((2, (2, columns)), stride=(2, (1, 4))))


def of_row(scale: Float32 | tuple[Float32, ...], r: int) -> Float32:
    """The scale of row r: the one of all rows, or its own."""
    return scale[r] if isinstance(scale, tuple) else scale


@cute.jit
def over_quad(x: Float32, op: cutlass.Constexpr) -> Float32:
    """`op` over the four threads that hold a row."""
    x = op(x, cute.arch.shuffle_sync_bfly(x, offset=1))
    return op(x, cute.arch.shuffle_sync_bfly(x, offset=2))


@cute.jit
def row_max(scores: cute.Tensor, r: cutlass.Constexpr[int]) -> Float32:
    """The largest of this thread's scores in row r, by two chains of maxima."""
    columns = cute.size(scores, mode=[1])
    a, b = scores[r, 0], scores[r, 1]
    for c in cutlass.range_constexpr(2, columns, 2):
        a = cute.arch.fmax(a, scores[r, c])
        b = cute.arch.fmax(b, scores[r, c + 1])
    return cute.arch.fmax(a, b)


@dataclass(frozen=True)
class Softmax:
    """The references and sums of a thread's rows: two rows of a wgmma accumulator, each shared by
    four threads."""

    reference: cute.Tensor  # (rows) in units of scores; -inf before the first key
    sums: cute.Tensor  # (rows) of this thread's columns alone
    scale_log2: Float32 | tuple[Float32, ...]  # powers of two in a unit of scores; of each row's
    threshold: float | Float32  # powers of two by which the maximum may exceed the reference
    shift: cute.Tensor | None = None  # (rows) the reference in powers of two; 0, not -inf

    rows: ClassVar[int] = 2
    valid_sum: ClassVar[float] = VALID_SUM
    over_row: ClassVar[Any] = staticmethod(over_quad)  # the reduction over the threads of a row

    @classmethod
    def start(cls, scale_log2: Float32 | tuple[Float32, ...], threshold: float | Float32) -> Self:
        """The state before the first block."""
        rows = cute.make_layout(cls.rows)
        reference = cute.make_rmem_tensor(rows, Float32)
        sums = cute.make_rmem_tensor(rows, Float32)
        return cls(reference, sums, scale_log2, threshold)

    def scale_of(self, r: int) -> Float32:
        """The powers of two in a unit of row r's scores."""
        return of_row(self.scale_log2, r)

    @cute.jit
    def first(self, scores: cute.Tensor) -> None:
        """Turn the first block of scores (rows, columns) into exponentials, and set the
        references."""
        for r in cutlass.range_constexpr(self.rows):
            self.set_reference(r, self.over_row(row_max(scores, r), cute.arch.fmax))
            self.sums[r] = self._exponentials(scores, r)

    @cute.jit
    def next(self, scores: cute.Tensor, factors: cute.Tensor) -> Boolean:
        """Turn a further block of scores into exponentials. Returns whether outputs so far must be
        multiplied by `factors` (rows), which are then set."""
        highest = [self.over_row(row_max(scores, r), cute.arch.fmax) for r in range(self.rows)]
        rescale = self.raise_references(highest, factors)
        for r in cutlass.range_constexpr(self.rows):
            self.sums[r] += self._exponentials(scores, r)
        return rescale

    @cute.jit
    def raise_references(self, highest: list[Float32], factors: cute.Tensor) -> Boolean:
        """Raise the references to the `highest` scores of a block if some row of this warp exceeds
        its own by more than the threshold, and scale the sums by `factors` (rows). Returns whether
        it did."""
        rescale = Boolean(False)
        for r in cutlass.range_constexpr(self.rows):
            above = (highest[r] - self.reference[r]) * self.scale_of(r)
            rescale = rescale | (above > self.threshold)
        rescale = cute.arch.vote_any_sync(rescale)
        if rescale:
            for r in cutlass.range_constexpr(self.rows):
                reference = cute.arch.fmax(highest[r], self.reference[r])
                # NOTE: -inf less -inf; a row without keys keeps its sum of 0
                shift = self.reference[r] - self._finite(reference)
                factors[r] = exp2(shift * self.scale_of(r))
                self.sums[r] *= factors[r]
                self.set_reference(r, reference)
        return rescale

    def set_reference(self, r: int, reference: Float32) -> None:
        self.reference[r] = reference
        if self.shift is not None:
            self.shift[r] = self._finite(reference) * self.scale_of(r)

    def shift_of(self, r: int) -> Float32:
        """The power of two by which row r's scores are lowered."""
        if self.shift is not None:
            return self.shift[r]
        return self._finite(self.reference[r]) * self.scale_of(r)

    def reference_log2(self, r: int) -> Float32:
        """The reference of row r in powers of two."""
        return self.shift_of(r)

    @cute.jit
    def add(self, scores: cute.Tensor) -> None:
        """Turn a further block of scores into exponentials, with the references left as they
        are."""
        for r in cutlass.range_constexpr(self.rows):
            self.sums[r] += self._exponentials(scores, r)

    @cute.jit
    def _exponentials(self, scores: cute.Tensor, r: cutlass.Constexpr[int]) -> Float32:
        """Turn row r into exponentials; return their sum."""
        return self._by_shift(scores, r, self.shift_of(r))

    @cute.jit
    def _by_shift(self, scores: cute.Tensor, r: cutlass.Constexpr[int], shift: Float32) -> Float32:
        """Replace row r, lowered by `shift` powers of two, by exponentials; return their sum."""
        a, b = self._halves_by_shift(scores, r, shift)
        return a + b

    @cute.jit
    def _halves_by_shift(
        self,
        scores: cute.Tensor,
        r: cutlass.Constexpr[int],
        shift: Float32,
        begun: Any = None,
    ) -> tuple[Float32, Float32]:
        """Like `_by_shift`, with separate sums of even and odd elements. begun: the exponentials of
        the first ones (rows, columns), if they have been computed."""
        columns, first = cute.size(scores, mode=[1]), 0
        if cutlass.const_expr(begun is not None):
            first = cute.size(begun, mode=[1])
        for c in cutlass.range_constexpr(first):
            scores[r, c] = begun[r, c]
        for c in cutlass.range_constexpr(first, columns):
            scores[r, c] = exp2(scores[r, c] * self.scale_of(r) - shift)
        a, b = scores[r, 0], scores[r, 1]
        for c in cutlass.range_constexpr(2, columns, 2):
            a += scores[r, c]
            b += scores[r, c + 1]
        return a, b

    @staticmethod
    @cute.jit
    def _finite(x: Float32) -> Float32:
        return Float32(0.0) if x == -Float32.inf else x

    @cute.jit
    def finish(self, sinks: tuple[Float32, ...], factors: cute.Tensor, lse: cute.Tensor) -> Boolean:
        """Finish the rows after the last block. Sets `factors` (rows), by which outputs must be
        multiplied, and `lse` (rows), the natural logarithm of the sums; rows without keys get 0 and
        -inf. Returns whether no sum exceeds the limit up to which `add` is exact.

        `sinks` are, for each row, the score, natural and scaled, of one more key that has no value;
        empty if there is no such key.
        """
        valid = Boolean(True)
        for r in cutlass.range_constexpr(self.rows):
            total = self.over_row(self.sums[r], lambda x, y: x + y)
            valid = valid & (total <= self.valid_sum)
            highest = self.reference_log2(r)
            scaled = Float32(1.0)
            if cutlass.const_expr(len(sinks) > 0):
                total, highest, scaled = self.with_sink(total, highest, sinks[r])
            factors[r] = self.normaliser(total, scaled)
            lse[r] = self.log_sum(total, highest)
        return valid

    @cute.jit
    def with_sink(
        self, total: Float32, highest: Float32, sink: Float32
    ) -> tuple[Float32, Float32, Float32]:
        """A row's sum of exponentials, lowered by `highest` powers of two, with one more key of
        score `sink`: the new sum, the power it is lowered by, and the factor of the old sum."""
        sink_log2 = sink * LOG2_E
        new = cute.arch.fmax(highest, sink_log2) if total > 0.0 else sink_log2
        scaled = exp2(highest - new) if total > 0.0 else Float32(0.0)
        # NOTE: -inf less -inf; a row without keys and a sink of -inf has a sum of 0
        total = total * scaled + exp2(sink_log2 - self._finite(new))
        return total, new, scaled

    @staticmethod
    @cute.jit
    def normaliser(total: Float32, scaled: Float32) -> Float32:
        """The factor of a row of outputs, whose sum is `total`; 0 without keys."""
        return Float32(0.0) if total == 0.0 else scaled * reciprocal(total)

    @staticmethod
    @cute.jit
    def log_sum(total: Float32, highest: Float32) -> Float32:
        """The LSE of a row, whose sum is `total` times 2^highest; -inf without keys."""
        return -Float32.inf if total == 0.0 else (highest + log2(total)) * LN2
