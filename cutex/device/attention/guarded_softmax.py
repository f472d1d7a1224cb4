"""The softmax of Hopper's forward for scores of any size, and for rows that start without keys.

Scores are lowered by one fused multiply-add whose addend, the reference in powers of two, is
rounded. Beyond 2^13 that rounding error matters: `first` and `next` then subtract the reference
first, which is exact, and multiply afterwards. `add` does not; `finish` detects such rows, and they
are computed again with `next`.

A row whose first block has no key has no reference that `add` could use. Any score in a later block
makes its sum infinite, which `finish` detects.

The result of `finish` depends on the sums alone, never on V.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import cutlass
from cutlass import Boolean, Float32, cute

from cutex.device.atoms.scalar import log2
from cutex.device.attention.softmax import LN2, Softmax, row_max

NO_KEY = -3e38  # the shift of a row without a key so far: any score exceeds it beyond fp32's range


@dataclass(frozen=True)
class GuardedSoftmax(Softmax):
    """A Softmax whose overflows `finish` detects; `shift` is kept if blocks may be processed by
    `add`."""

    shift: Any = None  # (rows) the reference in powers of two, or NO_KEY; None if not kept
    headroom: Float32 | float = 0.0  # powers of two by which that exceeds the largest score

    valid_sum: ClassVar[float] = 2.0**26
    large: ClassVar[float] = 2.0**13  # the largest shift whose rounding does not count

    @classmethod
    def of(
        cls,
        scale_log2: Float32 | tuple[Float32, ...],
        threshold: float | Float32,
        speculates: bool,
    ) -> Self:
        """The state before the first block; `speculates`: whether blocks may be processed by `add`.

        NOTE: `shift` has its own registers only then: computed in `add` from the reference, which
        LSE needs in the end, it cost 3 % at head dim 64; `next` is faster without it.
        """
        start = cls.start(scale_log2, threshold)
        if not speculates:
            return start
        return replace(start, shift=cute.make_rmem_tensor(cute.make_layout(cls.rows), Float32))

    @cute.jit
    def first(self, scores: cute.Tensor) -> None:
        for r in cutlass.range_constexpr(self.rows):
            self.set_reference(r, self.over_row(row_max(scores, r), cute.arch.fmax))
        self._lower(scores)
        for r in cutlass.range_constexpr(self.rows):
            self.sums[r] = self._exponentials(scores, r)

    @cute.jit
    def next(self, scores: cute.Tensor, factors: cute.Tensor) -> Boolean:
        highest = [self.over_row(row_max(scores, r), cute.arch.fmax) for r in range(self.rows)]
        rescale = self.raise_references(highest, factors)
        self.add_exactly(scores)
        return rescale

    @cute.jit
    def add_exactly(self, scores: cute.Tensor) -> None:
        """Like `add`, for references of any size."""
        self._lower(scores)
        for r in cutlass.range_constexpr(self.rows):
            self.sums[r] += self._exponentials(scores, r)

    @cute.jit
    def add(self, scores: cute.Tensor) -> None:
        for r in cutlass.range_constexpr(self.rows):
            self.sums[r] += self._by_shift(scores, r, self.reference_log2(r))

    @cute.jit
    def set_reference(self, r: int, reference: Float32) -> None:
        self.reference[r] = reference
        if cutlass.const_expr(self.shift is not None):
            no_key = reference == -Float32.inf
            shift = reference * self.scale_of(r) + self.headroom
            self.shift[r] = Float32(NO_KEY) if no_key else shift

    @cute.jit
    def reference_log2(self, r: int) -> Float32:
        if cutlass.const_expr(self.shift is not None):
            return self.shift[r]
        return self._finite(self.reference[r]) * self.scale_of(r)

    @cute.jit
    def shift_of(self, r: int) -> Float32:
        """The power of two that scores are lowered by after `_lower`."""
        return Float32(self.headroom) if self._is_large(r) else self.reference_log2(r)

    @cute.jit
    def _is_large(self, r: int) -> Boolean:
        """Whether row r's reference is too large for a rounded shift."""
        shift = self.reference_log2(r)
        return (cute.arch.fmax(shift, -shift) > self.large) & (shift != NO_KEY)

    @cute.jit
    def _lower(self, scores: cute.Tensor) -> None:
        """Subtract large references from `scores`."""
        for r in cutlass.range_constexpr(self.rows):
            if self._is_large(r):
                for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                    scores[r, c] -= self.reference[r]

    @cute.jit
    def finish(self, sinks: tuple[Float32, ...], factors: cute.Tensor, lse: cute.Tensor) -> Boolean:
        valid = super().finish(sinks, factors, lse)
        for r in cutlass.range_constexpr(self.rows):
            if cutlass.const_expr(self.shift is not None):
                valid = valid & ~self._is_large(r)
            elif cutlass.const_expr(len(sinks) == 0):  # noqa: SIM102 - known when tracing
                if self._is_large(r):  # the shift may exceed fp32's range where the score does not
                    scale = self.scale_of(r) * LN2
                    lse[r] = self.reference[r] * scale - log2(factors[r]) * LN2
        return valid
