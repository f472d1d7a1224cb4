"""The moments of a row, combined first within warps and then across them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, cute

from cutex.device.row.reduction import Values, add, lanes, pairwise
from cutex.device.row.tile import WARP

Sums = Any  # RowReduction, or RelayedReduction
CHAINS = 4  # sums that are added up beside each other, so that none waits for the one before


@dataclass(frozen=True)
class Moments:
    """What the threads of a row of n columns need to compute its moments, or its sum of squares
    (RMS norm).

    The reduction over the row's threads, the number of columns held by this thread's warp and by
    its CTA of a cluster, and the reciprocals of these counts."""

    centred: bool
    sums: Sums
    of_warp: Float32
    by_warp: Float32
    of_cta: Float32
    by_cta: Float32
    by_n: Float32

    @staticmethod
    def of(
        centred: bool, sums: Sums, own: Float32 | None, n: Int32, part: Int32 | None = None
    ) -> Moments:
        """own: the number of columns this thread holds; None for an RMS norm. part: the number its
        CTA holds, if not all."""
        of_warp, of_cta = Float32(0), Float32(n if part is None else part)
        if own is not None:
            of_warp = lanes((own,), add, min(sums.tile.threads, WARP))[0]
        by_warp, by_cta = (Float32(1) / cute.arch.fmax(x, Float32(1)) for x in (of_warp, of_cta))
        return Moments(centred, sums, of_warp, by_warp, of_cta, by_cta, Float32(1) / Float32(n))

    @property
    def group(self) -> int:
        """The number of threads of a warp that share a row."""
        return min(self.sums.tile.threads, WARP)

    def mean_of_warp(self, x: list[Float32]) -> Float32:
        """The mean of the warp's elements of a row; x are this thread's, 0 outside the row."""
        return lanes((folded(x, plus),), add, self.group)[0] * self.by_warp

    def squares_of_warp(self, x: list[Float32]) -> Float32:
        """The sum of squares of the warp's elements."""
        return lanes((folded(x, squared),), add, self.group)[0]

    def gather(self, found: list[Values], group: int) -> Values:
        """The moments, or the sum of squares, of a whole row, from those of its parts; each of
        `group` lanes holds some."""
        return self.gathered(found, group, self.by_n)

    def gather_of_cta(self, found: list[Values], group: int) -> Values:
        """Like `gather`, for one CTA's part of a row; its number of columns comes first, so that it
        can be combined again."""
        gathered = self.gathered(found, group, self.by_cta)
        return (self.of_cta, *gathered) if self.centred else gathered

    def gathered(self, found: list[Values], group: int, by_count: Float32) -> Values:
        """The combined moments of parts of `1 / by_count` columns each. Their means are taken
        relative to the first part's, so that a mean far from 0 loses no digits."""
        if not self.centred:
            return pairwise(add)(found, group)
        first = cute.arch.shuffle_sync(found[0][1], 0)
        parts = [(count, mean - first, squares) for count, mean, squares in found]
        (total,) = lanes((sum_of(n * mean for n, mean, _ in parts),), add, group)
        mean = total * by_count
        apart = (s + n * (m - mean) * (m - mean) for n, m, s in parts)
        (squares,) = lanes((sum_of(apart),), add, group)
        return mean + first, squares


def plus(total: Float32, x: Float32) -> Float32:
    return total + x


def squared(total: Float32, x: Float32) -> Float32:
    return total + x * x


def folded(x: list[Float32], combine: Callable[[Float32, Float32], Float32]) -> Float32:
    """The sum of `combine`d elements."""
    totals = [Float32(0)] * min(CHAINS, len(x))
    for i, value in enumerate(x):
        totals[i % len(totals)] = combine(totals[i % len(totals)], value)
    while len(totals) > 1:
        half = len(totals) // 2
        totals = [totals[i] + totals[i + half] for i in range(half)] + totals[2 * half :]
    return totals[0]


def sum_of(x: Iterable[Float32]) -> Float32:
    return functools.reduce(operator.add, x)
