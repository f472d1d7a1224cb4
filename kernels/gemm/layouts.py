"""The operands of a GEMM in memory, and what a tiling must know of a signature.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from cutex.compile.arguments import Operand


@dataclass(frozen=True)
class OperandLayout:
    """The memory layout of an argument: `major` says whether a "row" or a "column" is
    contiguous."""

    dtype: str = "bf16"
    major: str = "row"
    batched: bool = False
    tma: bool = True  # base and strides are multiples of 16 bytes; if False, any strides
    whole: bool = False  # the contiguous size is a multiple of 16 bytes, too
    fold: int = 0  # any stride between rows of K, of which so many divide K (unaligned/config.py)

    def argument(self, name: str, rows: str, columns: str, batch: str) -> Operand:
        sizes = (batch, rows, columns) if self.batched else (rows, columns)
        contiguous = None if not self.tma else -1 if self.major == "row" else -2
        return Operand(
            name, sizes, self.dtype, contiguous, self.tma, self.whole, any_stride=self.fold > 0
        )


class Signature(Protocol):
    """What a GEMM computes, as far as its tiles depend on it."""

    @property
    def a(self) -> OperandLayout: ...
    @property
    def b(self) -> OperandLayout: ...
    @property
    def out(self) -> OperandLayout: ...
    @property
    def ops(self) -> tuple[Any, ...]: ...  # operations of the epilogue
    @property
    def gated(self) -> bool: ...  # whether out has half the columns of the product
    @property
    def k_major(self) -> tuple[bool, bool]: ...  # of the MMA's first and second operand
    @property
    def columns_contiguous(self) -> bool: ...  # whether rows of the kernel's result are
