"""The config of a stage of the fp32 ladder. Loads no DSL."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cutex.kernels.gemm.config import MAX_GRID, MAX_INT

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.problem.gemm_fp32 import Fp32GemmProblem

VECTOR = 4  # elements of 16 bytes


@dataclass(frozen=True)
class SimtConfig:
    """A CTA computes tile_m x tile_n of C, tile_k of K at a time; each of its threads
    thread_m x thread_n of that."""

    tile_m: int
    tile_n: int
    tile_k: int
    thread_m: int = 1
    thread_n: int = 1
    num_stages: int = 1  # slots of A and B in smem
    whole_k: bool = True  # K is a multiple of VECTOR
    whole_n: bool = True  # N is

    @property
    def num_threads(self) -> int:
        return self.tile_m * self.tile_n // (self.thread_m * self.thread_n)

    def fitted(self, problem: Fp32GemmProblem) -> SimtConfig:
        return replace(self, whole_k=problem.k % VECTOR == 0, whole_n=problem.n % VECTOR == 0)

    def why_not(self, problem: Fp32GemmProblem | None, arch: Arch) -> str | None:
        if problem is None:
            return None
        for name, size in (("M", problem.m), ("N", problem.n), ("K", problem.k)):
            if size + 256 > MAX_INT:
                return f"{name}={size}: sizes are 32-bit"
        if -(-problem.n // self.tile_n) > MAX_GRID:
            return f"N={problem.n}: more than {MAX_GRID} tiles of {self.tile_n} columns"
        for name, size, whole in (("K", problem.k, self.whole_k), ("N", problem.n, self.whole_n)):
            if whole and size % VECTOR:
                return f"{name}={size}: vectors take a multiple of {VECTOR}"
        return None


# tiles of the last stage, and the rate of each where all SMs have many of them
TILES = {
    SimtConfig(128, 128, 8, thread_m=16, thread_n=8, num_stages=2): 1.0,
    SimtConfig(128, 64, 8, thread_m=8, thread_n=8, num_stages=2): 0.95,
}


def quickest(problem: Fp32GemmProblem, sms: int) -> SimtConfig:
    """The tile with which the busiest SM is done first (docs/facts/gemm.md#fp32-tiles)."""

    def work(config: SimtConfig) -> float:
        tiles = -(-problem.m // config.tile_m) * -(-problem.n // config.tile_n)
        return -(-tiles // sms) * config.tile_m * config.tile_n / TILES[config]

    return min(TILES, key=work)
