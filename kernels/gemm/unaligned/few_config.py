"""The config of the kernel of few rows, unaligned. Imports neither torch nor the DSL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutex.kernels.gemm.config import ELEMENT, GemmConfig, ceil_div

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.kernels.gemm.layouts import Signature
    from cutex.problem.gemm import GemmProblem

STEP_K = 16  # rows of K that a warp multiplies at a time: of one mma.sync
ROWS = 8  # of out, that one mma.sync computes
SUMS = 4  # of an mma.sync that a thread holds


@dataclass(frozen=True)
class FewRowsConfig(GemmConfig):
    """The warps of a CTA, and of a cluster of split_k CTAs, compute tile_m x tile_n of out, each
    from its own rows of K."""

    arch = "sm_90a"
    mma_columns = 16

    tile_m: int = 8
    tile_n: int = 64
    k_bytes: int = STEP_K * ELEMENT
    warps: int = 8
    steps: int = 2  # that a warp has loaded at a time

    @property
    def num_threads(self) -> int:
        return 32 * self.warps

    @property
    def cluster(self) -> tuple[int, int, int] | None:
        """The CTAs of a cluster, for a launch; None: without clusters."""
        return None if self.split_k == 1 else (self.split_k, 1, 1)

    @property
    def vectors(self) -> int:
        """The vectors of SUMS sums that a tile has."""
        return self.tile_m * self.tile_n // SUMS

    @property
    def vectors_of_cta(self) -> int:
        """The vectors of sums that each CTA of a cluster adds up and stores."""
        return ceil_div(self.vectors, self.split_k)

    @property
    def smem_bytes(self) -> int:
        """Bytes of the sums of all warps, and of all CTAs."""
        return (self.warps + 1) * self.vectors * SUMS * 4

    @property
    def takes_gates(self) -> bool:
        return True

    def why_not_arch(self, arch: Arch, epi_parts: int) -> str | None:
        if self.swap_ab or self.epi_n or self.epi_stages or self.num_stages != 1:
            return "swap_ab, epi_n, epi_stages, num_stages: a kernel of few rows has none"
        if self.split_k not in (1, 2, 4, 8):
            return f"split_k={self.split_k}: a cluster of 1, 2, 4 or 8 CTAs"
        return None

    def _why_not_shape(self, arch: Arch) -> str | None:
        if self.tile_m not in (ROWS, 2 * ROWS) or self.tile_n not in (16, 32, 64):
            return f"tile_m={self.tile_m}, tile_n={self.tile_n}: 8 or 16, and 16, 32 or 64"
        if self.k_bytes != STEP_K * ELEMENT or not 1 <= self.steps <= 8:
            return f"k_bytes={self.k_bytes}, steps={self.steps}: {STEP_K * ELEMENT}, and 1 to 8"
        if self.warps not in (4, 8, 16):
            return f"warps={self.warps}: 4, 8 or 16"
        if self.smem_bytes + 64 > arch.smem_per_cta:
            return f"{self.smem_bytes} bytes of sums are more than a CTA has"
        return None

    def why_not_problem(self, problem: GemmProblem, arch: Arch) -> str | None:
        if problem.m > self.tile_m:
            return f"M={problem.m}: more than the {self.tile_m} rows of a tile"
        return super().why_not_problem(problem, arch)

    def why_not_signature(self, signature: Signature) -> str | None:
        a, b = signature.a, signature.b
        if not a.fold or b.major != "row" or not b.whole or a.batched or b.batched:
            return "few rows: of a with any stride, by b whose rows are whole 16 bytes"
        return None
