"""The moments of a row whose threads meet once, with what each knows about the others' counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from cutex.device.row.columns import Columns
from cutex.device.row.reduction import RowReduction, Values
from cutex.device.row.tile import WARP


class Weights(NamedTuple):
    """Of two sets of elements that are merged: the second one's share of the union, and the
    product of both counts over that of the union."""

    share: Float32
    cross: Float32

    @staticmethod
    def of(a: Float32, b: Float32) -> Weights:
        by_both = cute.arch.rcp_approx(cute.arch.fmax(a + b, Float32(1)))
        share = cutlass.select_(a == 0.0, Float32(1), b * by_both)  # then b's mean, to the bit
        return Weights(share, a * b * by_both)

    def merged(self, a: Values, b: Values) -> Values:
        """The mean, and the sum of squared differences from it, of the union.

        Source: Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing
        sample variances, 1979."""
        apart = b[0] - a[0]
        return a[0] + apart * self.share, a[1] + b[1] + apart * apart * self.cross


@dataclass(frozen=True)
class UnequalMoments:
    """The mean of a row and the sum of squared differences from it, by one exchange between its
    threads. How many elements each of them has is combined while the row is on its way, so that
    behind its arrival a step is a shuffle and three dependent operations."""

    reduction: RowReduction
    columns: Columns
    by_count: Float32  # the reciprocal of this thread's count
    in_warp: list[Weights]
    in_cta: list[Weights]
    across: list[Weights]

    @staticmethod
    def of(reduction: RowReduction, columns: Columns) -> UnequalMoments:
        tile = columns.tile
        own = columns.count().to(Float32)
        by_count = Float32(1) / cute.arch.fmax(own, Float32(1))
        in_warp, in_cta, across = [*steps(own, min(tile.threads, WARP))], [], []
        lane, rank = cute.arch.lane_idx(), Int32(0)
        if tile.ctas > 1:
            rank = Int32(cute.arch.block_idx_in_cluster())
        if tile.warps > 1:
            place = rank * tile.warps + lane % tile.warps
            in_cta = [*steps(count_of(columns, place, WARP), tile.warps)]
        if tile.ctas > 1:
            across = [*steps(count_of(columns, lane % tile.ctas, tile.threads), tile.ctas)]
        return UnequalMoments(reduction, columns, by_count, in_warp, in_cta, across)

    def __call__(self, x: Any) -> Values:
        """The moments of the row of which this thread holds x (V, NumV), 0 outside it."""
        mean = x.reduce(cute.ReductionOp.ADD, Float32(0), 0) * self.by_count
        found = lanes_by(self.in_warp, (mean, self.columns.squares(x - mean)))
        if self.columns.tile.ctas == 1:
            return self.reduction.of_warps(found, self.gather_of_cta)
        return self.reduction.of_warps(found, self.gather, inner=self.gather_of_cta)

    def gather(self, found: list[Values], group: int) -> Values:
        return lanes_by(self.across, found[0])

    def gather_of_cta(self, found: list[Values], group: int) -> Values:
        return lanes_by(self.in_cta, found[0])


def steps(count: Float32, group: int) -> Iterator[Weights]:
    """The weights of each step in which `group` neighbouring lanes combine what they have."""
    distance = group // 2
    while distance:
        other = cute.arch.shuffle_sync_bfly(count, offset=distance)
        yield Weights.of(count, other)
        count, distance = count + other, distance // 2


def lanes_by(weights: list[Weights], values: Values) -> Values:
    """The moments of the lanes whose steps have these weights."""
    for step, weight in enumerate(weights):
        distance = 1 << (len(weights) - 1 - step)
        other = tuple(cute.arch.shuffle_sync_bfly(v, offset=distance) for v in values)
        values = weight.merged(values, other)
    return values


def count_of(columns: Columns, place: Int32, threads: int) -> Float32:
    """How many of the row's elements the `place`-th of its groups of so many threads holds."""
    tile, found = columns.tile, Int32(0)
    width = threads * tile.width
    for i in range(tile.vectors):
        begin = place * width + i * columns.step
        found += cutlass.min(cutlass.max(Int32(columns.n) - begin, 0), width)
    return found.to(Float32)
