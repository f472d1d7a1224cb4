"""The signature of the general GEMM, out = ops(A @ B), in the host's terms, on both archs.

A (L, M, K), B (L, K, N) and out (L, M, N) are passed as torch holds them, L where there is one; the
kernels (sm90/general.py, sm100/general.py) see each as rows and columns of the MMA.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cutlass import cute

from cutex.compile import Argument, Operand
from cutex.device.epilogue.epilogue_ops import BoundOps, EpilogueOp, has_gate, op_arguments
from cutex.dtypes import DTYPES
from cutex.kernels.gemm.config import GemmConfig, Workspace

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.problem.gemm import GemmProblem


@dataclass(frozen=True)
class OperandLayout:
    """The memory layout of an argument: `major` says whether the elements of a "row" or of a
    "column" are contiguous."""

    dtype: str = "bf16"
    major: str = "row"
    batched: bool = False
    tma: bool = True  # base and strides are multiples of 16 bytes; without, any strides will do
    whole: bool = False  # so is the contiguous size

    def argument(self, name: str, rows: str, columns: str, batch: str) -> Operand:
        sizes = (batch, rows, columns) if self.batched else (rows, columns)
        contiguous = None if not self.tma else -1 if self.major == "row" else -2
        return Operand(name, sizes, self.dtype, contiguous, aligned=self.tma, whole=self.whole)


@dataclass(frozen=True)
class GeneralConfig:
    """The config of the general kernel: what it computes, and the tiles that this is cut into."""

    tiles: GemmConfig
    a: OperandLayout = field(default_factory=OperandLayout)
    b: OperandLayout = field(default_factory=OperandLayout)
    out: OperandLayout = field(default_factory=OperandLayout)
    ops: tuple[EpilogueOp, ...] = ()

    @property
    def k_elements(self) -> int:
        """Elements of K in a tile."""
        return self.tiles.tile_k * 16 // DTYPES[self.a.dtype].bits

    @property
    def gated(self) -> bool:
        """Whether out has half the columns of the product."""
        return has_gate(self.ops)

    @property
    def epi_columns(self) -> int:
        """Columns of the product that are stored at a time."""
        return self.tiles.epi_n * 16 // DTYPES[self.out.dtype].bits

    @property
    def out_columns(self) -> int:
        """Columns of out that are stored at a time."""
        return self.epi_columns // (2 if self.gated else 1)

    @property
    def k_major(self) -> tuple[bool, bool]:
        """Whether K is contiguous in the first and in the second operand of the MMA."""
        a, b = self.a.major == "row", self.b.major == "column"
        return (b, a) if self.tiles.swap_ab else (a, b)

    @property
    def columns_contiguous(self) -> bool:
        """Whether rows of what is computed, with swap_ab of out transposed, are contiguous."""
        return (self.out.major == "row") != self.tiles.swap_ab

    def arguments(self) -> tuple[Argument, ...]:
        """a (M, K), b (K, N), out (M, N), each with L before if batched; what operations take; the
        workspace, if there is one."""
        return (
            self.a.argument("a", "m", "k", "la"),
            self.b.argument("b", "k", "n", "lb"),
            self.out.argument("out", "m", "half" if self.gated else "n", "l"),
            *op_arguments(self.ops),
            *workspace_arguments(self.tiles.workspace),
        )

    def why_not(self, problem: GemmProblem | None, arch: Arch) -> str | None:
        """Why this cannot compute `problem` (or, for None, anything) on `arch`."""
        tiles = self.tiles
        parts = tiles.tile_n // self.epi_columns if tiles.epi_n else 0
        if reason := tiles.why_not(problem, arch, parts):
            return reason
        if self.gated and (tiles.swap_ab or tiles.epi_n < 32):
            return f"swap_ab={tiles.swap_ab}, epi_n={tiles.epi_n}: gates take adjacent columns"
        return tiles.why_not_signature(self)

    def product(self, mOut: cute.Tensor) -> cute.Tensor:
        """A tensor of the product's shape: out, or one of twice its columns, before gates."""
        if not self.gated:
            return mOut
        m, n, *batch = mOut.shape
        return cute.make_identity_tensor((m, 2 * n, *batch))

    def bind(self, mProduct: cute.Tensor, arguments: tuple[Any, ...]) -> BoundOps:
        """The operations on the product (M, N), which with swap_ab is transposed."""
        bounds = cute.size(mProduct, mode=[0]), cute.size(mProduct, mode=[1])
        swapped = self.tiles.swap_ab
        return BoundOps(self.ops, arguments, bounds[::-1] if swapped else bounds, swapped)


def workspace_arguments(workspace: Workspace | None) -> tuple[Argument, ...]:
    """The sums and the flags."""
    if workspace is None:
        return ()
    flags = Operand("flags", ("flags",), "int32", aligned=False, whole=False)
    return Operand("sums", ("sums",), "fp32"), flags


def ladder(tiles: GemmConfig) -> GeneralConfig:
    """The plain product of the ladder's operands, row-major, where B is passed as (N, K)."""
    row, column = OperandLayout(whole=True), OperandLayout(major="column", whole=True)
    return GeneralConfig(tiles, a=row, b=column, out=row)


def modes(mX: cute.Tensor, columns_first: bool) -> cute.Tensor:
    """mX as (rows, columns), or of (L, rows, columns), (rows, columns, L); maybe columns first."""
    order = [1, 0] if columns_first else [0, 1]
    if cute.rank(mX) == 3:
        order = [order[0] + 1, order[1] + 1, 0]
    return cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=order))


def transposed(mX: cute.Tensor) -> cute.Tensor:
    """(M, N) as (N, M), or (M, N, L) as (N, M, L)."""
    order = [1, 0, 2][: cute.rank(mX)]
    return cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=order))
