"""The rows of a WatchedSoftmax while their scores are tame: `add`, and what makes it safe.

The first blocks show whether scores are tame (`look`). If sums grow nevertheless, `lower` raises
references by whole powers of two, which changes no bit of a mantissa: in bf16 once every few blocks
(`has_grown`), since exponentials up to 2^127 and their products are finite; in fp16 before a
block's probabilities are rounded, if one of them may exceed its range (`add_within`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from cutex.device.atoms.scalar import exp2, largest_of, nearest_whole, power_below, reciprocal
from cutex.device.attention.watched_state import ABOUT_ONE, WatchedState

LEAST_SEEN = 8  # columns of a thread, in which what scores are like can be seen
LOW = -15.0  # powers of two: a reference below which `guard` has to order scores below 0, too


@dataclass(frozen=True)
class TameSoftmax(WatchedState):
    """The blocks of tame rows, with probabilities in bf16."""

    high: ClassVar[float] = 2.0**12  # a part's sum from which on `lower` raises a reference
    lowered: ClassVar[float] = -64.0  # the power of two that the sum then has
    loses_low: ClassVar[bool] = False  # whether probabilities of 2^-25 are rounded to 0
    least_guarded: ClassVar[float] = LOW  # reference in powers of two of a row that is guarded

    # ---- blocks

    @cute.jit
    def add(self, scores: cute.Tensor) -> None:
        for r in cutlass.range_constexpr(self.rows):
            a, b = self._halves_by_shift(scores, r, self.reference_log2(r))
            self.sums[r] += a + b
            self.part[r] = largest_of(self.part[r], a, b)

    @cute.jit
    def add_within(self, scores: cute.Tensor) -> Boolean:
        """Like `add`. Returns whether a probability of this thread may be too `high` to be rounded;
        if one of any thread of the warp may, `lower` must come first."""
        exceeds = Boolean(False)
        for r in cutlass.range_constexpr(self.rows):
            a, b = self._halves_by_shift(scores, r, self.reference_log2(r))
            self.sums[r] += a + b
            self.part[r] = largest_of(self.part[r], a, b)
            # NOTE: `lower` has left no part of blocks before as high
            exceeds = exceeds | (self.part[r] >= self.high)
        return exceeds

    @cute.jit
    def look(self, largest: list[Float32], added: list[Float32], seen: tuple[Int32, ...]) -> None:
        """Test whether a block's scores are `peaked`.

        Given are, for this thread's parts of rows, the number of columns they see, their `largest`
        scores and sums of exponentials. A row is peaked if its sum is worth fewer of its largest
        score than for most Gaussian scores of a standard deviation of 1.4. Rows that see little are
        not peaked; those that see -1 do not count. In bf16 it is enough if in two warps some rows'
        parts consist of little more than their largest scores.
        """
        if cutlass.const_expr(self.peaked is not None):
            peaked, wild, counts = Boolean(True), Boolean(False), Boolean(False)
            for r in cutlass.range_constexpr(self.rows):
                number, top = 2.2 + 0.0875 * Float32(seen[r]), self._exponential(largest[r], r)
                seen_enough = seen[r] >= LEAST_SEEN
                of_row = (added[r] < number * top) & seen_enough
                if cutlass.const_expr(self.loses_low):
                    of_row, counts = of_row | (seen[r] < 0), counts | (seen[r] >= 0)
                peaked = peaked & of_row
                wild = wild | ((added[r] < ABOUT_ONE * top) & seen_enough)
            if cutlass.const_expr(self.loses_low):
                peaked = peaked & counts
            else:
                # NOTE: `lower` cannot follow scores that differ by 2^127 in few blocks, as those of
                # such rows may; half of a warp says so, and two warps are enough
                peaked = peaked | (cute.arch.vote_any_sync(wild) & (cute.arch.lane_idx() < 16))
            self.peaked[0] = peaked

    @cute.jit
    def is_guarded(self) -> Boolean:
        """Whether scores are peaked and, in bf16, not far below 0: `guard` compares those slowly,
        and `lower` can follow them."""
        return self.peaked[0] & (cute.arch.fmin(self.shift[0], self.shift[1]) > self.least_guarded)

    # ---- what is kept

    @cute.jit
    def forget_top(self) -> None:
        """Forget the largest exponential except as a part's sum, so that it occupies no
        register."""
        for r in cutlass.range_constexpr(self.rows):
            self.part[r] = cute.arch.fmax(self.part[r], self.top[r])
        self.top.fill(0.0)
        self.squares.fill(0.0)

    def _scale(self, r: int, factor: Float32) -> None:
        """Multiply everything kept of row r's exponentials by `factor`."""
        self.sums[r] *= factor
        self.top[r] *= factor
        self.squares[r] *= factor * factor

    @cute.jit
    def _exponential(self, score: Float32, r: cutlass.Constexpr[int]) -> Float32:
        """The exponential of a score of row r."""
        power = (score - self._finite(self.reference[r])) * self.scale_log2
        return exp2(power - self.headroom)

    # ---- references

    @cute.jit
    def has_grown(self, last: Boolean | bool) -> Boolean:
        """Whether a part of some row of this warp is `high` or, before the `last` block, low."""
        grown = Boolean(False)
        for r in cutlass.range_constexpr(self.rows):
            grown = grown | (self.part[r] >= self.high)
            grown = grown | (Boolean(last) & (self.part[r] < 1.0 / self.high))
        return cute.arch.vote_any_sync(grown)

    @cute.jit
    def lower(
        self, factors: cute.Tensor, last: Boolean | bool, first: Boolean | bool, blocks: Int32
    ) -> None:
        """Where parts are `high`, raise references by whole powers of two, and scale the sums by
        `factors` (rows). Outputs, and probabilities not yet added to them, must be scaled, too.

        Before the `last` block, references are set to where its scores will be if they keep growing
        as in the `blocks` since the last call (or since the `first`): otherwise exponents, and LSE,
        would be rounded more than necessary."""
        shift, each = self.shift, reciprocal(Float32(blocks))
        before = Float32(0.0) if first else Float32(self.lowered)
        for r in cutlass.range_constexpr(self.rows):
            total = self.over_row(self.part[r], cute.arch.fmax)
            size, far = power_below(total), total >= self.high
            goal = Float32(self.lowered)
            if last:
                far = far | ((total < 1.0 / self.high) & (total > 0.0))
                grown = cute.arch.fmax(size - before, 0.0) * each
                goal = -cute.arch.fmin(nearest_whole(grown), -self.lowered)
            # NOTE: a factor below 2^-126 would be 0; the next time then lowers the rest
            power = cute.arch.fmin(size - goal, 126.0)
            power = power if far else Float32(0.0)
            factors[r] = exp2(-power)
            self.sums[r] *= factors[r]
            self.part[r] *= factors[r]
            shift[r] += power
            self.reference[r] = shift[r] / self.scale_log2
