"""The choice of tiles for grouped products. The host does not know how long the groups are: it goes
by their mean.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from cutex.kernels.gemm.config import GemmConfig, ceil_div
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm100.config import Sm100Config

WARP = 32
FEW_ROWS = 96  # of a group in the mean, up to which a tile has 64
# widths of tiles, with the time of a column in each, relative to the widest
WIDTHS = {256: 1.0, 192: 1.04, 128: 1.15, 64: 1.6}


def most_groups(groups: int) -> int:
    """The size class of a number of groups: a power of two, so that serving compiles few
    kernels."""
    most = WARP
    while most < groups:
        most *= 2
    return most


def width(columns: int) -> int:
    """The tile's columns for a product of so many."""
    return min(WIDTHS, key=lambda w: ceil_div(columns, w) * w * WIDTHS[w])


def rows_tiles(arch: str, mean_rows: int, n: int, fused: bool) -> GemmConfig:
    """The tiles of a product of rows in groups of `mean_rows` with matrices of n columns; `fused`:
    with operations in the epilogue."""
    if arch == "sm_100a":
        return _sm100(n)
    return _sm90(mean_rows, n, fused)


def sums_tiles(arch: str, m: int, n: int) -> GemmConfig:
    """The tiles of sums over the rows of groups, whose results are (m, n)."""
    return _sm100(n) if arch == "sm_100a" else _sm90(m, n, fused=False)


def _sm90(m: int, n: int, fused: bool) -> Sm90Config:
    tile_n = width(n)
    tile_m, warpgroups = (64, 1) if m <= FEW_ROWS else (128, 2)
    num_stages = min(8, 192 * 1024 // ((tile_m + tile_n) * 128))
    pair = warpgroups == 2 and ceil_div(n, tile_n) % 2 == 0  # which then share their rows
    epi_n, epi_stages = (32, 2) if fused else (64, 1)
    return Sm90Config(
        tile_m=tile_m,
        tile_n=tile_n,
        num_stages=num_stages,
        epi_n=epi_n,
        epi_stages=epi_stages,
        warpgroups=warpgroups,
        cluster_n=2 if pair else 1,
    )


def _sm100(n: int) -> Sm100Config:
    tile_n = width(n)
    num_stages = min(8, 192 * 1024 // ((256 + tile_n) * 64))
    return Sm100Config(
        tile_m=256, tile_n=tile_n, num_stages=num_stages, epi_n=32, epi_stages=4, pair=True,
        num_acc=2,
    )  # fmt: skip
