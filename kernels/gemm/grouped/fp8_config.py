"""The config of the grouped fp8 kernel's tiles. Imports neither torch nor the DSL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutex.kernels.gemm.scaled.fp8.config import FACTORS_ALIGN, PROMOTED, Fp8Config

if TYPE_CHECKING:
    from cutex.arch import Arch

PITCH = 4  # fp32 factors in 16 bytes, at a multiple of which TMA begins


@dataclass(frozen=True)
class RowBlocksConfig(Fp8Config):
    """An Fp8Config for rows of groups that start at any row: the factors of a tile's rows are
    loaded in parts, each with a few rows more."""

    narrow: bool = False  # rows of tiles end with narrower ones (schedulers/narrow.py)
    skips: bool = False  # a warpgroup without rows of a tile only releases its slots

    @property
    def part_rows(self) -> int:
        """The rows of a tile whose factors come in one box."""
        return min(self.tile_m, 128)  # a box has at most 256

    @property
    def factor_bytes(self) -> int:
        if self.recipe == PROMOTED:
            return 0
        return 4 * (self.part_rows + PITCH) * (self.tile_m // self.part_rows)

    @property
    def smem_bytes(self) -> int:
        if self.recipe == PROMOTED:
            return super().smem_bytes
        padded = -(-(self.part_rows + PITCH) // FACTORS_ALIGN) * FACTORS_ALIGN
        more = 4 * padded * (self.tile_m // self.part_rows) - self.factor_bytes
        slots = self.num_stages * (self.stage_bytes // self.ctas + more)
        return slots + self.epi_bytes

    def _why_not_shape(self, arch: Arch) -> str | None:
        if self.tile_m % self.part_rows:
            return f"tile_m={self.tile_m}: 64, or a multiple of {self.part_rows}"
        if self.narrow and (not self.announced or self.cluster or self.warpgroup_rows != 64):
            return "narrow: CTAs alone loop over tiles, a warpgroup with 64 rows of each"
        if self.narrow and self.tile_n % (3 * self.epi_n):
            return f"narrow, tile_n={self.tile_n}: a third of it is whole parts of {self.epi_n}"
        if self.skips and (self.narrow or not self.announced or self.warpgroup_rows != 64):
            return "skips: a warpgroup has 64 rows of each tile, all of which are as wide"
        return super()._why_not_shape(arch)
