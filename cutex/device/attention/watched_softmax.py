"""The softmax of Hopper's forward, as fast and as exact for peaked scores as for tame ones.

Blocks of tame scores are processed by `add`, which uses a row's reference as it is:
tame_softmax.py.

Blocks of peaked scores are processed by `guard`, which finds the largest score of each thread's
part of a row and, if some row of the warp exceeds its reference by more than `room` powers of two,
raises references before computing exponentials: by enough that further raises are rare.

The state it keeps, and what is computed from it at the end of a tile: watched_state.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import cutlass
from cutlass import Boolean, Float16, Float32, Int32, cute

from cutex.device.atoms.scalar import (
    exp2,
    fma,
    largest_negative_of,
    largest_of,
    nearest_whole,
    power_below,
    sqrt,
)
from cutex.device.attention.guarded_softmax import GuardedSoftmax
from cutex.device.attention.softmax import row_max
from cutex.device.attention.tame_softmax import LOW, TameSoftmax
from cutex.device.attention.watched_state import ABOUT_ONE

NEVER = -3  # a step long before those of `guard`
FEW_KEYS = 64  # in a block, of which two rise by as much as one of twice as many
NEAR = 4.0  # powers of two by which a reference may differ from the largest score at the end
# exponentials that differ by less are of one score, relative to two references
SAME = 1.0 + 2.0**-14


@dataclass(frozen=True)
class WatchedSoftmax(TameSoftmax):
    """The softmax of a tile's blocks, with probabilities in bf16."""

    room: ClassVar[float] = 60.0  # powers of two by which a score may exceed its reference
    above: ClassVar[float] = 40.0  # and by which a reference that is raised exceeds all scores
    most_headroom: ClassVar[float] = 20.0  # powers of two, of a tile that is computed again

    @staticmethod
    def rounding_to(dtype: type[cutlass.Numeric]) -> type[WatchedSoftmax]:
        """The class for probabilities in `dtype`."""
        return WatchedSoftmaxFp16 if dtype is Float16 else WatchedSoftmax

    @classmethod
    def of(
        cls,
        scale_log2: Float32,
        threshold: float | Float32,
        speculates: bool,
        blocks: Int32 | int = 1,
        looks: bool = True,
        unit: Float32 | None = None,
        usual_unit: float = 0.0,
        truncated: float = 0.0,
        begins: int = 0,
        headroom: Float32 | float = 0.0,
    ) -> Self:
        kept = GuardedSoftmax.of(scale_log2, threshold, speculates)
        top = cute.make_rmem_tensor(cute.make_layout(cls.rows), Float32)
        squares = cute.make_rmem_tensor(cute.make_layout(cls.rows), Float32)
        looks = looks and speculates
        peaked = cute.make_rmem_tensor(cute.make_layout(1), Boolean) if looks else None
        best = cute.make_rmem_tensor(cute.make_layout(cls.rows), Float32) if speculates else None
        part = cute.make_rmem_tensor(cute.make_layout(cls.rows), Float32) if speculates else None
        if best is not None and part is not None:
            best.fill(-Float32.inf)
            part.fill(0.0)
        if peaked is not None:
            peaked[0] = Boolean(False)
        raised_at = None
        if speculates and (cls.loses_low or not looks):
            raised_at = cute.make_rmem_tensor(cute.make_layout(1), Int32)
            raised_at[0] = Int32(NEVER)
        tensors = kept.reference, kept.sums, scale_log2, threshold, kept.shift, headroom
        units = unit, usual_unit, truncated, begins
        return cls(*tensors, top, squares, part, best, peaked, blocks, raised_at, *units)

    # ---- blocks

    @cute.jit
    def first(self, scores: cute.Tensor, seen: tuple[Int32, ...] | None = None) -> None:
        """Softmax's `first`, plus `look` at the block if `seen` is given."""
        largest = [row_max(scores, r) for r in range(self.rows)]
        for r in cutlass.range_constexpr(self.rows):
            self.set_reference(r, self.over_row(largest[r], cute.arch.fmax))
        self._lower(scores)
        for r in cutlass.range_constexpr(self.rows):
            self.sums[r] = self._exponentials(scores, r)
            self.squares[r] = self.sums[r] * self.sums[r]
            self.top[r] = exp2(-Float32(self.headroom))
        if cutlass.const_expr(seen is not None):
            self.look(largest, [self.sums[r] for r in range(self.rows)], seen)

    @cute.jit
    def next(
        self,
        scores: cute.Tensor,
        factors: cute.Tensor,
        seen: tuple[Int32, ...] | None = None,
        late: cutlass.Constexpr[bool] = False,
    ) -> Boolean:
        """Softmax's `next`, plus `look` at the block if `seen` is given. `late`: after blocks that
        may have been processed by `add`."""
        known = [self.top[r] > 0.0 for r in range(self.rows)]
        largest = [row_max(scores, r) for r in range(self.rows)]
        highest = [self.over_row(largest[r], cute.arch.fmax) for r in range(self.rows)]
        rescale = self.raise_references(highest, factors)
        self._lower(scores)
        added = [Float32(0.0)] * self.rows
        for r in cutlass.range_constexpr(self.rows):
            added[r] = self._exponentials(scores, r)
            self.sums[r] += added[r]
            self.squares[r] += added[r] * added[r]
            self.top[r] = cute.arch.fmax(self.top[r], self._probability(highest[r], r))
        if cutlass.const_expr(late):
            for r in cutlass.range_constexpr(self.rows):
                if rescale:
                    self.part[r] *= factors[r]
                self.part[r] = cute.arch.fmax(self.part[r], added[r])
                self.top[r] = self.top[r] if known[r] else Float32(0.0)
        if cutlass.const_expr(seen is not None):
            self.look(largest, added, seen)
        return rescale

    @cute.jit
    def guard(
        self,
        scores: cute.Tensor,
        factors: cute.Tensor,
        seen: tuple[Int32, ...] | None = None,
        low: cutlass.Constexpr[bool] = False,
        eager: Boolean | bool = False,
        step: Int32 | int = -1,
        last: Boolean | bool = False,
    ) -> Boolean:
        """Like `add`, after raising references if the block exceeds one by more than `room` powers
        of two.

        Returns whether outputs so far must be multiplied by `factors` (rows). With `seen`, also
        `look` at the block: blocks by `add` may follow. `low`: rows may have references far below 0
        (`is_low`). `eager`: references rise to any larger score, whose probability is then exact.
        `step`: the number of guarded blocks before. `last`: references that have risen end near the
        largest score (`_settles`).
        """
        # NOTE: assigned to in a branch, `self` would not be constant behind it
        best, part = self.best, self.part
        settles = self._settles(step, last, low, self._gap(scores))
        if cutlass.const_expr(last is not False and self.settles_any):  # noqa: SIM102
            if settles:
                self._keep_top(low)
        begun = self._begun(scores) if self.begins > 0 and seen is None else None
        room = Float32(0.0) if eager else Float32(self.room)
        if cutlass.const_expr(last is not False and self.raised_at is not None):
            room = Float32(NEAR) if settles else room
        mixed = self._find_best(scores, low, surely=seen is not None)
        exceeds = mixed
        for r in cutlass.range_constexpr(self.rows):
            above = best[r] * self.scale_log2 - self.shift[r]
            exceeds = exceeds | (above > room)
            if cutlass.const_expr(last is not False and not self.loses_low):
                exceeds = exceeds | (settles & (above < -NEAR))
            if cutlass.const_expr(seen is not None):
                # NOTE: a row that has seen few keys may have a low reference by chance
                exceeds = exceeds | ((self.shift[r] < LOW) & (above > 0.0))
        exceeds = cute.arch.vote_any_sync(exceeds)
        if exceeds:
            if cutlass.const_expr(low):  # noqa: SIM102 - known when tracing
                if cute.arch.vote_any_sync(mixed):
                    self._find_mixed(scores)
            self._raise_above(scores, factors, low, eager, step, settles, seen is not None)
            if cutlass.const_expr(seen is not None):
                for r in cutlass.range_constexpr(self.rows):
                    part[r] *= factors[r]
            if cutlass.const_expr(begun is not None):
                self._begin(begun, scores)
        added = [Float32(0.0)] * self.rows
        for r in cutlass.range_constexpr(self.rows):
            a, b = self._halves_by_shift(scores, r, self.reference_log2(r), begun)
            added[r] = a + b
            self.sums[r] += added[r]
            self.squares[r] += added[r] * added[r]
        if cutlass.const_expr(seen is not None):
            for r in cutlass.range_constexpr(self.rows):
                self.part[r] = cute.arch.fmax(self.part[r], added[r])
            self.look([best[r] for r in range(self.rows)], added, seen)
        return exceeds

    def _begun(self, scores: cute.Tensor) -> cute.Tensor:
        """The exponentials of each row's first columns (rows, `begins`), by references as they are:
        they are computed while `guard` searches and votes, and again if references are raised."""
        layout = cute.make_layout((self.rows, self.begins))
        begun = cute.make_rmem_tensor(layout, Float32)
        self._begin(begun, scores)
        return begun

    @cute.jit
    def _begin(self, begun: cute.Tensor, scores: cute.Tensor) -> None:
        for r in cutlass.range_constexpr(self.rows):
            for c in cutlass.range_constexpr(self.begins):
                # NOTE: fma; a product would be kept for both branches, and a difference taken of it
                power = fma(scores[r, c], self.scale_log2, -self.reference_log2(r))
                begun[r, c] = exp2(power)

    @cute.jit
    def _find_best(
        self,
        scores: cute.Tensor,
        low: cutlass.Constexpr[bool],
        surely: cutlass.Constexpr[bool] = False,
    ) -> Boolean:
        """Update `best`, the largest scores that `guard` has found, with this block. Returns
        whether this thread must still search some rows by `_find_mixed`.

        NOTE: compared as integers, floats are ordered as long as one of them is positive. If none
        is, not `low`, the result is 0 unless they are searched again, `surely`. If `low`, rows with
        any non-negative score are searched again: such scores exceed low references, so one vote
        serves both questions.
        """
        best, columns, mixed = self.best, cute.size(scores, mode=[1]), Boolean(False)
        if cutlass.const_expr(low):
            for r in cutlass.range_constexpr(self.rows):
                a, b = scores[r, 0], scores[r, 1]
                for c in cutlass.range_constexpr(2, columns, 4):
                    a = largest_negative_of(a, scores[r, c], scores[r, c + 1])
                    if cutlass.const_expr(c + 3 < columns):
                        b = largest_negative_of(b, scores[r, c + 2], scores[r, c + 3])
                found = largest_negative_of(a, b, b)
                mixed = mixed | (found >= 0.0)
                best[r] = cute.arch.fmax(best[r], found)
        else:
            negative, before = Boolean(False), [best[r] for r in range(self.rows)]
            for r in cutlass.range_constexpr(self.rows):
                a, b = best[r], Float32(0.0)
                for c in cutlass.range_constexpr(0, columns, 4):
                    a = largest_of(a, scores[r, c], scores[r, c + 1])
                    b = largest_of(b, scores[r, c + 2], scores[r, c + 3])
                best[r] = largest_of(a, b, b)
                negative = negative | (best[r] <= 0.0)
            if cutlass.const_expr(surely):  # noqa: SIM102 - known when tracing
                if cute.arch.vote_any_sync(negative):
                    for r in cutlass.range_constexpr(self.rows):
                        best[r] = cute.arch.fmax(before[r], row_max(scores, r))
        return mixed

    @cute.jit
    def _find_mixed(self, scores: cute.Tensor) -> None:
        """Find the largest scores of a block in which signs are mixed."""
        for r in cutlass.range_constexpr(self.rows):
            self.best[r] = cute.arch.fmax(self.best[r], row_max(scores, r))

    @cute.jit
    def is_low(self) -> Boolean:
        """Whether some row of this thread has a reference so far below 0 that `guard` would raise
        it for each score below 0 in fp16, or miss one that outweighs all others."""
        low = Boolean(False)
        for r in cutlass.range_constexpr(self.rows):
            low = low | (self.shift[r] < LOW)
        return low

    @cute.jit
    def is_negative(self) -> Boolean:
        """Whether some row of this thread has a reference below 0, which an eager `guard` would
        raise although no score is positive."""
        return cute.arch.fmin(self.shift[0], self.shift[1]) < 0.0

    @cute.jit
    def _raise_above(
        self,
        scores: cute.Tensor,
        factors: cute.Tensor,
        low: cutlass.Constexpr[bool],
        eager: Boolean | bool,
        step: Int32 | int,
        settles: Boolean,
        looks: cutlass.Constexpr[bool] = False,
    ) -> None:
        """Raise the references of this warp's rows above the largest scores that `guard` has found
        (or above this block's, if none of those is positive and the rows are not `low`); if
        `eager`, exactly to them. In fp16 by whole powers of two, too, except for rows whose scores
        rise block by block. Where references settle, move them to the largest scores by whole
        powers, up or down.

        NOTE: a largest score that is the reference has probability 1, which is exact. Otherwise
        references rise by whole powers of two, so probabilities keep the values they were rounded
        to.
        """
        shift, reference = self.shift, self.reference
        above = Float32(0.0) if looks or eager else Float32(self.above)
        rises = self._rises(step, self._gap(scores)) & ~Boolean(eager) & ~settles
        found = [self.best[r] for r in range(self.rows)]
        if cutlass.const_expr(not low):
            unseen = Boolean(False)
            for r in cutlass.range_constexpr(self.rows):
                unseen = unseen | ~(found[r] > 0.0)
            if cute.arch.vote_any_sync(unseen):
                for r in cutlass.range_constexpr(self.rows):
                    largest = row_max(scores, r)
                    found[r] = found[r] if found[r] > 0.0 else largest
        # NOTE: no branch between the rows, whose shuffles are waited for together
        highest = [self.over_row(found[r], cute.arch.fmax) * self.scale_log2 for r in range(2)]
        for r in cutlass.range_constexpr(self.rows):
            goal, least = highest[r] + above, Float32(0.0)
            if cutlass.const_expr(self.raised_at is not None and not self.loses_low):
                # NOTE: not below what blocks before have had
                total = power_below(self.over_row(self.sums[r], lambda x, y: x + y))
                least = cute.arch.fmax(total, self.lowered) if settles else least
                goal = highest[r] if settles else goal
            if cutlass.const_expr(self.loses_low):
                # NOTE: probabilities below 2^-25 are rounded to 0, which those of many keys may be
                goal = goal if rises & (highest[r] - shift[r] > self.room) else highest[r]
            power = cute.arch.fmax(goal - shift[r], least)
            leads = Boolean(eager) & (power > 0.0) & (exp2(power) > self.top[r])
            whole = nearest_whole(power)
            exact = leads | (power >= 2.0**20)
            raised = goal if exact else shift[r] + whole
            factors[r] = exp2(shift[r] - raised)
            self._scale(r, factors[r])
            self.top[r] = Float32(1.0) if leads else self.top[r]
            shift[r] = raised
            reference[r] = shift[r] / self.scale_log2

    @cute.jit
    def _rises(self, step: Int32 | int, gap: cutlass.Constexpr[int]) -> Boolean:
        """Whether `guard`, raising references in `step`, also did so `gap` blocks before, and so
        on; one block less often then, because of how far fp16 raises them."""
        rises = Boolean(False)
        if cutlass.const_expr(self.raised_at is not None):
            rises = Int32(step) - self.raised_at[0] <= gap
            self.raised_at[0] = Int32(step) + Int32(rises)
        return rises

    @staticmethod
    def _gap(scores: cute.Tensor) -> int:
        """The number of blocks after which steadily rising scores exceed fp16's range: two blocks
        of 64 or of 128 keys; one of 96, since two exceed what references may be raised by."""
        return 2 if 4 * cute.size(scores, mode=[1]) <= FEW_KEYS else 1

    @cute.jit
    def _settles(
        self,
        step: Int32 | int,
        last: Boolean | bool,
        low: cutlass.Constexpr[bool],
        gap: cutlass.Constexpr[int],
    ) -> Boolean:
        """Whether this is the `last` block and this warp's references may, having risen, be far
        from the largest scores. Exponents are rounded by their distance, and LSE would inherit
        that. `low` rows with few blocks may be far off without a raise. In fp16 only if they rise
        block by block: otherwise their distance is less than the rounding of such scores."""
        settles = Boolean(False)
        if cutlass.const_expr(last is not False and self.raised_at is not None):
            risen = Boolean(low) | (self.raised_at[0] > NEVER)
            if cutlass.const_expr(self.loses_low):
                risen = Int32(step) - self.raised_at[0] <= gap
            settles = Boolean(last) & risen
        return settles

    @property
    def settles_any(self) -> bool:
        """Whether references settle near the largest scores whatever rows have been like."""
        return self.raised_at is not None and not self.loses_low

    @cute.jit
    def _keep_top(self, low: cutlass.Constexpr[bool]) -> None:
        """Before references settle, count the largest scores that `guard` has found among the
        largest exponentials as they were rounded: relative to another reference they may round
        differently."""
        for r in cutlass.range_constexpr(self.rows):
            found = exp2(self.best[r] * self.scale_log2 - self.shift[r])
            if cutlass.const_expr(not low):
                found = found if self.best[r] > 0.0 else Float32(0.0)
            self.top[r] = cute.arch.fmax(self.top[r], found)

    @cute.jit
    def note_looked(self) -> None:
        """Count the examined block's largest score among the largest exponentials, but not as a
        score that references could rise to: its probability has already been rounded."""
        for r in cutlass.range_constexpr(self.rows):
            found = exp2(self.best[r] * self.scale_log2 - self.shift[r])
            # NOTE: alike in all threads of a row, which raise its reference alike
            self.top[r] = self.over_row(cute.arch.fmax(self.top[r], found), cute.arch.fmax)
            self.best[r] = -Float32.inf

    @cute.jit
    def note_top(self, low: cutlass.Constexpr[bool] = False) -> None:
        """Count the largest score that `guard` has found among the largest exponentials. Where it
        found 0, one below may be the largest: only its part's sum is known."""
        for r in cutlass.range_constexpr(self.rows):
            found = exp2(self.best[r] * self.scale_log2 - self.shift[r])
            self.part[r] = Float32(0.0)
            if cutlass.const_expr(not low):
                known = (self.best[r] > 0.0) | (self.top[r] >= found)
                found = found if self.best[r] > 0.0 else Float32(0.0)
                self.top[r] = self.top[r] if known else Float32(0.0)
                self.part[r] = self._largest_part(r)
            if cutlass.const_expr(self.settles_any):
                found = found if found > self.top[r] * SAME else self.top[r]
            self.top[r] = cute.arch.fmax(self.top[r], found)

    @cute.jit
    def _largest_part(self, r: cutlass.Constexpr[int]) -> Float32:
        """The sum of this thread's largest part of row r, if it is much larger than all others: the
        root of the squares, or the thread's whole sum, which is exact when they agree.
        """
        return cute.arch.fmin(sqrt(self.squares[r]) * ABOUT_ONE, self.sums[r])

    @cute.jit
    def _probability(self, score: Float32, r: cutlass.Constexpr[int]) -> Float32:
        """The same probability to the bit as `_exponentials` computes, so that it rounds to the
        same value."""
        large = (score - self._finite(self.reference[r])) * self.scale_log2 - self.headroom
        power = score * self.scale_log2 - self.reference_log2(r)
        return exp2(large if self._is_large(r) else power)

    # ---- references

    @cute.jit
    def raise_references(self, highest: list[Float32], factors: cute.Tensor) -> Boolean:
        """Raise the references of rows whose `highest` scores of a block exceed them by more than
        the threshold. Other rows keep theirs, and so the rounding of `top`."""
        rescale = Boolean(False)
        raised = [Boolean(False)] * self.rows
        for r in cutlass.range_constexpr(self.rows):
            raised[r] = (highest[r] - self.reference[r]) * self.scale_log2 > self.threshold
            rescale = rescale | raised[r]
        rescale = cute.arch.vote_any_sync(rescale)
        if rescale:
            for r in cutlass.range_constexpr(self.rows):
                reference = highest[r] if raised[r] else self.reference[r]
                # NOTE: -inf less -inf; a row without keys keeps its sum of 0
                power = (self.reference[r] - self._finite(reference)) * self.scale_log2
                if cutlass.const_expr(self.shift is not None):
                    before = self.shift[r]
                    self.set_reference(r, reference)
                    self.shift[r] = self.shift[r] if raised[r] else before
                    power = power if self._is_large(r) else before - self.shift[r]
                else:
                    self.set_reference(r, reference)
                factors[r] = exp2(power)
                self._scale(r, factors[r])
        return rescale


@dataclass(frozen=True)
class WatchedSoftmaxFp16(WatchedSoftmax):
    """The softmax of a tile's blocks, with probabilities in fp16, which ends at 2^16 and loses bits
    below 2^-14."""

    rounded: ClassVar[type[cutlass.Numeric]] = Float16
    high: ClassVar[float] = 2.0**15
    lowered: ClassVar[float] = 2.0  # no lower: what each of many keys gives must not be subnormal
    room: ClassVar[float] = 15.0
    above: ClassVar[float] = 5.0
    loses_low: ClassVar[bool] = True
    least_guarded: ClassVar[float] = -1e30
    most_headroom: ClassVar[float] = 0.0  # O of fp16 values cannot overflow
    most: ClassVar[float] = 2.0**40  # parts of blocks are below `high`
    alone: ClassVar[float] = 2.0**-16
