"""The signature of the general GEMM, out = ops(A @ B), as the host sees it, on both archs.

A (L, M, K), B (L, K, N) and out (L, M, N) are passed in torch's order of modes, L where there is
one; the kernels (sm90/general.py, sm100/general.py) see each as rows and columns of the MMA.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cutlass import cute

from cutex.compile import Argument, Bound, Operand, Workspace
from cutex.device.epilogue.epilogue_ops import BoundOps, EpilogueOp, has_gate, op_arguments
from cutex.dtypes import DTYPES
from cutex.kernels.gemm.config import GemmConfig
from cutex.kernels.gemm.layouts import OperandLayout
from cutex.schedulers.order import TileCounts

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.problem.gemm import GemmProblem


@dataclass(frozen=True)
class GeneralConfig:
    """The config of the general kernel: what it computes, and the tiling."""

    tiles: GemmConfig
    a: OperandLayout = field(default_factory=OperandLayout)
    b: OperandLayout = field(default_factory=OperandLayout)
    out: OperandLayout = field(default_factory=OperandLayout)
    ops: tuple[EpilogueOp, ...] = ()

    @property
    def k_elements(self) -> int:
        """The elements of K in a tile."""
        return self.tiles.k_of(DTYPES[self.a.dtype].bits)

    @property
    def gated(self) -> bool:
        """Whether out has half the columns of the product."""
        return has_gate(self.ops)

    @property
    def epi_columns(self) -> int:
        """The columns of the product that are stored at a time."""
        return self.tiles.epi_n * 16 // DTYPES[self.out.dtype].bits

    @property
    def out_columns(self) -> int:
        """The columns of out that are stored at a time."""
        return self.epi_columns // (2 if self.gated else 1)

    @property
    def k_major(self) -> tuple[bool, bool]:
        """Whether K is contiguous in the first and in the second operand of the MMA."""
        a, b = self.a.major == "row", self.b.major == "column"
        return (b, a) if self.tiles.swap_ab else (a, b)

    @property
    def columns_contiguous(self) -> bool:
        """Whether rows of the kernel's result (out, or out transposed with swap_ab) are
        contiguous."""
        return (self.out.major == "row") != self.tiles.swap_ab

    def arguments(self) -> tuple[Argument, ...]:
        """The kernel's arguments: a (M, K), b (K, N), out (M, N), each with L first if batched;
        those of the operations; the workspace, if there is one."""
        out = self.out.argument("out", "m", "half" if self.gated else "n", "l")
        return (
            self.a.argument("a", "m", "k", "la"),
            self.b.argument("b", "k", "n", "lb"),
            self.tiles.within_workspace(out),
            *op_arguments(self.ops),
            *workspace_arguments(self.tiles.workspace),
        )

    def why_not(self, problem: GemmProblem | None, arch: Arch) -> str | None:
        """The reason why this config cannot compute `problem` (or, for None, any) on `arch`, or
        None."""
        tiles = self.tiles
        parts = tiles.tile_n // self.epi_columns if tiles.epi_n else 0
        if reason := tiles.why_not(problem, arch, parts):
            return reason
        if self.gated and not tiles.takes_gates:
            return f"swap_ab={tiles.swap_ab}, epi_n={tiles.epi_n}: gates take adjacent columns"
        return tiles.why_not_signature(self)

    def product(self, mOut: cute.Tensor) -> cute.Tensor:
        """A tensor of the product's shape: out, or with gates one of twice its columns."""
        if not self.gated:
            return mOut
        m, n, *batch = mOut.shape
        return cute.make_identity_tensor((m, 2 * n, *batch))

    def bind(self, mProduct: cute.Tensor, arguments: tuple[Any, ...]) -> BoundOps:
        """The operations with their arguments, bound to the product (M, N), transposed with
        swap_ab."""
        bounds = cute.size(mProduct, mode=[0]), cute.size(mProduct, mode=[1])
        swapped = self.tiles.swap_ab
        return BoundOps(self.ops, arguments, bounds[::-1] if swapped else bounds, swapped)


def workspace_arguments(workspace: Workspace | None) -> tuple[Argument, ...]:
    """The arguments of the workspace, sums and flags; none without one."""
    if workspace is None:
        return ()
    sums, flags = (((Bound(x, getattr(workspace, x)),)) for x in ("sums", "flags"))
    return (
        Operand("sums", ("sums",), "fp32", bounds=sums),
        Operand("flags", ("flags",), "int32", aligned=False, whole=False, bounds=flags),
    )


def ladder(tiles: GemmConfig) -> GeneralConfig:
    """The config of the ladder's plain product: row-major operands, B passed as (N, K)."""
    row, column = OperandLayout(whole=True), OperandLayout(major="column", whole=True)
    return GeneralConfig(tiles, a=row, b=column, out=row)


def modes(mX: cute.Tensor, columns_first: bool) -> cute.Tensor:
    """mX (rows, columns) or (L, rows, columns) as (rows, columns) or (rows, columns, L), with rows
    and columns exchanged if `columns_first`."""
    order = [1, 0] if columns_first else [0, 1]
    if cute.rank(mX) == 3:
        order = [order[0] + 1, order[1] + 1, 0]
    return cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=order))


def tile_counts(tiles: GemmConfig, mProduct: cute.Tensor) -> TileCounts:
    """The numbers of tiles that cover the product."""
    return TileCounts.of(mProduct, (tiles.tile_m, tiles.tile_n))


def transposed(mX: cute.Tensor) -> cute.Tensor:
    """mX (M, N) as (N, M), or (M, N, L) as (N, M, L)."""
    order = [1, 0, 2][: cute.rank(mX)]
    return cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=order))
