"""The config of a grouped product whose rows of tiles end with narrower ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutex.dtypes import DTYPES
from cutex.kernels.gemm.grouped.config import GroupedConfig
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.schedulers.trimmed import UNIT

if TYPE_CHECKING:
    from cutex.arch import Arch


@dataclass(frozen=True)
class TrimmedConfig(GroupedConfig):
    """A GroupedConfig whose rows of tiles end with tiles of `narrow` columns, as many as have the
    last cluster end first."""

    narrow: int = 144

    @property
    def kind(self) -> str:
        """The kernel of such tiles."""
        return "trimmed"

    @property
    def widths(self) -> tuple[int, int]:
        """The columns of a wide tile and of a narrow one."""
        return self.product.tiles.tile_n, self.narrow

    def why_not(self, arch: Arch) -> str | None:
        """The reason why this config does not fit `arch`, or None."""
        p, tiles = self.product, self.product.tiles
        if not isinstance(tiles, Sm90Config) or not tiles.pingpong or tiles.cluster_n > 1:
            return f"tiles={tiles}: tiles of two widths are computed in turn, on Hopper"
        if any(w % UNIT or w % tiles.epi_n for w in self.widths) or self.narrow >= tiles.tile_n:
            return f"narrow={self.narrow}, tile_n={tiles.tile_n}: both are whole parts of a store"
        if p.b.major != "column" or p.ops or DTYPES[p.a.dtype].bits != 16:
            return f"b.major={p.b.major}, ops={p.ops}: rows of 16 bits along K, and no operations"
        return super().why_not(arch)
