"""ScoreOps: what happens to the scores of a block between Q K^T and the softmax.

In this order: soft cap, a user's score function, the band and the end of the keys, a user's mask
function. Without the first two, scores stay as they come from the tensor core, and the softmax
scales them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from cutex.device.atoms.scalar import tanh
from cutex.device.attention.mask import Mask
from cutex.device.attention.softmax import LOG2_E


@dataclass(frozen=True)
class ScoreOps:
    """For the rows of one thread, of which row r is query `mask.queries[r]` of `heads[r]`."""

    mask: Mask
    scale: Float32
    softcap: Float32 | None
    score_mod: Any  # (score, batch, head, query, key) -> score, natural and scaled
    mask_mod: Any  # (batch, head, query, key) -> whether it counts
    batch: Int32
    heads: tuple[Int32, ...]

    @property
    def elementwise(self) -> bool:
        """Whether scores change in blocks without a mask, too."""
        functions = self.softcap, self.score_mod, self.mask_mod
        return any(f is not None for f in functions)

    def scale_log2(self) -> Float32:
        """Powers of two in a unit of what `apply` leaves."""
        if self.score_mod is not None:
            return Float32(LOG2_E)
        unit = self.scale if self.softcap is None else self.softcap
        return unit * LOG2_E

    @cute.jit
    def apply(
        self,
        scores: cute.Tensor,
        n_block: Int32,
        masked: cutlass.Constexpr[bool],
        column: Int32 | int = 0,
    ) -> None:
        """To `scores`, (rows, columns), the thread's columns of the block from `column` on;
        `masked` says whether the band cuts this block."""
        if cutlass.const_expr(self.softcap is not None):
            factor = self.scale / self.softcap
            for i in cutlass.range_constexpr(cute.size(scores)):
                scores[i] = tanh(scores[i] * factor)
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

    def _place(self, r: int, c: int, n_block: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """Batch entry, head, query and key of a score."""
        return self.batch, self.heads[r], self.mask.queries[r], self.mask.key(c, n_block)
