"""The choice of a config for an fp8 problem: candidates, ranked by a cost model.

The model has three times: of the tensor cores with what stands between their MMAs, of what CTAs
load from L2, all together, and of memory. Its constants are of one H200 and of one H100
(docs/facts/scaled.md#fp8-chooser-refitted). Imports neither torch nor the DSL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from cutex.arch import BOARDS
from cutex.arch import arch as arch_named
from cutex.kernels.gemm.choose import rows_class
from cutex.kernels.gemm.config import ceil_div
from cutex.kernels.gemm.scaled.fp8.config import BLOCK, Fp8Config
from cutex.problem.scaled import Fp8Problem

if TYPE_CHECKING:
    from cutex.arch import Arch

# clocks per block of K: of a column of 64 rows, and of 64 rows beside; more where one warpgroup is
# alone; of clusters that share loads, which wait for each other; least
COLUMN, WAVE, ALONE, LEAST = 1.95, 50, 78, 80
SHARED, SHARED_ALONE = 44, 46
ALTERNATING_COLUMN, ALTERNATING_WAVE = 1.97, 39  # the first two, of warpgroups that alternate
# from so many rows on, of tiles that neither alternate nor share K
# (docs/facts/scaled.md#fp8-mid-rows): clocks of a column of 64 rows, of 64 rows beside; of 64 rows
# where a warpgroup has twice as many; of each group of columns with a factor of its own; and how
# many times as long one warpgroup takes
MID_ROWS, MID_COLUMN, MID_WAVE, MID_SECOND, MID_GROUP, MID_ALONE = 192, 1.41, 113, 70, 6, 1.1
ADD_UP = 0.3  # clocks of an element whose two sums these add
CROWDED, CROWDED_TIMES = 160, 1.05  # accumulators a thread, transposed, beyond which it is longer
SWAPPED = 1.05  # times as long, transposed
# clocks of a round of tiles; of an exchange of sums; of one that the next tile's loads wait for; of
# an element that is exchanged
ROUND, SPLIT, SPLIT_ROUND, SPLIT_ELEMENT = 1150, 570, 550, 0.41
SPLIT_OF_TWO = 0  # of one between two CTAs of two warpgroups each (docs/facts/scaled.md#fp8-halves)
CLOCK = 0.88  # the SMs' clock, relative to that of the dense peak
L2 = 129.4  # bytes in a clock, of an SM
MEMORY = 0.887  # of its nominal rate
POWER, OVERLAP = 1.76, 2.59  # how sharply the larger time counts: of two, and of them and memory
FIXED_US = 1.45  # of a launch
SMS_OF_FOURS, SMS_OF_THREES = 0.8, 0.86  # of the SMs, those that clusters of so many fill
MOST_SENT = 128 * 128  # elements of a tile, up to which its K is split
DEEPEST = 8  # slots of a ring, beyond which nothing is gained
FEW_ROWS = 256  # up to which rows may be columns of the MMA
# rows from which on tiles of 256x128 are as fast as any (#fp8-alone), if they are so large a part
# of the SMs
MANY_ROWS, FILLED = 1000, 0.75
MOST_ROUND, MOST_ALTERNATING = 4, 8  # rows, or columns, of tiles of one round
WIDTHS = (64, 80, 96, 112, 128, 144, 160, 176, 192)
SWAPPED_WIDTHS = (16, 32, 64, 96, 128, 160)
TALL = ((64, 1), (128, 2), (256, 2))  # rows of a tile, and its warpgroups
MOST_RANKED = 12


def candidates(problem: Fp8Problem, num_sms: int, batch: int = 1) -> Iterator[Fp8Config]:
    """The configs worth predicting."""
    base = Fp8Config(tile_m=128, tile_n=128, warpgroups=2, epi_n=32, epi_stages=1, num_stages=2,
                     recipe=problem.dtype)  # fmt: skip
    if problem.m >= MANY_ROWS:
        tall = replace(base, tile_m=256, epi_n=64)
        # NOTE: all of C in smem, so that a store waits for no slot
        yield replace(tall, epi_stages=4)
        if ceil_div(problem.m, 256) * ceil_div(problem.n, 128) * batch < num_sms * FILLED:
            yield from (replace(base, epi_n=64, split_k=split_k) for split_k in (1, 2, 4))
    for tile in _tiles(base, problem.m):
        yield from _placed(tile, (problem.m, problem.n), num_sms, batch)
        yield from _alternating(tile, (problem.m, problem.n), num_sms, batch)
    if problem.m <= FEW_ROWS:
        for tile in _swapped_tiles(base, problem.m):
            yield from _placed(tile, (problem.n, problem.m), num_sms, batch)
            yield from _alternating(tile, (problem.n, problem.m), num_sms, batch)


def _tiles(base: Fp8Config, m: int) -> Iterator[Fp8Config]:
    for tile_m, warpgroups in TALL:
        if tile_m > 128 >= m or (tile_m > 128 and m >= MANY_ROWS):
            continue
        for tile_n in WIDTHS:
            if all(base.vectors) and tile_m * tile_n > 128 * 128:
                continue  # a thread has factors of columns in registers, too
            epi_n = 32 if tile_n % 32 == 0 else 16
            yield replace(base, tile_m=tile_m, warpgroups=warpgroups, tile_n=tile_n, epi_n=epi_n)


def _swapped_tiles(base: Fp8Config, m: int) -> Iterator[Fp8Config]:
    for tile_m, warpgroups in TALL:
        for tile_n in SWAPPED_WIDTHS:
            if tile_n < 64 and m > 2 * tile_n:
                continue
            yield replace(base, tile_m=tile_m, warpgroups=warpgroups, tile_n=tile_n,
                          epi_n=min(tile_n, 32), swap_ab=True)  # fmt: skip


def _placed(
    tile: Fp8Config, sizes: tuple[int, int], num_sms: int, batch: int
) -> Iterator[Fp8Config]:
    """A tile for a product of these sizes: several for each CTA or, if they fit in one round, one;
    shared by two CTAs, or split along K."""
    down, across = ceil_div(sizes[0], tile.tile_m), ceil_div(sizes[1], tile.tile_n)
    few = across if tile.swap_ab else down
    most = MOST_ALTERNATING if tile.alternating else MOST_ROUND
    fits = num_sms // (down * across) if batch == 1 and few <= most else 0

    def one_round(tiles: Fp8Config, few: int) -> Fp8Config:
        return replace(tiles, columns=few) if tiles.swap_ab else replace(tiles, rows=few)

    yield one_round(tile, few) if fits else tile
    if tile.tile_m * tile.tile_n <= MOST_SENT:
        for split_k in range(2, min(fits, 4) + 1):
            yield one_round(replace(tile, split_k=split_k), few)
    if down % 2 == 0 and not tile.swap_ab:
        shared = replace(tile, cluster_m=2)
        yield one_round(shared, few // 2) if fits else shared
    if across % 2 == 0:
        shared = replace(tile, cluster_n=2)
        yield one_round(shared, few // 2) if fits and tile.swap_ab else shared


def _alternating(
    tile: Fp8Config, sizes: tuple[int, int], num_sms: int, batch: int
) -> Iterator[Fp8Config]:
    """The same for two warpgroups that alternate along K, one tile per CTA."""
    both = replace(tile, warpgroups=2, alternating=True)
    for placed in _placed(both, sizes, num_sms, batch):
        if placed.one_tile and placed.split_k == 1:
            yield placed


def deepest(tiles: Fp8Config, arch: Arch) -> Fp8Config | None:
    """`tiles` with as many slots as fit in smem; None if none do."""
    for num_stages in range(DEEPEST, 1, -1):
        found = replace(tiles, num_stages=num_stages)
        if found.why_not(None, arch) is None:
            return found.on(arch.num_sms)
    return None


def predict(tiles: Fp8Config, problem: Fp8Problem, arch: Arch, batch: int = 1) -> float:
    """The predicted microseconds of `batch` such problems in one launch."""
    rows, columns = problem.m, problem.n
    if tiles.swap_ab:
        rows, columns = columns, rows
    down, across = ceil_div(rows, tiles.tile_m), ceil_div(columns, tiles.tile_n)
    shared = tiles.cluster_m * tiles.cluster_n
    group = shared * tiles.split_k
    ctas = batch * ceil_div(down, tiles.cluster_m) * ceil_div(across, tiles.cluster_n) * group
    # NOTE: not every GPC has a multiple of 4 SMs left
    share = {1: 1.0, 2: 1.0, 3: SMS_OF_THREES}.get(group, SMS_OF_FOURS)
    rounds = ceil_div(ctas, int(arch.num_sms * share) // group * group)
    blocks = ceil_div(ceil_div(problem.k, BLOCK), tiles.split_k)
    clocks = rounds * (blocks * block_clocks(tiles, problem.m > MID_ROWS) + ROUND)
    if tiles.split_k > 1:
        of_two = tiles.split_k == tiles.warpgroups == 2 and not tiles.swap_ab
        one = SPLIT_OF_TWO if of_two else SPLIT
        clocks += one if rounds == 1 else rounds * SPLIT_ROUND
        sent = tiles.tile_m * tiles.tile_n * (tiles.split_k - 1) / tiles.split_k
        clocks += rounds * SPLIT_ELEMENT * sent
    if tiles.alternating:
        clocks += rounds * ADD_UP * tiles.tile_m * tiles.tile_n
    mhz = CLOCK * arch.clock_hz * 1e-6
    compute = clocks / mhz * (SWAPPED if tiles.swap_ab else 1.0)
    # rows beyond the product's are not loaded
    loaded = min(tiles.tile_m, rows / down) / tiles.cluster_n
    loaded += min(tiles.tile_n, columns / across) / tiles.cluster_m
    loads = ctas * blocks * loaded * BLOCK / (L2 * arch.num_sms * mhz)
    inner = (compute**POWER + loads**POWER) ** (1 / POWER)
    memory = batch * problem.bytes / (MEMORY * arch.hbm_gbs * 1e3)
    return FIXED_US + (inner**OVERLAP + memory**OVERLAP) ** (1 / OVERLAP)


def block_clocks(tiles: Fp8Config, many: bool = False) -> float:
    """A CTA's clocks per block of K if nothing waits for loads; `many`: of MID_ROWS and more."""
    alone = tiles.mma_warpgroups == 1
    usual = not tiles.alternating and tiles.split_k == 1
    if many and usual and not tiles.swap_ab:
        return _many_rows_clocks(tiles)
    column, wave = COLUMN, WAVE + ALONE * alone
    if tiles.alternating:
        column, wave = ALTERNATING_COLUMN, ALTERNATING_WAVE
    clocks = tiles.tile_m // 64 * (tiles.tile_n * column + wave)
    clocks = max(clocks, LEAST)
    if tiles.cluster_m * tiles.cluster_n > 1:
        clocks += SHARED_ALONE if alone else SHARED
    if tiles.swap_ab and tiles.accumulators >= CROWDED:
        clocks *= CROWDED_TIMES
    return clocks


