"""The choice of a config for an unaligned operand: candidates, ranked by a cost model.

The model counts clocks of a CTA per K tile: of the tensor cores, of reading operand A into
registers, and of loads; the rounds of tiles; and memory. Its constants are fitted to 301 times of
91 weight gradients on H200s (docs/facts/gemm.md#unaligned-choice). Imports neither torch nor the
DSL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from cutex.arch import arch as arch_named
from cutex.kernels.gemm.config import ELEMENT, ceil_div
from cutex.kernels.gemm.sm90.candidates import at_once
from cutex.kernels.gemm.unaligned import few_choose as few_rows
from cutex.kernels.gemm.unaligned.config import TILE_K, UnalignedConfig
from cutex.kernels.gemm.unaligned.few_config import FewRowsConfig

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.problem.gemm import GemmProblem

COLUMNS = (8, 16, 32, 48, 64, 96, 128, 160, 192, 256)
BOX = 32  # rows of B contiguous that a box has at least, or all
MMA_CLOCKS = 2.4  # of 64 rows by one column by a K tile, where the tensor core limits
READ_CLOCKS = 175  # of a warpgroup's 64 rows, from their arrival to the wgmmas
ISSUE_CLOCKS = 115  # of the same, of the four schedulers' time
SECTOR_CLOCKS = 0.2  # of TMA, for 32 bytes
SHARED_CLOCKS = 1.8  # of L2, for a CTA that reads the same rows of a narrow A at the same time
LOAD_BYTES = 29  # per clock and SM, that L2 gives
CLOCK = 0.929  # of that at which the board's peak holds
POWER = 1.46  # how sharply the larger of two limits counts
FIXED_US, TILE_CLOCKS = 2.6, 553
STREAM_CLOCKS, STREAM_BYTES = 1743, 64  # of sums through memory, and bytes of them in a clock
PARTIAL_CLOCKS = 436  # of one CTA's sums, beside their bytes: they are added one after the other
SPLIT_BYTES = 38  # of sums within a cluster, in a clock
# time of tiles whose K a cluster shares, of so many columns or more, relative to the model's: TMA
# loads 64 bytes of a row of B as slowly as 128 (docs/facts/gemm.md#unaligned-splits)
SPLIT_TIMES = {96: 0.88, 48: 1.0, 8: 1.25}
DEEPEST, MOST = 12, 16  # slots, and as many where a split's sums take the room


def candidates(n: int, fold: int, k_contiguous: bool) -> Iterator[UnalignedConfig]:
    """The configs worth predicting for N columns."""
    for warpgroups in (1, 2, 3):
        for tile_n in COLUMNS:
            if not k_contiguous and tile_n % BOX and tile_n != n:
                continue
            epi_n = tile_n if tile_n % 16 else next(e for e in (64, 32, 16) if tile_n % e == 0)
            tile = UnalignedConfig(
                tile_m=64 * warpgroups,
                tile_n=tile_n,
                epi_n=epi_n,
                epi_stages=1,
                warpgroups=warpgroups,
                fold=fold,
            )
            for cluster_m in (1, 2, 4):
                pair = replace(tile, cluster_m=cluster_m)
                yield pair
                yield replace(pair, stream_k=1)
                yield replace(pair, stream_k=2)
                yield from (replace(pair, split_k=n) for n in (2, 4, 8) if n * cluster_m <= 8)


def deepest(tiles: UnalignedConfig, arch: Arch) -> UnalignedConfig | None:
    """`tiles` with as many slots as fit in smem; None if none do."""
    size = tiles.cluster_m * tiles.split_k
    most = at_once(size, arch.num_sms)
    grid = 0 if most == arch_named(arch.name).num_sms else most // size * size
    for num_stages in (*range(DEEPEST, 2, -1), *range(DEEPEST + 1, MOST + 1)):
        found = replace(tiles, num_stages=num_stages, num_ctas=grid)
        if found.why_not(None, arch) is None:
            return found
    return None


def predict(tiles: UnalignedConfig, problem: GemmProblem, arch: Arch) -> float:
    """The predicted microseconds."""
    c, (m, n, k) = tiles, problem.mnk
    k_tiles = ceil_div(k, TILE_K)
    down = ceil_div(ceil_div(m, c.tile_m), c.cluster_m) * c.cluster_m
    tiles_of_c = down * ceil_div(n, c.tile_n)
    ctas = c.num_ctas or arch.num_sms
    rounds = ceil_div(tiles_of_c * c.split_k, ctas)
    # NOTE: A's boxes overlap where it has fewer rows than they: few lines of L2 for all CTAs
    overlap = max(1.0, c.box_columns / m) - 1
    k_tile = k_tile_clocks(c) + SHARED_CLOCKS * overlap * ceil_div(n, c.tile_n)
    clocks = rounds * (ceil_div(k_tiles, c.split_k) * k_tile + TILE_CLOCKS)
    if c.stream_k:
        whole = tiles_of_c / ctas
        clocks = whole * k_tiles * k_tile + rounds * TILE_CLOCKS + STREAM_CLOCKS
        partials = max(1.0, min(ctas / tiles_of_c, k_tiles) - 1)
        clocks += partials * (PARTIAL_CLOCKS + c.partial_bytes / STREAM_BYTES)
    if c.split_k > 1:
        clocks += rounds * c.partial_bytes / SPLIT_BYTES
    memory = problem.bytes / (0.88 * arch.hbm_gbs * 1e3)
    busy = clocks / (CLOCK * arch.clock_hz / 1e6)
    us = FIXED_US + (busy**POWER + memory**POWER) ** (1 / POWER)
    if c.split_k == 1:
        return us
    return us * next(time for least, time in SPLIT_TIMES.items() if c.tile_n >= least)


def k_tile_clocks(c: UnalignedConfig) -> float:
    """A CTA's clocks per K tile."""
    alone = READ_CLOCKS + MMA_CLOCKS * c.tile_n
    of_b = c.tile_n / c.cluster_m
    tma = SECTOR_CLOCKS * (c.box_columns + of_b) * TILE_K * ELEMENT / 32
    l2 = (c.box_columns + of_b) * TILE_K * ELEMENT / LOAD_BYTES
    return max(alone, c.warpgroups * max(ISSUE_CLOCKS, MMA_CLOCKS * c.tile_n), tma, l2)


