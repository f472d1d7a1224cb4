"""ScoreOps: the operations on the scores of a block between Q K^T and the softmax.

In this order: soft cap, ALiBi's bias, a user's score function, the band and the end of the keys, a
user's mask function. Without the soft cap and the user's function, scores stay as the tensor core
scales them, and the softmax makes them natural.
"""

from __future__ import annotations

from ctypes import c_float
from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from cutex.device.atoms.scalar import tanh
from cutex.device.attention.mask import Mask
from cutex.device.attention.softmax import LOG2_E


@dataclass(frozen=True)
class ScoreOps:
    """The score operations for the rows of one thread: row r is query `mask.queries[r]` of head
    `heads[r]`."""

    mask: Mask
    scale: Float32
    softcap: Float32 | None
    score_mod: Any  # (score, batch, head, query, key) -> score, natural and scaled
    mask_mod: Any  # (batch, head, query, key) -> whether it counts
    batch: Int32
    heads: tuple[Int32, ...]
    slopes: tuple[Float32, ...] = ()  # ALiBi's of each row, in the unit of its scores
    powers: tuple[Float32, ...] = ()  # of two, by which each row's queries were divided; (): none

    @property
    def elementwise(self) -> bool:
        """Whether scores are changed even in blocks without a mask."""
        functions = self.softcap, self.score_mod, self.mask_mod
        return any(f is not None for f in functions) or len(self.slopes) > 0

    def with_slopes(self, slopes: cute.Tensor | None) -> ScoreOps:
        """A copy with the ALiBi slopes of its rows, out of `slopes` (batch, heads)."""
        if slopes is None:
            return self
        unit = self.scale if self.softcap is None else self.softcap
        return replace(self, slopes=tuple(slopes[self.batch, h] / unit for h in self.heads))

    def unit(self) -> Float32:
        """The factor that turns a score as `apply` leaves it into a natural one."""
        if self.score_mod is not None:
            return Float32(1.0)
        return self.scale if self.softcap is None else self.softcap

    def usual_unit(self, head_dim: int) -> float:
        """The `unit` that LSE assumes unless a call brings its own scale; 0 if others apply.

        NOTE: tensor cores truncate sums of 16 products, and with them scores, by 2^-26 in the mean
        for Gaussian data, and not at all for other data: so never less than the exact value.
        """
        changed = self.score_mod is not None or self.softcap is not None
        usual = max(head_dim**-0.5, c_float(head_dim**-0.5).value)
        return 0.0 if changed else usual * (1.0 + head_dim // 16 * 2.0**-31)

    def truncated(self, head_dim: int, of_fp16: bool) -> float:
        """Half of the share of a score that tensor cores truncate in the mean: 2^-26 for 16
        products of float16, whose sums seldom fit float32 (those that do would be off by as much).
        Sums of bfloat16 products often fit. At 256 dims this made the LSE of a sink worse."""
        changed = self.score_mod is not None or self.softcap is not None or self.slopes
        known = of_fp16 and head_dim < 256 and not changed
        return head_dim // 16 * 2.0**-27 if known else 0.0

    def scale_log2(self) -> Float32 | tuple[Float32, ...]:
        """The factor that turns a score as `apply` leaves it into a power of two; one of each row
        where their queries were divided by `powers`."""
        if self.powers and self.softcap is None:
            return tuple(self.scale * x * LOG2_E for x in self.powers)
        return Float32(LOG2_E) if self.score_mod is not None else self.unit() * LOG2_E

    @cute.jit
    def apply(
        self,
        scores: cute.Tensor,
        n_block: Int32,
        masked: cutlass.Constexpr[bool],
        column: Int32 | int = 0,
    ) -> None:
        """Apply the operations to `scores` (rows, columns), the thread's columns of block `n_block`
        from `column` on; `masked` says whether the band cuts the block."""
        if cutlass.const_expr(self.softcap is not None):
            factors = self._cap_factors()
            for i in cutlass.range_constexpr(cute.size(scores)):  # rows first
                scores[i] = tanh(scores[i] * factors[i % len(factors)])
        if cutlass.const_expr(len(self.slopes) > 0):
            self._subtract_distances(scores, n_block, column)
        if cutlass.const_expr(self.score_mod is not None):
            unit = self.scale if self.softcap is None else self.softcap
            for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
                for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                    place = self._place(r, column + c, n_block)
                    scores[r, c] = Float32(self.score_mod(scores[r, c] * unit, *place))
        if cutlass.const_expr(masked):
            self.mask.apply(scores, n_block, column)
        if cutlass.const_expr(self.mask_mod is not None):
            for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
                for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                    counts = cutlass.Boolean(self.mask_mod(*self._place(r, column + c, n_block)))
                    scores[r, c] = scores[r, c] if counts else -Float32.inf

    def _cap_factors(self) -> tuple[Float32, ...]:
        """What scores are multiplied by before tanh: of all rows, or of each."""
        assert self.softcap is not None
        factor = self.scale / self.softcap
        return tuple(factor * x for x in self.powers) if self.powers else (factor,)

    @cute.jit
    def _subtract_distances(self, scores: cute.Tensor, n_block: Int32, column: Int32 | int) -> None:
        """Subtract from each score its row's slope times the distance of its key from the one that
        is aligned with its query (Press et al., Train Short, Test Long)."""
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            # NOTE: one conversion a row; a float counts to 2^24
            first = Float32(self.mask.key(0, n_block) + column - self.mask.diagonal(r))
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                distance = first + self.mask.step(c)
                scores[r, c] -= self.slopes[r] * cutlass.max(distance, -distance)

    def _place(self, r: int, c: int, n_block: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """The batch entry, head, query and key of the score in row r, column c."""
        return self.batch, self.heads[r], self.mask.queries[r], self.mask.key(c, n_block)
