"""The choice of a config for products of fp8 whose sums are promoted, but not scaled, after each
128 of K; an epilogue may scale them.

The model counts clocks of a CTA per block of K: of smem, which wgmmas read and TMA writes; of the
wgmmas, and of a warpgroup's block from end to end, which the other warpgroup hides; and of TMA,
whose rows cost more where they are two lines of L2, or out of bounds. Beside it are what all CTAs
load from L2, and memory (docs/facts/scaled.md#promoted-model). Imports neither torch nor the DSL.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from cutex.kernels.gemm.config import ceil_div
from cutex.kernels.gemm.scaled.fp8 import choose
from cutex.kernels.gemm.scaled.fp8.config import BLOCK, PROMOTED, Fp8Config
from cutex.problem.scaled import Fp8Problem

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.kernels.gemm.config import GemmConfig

# ---- the model's constants: bytes of smem in a clock; clocks of a column of 64 rows in a wgmma,
# and of each column beside it in a warpgroup's block; of a block whose loads are shared; of a row
# that TMA loads, of one out of bounds beyond the first 16, and how much more where a row is two
# lines
SMEM, MMA_COLUMN, ADDED_COLUMN, SHARED = 131, 1.92, 0.75, 11
ROW, OUT_OF_BOUNDS, NOT_COUNTED, TWO_LINES = 1.65, 2.8, 16, 0.8
# clocks of an exchange of sums, and of an element of them; of one whose two sums alternating
# warpgroups add; how many times as long a tile of 64 rows takes, and one transposed
SPLIT, SPLIT_ELEMENT, ADD_UP = 46, 0.36, 0.023
NARROW, SWAPPED = 1.07, 0.896
SPLIT_TIMES, MOST_TIMES = {1: 0.0, 2: 1.0, 3: 1.5}, 2.5  # of so many shares, and of more
CLOCK_MHZ, FIXED_US = 1755, 2.02
L2_OF_MEMORY, MEMORY = 2.57, 0.854  # bytes in a second, relative to memory's nominal rate
BLOCK_POWER, POWER = 6.0, 2.9  # how sharply the larger times count: of a block, and of all
# ---- candidates: rows of a tile and its warpgroups; its columns; clusters that share loads; shares
# of K
TALL = ((64, 1), (64, 2), (128, 2), (256, 2))
WIDTHS = (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192)
CLUSTERS = ((1, 1), (1, 2), (2, 1), (1, 4), (4, 1), (2, 2))
SPLITS = (1, 2, 3, 4, 6)
PADDED = 1.15  # times as many tiles as there are, at most, where clusters are whole
MOST_ROUND, MOST_ROUND_ROWS = 8, 1024  # rows of tiles of one round, and rows, whose class is exact
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


def candidates(problem: Fp8Problem, num_sms: int, batch: int = 1) -> Iterator[Fp8Config]:
    """The configs worth predicting."""
    base = Fp8Config(tile_m=128, tile_n=128, warpgroups=2, epi_n=32, epi_stages=1, num_stages=2,
                     recipe=PROMOTED)  # fmt: skip
    if problem.m >= choose.MANY_ROWS:
        # NOTE: all of C in smem, so that a store waits for no slot
        yield replace(base, tile_m=256, epi_n=64, epi_stages=4)
    for swap_ab in (False, True):
        for tile_m, warpgroups in TALL:
            for tile_n in WIDTHS:
                tile = replace(
                    base, tile_m=tile_m, tile_n=tile_n, warpgroups=warpgroups, swap_ab=swap_ab,
                    epi_n=16 if tile_n % 32 else 32, alternating=64 * warpgroups > tile_m,
                )  # fmt: skip
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
    counts = Counts.of(tiles, problem)
    ctas = counts.ctas(tiles) * batch
    rounds = ceil_div(ctas, at_once(tiles, arch.num_sms))
    blocks = ceil_div(ceil_div(problem.k, BLOCK), tiles.split_k)
    lines = 1 + TWO_LINES * (1 - math.gcd(problem.k, BLOCK) / BLOCK)
    clocks = blocks * block_clocks(tiles, counts, rounds, lines)
    if tiles.split_k > 1:
        sent = tiles.tile_m * tiles.tile_n * (tiles.split_k - 1) / tiles.split_k
        clocks += SPLIT * SPLIT_TIMES.get(tiles.split_k, MOST_TIMES) + SPLIT_ELEMENT * sent
    if tiles.alternating:
        clocks += ADD_UP * tiles.tile_m * tiles.tile_n
    clocks *= NARROW if tiles.tile_m == 64 else 1.0
    clocks *= SWAPPED if tiles.swap_ab else 1.0
    # rows beyond the product's are not loaded
    loaded = min(tiles.tile_m, counts.rows / counts.down) / tiles.cluster_n
    loaded += min(tiles.tile_n, counts.columns / counts.across) / tiles.cluster_m
    memory = arch.hbm_gbs * 1e3  # bytes in a microsecond
    times = (
        rounds * clocks / CLOCK_MHZ,
        ctas * blocks * loaded * BLOCK * lines / (L2_OF_MEMORY * memory),
        batch * problem.bytes / (MEMORY * memory),
    )
    return FIXED_US + sum(us**POWER for us in times) ** (1 / POWER)


def block_clocks(tiles: Fp8Config, counts: Counts, rounds: int, lines: float) -> float:
    """A CTA's clocks per block of K; `lines`: of L2, in a row that TMA loads."""
    waves = tiles.tile_m // 64
    # a wgmma reads 64 rows and all columns, of 32 bytes
    read = waves * 4 * 32 * (64 + tiles.tile_n)
    smem = (read + (tiles.tile_m + tiles.tile_n) * BLOCK) / SMEM
    mma = MMA_COLUMN * tiles.tile_n
    chain = (mma + ADDED_COLUMN * tiles.tile_n) * waves / tiles.warpgroups
    # NOTE: in one round the last tile's time counts, of more its share
    lacking = (
        (counts.down * tiles.tile_m - counts.rows) / min(counts.down, rounds),
        (counts.across * tiles.tile_n - counts.columns) / min(counts.across, rounds),
    )
    inside = (tiles.tile_m - lacking[0]) / tiles.cluster_n
    inside += (tiles.tile_n - lacking[1]) / tiles.cluster_m
    outside = max(0.0, lacking[0] - NOT_COUNTED) / tiles.cluster_n
    outside += max(0.0, lacking[1] - NOT_COUNTED) / tiles.cluster_m
    tma = lines * (ROW * inside + OUT_OF_BOUNDS * outside)
    found: float = sum(x**BLOCK_POWER for x in (smem, waves * mma, chain, tma))
    shared = tiles.cluster_m * tiles.cluster_n > 1
    return found ** (1 / BLOCK_POWER) + SHARED * shared


