"""ScoreOps: the operations on the scores of a block between Q K^T and the softmax.

In this order: soft cap, a user's score function, the band and the end of the keys, a user's mask
function. Without the first two, scores stay as the tensor core leaves them, and the softmax scales
them.
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
    """The score operations for the rows of one thread: row r is query `mask.queries[r]` of head
    `heads[r]`."""

    mask: Mask
    scale: Float32
    softcap: Float32 | None
    score_mod: Any  # (score, batch, head, query, key) -> score, natural and scaled
    mask_mod: Any  # (batch, head, query, key) -> whether it counts
    batch: Int32
    heads: tuple[Int32, ...]

    @property
    def elementwise(self) -> bool:
        """Whether scores change even in blocks without a mask."""
        functions = self.softcap, self.score_mod, self.mask_mod
        return any(f is not None for f in functions)

    def unit(self) -> Float32:
        """The factor that turns a score as `apply` leaves it into a natural one."""
        if self.score_mod is not None:
            return Float32(1.0)
        return self.scale if self.softcap is None else self.softcap

    def scale_log2(self) -> Float32:
        """The factor that turns a score as `apply` leaves it into a power of two."""
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
        """The batch entry, head, query and key of the score in row r, column c."""
        return self.batch, self.heads[r], self.mask.queries[r], self.mask.key(c, n_block)
