"""RowStats: what is known of the sum of a row's exponentials, over a part of its keys.

    O = sum of w O / sum of w,   w = n 2^(e + r)

over the parts of a row's keys, of which each has its own O, divided by its own sum n 2^e of
exponentials, which are lowered by r powers of two. What parts are worth beside each other is found
from differences of r and of e, which are exact where it matters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass import Float32, cute

from cutex.device.atoms.scalar import exp2, log2, power_below

LN2_REST = -1.9046543e-9  # of ln 2, beside the nearest float32
FIELDS, KEPT_FIELDS = 5, 4  # of RowStats, and of KeptStats


class KeptStats(NamedTuple):
    """What of it goes through memory: 16 bytes."""

    total: Any  # n 2^e
    r: Any
    lse: Any
    low: Any  # what rounding has taken from LSE

    @staticmethod
    def of(softmax: Any, lse: cute.Tensor, low: cute.Tensor, r: int) -> KeptStats:
        """Of row `r` of this thread, whose blocks `softmax` has seen."""
        total = softmax.over_row(softmax.sums[r], lambda x, y: x + y)
        return KeptStats(total, softmax.reference_log2(r), lse[r], low[r])

    @property
    def known(self) -> RowStats:
        power = power_below(self.total)  # NOTE: of no keys -127, so that n is 0
        return RowStats(self.total * exp2(-power), power, self.r, self.lse, self.low)


class RowStats(NamedTuple):
    """The sum n 2^e of exponentials that r powers of two have been taken from, and LSE in two
    terms."""

    n: Any
    e: Any
    r: Any
    lse: Any
    low: Any

    def above(self, other: RowStats) -> Float32:
        """The powers of two by which its weight, but for n, is larger than the other's."""
        return (self.r - other.r) + (self.e - other.e)


def sum_of_terms(a: Float32, b: Float32) -> tuple[Float32, Float32]:
    """The sum of two numbers, and what its rounding has taken (Knuth)."""
    total = a + b
    added = total - a
    return total, (a - (total - added)) + (b - added)


def log2_of_ratio(total: Float32, n: Float32) -> Float32:
    """log2(total / n), of positive numbers.

    NOTE: to the LSE of a sum n it adds what log2 of `total` is off, and takes away what that of n
    was: a sum of several parts is as exact as that of one, and of equal numbers it is 0.
    """
    (power, fraction), (below, of_n) = log2_terms(total), log2_terms(n)
    return (power - below) + (fraction - of_n)


def log2_terms(x: Float32) -> tuple[Float32, Float32]:
    """The whole powers of two in log2 of a positive number, and the rest."""
    power = power_below(x)
    return power, log2(x * exp2(-power))
