"""A softmax whose sums and outputs stay far from the end of float32's range for any V.

O is divided by the sum of probabilities only at the end. Until then it may be larger by the number
of keys, and by 2^threshold where references lag; with V near the end of bfloat16's range that
overflows float32. So exponentials are lowered by a power of two. This rounds nothing and costs
nothing: it is added to the shift that scores are lowered by anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import cutlass
from cutlass import BFloat16, Boolean, Float32, cute

from cutex.device.atoms.scalar import log2
from cutex.device.attention.guarded_softmax import GuardedSoftmax
from cutex.device.attention.softmax import LN2, Softmax, threshold_of

# powers of two: for 2^17 keys of 2^8 times the reference's, V may be up to 2^123, 1e37; below
# 2^-98 V begins to lose digits in products with small probabilities
HEADROOM = 20.0
OF_FP16 = 4.0  # the rescale threshold of fp16, at most


@dataclass(frozen=True)
class LoweredSoftmax(GuardedSoftmax):
    """A GuardedSoftmax without `add`, whose exponentials are lowered by `headroom`."""

    headroom: float = 0.0  # powers of two

    @classmethod
    def rounding_to(
        cls,
        dtype: type[cutlass.Numeric],
        scale_log2: Float32 | tuple[Float32, ...],
        threshold: float,
    ) -> Self:
        """The state before the first block, where P is rounded to `dtype`. fp16 has no headroom: it
        is coarse far below 1, and V ends at 2^16."""
        start = cls.of(scale_log2, threshold_of(dtype, threshold, OF_FP16), False)
        return replace(start, headroom=HEADROOM if dtype is BFloat16 else 0.0)

    @cute.jit
    def reference_log2(self, r: int) -> Float32:
        found = self._finite(self.reference[r]) * self.scale_of(r)
        return found + self.headroom if self.headroom else found

    @cute.jit
    def shift_of(self, r: int) -> Float32:
        return Float32(self.headroom) if self._is_large(r) else self.reference_log2(r)

    @cute.jit
    def finish(self, sinks: tuple[Float32, ...], factors: cute.Tensor, lse: cute.Tensor) -> Boolean:
        # NOTE: the DSL takes `super()` within a method for the base of the object's own class
        valid = Softmax.finish(self, sinks, factors, lse)
        if cutlass.const_expr(len(sinks) == 0):
            for r in cutlass.range_constexpr(self.rows):
                if self._is_large(r):  # the shift may exceed fp32's range where the score does not
                    scale, sum_log2 = self.scale_of(r) * LN2, self.headroom - log2(factors[r])
                    lse[r] = self.reference[r] * scale + sum_log2 * LN2
        return valid
