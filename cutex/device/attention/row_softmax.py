"""The softmax of one whole row per thread, as loads of tensor memory return it, two columns at a
time.

A share of the exponentials is computed on the FMA units (as in FlashAttention-4): for a block of
128 keys at head dim 128, the tensor cores of an sm_100 take as long as MUFU takes for the
exponentials, while the FMA units, eight times as wide, would idle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import cutlass
from cutlass import Boolean, Float32, cute

from cutex.device.atoms.packed import ROUND, add2, exp2_by_fma, fma2, largest
from cutex.device.atoms.scalar import exp2
from cutex.device.attention.softmax import Softmax

PAIRS = 16  # pairs of columns in one group; `by_fma` of them use the FMA units, the rest MUFU
TRUSTED = 30.0  # the largest trusted exponent of 2, the same as for sums


@dataclass(frozen=True)
class RowSoftmax(Softmax):
    """The reference and the sum of a thread's row.

    by_fma: how many of 16 pairs of columns use the FMA units. There a score of -inf becomes 2^-127,
    not 0, so blocks with a mask use none; large scores become anything, see `by_fma_is_exact`.
    """

    top: cute.Tensor = None  # (1) the largest shifted number from exp2_by_fma; `start` makes it
    by_fma: int = 0

    rows: ClassVar[int] = 1
    over_row: ClassVar[Any] = staticmethod(lambda x, op: x)

    @classmethod
    def start(cls, scale_log2: Float32, slack: float) -> Self:
        top = cute.make_rmem_tensor(cute.make_layout(1), Float32)
        top[0] = Float32(0.0)
        return replace(super().start(scale_log2, slack), top=top)

    def partly_by_fma(self, share: int) -> Self:
        """The same, with `share` of 16 pairs of exponentials on the FMA units."""
        return replace(self, by_fma=share)

    @cute.jit
    def _exponentials(self, scores: cute.Tensor, r: cutlass.Constexpr[int]) -> Float32:
        top, by_fma = self.top, self.by_fma
        reference = self._finite(self.reference[r]) * self.scale_log2
        scale, shift = (self.scale_log2,) * 2, (-reference,) * 2
        total: tuple[Float32, ...] = ()
        seen = top[0]
        for pair in cutlass.range_constexpr(cute.size(scores, mode=[1]) // 2):
            c = 2 * pair
            x = fma2((scores[r, c], scores[r, c + 1]), scale, shift)
            # evenly spread, so that both units always have some
            if cutlass.const_expr((pair + 1) * by_fma // PAIRS > pair * by_fma // PAIRS):
                y, whole = exp2_by_fma(x)
                seen = largest(seen, *whole)
            else:
                y = exp2(x[0]), exp2(x[1])
            scores[r, c], scores[r, c + 1] = y
            total = y if pair == 0 else add2((total[0], total[1]), y)
        top[0] = seen
        return total[0] + total[1]

    def by_fma_is_exact(self) -> Boolean:
        """Whether every number that went through the FMA units was small enough for them."""
        return self.top[0] <= ROUND + TRUSTED
