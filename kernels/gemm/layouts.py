"""The operands of a GEMM in memory, and what a tiling must know of a signature.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from cutex.compile.arguments import Operand


@dataclass(frozen=True)
class FactorLayout:
    """The memory layout of an operand's scale factors: fp32, a matrix by rows and along K; or
    `swizzled`, as tensor cores read them, of which 32-bit words are passed."""

    rows: int = 1  # of the operand that share a factor: 1, or more, in blocks
    swizzled: bool = False

    def argument(self, side: str, rows: str, batch: str) -> Operand:
        """The factors of operand `side`, whose numbers of rows and of batch entries, "" for none,
        have these names: (L, rows, K), single rows contiguous at a pitch of a multiple of 16 bytes,
        blocks of any strides; or words (L, chunks of rows, chunks along K, 128)."""
        if self.swizzled:
            sizes = batch, f"chunks_{rows}", "chunks_k", "words"
            return Operand(f"factors_{side}", sizes, "int32")
        single = self.rows == 1
        of_matrix = rows if single else f"{rows}b", "kb"
        return Operand(
            f"scale_{side}",
            (batch, *of_matrix) if batch else of_matrix,
            "fp32",
            contiguous=-2 if single else None,
            aligned=single,
            whole=False,
        )


@dataclass(frozen=True)
class OperandLayout:
    """The memory layout of an argument: `major` says whether a "row" or a "column" is
    contiguous. Elements of 4 bits are passed as bytes of two along K."""

    dtype: str = "bf16"
    major: str = "row"
    batched: bool = False
    tma: bool = True  # base and strides are multiples of 16 bytes; if False, any strides
    whole: bool = False  # the contiguous size is a multiple of 16 bytes, too
    # any stride between rows of K, of which so many divide K (unaligned/config.py); 1: few rows
    fold: int = 0
    scales: FactorLayout | None = None  # of its scale factors, if it has any

    def argument(self, name: str, rows: str, columns: str, batch: str) -> Operand:
        dtype, sizes = self.dtype, [batch, rows, columns] if self.batched else [rows, columns]
        if dtype == "e2m1":
            dtype, sizes = "uint8", ["half_k" if size == "k" else size for size in sizes]
        contiguous = None if not self.tma else -1 if self.major == "row" else -2
        return Operand(
            name, tuple(sizes), dtype, contiguous, self.tma, self.whole, any_stride=self.fold > 0
        )

    def factors(self, side: str, rows: str, batch: str) -> tuple[Operand, ...]:
        """The argument of the scale factors (FactorLayout.argument); none without any."""
        if self.scales is None:
            return ()
        named = self.batched or self.scales.swizzled
        return (self.scales.argument(side, rows, batch if named else ""),)


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
