"""The choice of tiles for grouped products. The host does not know the groups' lengths, only their
mean.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from cutex.arch import arch as arch_named
from cutex.kernels.gemm.config import BARRIERS, GemmConfig, ceil_div
from cutex.kernels.gemm.grouped.fp8_config import RowBlocksConfig
from cutex.kernels.gemm.scaled.fp8.config import BLOCK, PROMOTED
from cutex.kernels.gemm.scaled.sm100.config import ScaledTiles
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm100.config import Sm100Config
from cutex.problem.grouped_gemm import MOST_GROUPS

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.problem.grouped_gemm import GroupedGemmProblem

Tiles = TypeVar("Tiles", bound=Sm90Config)
WARP = 32
MOST_STAGES = 8
WITH_CHUNKS = 4  # tables of groups, where one says where their factors begin
WITH_PLAN = 4  # the same, where one says the order of groups (schedulers/packed.py)
# rows of a group in the mean: up to which a tile has 64, as most groups then have fewer, or many
# have none; the same where rows are gathered; from which on two tiles of rows share matrices, where
# K is short
VERY_FEW_ROWS, FEW_GATHERED, MANY_ROWS = 32, 60, 256
# rows of a low tile; fp8's widths of tiles where most groups have no more, with the time of a
# column (docs/facts/grouped.md#grouped-fp8-low)
LOW_ROWS, LOW_WIDTHS = 64, {192: 1.0, 128: 1.01}
# with a long K: rows of a group in the mean up to which tiles have 128 columns instead of 256, and
# rounds of the latter below which they do, too (docs/facts/grouped.md#grouped-few-narrow); columns
# from which on tiles of 64 rows have 192, where K is short (#grouped-decode-widths)
FINE_ROWS, FINE_ROUNDS, WIDE_COLUMNS = 48, 1.5, 8192
# rows from which on two warpgroups take turns, with short K whatever N; and from which on, with a
# long K, two tiles of rows share matrices (docs/facts/grouped.md#grouped-along-n)
LONG_GROUPS, VERY_LONG_GROUPS = 1024, 4096
MANY_COLUMNS = 40  # tiles of columns from which on one too many is less than what sharing saves
FEW_ROUNDS = 12  # of tiles of 128x256, below which lower tiles waste less than 256x128
# of a router's group in a tile, at most; in the mean, from which on groups are divided into equal
# tiles; and tiles of columns from which on one too many is less than what sharing rows saves
LEVEL_ROWS, FEW_LEVEL, MANY_LEVEL = 192, 96, 20
LONG_LEVEL = 7168  # K from which on two warpgroups work on one of these tiles
EVEN_ROWS = 64  # that even groups are taken for multiples of
# products of numbers from which on the launch of a second kernel, which ends at once, is little
# beside them (docs/facts/grouped.md#grouped-both)
MUCH_WORK = 10**11
GATHERED_COLUMNS = 2048  # up to which rows are gathered in the load
SHORT_K = 4096  # up to which a tile's store takes long beside its products
# fp8: rows of a group in the mean from which on a tile may have 256 rows, with the time of a column
# then beside one of 192; that of 128 columns, by how many CTAs share rows
# (docs/facts/grouped.md#grouped-fp8-192-again, #grouped-fp8-half-empty)
LONG_BLOCKS = 1000
TALL_BLOCKS = 1.045
ROUND = 4  # slots of 128x192
NARROW_K, NARROW_WASTE = 7168, 1.02  # from which on narrow tiles pay
PROMOTED_BLOCKS = 1.13  # the same of 128 columns where factors are the epilogue's
SHORT_BLOCKS = {2: 1.06, 1: 1.13}
# widths of tiles, with the time of a column in each, relative to the widest
WIDTHS = {256: 1.0, 192: 1.04, 128: 1.15, 64: 1.6}
TOGETHER = {256: 1.0, 192: 0.99, 128: 1.15, 64: 1.6}  # of 128 rows by two warpgroups
FEW = {192: 1.0, 128: 1.0, 64: 1.3}  # of 64 rows
WIDE_TILE = 208  # columns of tiles in turn, where matrices are contiguous along K
IN_TURN = {192: 1.0, 256: 1.05, 128: 1.2, 64: 1.7}  # where ping-pong of 192 is faster
# rows of a group in the mean between which a tile's store takes as long as its sums
SHORT_SUMS = (100, 6000)


def choose(problem: GroupedGemmProblem, arch: Arch) -> GemmConfig:
    """The tiles of a problem of the ladder."""
    mean = ceil_div(problem.m, problem.groups)
    sizes = problem.k, problem.n
    return rows_tiles(arch.name, mean, sizes, False, MOST_GROUPS, problem.groups)


def shortlist(problem: GroupedGemmProblem, arch: Arch, count: int) -> list[GemmConfig]:
    """Just `choose`: there is no ranking."""
    return [choose(problem, arch)]


def most_groups(groups: int) -> int:
    """The size class of a number of groups: a power of two, so that serving compiles few
    kernels."""
    most = WARP
    while most < groups:
        most *= 2
    return most


def width(columns: int, times: dict[int, float] = WIDTHS) -> int:
    """The tile's columns for a product with this many; `times` are those of a column at each
    width."""
    return min(times, key=lambda w: ceil_div(columns, w) * w * times[w])


def rows_tiles(
    arch: str,
    mean_rows: int,
    matrix: tuple[int, int],
    fused: bool,
    most: int = WARP,
    groups: int = WARP,
    ragged: bool = False,
    by_k: bool = True,
    padded: bool = False,
) -> GemmConfig:
    """The tiles of a product of rows in `groups` groups of `mean_rows` with matrices of (K, N)
    elements.

    fused: with operations in the epilogue. most: the groups that the tables hold. ragged: the
    groups surely differ, as a router's do; pairs of row tiles, or 256 rows, then waste more
    (docs/facts/grouped.md#grouped-routed-tiles). by_k: matrices are contiguous along K; along N,
    208 columns are atoms of 32 bytes. padded: no group has more than `mean_rows`.
    """
    k, n = matrix
    if arch == "sm_100a":
        return _sm100(n, most)
    # NOTE: where memory limits, fewer, longer steps read it better (docs/grouped.md). What groups
    # are empty is not known here: tiles of 64 rows take up to twice the time of those of 128 if
    # half are, these 1.07 of the time of those if none is
    if mean_rows <= (LOW_ROWS if padded else VERY_FEW_ROWS):
        tiles = Sm90Config(tile_m=64, tile_n=_few_width(k, n), k_bytes=256, warpgroups=1)
    elif mean_rows < MANY_ROWS or width(n) < 128:
        rounds = groups * ceil_div(mean_rows, 128) * ceil_div(n, 256) / arch_named(arch).num_sms
        fine = by_k and k > SHORT_K and (mean_rows <= FINE_ROWS or rounds < FINE_ROUNDS)
        tiles = _together(n, TOGETHER, most_columns=128 if fine else 256)
    elif k <= SHORT_K:
        # NOTE: two tiles of rows, which share matrices, waste more where groups differ
        # (docs/facts/grouped.md#grouped-short-k-in-turn)
        in_turn = width(n, IN_TURN) == 192
        along_n = ragged or n > SHORT_K or mean_rows % MANY_ROWS > 0
        tiles = _taken_in_turn(n, along_n) if in_turn else _together(n, TOGETHER)
    elif mean_rows >= LONG_GROUPS and n >= WIDE_TILE and by_k and not fused:
        # NOTE: the same, but for groups so long that what is wasted is little, if any
        along_n = ragged or mean_rows < VERY_LONG_GROUPS or mean_rows % MANY_ROWS > 0
        across, down = (_sharers(n, WIDE_TILE), 1) if along_n else (1, 2)
        tiles = replace(_in_turn(WIDE_TILE), cluster_n=across, cluster_m=down)
    elif mean_rows >= LONG_GROUPS and not by_k and width(n, IN_TURN) == 192:
        tiles = _in_turn(192, cluster_m=2)
    elif mean_rows * groups * ceil_div(n, 256) < FEW_ROUNDS * 128 * arch_named(arch).num_sms:
        in_turn = ragged and width(n, TOGETHER) == 192
        tiles = _taken_in_turn(n, ragged) if in_turn else _together(n, TOGETHER)
    elif not ragged and by_k and not fused and n >= WIDE_TILE and _sharers(n, WIDE_TILE) == 2:
        tiles = replace(_in_turn(WIDE_TILE), cluster_n=2)
    elif width(n, IN_TURN) == 192:
        tiles = _taken_in_turn(n, True)
    else:
        tiles = Sm90Config(tile_m=256, tile_n=128, warpgroups=2, cluster_n=_sharers(n, 128))
    return _filled(tiles, fused, most)


def levels_pay(mean_rows: int) -> bool:
    """Whether, for a router's groups, tiles of equal width within a group beat tiles of a fixed
    height, which waste more (docs/facts/grouped.md#grouped-level-tiles)."""
    return mean_rows >= FEW_LEVEL


def surely_differ(rows: int, groups: int) -> bool:
    """Whether so many rows are no even groups of whole tiles, so that levels may pay though nobody
    said that groups are ragged (docs/facts/grouped.md#grouped-level-unsaid)."""
    return rows % (EVEN_ROWS * groups) != 0


def both_pay(rows: int, matrix: tuple[int, int]) -> bool:
    """Whether two kernels are launched, for levels and for groups that fill tiles, of which the
    device runs one: where `rows` in all may be of either, and times (K, N) are enough."""
    k, n = matrix
    return rows * k * n >= MUCH_WORK


def full_tiles(
    mean_rows: int, matrix: tuple[int, int], fused: bool, most: int, by_k: bool
) -> Sm90Config | None:
    """Hopper's wide tiles for groups that surely fill pairs of tiles of rows, which share matrices,
    of a TrimmedConfig (docs/facts/grouped.md#grouped-trimmed); None where those of `rows_tiles` are
    as good."""
    if fused or not by_k or mean_rows < MANY_ROWS or matrix[1] < WIDE_TILE:
        return None
    return _filled(_in_turn(WIDE_TILE, cluster_m=2), fused, most)


def level_tiles(matrix: tuple[int, int], fused: bool, most: int = WARP) -> Sm90Config:
    """Hopper's tiles for equally divided rows and matrices of (K, N) elements.

    With a long K two warpgroups work on one tile, of 256 columns: half as many bytes of rows go to
    an SM, and the power limit leaves more to products; with a short one stores are too long a pause
    (docs/facts/grouped.md#grouped-level-together).
    """
    k, columns = matrix
    tile_m = 256 if k >= LONG_LEVEL else 128
    sharers = 2 if ceil_div(columns, tile_m) >= MANY_LEVEL else _sharers(columns, tile_m)
    tiles = replace(_in_turn(LEVEL_ROWS), swap_ab=True, cluster_m=sharers)
    if k < LONG_LEVEL:
        return _filled(tiles, fused, most, WITH_PLAN)
    return _with_slots(replace(tiles, tile_m=256, pingpong=False), fused, most)


def _with_slots(tiles: Sm90Config, fused: bool, most: int) -> Sm90Config:
    """`tiles` with as many slots for parts of C as leave three for operands."""
    tiles = _filled(tiles, fused, most, WITH_PLAN)
    for slots in (3, 2):
        with_slots = replace(tiles, epi_stages=slots)
        if _stages(with_slots, most, WITH_PLAN) >= 3:
            return replace(with_slots, num_stages=3)
    return tiles


def gathering_pays(mean_rows: int, n: int) -> bool:
    """Whether a kernel that gathers its rows is faster than copying them first: rows are gathered
    once per tile of columns, by instructions issued beside the MMAs
    (docs/facts/grouped.md#grouped-gather)."""
    return n <= GATHERED_COLUMNS or mean_rows <= FEW_GATHERED


def gathered_tiles(
    mean_rows: int, matrix: tuple[int, int], fused: bool, most: int = WARP
) -> Sm90Config:
    """Hopper's tiles for rows given by an index: each CTA gathers up to 128 of its own, so two CTAs
    share matrices only."""
    k, n = matrix
    if mean_rows <= FEW_GATHERED:
        tiles = Sm90Config(tile_m=64, tile_n=_few_width(k, n), warpgroups=1)
    elif mean_rows < MANY_ROWS:
        tiles = Sm90Config(tile_m=128, tile_n=width(n, TOGETHER), warpgroups=2)
    elif k <= SHORT_K and (tile_n := width(n, IN_TURN)) == 192:
        tiles = _in_turn(tile_n, cluster_m=2)
    else:
        tiles = Sm90Config(tile_m=128, tile_n=width(n), warpgroups=2, cluster_m=2)
    return _filled(tiles, fused, most)


def blocks_tiles(
    mean_rows: int,
    matrix: tuple[int, int],
    fused: bool,
    most: int = WARP,
    groups: int = WARP,
    padded: bool = False,
) -> RowBlocksConfig:
    """Hopper's tiles of a product of fp8 rows in `groups` groups and matrices of (K, N) elements
    with factors of blocks; padded: no group has more than `mean_rows`."""
    k, n = matrix
    whole = ceil_div(k, BLOCK) % ROUND == 0
    if mean_rows <= LOW_ROWS and n >= 128:
        low = padded or mean_rows <= VERY_FEW_ROWS
        tiles = _low_blocks(groups, n) if low else _skipping_blocks(groups, n)
    elif mean_rows <= VERY_FEW_ROWS:
        tiles = RowBlocksConfig(tile_m=64, tile_n=128, warpgroups=1)
    elif mean_rows < LONG_BLOCKS or n < 128:
        # NOTE: 256 rows waste more where a group ends, which 192 columns do not where N is long
        sharers = _sharers(n, 128)
        tile_n = width(n, {192: 1.0, 128: SHORT_BLOCKS[sharers]})
        tiles = RowBlocksConfig(tile_m=128, tile_n=tile_n, warpgroups=2)
        tiles = replace(tiles, cluster_n=sharers if tile_n == 128 else 1)
    elif (not fused or whole) and width(n, {192: 1.0, 128: TALL_BLOCKS}) == 192:
        tiles = RowBlocksConfig(tile_m=128, tile_n=192, warpgroups=2)
    else:
        tiles = RowBlocksConfig(tile_m=256, tile_n=128, warpgroups=2, cluster_n=_sharers(n, 128))
    tiles = _filled(replace(tiles, tile_n=min(tiles.tile_n, ceil_div(n, 64) * 64)), fused, most)
    if tiles.tile_m * tiles.tile_n < 128 * 192:
        if whole and tiles.tile_n == 192:
            return replace(tiles, num_stages=min(ROUND, tiles.num_stages)).with_rounds(k)
        return tiles
    narrow = tiles.tile_n == 192 and not tiles.skips and _narrow_pays(k, n)
    tiles = replace(tiles, narrow=narrow)
    if fused and (tiles.tile_n < 192 or not whole):
        return tiles
    # NOTE: a part of a warpgroup's store then waits for no slot, and those of 128 rows are written
    # behind one barrier (docs/facts/grouped.md#grouped-fp8-at-once, #grouped-fp8-gated-at-once)
    tiles = replace(tiles, epi_n=64, epi_stages=tiles.warpgroup_rows * tiles.tile_n // 64**2)
    return replace(tiles, num_stages=_stages(tiles, most)).with_rounds(k)


def promoted_tiles(mean_rows: int, matrix: tuple[int, int], most: int = WARP) -> RowBlocksConfig:
    """Hopper's tiles for fp8 whose factors, of rows or tensors, the epilogue multiplies with: all
    of C has slots, written behind one barrier (docs/facts/grouped.md#grouped-fp8-promoted)."""
    k, n = matrix
    if mean_rows <= VERY_FEW_ROWS:
        tiles = RowBlocksConfig(tile_m=64, tile_n=128, warpgroups=1)
    else:
        tile_n = width(n, {192: 1.0, 128: PROMOTED_BLOCKS})
        tiles = RowBlocksConfig(tile_m=128, tile_n=tile_n, warpgroups=2)
    tiles = replace(tiles, recipe=PROMOTED, tile_n=min(tiles.tile_n, ceil_div(n, 64) * 64))
    tiles = replace(tiles, epi_n=64, epi_stages=tiles.tile_n // 64)
    stages = min(_stages(tiles, most), ROUND if tiles.tile_n == 192 else MOST_STAGES)
    return replace(tiles, num_stages=stages).with_rounds(k)


def _low_width(groups: int, n: int) -> int:
    """The columns of fp8's tiles where each of `groups` is one tile of rows, whose matrix memory
    limits."""
    sms = arch_named("sm_90a").num_sms
    return min(LOW_WIDTHS, key=lambda w: ceil_div(groups * ceil_div(n, w), sms) * w * LOW_WIDTHS[w])


def _low_blocks(groups: int, n: int) -> RowBlocksConfig:
    """fp8's tiles for groups of up to 64 rows."""
    return RowBlocksConfig(tile_m=LOW_ROWS, tile_n=_low_width(groups, n), warpgroups=1)


def _skipping_blocks(groups: int, n: int) -> RowBlocksConfig:
    """fp8's tiles for groups of 64 rows or fewer in the mean, of which some have more."""
    tile_n = _low_width(groups, n)
    tiles = RowBlocksConfig(tile_m=128, tile_n=tile_n, warpgroups=2, skips=True)
    return replace(tiles, cluster_n=_sharers(n, tile_n))


def _narrow_pays(k: int, n: int) -> bool:
    """Whether rows of 192 columns end with narrower tiles: fewer of the last columns, and of the
    last round, are computed in vain, but CTAs no longer ask for the same at the same time, which
    costs more where K is short (docs/facts/grouped.md#grouped-fp8-narrow)."""
    return k >= NARROW_K and ceil_div(n, 192) * 192 >= NARROW_WASTE * n


def scaled_tiles(
    columns: int, operands: tuple[str, str, int], fused: bool, most: int = WARP
) -> ScaledTiles:
    """Blackwell's tiles for products whose factors the tensor cores read; operands: the dtypes of A
    and of B, and the number of elements that share a factor."""
    epi_n, epi_stages = (32, 2) if fused else (32, 4)
    tiles = ScaledTiles(tile_m=256, tile_n=max(64, width(columns)), epi_n=epi_n, pair=True)
    tiles = replace(tiles, epi_stages=epi_stages, num_acc=2).of(*operands)
    return replace(tiles, num_stages=_stages(tiles, most, WITH_CHUNKS))


def sums_tiles(arch: str, mean_rows: int, n: int, most: int = WARP) -> GemmConfig:
    """The tiles of sums over groups of `mean_rows`, whose results have n columns."""
    if arch == "sm_100a":
        return _sm100(n, most)
    least, end = SHORT_SUMS
    if least <= mean_rows < end and (tile_n := width(n, IN_TURN)) == 192:
        tiles = _in_turn(tile_n, cluster_m=2)
    else:
        tiles = _together(n)
    return _filled(tiles, False, most)


def _few_width(k: int, n: int) -> int:
    """The columns of a tile of 64 rows."""
    return 192 if n >= WIDE_COLUMNS and k <= SHORT_K else width(n, FEW)


def _together(n: int, times: dict[int, float] = WIDTHS, most_columns: int = 256) -> Sm90Config:
    """Tiles of 128 rows computed by two warpgroups together; two CTAs side by side share their
    rows. Where `times` ask for 256 columns, a tile has no more than `most_columns`."""
    tile_n = width(n, times)
    if tile_n == 256:
        tile_n = most_columns
    return Sm90Config(tile_m=128, tile_n=tile_n, warpgroups=2, cluster_n=_sharers(n, tile_n))


def _in_turn(tile_n: int, cluster_m: int = 1) -> Sm90Config:
    """Tiles of 128 rows that two warpgroups compute alternately."""
    tiles = Sm90Config(tile_m=128, tile_n=tile_n, warpgroups=2, pingpong=True)
    return replace(tiles, cluster_m=cluster_m)


def _taken_in_turn(n: int, ragged: bool) -> Sm90Config:
    """Tiles of 192 columns, computed alternately; two CTAs share rows if groups are ragged,
    otherwise matrices."""
    if ragged:
        sharers = 2 if ceil_div(n, 192) >= MANY_COLUMNS else _sharers(n, 192)
        return replace(_in_turn(192), cluster_n=sharers)
    return _in_turn(192, cluster_m=2)


def _sharers(n: int, tile_n: int) -> int:
    """The number of CTAs that share rows: two, if the tiles of a row come in pairs."""
    return 2 if ceil_div(n, tile_n) % 2 == 0 else 1


def _filled(tiles: Tiles, fused: bool, most: int, tables: int = 3) -> Tiles:
    """`tiles` with a store, narrower if it has operations, and a ring in the rest of smem."""
    epi_n, epi_stages = (32, 2) if fused else (64, 1)
    epi_n = next(n for n in (epi_n, 32, 16) if tiles.tile_n % n == 0)
    tiles = replace(tiles, epi_n=epi_n, epi_stages=epi_stages)
    return replace(tiles, num_stages=_stages(tiles, most, tables))


def _sm100(n: int, most: int) -> Sm100Config:
    tiles = Sm100Config(tile_m=256, tile_n=width(n), epi_n=32, epi_stages=4, pair=True, num_acc=2)
    return replace(tiles, num_stages=_stages(tiles, most))


def _stages(tiles: GemmConfig, most: int, tables: int = 3) -> int:
    """The slots of a ring that fills a CTA's smem beside the tables of `most` groups."""
    room = (
        arch_named(tiles.arch).smem_per_cta - BARRIERS - tiles.epi_bytes - table_bytes(most, tables)
    )
    slot = replace(tiles, num_stages=1).smem_bytes - tiles.epi_bytes
    return min(MOST_STAGES, room // slot)


def table_bytes(most: int, tables: int = 3) -> int:
    """The smem that the tables of `most` groups take (schedulers/ragged.py)."""
    return 4 * (tables * most + 1)
