"""The norm of a row in smem, in place, by 32-bit words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from cutex.device.row.reduction import Values
from cutex.device.row.words import Words
from cutex.kernels.row.moments import Moments, Sums
from cutex.kernels.row.norm import NormConfig


@dataclass(frozen=True)
class NormByWords:
    """What a thread needs for its rows of n columns, all with the same offset from a word: the
    weights and biases of its columns, and the reduction of the row's moments."""

    config: NormConfig
    words: Words
    held: dict[str, cute.Tensor]
    moments: Moments

    @staticmethod
    def of(
        config: NormConfig, words: Words, vectors: dict[str, cute.Tensor], sums: Sums, n: Int32,
        part: Int32 | None = None,
    ) -> NormByWords:  # fmt: skip
        held = {name: words.weights(vectors[name]) for name in config.vectors}
        own = words.own() if config.centred else None
        moments = Moments.of(config.centred, sums, own, n, part)
        return NormByWords(config, words, held, moments)

    @cute.jit
    def __call__(
        self, sX: cute.Tensor, begin: Int32, exists: Boolean, eps: Float32, turn: Int32 | int,
        turns: Int32 | int,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Overwrite the row at sX[begin] with its norm; returns its mean and rstd. A row that does
        not exist is neither read nor written."""
        rX = self.words.load(sX, begin, exists)
        found = self.moments.sums.of_warps(self.of_its_warp(rX), self.moments.gather, turn, turns)
        return self.scaled(rX, found, sX, begin, exists, eps)

    @cute.jit
    def start(self, sX: cute.Tensor, begin: Int32, turn: Int32) -> None:
        """The first half: contribute this warp's moments."""
        rX = self.words.load(sX, begin, Boolean(True))
        self.moments.sums.start(self.of_its_warp(rX), turn)

    @cute.jit
    def finish(
        self, sX: cute.Tensor, begin: Int32, eps: Float32, turn: Int32, turns: Int32
    ) -> tuple[Any, Any]:
        """The second half, one CTA barrier later."""
        exists = Boolean(True)
        found = self.moments.sums.finish(self.moments.gather, turn, turns)
        rX = self.words.load_again(sX, begin, exists)
        return self.scaled(rX, found, sX, begin, exists, eps)

    def of_its_warp(self, rX: cute.Tensor) -> Values:
        """The number of the warp's elements in the row, their mean, and the sum of squared
        differences from it; for an RMS norm their sum of squares. rX are this thread's elements."""
        x, moments = self.words.elements(rX), self.moments
        if not self.config.centred:
            return (moments.squares_of_warp(x),)
        mean = moments.mean_of_warp(x)
        apart = self.words.where_held([v - mean for v in x])
        return moments.of_warp, mean, moments.squares_of_warp(apart)

    @cute.jit
    def scaled(
        self, rX: cute.Tensor, found: Values, sX: cute.Tensor, begin: Int32, exists: Boolean,
        eps: Float32,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Store the norm of the row of which this thread holds rX; returns its mean and rstd."""
        c, words = self.config, self.words
        mean, squares = found[-2:] if c.centred else (Float32(0), found[0])
        rstd = cute.math.rsqrt(squares * self.moments.by_n + eps)
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
