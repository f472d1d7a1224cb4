"""The config of a stage of the Blackwell attention ladder: the tiling, and the problems that it
fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutex.kernels.attention.forward.config import BARRIERS, ELEMENT
from cutex.kernels.attention.forward.ladder import LadderConfig
from cutex.kernels.attention.forward.sm100.config import ROWS, Sm100ForwardConfig

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.problem.attention import AttentionProblem

HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class Sm100LadderConfig(LadderConfig):
    """The tiling of a stage: one CTA computes one or two Q tiles of 128 rows, tile_n keys at a
    time, from num_stages slots of K and as many of V."""

    @property
    def q_tiles(self) -> int:
        return self.tile_m // ROWS

    @property
    def o_column(self) -> int:
        """The first column of tensor memory after S, where O begins."""
        return self.q_tiles * self.tile_n

    @property
    def columns(self) -> int:
        """The columns of tensor memory in use: S and O of all Q tiles."""
        return self.o_column + self.q_tiles * self.head_dim

    @property
    def production(self) -> Sm100ForwardConfig:
        """The config of a stage with the production kernel's roles, with all its further features
        off."""
        return Sm100ForwardConfig(
            head_dim=self.head_dim,
            head_dim_v=self.head_dim,
            causal=self.causal,
            tile_n=self.tile_n,
            q_tiles=self.q_tiles,
            num_stages=self.num_stages,
            num_ctas=self.num_ctas or Sm100ForwardConfig.num_ctas,
            tentative=False,
            p_first=self.tile_n,
            by_fma=0,
        )

    @property
    def smem_bytes(self) -> int:
        if self.dispatch == "dynamic":
            return self.production.smem_bytes
        p = self.tile_m * self.tile_n * ELEMENT if self.p_in_smem else 0
        return self.q_bytes + 2 * self.k_bytes * self.num_stages + p

    def why_not(self, problem: AttentionProblem | None, arch: Arch) -> str | None:
        """The reason why this config cannot run `problem` (or, for None, any problem) on `arch`, or
        None."""
        if self.head_dim not in HEAD_DIMS:
            return f"head_dim={self.head_dim}: the ladder takes {', '.join(map(str, HEAD_DIMS))}"
        if self.tile_m not in (ROWS, 2 * ROWS):
            return f"tile_m={self.tile_m}: one or two Q tiles have {ROWS} rows each"
        if self.tile_n % 64 or not 64 <= self.tile_n <= 128:
            return f"tile_n={self.tile_n}: 64 or 128"
        if self.num_stages < 1:
            return f"num_stages={self.num_stages}: at least 1 slot"
        if self.smem_bytes + BARRIERS > arch.smem_per_cta:
            return (
                f"head_dim={self.head_dim}, tile_n={self.tile_n}: {self.smem_bytes} bytes of tiles "
                f"and {BARRIERS} of barriers are more than the {arch.smem_per_cta} that a CTA has "
                f"on {arch.name}"
            )
        return None if problem is None else self._why_not_problem(problem)