def _many_rows_clocks(tiles: Fp8Config) -> float:
    """`block_clocks` of a tile of many rows, one CTA's own."""
    groups = tiles.tile_n // tiles.column_group if tiles.shares[1] else 0
    wave = MID_SECOND if tiles.warpgroup_rows > 64 else MID_WAVE
    clocks = tiles.tile_m // 64 * (tiles.tile_n * MID_COLUMN + wave + groups * MID_GROUP)
    if tiles.mma_warpgroups == 1:
        clocks = MID_ALONE * (clocks + ALONE)
    shared = tiles.cluster_m * tiles.cluster_n > 1
    return clocks + SHARED * shared


def ranked(problem: Fp8Problem, arch: Arch, batch: int = 1) -> list[Fp8Config]:
    """The best candidates for `batch` such problems, fastest predicted first, and one that fits any
    call."""
    every = dict.fromkeys(candidates(problem, arch.num_sms, batch))
    order = sorted(every, key=lambda tiles: predict(tiles, problem, arch, batch))
    last = plain(problem, arch)
    fits = (deepest(tiles, arch) for tiles in (*order, last))
    found = (c for c in fits if c is not None and c.why_not(problem, arch) is None)  # type: ignore[arg-type]
    return list(dict.fromkeys((*islice(found, MOST_RANKED), last)))


