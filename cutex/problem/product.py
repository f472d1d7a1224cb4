"""What problems of one product of two matrices share: sizes, FLOPs, tiles and steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutex.problem.protocol import Problem


class ProductProblem(Problem):
    """C (M, N) of A (M, K) and B (N, K), computed in tiles of C by steps along K."""

    m: int
    n: int
    k: int

    def check_sizes(self) -> None:
        """Raises ValueError for a size below one."""
        for name, size in zip("MNK", self.mnk, strict=True):
            if size < 1:
                raise ValueError(f"{name}={size}: every size must be at least 1")

    @property
    def mnk(self) -> tuple[int, int, int]:
        return self.m, self.n, self.k

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    def grid(self, tile: Sequence[int]) -> int:
        return -(-self.m // tile[0]) * -(-self.n // tile[1])

    def steps(self, tile: Sequence[int], step_flops: int) -> int:
        return -(-self.k // (step_flops // (2 * tile[0] * tile[1])))

    def tile(self, config: Any) -> tuple[int, int]:
        return config.tile_m, config.tile_n

    def step_k(self, config: Any) -> int:
        """The elements along K of a step of `config`."""
        step: int = config.k_of(16)
        return step

    def work(self, config: Any) -> tuple[float, float]:
        m, n = (self.n, self.m) if getattr(config, "swap_ab", False) else (self.m, self.n)
        # NOTE: all CTAs of a cluster compute, also one whose tile is outside
        down, across = getattr(config, "cluster_m", 1), getattr(config, "cluster_n", 1)
        clusters = -(-m // (config.tile_m * down)) * -(-n // (config.tile_n * across))
        tiles = clusters * down * across
        step_k = self.step_k(config)
        tile = 2.0 * config.tile_m * config.tile_n * step_k * -(-self.k // step_k)
        return tiles * tile, tile / config.split_k / config.ctas
