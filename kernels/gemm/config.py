"""How a GEMM kernel cuts the problem up, and when that does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.problem import GemmProblem

ELEMENT = 2  # bytes of bf16 and fp16
BARRIERS = 1024  # bytes of smem kept for barriers and the like
MAX_INT = 2**31 - 1  # sizes and TMA coordinates are 32-bit
MAX_GRID = 65535  # CTAs along grid y


@dataclass(frozen=True)
class GemmConfig:
    """One CTA computes tile_m x tile_n of C, tile_k of K at a time, from a ring of num_stages."""

    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 64
    num_stages: int = 1

    @property
    def stage_bytes(self) -> int:
        """Of A and B in one slot of the ring; what one full barrier expects."""
        return (self.tile_m + self.tile_n) * self.tile_k * ELEMENT

    @property
    def smem_bytes(self) -> int:
        return self.num_stages * self.stage_bytes

    def why_not(self, problem: GemmProblem | None, arch: Arch) -> str | None:
        """Why this config cannot run `problem` (or, for None, anything) on `arch`."""
        if self.tile_m != 128:
            return f"tile_m={self.tile_m}: these kernels take 128"
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            return f"tile_n={self.tile_n}: one MMA takes a multiple of 16 from 16 to 256"
        if self.tile_k % 64 or self.tile_k < 64:
            return f"tile_k={self.tile_k}: a 128-byte swizzle takes a multiple of 64"
        if self.num_stages < 1:
            return f"num_stages={self.num_stages}: a ring has at least 1"
        if self.smem_bytes + BARRIERS > arch.smem_per_cta:
            return (
                f"num_stages={self.num_stages}: {self.smem_bytes} bytes of A and B and {BARRIERS} "
                f"of barriers are more than the {arch.smem_per_cta} that a CTA has on {arch.name}"
            )
        return None if problem is None else self._why_not_problem(problem)

    def _why_not_problem(self, problem: GemmProblem) -> str | None:
        for name, size in (("M", problem.m), ("N", problem.n), ("K", problem.k)):
            if size + 256 > MAX_INT:
                return f"{name}={size}: sizes are 32-bit"
        if -(-problem.n // self.tile_n) > MAX_GRID:
            return f"N={problem.n}: more than {MAX_GRID} tiles of {self.tile_n} columns"
        return None
