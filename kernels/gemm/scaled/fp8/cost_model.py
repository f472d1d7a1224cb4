"""A cost model of the fp8 kernels whose sums are promoted after each 128 of K, with factors or
without, and the configs worth predicting.

It counts clocks of a CTA per block of K: of smem, which wgmmas read and TMA writes; of the wgmmas,
and of a warpgroup's block from end to end, which the other warpgroup hides; and of TMA, whose rows
cost more where they are two lines of L2, or out of bounds. Beside it are what all CTAs load from
L2, and memory (docs/facts/scaled.md#promoted-model). Imports neither torch nor the DSL.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from cutex.kernels.gemm.config import ceil_div
from cutex.kernels.gemm.scaled.fp8.config import BLOCK, PROMOTED, Fp8Config
from cutex.problem.scaled import Fp8Problem

if TYPE_CHECKING:
    from cutex.arch import Arch


@dataclass(frozen=True)
class Costs:
    """The model's constants, of sums without factors."""

    smem: float = 131  # bytes in a clock
    # clocks of a column of 64 rows in a wgmma; in a warpgroup's block beside it, of each column, of
    # 64 rows, and of each group of columns that has a factor of its own
    mma_column: float = 1.92
    added_column: float = 0.75
    wave: float = 0
    group: float = 0
    shared: float = 11  # clocks of a block whose loads are shared
    # of a row that TMA loads, and of one out of bounds beyond the first NOT_COUNTED
    row: float = 1.65
    out_of_bounds: float = 2.8
    # clocks of an exchange of sums, and of an element of them; of an element whose two sums
    # alternating warpgroups add, and of one that is stored
    split: float = 46
    split_element: float = 0.36
    add_up: float = 0.023
    element: float = 0
    # clocks of a tile of CTAs that share loads, and more of four and more
    cluster: float = 0
    larger_cluster: float = 0
    # how many times as long a tile of 64 rows takes, one transposed, and one of CTAs that loop; and
    # all of 256x128 that share nothing, from MANY_ROWS on
    narrow: float = 1.07
    swapped: float = 0.896
    looped: float = 1.0
    tall: float = 1.0
    clock_mhz: float = 1755
    fixed_us: float = 2.02
    l2_of_memory: float = 2.57  # bytes in a second, relative to memory's nominal rate
    memory: float = 0.854
    block_power: float = 6.0  # how sharply the larger times count: of a block, and of all
    power: float = 2.9


WITHOUT_FACTORS = Costs()
# of blocks with factors of their own (docs/facts/scaled.md#one-model)
OF_BLOCKS = Costs(
    smem=318, mma_column=1.822, added_column=0.628, wave=14.4, group=30, shared=36.7, row=1.496,
    out_of_bounds=3.44, split=48, split_element=0.108, add_up=0.022, element=0.0804, cluster=187,
    larger_cluster=182, narrow=1.0, swapped=1.407, looped=1.041, tall=0.95, clock_mhz=1504,
    fixed_us=1.963, l2_of_memory=3.02, memory=0.933, block_power=6.12, power=2.6,
)  # fmt: skip
NOT_COUNTED, TWO_LINES = 16, 0.8  # how much more a row costs that is two lines
SPLIT_TIMES, MOST_TIMES = {1: 0.0, 2: 1.0, 3: 1.5}, 2.5  # of so many shares, and of more
# ---- candidates: rows of a tile and its warpgroups; its columns; clusters that share loads; shares
# of K
TALL = ((64, 1), (64, 2), (128, 2), (256, 2))
WIDTHS = (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192)
CLUSTERS = ((1, 1), (1, 2), (2, 1), (1, 4), (4, 1), (2, 2))
SPLITS = (1, 2, 3, 4, 6)
PADDED = 1.15  # times as many tiles as there are, at most, where clusters are whole
MOST_ROUND, MOST_ROUND_ROWS = 8, 1024  # rows of tiles of one round, and rows, whose class is exact
MANY_ROWS = 1000  # from which on tiles of 256x128 with all of C in smem may be the fastest
# of the SMs, those that clusters of so many CTAs fill at one time
FILLED = {1: 1.0, 2: 1.0, 3: 0.86, 4: 0.92, 6: 0.7}
FEWEST_FILLED = 0.7  # by any others