# ---- rankings


def predictions(
    sizes: tuple[int, int, int, int], arch: Arch, configs: Iterable[GemmConfig] | None = None
) -> dict[GemmConfig, float]:
    """The predicted microseconds of the best configs, or those given, of a batch of products,
    `sizes` (M, N, K in units of 2 bytes, L)."""
    problem, batch = _problem(sizes), sizes[3]
    if configs is None:
        return _best(problem, arch, batch)
    given = [replace(c, recipe=problem.dtype) for c in configs if isinstance(c, Fp8Config)]
    fits = [c for c in given if c.why_not(problem, arch) is None]  # type: ignore[arg-type]
    found = [replace(c, recipe=PROMOTED) for c in fits]
    return {c: predict(c, problem, arch, batch) for c in found}


def _best(problem: Fp8Problem, arch: Arch, batch: int) -> dict[GemmConfig, float]:
    """The best candidates, and one that fits any call, with their predicted microseconds."""
    tiles = dict.fromkeys(candidates(problem, arch.num_sms, batch))
    order = sorted(tiles, key=lambda c: predict(c, problem, arch, batch))
    fits = (choose.deepest(c, arch) for c in order)
    found = (c for c in fits if c is not None and c.why_not(problem, arch) is None)  # type: ignore[arg-type]
    some = [
        *islice(found, choose.MOST_RANKED),
        replace(choose.plain(problem, arch), recipe=PROMOTED),
    ]
    return {c: predict(c, problem, arch, batch) for c in dict.fromkeys(some)}


def ranked(sizes: tuple[int, int, int, int], arch: Arch) -> list[GemmConfig]:
    """The best configs for such products, fastest predicted first, and one that fits any call."""
    times = predictions(sizes, arch)
    return sorted(times, key=times.__getitem__)


def _problem(sizes: tuple[int, int, int, int]) -> Fp8Problem:
    """The scaled problem of such sizes, which a model knows."""
    m, n, k, _ = sizes
    return Fp8Problem(m, -(-n // 8) * 8, -(-k // 8) * 16)
