"""The config of the kernels by mma.sync. Imports neither torch nor the DSL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from cutex.arch import PORTABLE
from cutex.dtypes import DTYPES
from cutex.kernels.gemm.config import GemmConfig

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.kernels.gemm.layouts import Signature
    from cutex.problem.gemm import GemmProblem

ARCHS = tuple(PORTABLE)
MMA_M, MMA_N, MMA_K = 16, 8, 16  # of one mma.sync with 16-bit operands
LINE = 64  # elements of 128 bytes, of which an operand that is contiguous along its rows has lines
REGISTERS = 255  # of a thread, at most
OTHERS = 56  # registers beside sums and operands: addresses, places


@dataclass(frozen=True)
class Sm80Config(GemmConfig):
    """A CTA of warps_m x warps_n warps computes tile_m x tile_n, an equal part each."""

    arch: ClassVar[str] = "sm_80"

    k_bytes: int = 64
    num_stages: int = 3
    warps_m: int = 2
    warps_n: int = 2

    @property
    def num_threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def registers(self) -> int:
        """The registers of a thread: sums, two blocks of K of both operands, and others."""
        m, n = self.tile_m // self.warps_m, self.tile_n // self.warps_n
        return m * n // 32 + 2 * (m + n) * MMA_K // 64 + OTHERS

    @property
    def takes_gates(self) -> bool:
        return not self.swap_ab

    def why_not(
        self, problem: GemmProblem | None, arch: Arch, epi_parts: int | None = None
    ) -> str | None:
        if arch.name not in ARCHS:
            return f"a config of {', '.join(ARCHS)}: {arch.name} has another"
        return (
            self.why_not_arch(arch, 0)
            or self._why_not_shape(arch)
            or (self.why_not_problem(problem, arch) if problem is not None else None)
        )

    def why_not_arch(self, arch: Arch, epi_parts: int) -> str | None:
        if self.epi_n or self.epi_stages or self.swap_ab or self.split_k != 1:
            return "epi_n, epi_stages, swap_ab, split_k: mma.sync's kernels have none"
        for name, size, warps, unit in (
            ("tile_m", self.tile_m, self.warps_m, MMA_M),
            ("tile_n", self.tile_n, self.warps_n, 2 * MMA_N),
        ):
            if size % LINE or size % (warps * unit):
                return f"{name}={size}: a multiple of {LINE}, and of {unit} for each warp"
        if self.registers > REGISTERS:
            return f"{self.registers} registers of a thread are more than {REGISTERS}"
        return None

    def _why_not_shape(self, arch: Arch) -> str | None:
        if self.k_bytes not in (64, 128):
            return f"k_bytes={self.k_bytes}: rows of smem have 64 or 128"
        if self.raster_along not in ("m", "n") or self.raster_group < 1:
            return f"raster_group={self.raster_group}, raster_along={self.raster_along}: m or n"
        if self.num_stages < 1:
            return f"num_stages={self.num_stages}: a ring has at least 1"
        if self.smem_bytes > arch.smem_per_cta:
            return (
                f"num_stages={self.num_stages}: {self.smem_bytes} bytes of tiles are more than the "
                f"{arch.smem_per_cta} that a CTA has on {arch.name}"
            )
        return None

    def why_not_signature(self, signature: Signature) -> str | None:
        for layout in (signature.a, signature.b):
            if DTYPES[layout.dtype].bits != 16:
                return f"{layout.dtype}: mma.sync's kernels take bf16 and fp16"
        return None