class Counts(NamedTuple):
    """The tiles of a product, and the sizes that they cover."""

    rows: int
    columns: int
    down: int
    across: int

    @staticmethod
    def of(tiles: Fp8Config, problem: Fp8Problem) -> Counts:
        rows, columns = problem.m, problem.n
        if tiles.swap_ab:
            rows, columns = columns, rows
        return Counts(rows, columns, ceil_div(rows, tiles.tile_m), ceil_div(columns, tiles.tile_n))

    def ctas(self, tiles: Fp8Config) -> int:
        """The CTAs of one matrix, whole clusters."""
        clusters = ceil_div(self.down, tiles.cluster_m) * ceil_div(self.across, tiles.cluster_n)
        return clusters * group_of(tiles)


def group_of(tiles: Fp8Config) -> int:
    """The CTAs of a cluster."""
    return tiles.cluster_m * tiles.cluster_n * tiles.split_k


def at_once(tiles: Fp8Config, num_sms: int) -> int:
    """The CTAs that run at one time."""
    group = group_of(tiles)
    return max(1, int(num_sms * FILLED.get(group, FEWEST_FILLED)) // group) * group


def candidates(
    problem: Fp8Problem, num_sms: int, batch: int = 1, recipe: str = ""
) -> Iterator[Fp8Config]:
    """The configs worth predicting; `recipe`: PROMOTED, if not the problem's."""
    base = Fp8Config(tile_m=128, tile_n=128, warpgroups=2, epi_n=32, epi_stages=1, num_stages=2,
                     recipe=recipe or problem.dtype)  # fmt: skip
    of_vectors = recipe != PROMOTED and all(base.vectors)
    if problem.m >= MANY_ROWS:
        # NOTE: all of C in smem, so that a store waits for no slot
        yield replace(base, tile_m=256, epi_n=64, epi_stages=4)
    for swap_ab in (False, True):
        for tile_m, warpgroups in TALL:
            for tile_n in WIDTHS:
                tile = replace(
                    base, tile_m=tile_m, tile_n=tile_n, warpgroups=warpgroups, swap_ab=swap_ab,
                    epi_n=16 if tile_n % 32 else 32, alternating=64 * warpgroups > tile_m,
                )  # fmt: skip
                if of_vectors and tile_m * tile_n > 128 * 128:
                    continue  # a thread has factors of columns in registers, too
                counts = Counts.of(tile, problem)
                if tile_n < 64 and not swap_ab and problem.m > 64:
                    continue
                if tile_n >= 2 * max(counts.columns, 16) or tile_m >= max(2 * counts.rows, 129):
                    continue
                yield from _placed(tile, counts, (problem.m, num_sms, batch))


def _placed(tile: Fp8Config, counts: Counts, of: tuple[int, int, int]) -> Iterator[Fp8Config]:
    """A tile computed by one CTA, or by clusters that share loads or K; one tile a CTA where all
    are there at one time. `of`: rows of the problem, SMs, matrices."""
    m, num_sms, batch = of
    for cluster_m, cluster_n in CLUSTERS:
        for split_k in SPLITS:
            group = cluster_m * cluster_n * split_k
            if group not in FILLED or (cluster_m * cluster_n > 2 and split_k > 1):
                continue
            placed = replace(tile, cluster_m=cluster_m, cluster_n=cluster_n, split_k=split_k)
            ctas = counts.ctas(placed)
            if ctas > PADDED * counts.down * counts.across * split_k:
                continue
            whole = ctas * batch <= at_once(placed, num_sms)
            # NOTE: a grid for all SMs has clusters that wait for others to end
            if (group > 2 or tile.alternating) and not whole:
                continue
            few = counts.across if tile.swap_ab else counts.down
            few = ceil_div(few, cluster_n if tile.swap_ab else cluster_m)
            one_round = whole and batch == 1 and few <= MOST_ROUND and m <= MOST_ROUND_ROWS
            if one_round and tile.swap_ab:
                yield replace(placed, columns=few)
            elif one_round:
                yield replace(placed, rows=few)
            elif not tile.alternating:
                yield placed


def predict(tiles: Fp8Config, problem: Fp8Problem, arch: Arch, batch: int = 1) -> float:
    """The predicted microseconds of `batch` such products in one launch."""
    costs = costs_of(tiles)
    counts = Counts.of(tiles, problem)
    ctas = counts.ctas(tiles) * batch
    rounds = ceil_div(ctas, at_once(tiles, arch.num_sms))
    blocks = ceil_div(ceil_div(problem.k, BLOCK), tiles.split_k)
    lines = 1 + TWO_LINES * (1 - math.gcd(problem.k, BLOCK) / BLOCK)
    clocks = blocks * block_clocks(tiles, counts, rounds, lines) + tile_clocks(tiles)
    clocks *= costs.narrow if tiles.tile_m == 64 else 1.0
    clocks *= costs.swapped if tiles.swap_ab else 1.0
    clocks *= 1.0 if tiles.one_tile else costs.looped
    # rows beyond the product's are not loaded
    loaded = min(tiles.tile_m, counts.rows / counts.down) / tiles.cluster_n
    loaded += min(tiles.tile_n, counts.columns / counts.across) / tiles.cluster_m
    memory = arch.hbm_gbs * 1e3  # bytes in a microsecond
    times = (
        rounds * clocks / costs.clock_mhz,
        ctas * blocks * loaded * BLOCK * lines / (costs.l2_of_memory * memory),
        batch * problem.bytes / (costs.memory * memory),
    )
    total: float = sum(us**costs.power for us in times)
    tall = (tiles.tile_m, tiles.tile_n, group_of(tiles)) == (256, 128, 1) and not tiles.swap_ab
    share = costs.tall if tall and problem.m >= MANY_ROWS else 1.0
    return costs.fixed_us + share * total ** (1 / costs.power)


def costs_of(tiles: Fp8Config) -> Costs:
    return WITHOUT_FACTORS if tiles.recipe == PROMOTED else OF_BLOCKS


def tile_clocks(tiles: Fp8Config) -> float:
    """A CTA's clocks of a tile beside its blocks."""
    costs, elements = costs_of(tiles), tiles.tile_m * tiles.tile_n
    shared = tiles.cluster_m * tiles.cluster_n
    clocks = costs.element * elements + costs.cluster * (shared > 1)
    clocks += costs.larger_cluster * (shared > 2)
    if tiles.split_k > 1:
        sent = elements * (tiles.split_k - 1) / tiles.split_k
        clocks += costs.split * SPLIT_TIMES.get(tiles.split_k, MOST_TIMES)
        clocks += costs.split_element * sent
    if tiles.alternating:
        clocks += costs.add_up * elements
    return clocks


def block_clocks(tiles: Fp8Config, counts: Counts, rounds: int, lines: float) -> float:
    """A CTA's clocks per block of K; `lines`: of L2, in a row that TMA loads."""
    costs, waves = costs_of(tiles), tiles.tile_m // 64
    # a wgmma reads 64 rows and all columns, of 32 bytes
    read = waves * 4 * 32 * (64 + tiles.tile_n)
    smem = (read + (tiles.tile_m + tiles.tile_n) * BLOCK) / costs.smem
    mma = costs.mma_column * tiles.tile_n
    chain = mma + costs.added_column * tiles.tile_n + costs.wave + costs.group * groups_of(tiles)
    chain *= waves / tiles.warpgroups
    # NOTE: in one round the last tile's time counts, of more its share
    lacking = (
        (counts.down * tiles.tile_m - counts.rows) / min(counts.down, rounds),
        (counts.across * tiles.tile_n - counts.columns) / min(counts.across, rounds),
    )
    inside = (tiles.tile_m - lacking[0]) / tiles.cluster_n
    inside += (tiles.tile_n - lacking[1]) / tiles.cluster_m
    outside = max(0.0, lacking[0] - NOT_COUNTED) / tiles.cluster_n
    outside += max(0.0, lacking[1] - NOT_COUNTED) / tiles.cluster_m
    tma = lines * (costs.row * inside + costs.out_of_bounds * outside)
    found: float = sum(x**costs.block_power for x in (smem, waves * mma, chain, tma))
    shared = tiles.cluster_m * tiles.cluster_n > 1
    return found ** (1 / costs.block_power) + costs.shared * shared


def groups_of(tiles: Fp8Config) -> int:
    """The groups of columns of a tile that a factor is looked up for."""
    if tiles.recipe == PROMOTED or not tiles.shares[1]:
        return 0
    return tiles.touched_blocks if tiles.bounded else tiles.tile_n // tiles.column_group