def plain(problem: Fp8Problem, arch: Arch) -> Fp8Config:
    """The config that fits any call."""
    tiles = deepest(
        Fp8Config(tile_m=128, tile_n=128, warpgroups=2, epi_n=32, epi_stages=1, num_stages=2,
                  recipe=problem.dtype), arch)  # fmt: skip
    assert tiles is not None  # on any board
    return tiles


def shortlist(problem: Fp8Problem, arch: Arch, count: int) -> list[Fp8Config]:
    """The first `count` of the ranking."""
    return ranked(problem, arch)[:count]


def choose(problem: Fp8Problem, arch: Arch) -> Fp8Config:
    """The config that the cost model ranks first."""
    return ranked(problem, arch)[0]


def configs_for(
    mnk: tuple[int, int, int], recipe: str, batch: int = 1, board: str = ""
) -> list[Fp8Config]:
    """The ranking for calls of these sizes, which are rounded up to classes, so that few kernels
    serve all M. board: one of BOARDS, if the GPU is not on the arch's usual board."""
    m, n, k = mnk
    n, k = -(-n // 8) * 8, -(-k // 16) * 16
    problem = Fp8Problem(rows_class(m), n, k, dtype=recipe)
    return ranked(problem, BOARDS[board] if board else arch_named("sm_90a"), batch)
