"""What the general GEMM is on both archs: its config, and out = pieces(A @ B) in the host's terms.

A (L, M, K), B (L, K, N) and out (L, M, N) are passed as torch holds them, L where there is one, and
oriented by the kernels (sm90/general.py, sm100/general.py).

Sizes in the config are in units of 2 bytes: tile_k = 64 is 128 elements of fp8, epi_n = 64 is 32
columns of fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cutlass import cute

from cutex.compile import Argument, Operand
from cutex.device.epilogue import epilogue_ops as fusion
from cutex.device.epilogue.sm90 import Fusion
from cutex.dtypes import DTYPES
from cutex.kernels.gemm.config import GemmConfig

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.problem.gemm import GemmProblem


@dataclass(frozen=True)
class Matrix:
    """How an argument lies in memory: `major` says what is contiguous, its "row"s or "column"s.

    tma: base and strides are multiples of 16 bytes; without it any strides will do.
    """

    dtype: str = "bf16"
    major: str = "row"
    batched: bool = False
    tma: bool = True

    def argument(self, name: str, rows: str, columns: str, batch: str) -> Operand:
        sizes = (batch, rows, columns) if self.batched else (rows, columns)
        contiguous = None if not self.tma else -1 if self.major == "row" else -2
        return Operand(name, sizes, self.dtype, contiguous, aligned=self.tma, whole=False)


@dataclass(frozen=True)
class GeneralConfig(GemmConfig):
    """A config of stage 9, and what is computed with it."""

    a: Matrix = field(default_factory=Matrix)
    b: Matrix = field(default_factory=Matrix)
    out: Matrix = field(default_factory=Matrix)
    pieces: tuple[fusion.Piece, ...] = ()

    @property
    def k_elements(self) -> int:
        """Of K in a tile."""
        return self.tile_k * 16 // DTYPES[self.a.dtype].bits

    @property
    def epi_columns(self) -> int:
        """Of out that leave at a time."""
        return self.epi_n * 16 // DTYPES[self.out.dtype].bits

    @property
    def epi_parts(self) -> int:
        return self.tile_n // self.epi_columns if self.epi_n else 0

    @property
    def columns_contiguous(self) -> bool:
        """In what the kernel computes, which with swap_ab is out transposed."""
        return (self.out.major == "row") != self.swap_ab

    def why_not(self, problem: GemmProblem | None, arch: Arch) -> str | None:
        if reason := super().why_not(problem, arch):
            return reason
        if fusion.gated(self.pieces) and (self.swap_ab or self.epi_n < 32):
            return f"swap_ab={self.swap_ab}, epi_n={self.epi_n}: a gate takes neighbouring columns"
        if self.spread and (self.pieces or self.out.batched or not self.out.tma):
            return f"spread={self.spread}: out's places count from the tile's, and rows twice"
        if self.column and self.out.batched:
            return f"column={self.column}: the tiles of a batch are no column"
        if arch.tmem_columns:
            return self._why_not_pair()
        if self.split_k > 1 and (self.out.batched or self.out.dtype == "fp32"):
            return f"split_k={self.split_k}: such a tile leaves in parts of 16 bits, of no batch"
        return None

    def _why_not_pair(self) -> str | None:
        b = self.a if self.swap_ab else self.b
        k_major = b.major == ("row" if self.swap_ab else "column")
        row_bytes = self.tile_n // 2 * DTYPES[b.dtype].bits // 8
        least, rows = (128, "128") if b.dtype == "fp32" else (64, "64 or 128")
        if not k_major and row_bytes % least:
            return f"tile_n={self.tile_n}: {row_bytes} bytes of N, smem rows have {rows}"
        return None


def modes(mX: cute.Tensor, columns_first: bool) -> cute.Tensor:
    """(rows, columns) or, of (L, rows, columns), (rows, columns, L); maybe columns first."""
    order = [1, 0] if columns_first else [0, 1]
    if cute.rank(mX) == 3:
        order = [order[0] + 1, order[1] + 1, 0]
    return cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=order))


class GeneralGemm:
    """Beside a stage 9, which it is mixed into: arguments, and what they mean."""

    config: GeneralConfig
    dtypes = ("bf16", "fp16", "e4m3", "e5m2", "fp32")  # fp32 is read as tf32

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        """a (M, K), b (K, N), out (M, N), each with L before where batched; then the pieces'."""
        c = self.config
        gated = fusion.gated(c.pieces)  # then out has half the columns of b
        return (
            c.a.argument("a", "m", "k", "la"),
            c.b.argument("b", "k", "n", "lb"),
            c.out.argument("out", "m", "half" if gated else "n", "l"),
            *fusion.arguments(c.pieces),
        )

    @property
    def k_major(self) -> tuple[bool, bool]:
        """Whether K is contiguous in the first and in the second operand of the MMA."""
        c = self.config
        a, b = c.a.major == "row", c.b.major == "column"
        return (b, a) if c.swap_ab else (a, b)

    def oriented(self, mA: cute.Tensor, mB: cute.Tensor, mOut: cute.Tensor) -> tuple:
        """What the MMA multiplies, (M, K) and (N, K), and (M, N), each with L behind where batched;
        with swap_ab, M and N are out's columns and rows."""
        swapped = self.config.swap_ab
        mA, mB = modes(mA, columns_first=False), modes(mB, columns_first=True)
        mOut = modes(mOut, columns_first=swapped)
        return (mB, mA, mOut) if swapped else (mA, mB, mOut)

    def product(self, mOut: Any) -> Any:
        """What the tiles cover: out, or twice its columns, of which gates leave half."""
        if not fusion.gated(self.config.pieces):
            return mOut
        m, n, *batch = mOut.shape
        return cute.make_identity_tensor((m, 2 * n, *batch))

    def fusion(self, mProduct: cute.Tensor, passed: tuple[Any, ...]) -> Fusion:
        """The bounds are those of the product."""
        bounds = cute.size(mProduct, mode=[0]), cute.size(mProduct, mode=[1])
        swapped = self.config.swap_ab
        return Fusion(self.config.pieces, passed, bounds[::-1] if swapped else bounds, swapped)
