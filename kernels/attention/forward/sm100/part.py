"""Part: one Q tile of a stage of the ladder, with its products and its row of scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import cutlass
from cutlass import Boolean, Int32, cute

from cutex.device.atoms.umma import UmmaProduct
from cutex.device.attention.tmem_rows import ScoreRow


class Probabilities(Protocol):
    """The place of a Q tile's probabilities between the softmax and the second product, whose
    operand A they are."""

    @property
    def tCrA(self) -> cute.Tensor:
        """Operand A of the second product, (MMA, MMA_M, MMA_K)."""

    @property
    def dtype(self) -> type[cutlass.Numeric]: ...

    def store(self, probabilities: cute.Tensor, part: cutlass.Constexpr[int]) -> None:
        """Store part `part` of this thread's row, (PART)."""

    def fence(self) -> None:
        """Fence the stores, before the barrier after which the MMA reads them."""


@dataclass(frozen=True)
class Part:
    """A Q tile: its products, and this thread's row of it."""

    qk: UmmaProduct  # S at column 0
    pv: UmmaProduct  # O at column 0
    p: Probabilities
    s_column: Int32 | int  # first column of S in tensor memory
    o_column: Int32 | int
    row: ScoreRow
    factors: cute.Tensor  # (1) the factor of the row of O

    @cute.jit
    def start_scores(self, slot: Int32) -> None:
        self.qk.at(Int32(self.s_column)).issue(slot, accumulate=Boolean(False))

    @cute.jit
    def start_outputs(self, slot: Int32, accumulate: Boolean) -> None:
        self.pv.of(self.p.tCrA).at(Int32(self.o_column)).issue(slot, accumulate)
