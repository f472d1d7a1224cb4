"""The norm of a row in the place that it has in smem, by words of 32 bits."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from cutex.device.row.reduction import RowReduction, Values, add, lanes, pairwise
from cutex.device.row.tile import WARP
from cutex.device.row.words import Words
from cutex.kernels.row.norm import NormConfig


@dataclass(frozen=True)
class NormByWords:
    """What a thread needs for each of its rows of n columns, which all lie alike to the words: the
    elements of weight and bias in its columns, the reduction over the row's threads, how many
    columns its warp has of a row, and the reciprocals of both counts."""

    config: NormConfig
    words: Words
    held: dict[str, cute.Tensor]
    sums: RowReduction
    of_warp: Float32
    by_warp: Float32
    by_n: Float32

    @staticmethod
    def of(
        config: NormConfig, words: Words, vectors: dict[str, cute.Tensor], sums: RowReduction,
        n: Int32,
    ) -> NormByWords:  # fmt: skip
        held = {name: words.weights(vectors[name]) for name in config.vectors}
        of_warp = by_warp = Float32(0)
        if config.centred:
            of_warp = lanes((words.own(),), add, min(config.tile.threads, WARP))[0]
            by_warp = Float32(1) / cute.arch.fmax(of_warp, Float32(1))
        by_n = Float32(1) / Float32(n)
        return NormByWords(config, words, held, sums, of_warp, by_warp, by_n)

    @cute.jit
    def __call__(
        self, sX: cute.Tensor, begin: Int32, exists: Boolean, eps: Float32, turn: Int32 | int,
        turns: Int32 | int,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Put the norm of the row at sX[begin] in its place; its mean and rstd. A row that does
        not exist is neither read nor written."""
        rX = self.words.load(sX, begin, exists)
        found = self.sums.of_warps(self.of_its_warp(rX), self.gather, turn, turns)
        return self.scaled(rX, found, sX, begin, exists, eps)

    @cute.jit
    def start(self, sX: cute.Tensor, begin: Int32, turn: Int32) -> None:
        """The first half: hand what this warp has of the row to the others."""
        rX = self.words.load(sX, begin, Boolean(True))
        self.sums.start(self.of_its_warp(rX), turn)

    @cute.jit
    def finish(
        self, sX: cute.Tensor, begin: Int32, eps: Float32, turn: Int32, turns: Int32
    ) -> tuple[Any, Any]:
        """The second half, a barrier of the CTA later."""
        exists = Boolean(True)
        found = self.sums.finish(self.gather, turn, turns)
        return self.scaled(self.words.load(sX, begin, exists), found, sX, begin, exists, eps)

    def gather(self, found: list[Values], group: int) -> Values:
        """The moments of a row, or the sum of its squares, of those of its parts, of which `group`
        lanes have some each. The parts' means come as differences from the first one's, so that a
        mean far from 0 costs no digits."""
        if not self.config.centred:
            return pairwise(add)(found, group)
        first = cute.arch.shuffle_sync(found[0][1], 0)
        parts = [(count, mean - first, squares) for count, mean, squares in found]
        (total,) = lanes((sum_of(n * mean for n, mean, _ in parts),), add, group)
        mean = total * self.by_n
        apart = (s + n * (m - mean) * (m - mean) for n, m, s in parts)
        (squares,) = lanes((sum_of(apart),), add, group)
        return mean + first, squares

    def of_its_warp(self, rX: cute.Tensor) -> Values:
        """How many elements the warp has of the row, their mean and the sum of squares of the
        differences from it; of an RMS norm that of their squares. rX is this thread's."""
        x, group = self.words.elements(rX), min(self.config.tile.threads, WARP)
        if not self.config.centred:
            return lanes((folded(x, squared),), add, group)
        mean = lanes((folded(x, plus),), add, group)[0] * self.by_warp
        apart = self.words.where_held([v - mean for v in x])
        return self.of_warp, mean, lanes((folded(apart, squared),), add, group)[0]

    @cute.jit
    def scaled(
        self, rX: cute.Tensor, found: Values, sX: cute.Tensor, begin: Int32, exists: Boolean,
        eps: Float32,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Store the norm of the row of which this thread has rX; its mean and rstd."""
        c, words = self.config, self.words
        mean, squares = found[-2:] if c.centred else (Float32(0), found[0])
        rstd = cute.math.rsqrt(squares * self.by_n + eps)
        y = [(v - mean if c.centred else v) * rstd for v in words.elements(rX)]
        if cutlass.const_expr(c.weight):
            y = [v * w for v, w in zip(y, words.elements(self.held["weight"]), strict=True)]
        if cutlass.const_expr(c.bias):
            y = [v + b for v, b in zip(y, words.elements(self.held["bias"]), strict=True)]
        rY = cute.make_rmem_tensor(len(y), Float32)
        for i in cutlass.range_constexpr(len(y)):
            rY[i] = y[i]
        rX.store(rY.load().to(sX.element_type))
        if exists:
            words.store(rX, sX, begin)
        return mean, rstd


def plus(total: Float32, x: Float32) -> Float32:
    return total + x


def squared(total: Float32, x: Float32) -> Float32:
    return total + x * x


CHAINS = 4  # sums that are added up beside each other, so that none waits for the one before


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