def ranked(
    problem: GemmProblem, fold: int, k_contiguous: bool, arch: Arch
) -> list[UnalignedConfig | FewRowsConfig]:
    """The candidate configs, fastest predicted first; `k_contiguous`: whether K is in B."""
    every = candidates(problem.n, fold, k_contiguous)
    found = (deepest(tiles, arch) for tiles in every)
    times: dict[UnalignedConfig | FewRowsConfig, float] = {
        c: predict(c, problem, arch) for c in found if c is not None and fit(c, problem, arch)
    }
    if not k_contiguous:
        few = few_rows.candidates(problem, arch)
        times |= {c: few_rows.predict(c, problem, arch) for c in few}
    return sorted(times, key=times.__getitem__)


def fit(c: UnalignedConfig, problem: GemmProblem, arch: Arch) -> bool:
    """Whether every CTA of a split has a K tile, every CTA of a cluster has rows, and streamed
    tiles make the same number of rounds."""
    if ceil_div(problem.m, c.tile_m) < c.cluster_m:
        return False
    tiles = ceil_div(problem.m, c.tile_m * c.cluster_m) * ceil_div(problem.n, c.tile_n)
    rounds = tiles * c.cluster_m / (c.num_ctas or arch.num_sms)
    if c.stream_k and c.stream_k != min(2, ceil_div(round(rounds * 1000), 1000)):
        return False
    # NOTE: of few rows 32 columns shared by two CTAs take up to five times as long as others; why
    # is not known (docs/facts/gemm.md#unaligned-again)
    if c.split_k == 2 and c.tile_n == 32 and problem.m < c.tile_m:
        return False
    return c.split_k == 1 or ceil_div(problem.k, TILE_K) >= 2 * c.split_k
