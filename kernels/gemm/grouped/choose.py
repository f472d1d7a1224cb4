"""The choice of tiles for grouped products. The host does not know how long the groups are: it goes
by their mean.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import replace

from cutex.arch import arch as arch_named
from cutex.kernels.gemm.config import BARRIERS, GemmConfig, ceil_div
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm100.config import Sm100Config

WARP = 32
MOST_STAGES = 8
FEW_ROWS = 96  # of a group in the mean, up to which a tile has 64
MANY_ROWS = 1536  # from which on two tiles of a group's rows, in ping-pong, share matrices
# widths of tiles, with the time of a column in each, relative to the widest
WIDTHS = {256: 1.0, 192: 1.04, 128: 1.15, 64: 1.6}
IN_TURN = {192: 1.0, 256: 1.05, 128: 1.2, 64: 1.7}  # where ping-pong of 192 is faster
# rows of a group in the mean between which a tile's store takes as long as its sums
SHORT_SUMS = (100, 1500)


def most_groups(groups: int) -> int:
    """The size class of a number of groups: a power of two, so that serving compiles few
    kernels."""
    most = WARP
    while most < groups:
        most *= 2
    return most


def width(columns: int, times: dict[int, float] = WIDTHS) -> int:
    """The tile's columns for a product of so many; `times` are those of a column in each."""
    return min(times, key=lambda w: ceil_div(columns, w) * w * times[w])


def rows_tiles(arch: str, mean_rows: int, n: int, fused: bool, most: int = WARP) -> GemmConfig:
    """The tiles of a product of rows in groups of `mean_rows` with matrices of n columns.

    fused: with operations in the epilogue. most: the groups that there are tables for.
    """
    if arch == "sm_100a":
        return _sm100(n, most)
    epilogue = {"epi_n": 32, "epi_stages": 2} if fused else {"epi_n": 64, "epi_stages": 1}
    if mean_rows <= FEW_ROWS:
        tile_n = width(n)
        # NOTE: memory limits; fewer, longer steps read it better
        tiles = Sm90Config(tile_m=64, tile_n=tile_n, tile_k=128, warpgroups=1, **epilogue)
    elif mean_rows >= MANY_ROWS and (tile_n := width(n, IN_TURN)) == 192:
        tiles = _in_turn(tile_n, cluster_m=2, **epilogue)
    else:
        tiles = _together(n, **epilogue)
    return replace(tiles, num_stages=_stages(tiles, most))


def sums_tiles(arch: str, mean_rows: int, n: int, most: int = WARP) -> GemmConfig:
    """The tiles of sums over groups of `mean_rows`, whose results have n columns."""
    if arch == "sm_100a":
        return _sm100(n, most)
    epilogue = {"epi_n": 64, "epi_stages": 1}
    least, end = SHORT_SUMS
    if least <= mean_rows < end and (tile_n := width(n, IN_TURN)) == 192:
        tiles = _in_turn(tile_n, cluster_n=1 + (ceil_div(n, tile_n) % 2 == 0), **epilogue)
    else:
        tiles = _together(n, **epilogue)
    return replace(tiles, num_stages=_stages(tiles, most))


def _together(n: int, **epilogue: int) -> Sm90Config:
    """Tiles of 128 rows that two warpgroups compute together; two side by side share their
    rows."""
    tile_n = width(n)
    sharers = 2 if ceil_div(n, tile_n) % 2 == 0 else 1
    return Sm90Config(tile_m=128, tile_n=tile_n, warpgroups=2, cluster_n=sharers, **epilogue)


def _in_turn(tile_n: int, **fields: int) -> Sm90Config:
    """Tiles of 128 rows that two warpgroups compute in turn."""
    return Sm90Config(tile_m=128, tile_n=tile_n, warpgroups=2, pingpong=True, **fields)


def _sm100(n: int, most: int) -> Sm100Config:
    tiles = Sm100Config(tile_m=256, tile_n=width(n), epi_n=32, epi_stages=4, pair=True, num_acc=2)
    return replace(tiles, num_stages=_stages(tiles, most))


def _stages(tiles: GemmConfig, most: int) -> int:
    """The slots of a ring that fills the smem of a CTA, beside the tables of `most` groups."""
    room = arch_named(tiles.arch).smem_per_cta - BARRIERS - tiles.epi_bytes - table_bytes(most)
    return min(MOST_STAGES, room * tiles.ctas // tiles.stage_bytes)


def table_bytes(most: int) -> int:
    """The smem that the tables of `most` groups take (schedulers/ragged.py)."""
    return 4 * (3 * most + 1)
