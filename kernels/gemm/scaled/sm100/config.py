"""The config of Blackwell's block-scaled kernels: tiles, and the room that scale factors take.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from cutex.arch import arch as arch_named
from cutex.arch import kernels_of
from cutex.kernels.gemm.config import ceil_div
from cutex.kernels.gemm.sm100.config import Sm100Config

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.kernels.gemm.layouts import Signature

CHUNK_ROWS, CHUNK_FACTORS, CHUNK_BYTES, CHUNK_COLUMNS = 128, 4, 512, 4
PADDED_K = 128  # elements in a box of TMA that unpacks 4-bit ones (PTX ISA, .b4x16_p64)
CHUNK_COPY_CYCLES = 12.0  # of tcgen05.cp, in which no MMA runs: fit to B200 rows (docs/time.md)
INST_ROWS = 32  # rows whose factors share a column of tensor memory


class Kind(NamedTuple):
    """A block-scaled kind of tcgen05.mma."""

    bits: int  # of an element in smem
    vector: int  # elements of K that share a factor
    factors: str  # their dtype
    dtypes: tuple[str, ...]  # of A and of B, independently


KINDS = {
    "mxf8f6f4": Kind(8, 32, "e8m0", ("e4m3", "e5m2", "e2m1")),
    "mxf4": Kind(4, 32, "e8m0", ("e2m1",)),
    "mxf4nvf4": Kind(4, 16, "e4m3", ("e2m1",)),
}


def kind_of(a: str, b: str, vector: int) -> str:
    """The kind of MMA for operands of these dtypes with a factor for `vector` elements. ValueError
    if there is none."""
    both_fp4 = (a, b) == ("e2m1", "e2m1")
    for name, kind in KINDS.items():
        fits = {a, b} <= {*kind.dtypes} and vector == kind.vector
        if fits and (kind.bits == 4) == both_fp4:
            return name
    raise ValueError(f"no MMA takes {a} and {b} with a scale factor for {vector} elements")


@dataclass(frozen=True)
class ScaledTiles(Sm100Config):
    """An Sm100Config whose operands have scale factors, for one CTA or a pair.

    Tensor memory holds the accumulators and one step's factors. With `num_acc` = 2 and no room for
    both, the second accumulator begins before the first ends (`overlap` columns).
    """

    a: str = "e4m3"  # dtypes of the operands
    b: str = "e4m3"
    vector: int = 32  # elements that share a factor

    @property
    def kind(self) -> Kind:
        return KINDS[kind_of(self.a, self.b, self.vector)]

    @property
    def num_blocks(self) -> int:
        """The accumulators of a tile."""
        return 1

    @property
    def k_elements(self) -> int:
        """The elements of K in a step."""
        return self.k_of(self.kind.bits)

    @property
    def factor_steps(self) -> int:
        """Chunks of factors along K in a step."""
        return self.k_elements // self.kind.vector // CHUNK_FACTORS

    @property
    def b_chunks(self) -> int:
        """Chunks of 128 rows of B that a tile may touch, wherever it begins."""
        last = CHUNK_ROWS - gcd(self.tile_n, CHUNK_ROWS)
        return ceil_div(last + self.tile_n, CHUNK_ROWS)

    @property
    def factor_bytes(self) -> int:
        """Bytes of the factors of A and B of one CTA in a slot; each CTA has all of B's."""
        return (1 + self.b_chunks) * self.factor_steps * CHUNK_BYTES

    @property
    def factor_columns(self) -> int:
        """Columns of tensor memory of the factors of A and B."""
        return (1 + self.b_chunks) * self.factor_steps * CHUNK_COLUMNS

    @property
    def stage_bytes(self) -> int:
        return super().stage_bytes + self.ctas * self.factor_bytes

    @property
    def overlap(self) -> int:
        """Columns that both accumulators of tensor memory share."""
        room = arch_named(self.arch).tmem_columns - self.factor_columns
        return max(0, self.num_acc * self.tile_n - room) if self.num_acc == 2 else 0

    @property
    def acc_columns(self) -> int:
        return self.num_acc * self.tile_n - self.overlap

    def why_not(self, problem: Any, arch: Arch, epi_parts: int | None = None) -> str | None:
        """As of every config; an arch that runs another arch's kernels counts as that arch."""
        return super().why_not(problem, arch_named(kernels_of(arch.name)), epi_parts)

    def why_not_arch(self, arch: Arch, epi_parts: int) -> str | None:
        try:
            kind_of(self.a, self.b, self.vector)
        except ValueError as error:
            return str(error)
        if self.tile_n % INST_ROWS:
            return f"tile_n={self.tile_n}: factors are addressed by {INST_ROWS} rows of B"
        if self.tile_m > 256:
            return f"tile_m={self.tile_m}: with factors 128 a CTA, 256 a pair"
        if self.epi_n and epi_parts < 2:
            return f"epi_n={self.epi_n}: a tile has two sub-tiles or more"
        if self.num_acc not in (1, 2):
            return f"num_acc={self.num_acc}: 1 or 2"
        if self.acc_columns + self.factor_columns > arch.tmem_columns:
            return (
                f"tile_n={self.tile_n}, num_acc={self.num_acc}: with {self.factor_columns} columns "
                f"of factors more than the {arch.tmem_columns} of tensor memory"
            )
        if self.overlap and self.overlap > self.tile_n // 2:
            return f"num_acc={self.num_acc}: accumulators would share {self.overlap} columns"
        if self.split_k > 1 and self.num_acc > 1:
            return f"split_k={self.split_k}: takes num_acc=1"
        # NOTE: the room for two accumulators was just counted, with what they share
        return replace(self, num_acc=1).plain_why_not(arch, epi_parts)

    def of(self, a: str, b: str, vector: int) -> Self:
        """These tiles for operands of these dtypes."""
        return replace(self, a=a, b=b, vector=vector)

    def plain_why_not(self, arch: Arch, epi_parts: int) -> str | None:
        """The reason why the tiles would not fit without factors, or None."""
        return super().why_not_arch(arch, epi_parts)

    def why_not_problem(self, problem: Any, arch: Arch) -> str | None:
        if self.mixed and problem.k % PADDED_K:
            return (
                f"K={problem.k}: elements of 4 bits beside 8-bit ones take a multiple of {PADDED_K}"
            )
        return super().why_not_problem(problem, arch)

    @property
    def mixed(self) -> bool:
        """Whether 4-bit elements take a byte each in smem."""
        return self.kind.bits == 8 and "e2m1" in (self.a, self.b)

    def why_not_signature(self, signature: Signature) -> str | None:
        for name, operand, own in (("a", signature.a, self.a), ("b", signature.b, self.b)):
            if operand.dtype != own:
                return f"{name}={own}: the operand is {operand.dtype}"
            if not operand.tma:
                return f"{name} has strides that TMA cannot step"
        k_major = signature.k_major[:: -1 if self.swap_ab else 1]  # of a, of b
        for dtype, contiguous in zip((self.a, self.b), k_major, strict=True):
            if dtype == "e2m1" and not contiguous:
                return "elements of 4 bits must be contiguous along K"
        return super().why_not_signature(signature)

    # ---- for the cost model

    @property
    def copy_cycles(self) -> float:
        return (1 + self.b_chunks) * self.factor_steps * CHUNK_COPY_CYCLES

    @property
    def shown_parts(self) -> int:
        return ceil_div(self.overlap, self.epi_n) if self.epi_n else 0
