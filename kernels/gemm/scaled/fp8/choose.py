"""The choice of a config for an fp8 problem: candidates, ranked by a cost model.

The model counts clocks of a CTA per 128 of K, of the tensor core, of smem and of L2, the rounds of
tiles, and memory; its constants are of an H100 (docs/facts). Imports neither torch nor the DSL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from cutex.arch import arch as arch_named
from cutex.kernels.gemm.choose import rows_class
from cutex.kernels.gemm.config import ceil_div
from cutex.kernels.gemm.scaled.fp8.config import BLOCK, Fp8Config
from cutex.problem.scaled import Fp8Problem

if TYPE_CHECKING:
    from cutex.arch import Arch

MMA_CLOCK = 2 * 64 * BLOCK / 8192  # clocks of 64 rows by one column by 128 of K
SMEM_BYTES = 128  # per clock and SM, that wgmma reads
L2_BYTES = 38  # per clock and SM, that TMA brings
MHZ = 1600  # clocks in a microsecond; at full power less, with few rows more
MEMORY = 2.9e6  # bytes in a microsecond
FIXED_US, ROUND_CLOCKS, SPLIT_CLOCKS = 3.5, 1300, 1400  # of a launch, a round of tiles, an exchange
ALONE_CLOCKS = 90  # that one warpgroup adds while nothing else runs
DEEPEST = 12  # slots of a ring, beyond which nothing is gained
FEW_ROWS = 256


def candidates(problem: Fp8Problem) -> Iterator[Fp8Config]:
    """The configs that are worth a prediction."""
    base = Fp8Config(tile_m=256, tile_n=128, warpgroups=2, epi_n=64, epi_stages=1,
                     recipe=problem.dtype)  # fmt: skip
    for tile_m, tile_n in ((256, 128), (128, 192), (128, 128), (128, 64)):
        for shared in ({}, {"cluster_m": 2}, {"cluster_n": 2}):
            yield replace(base, tile_m=tile_m, tile_n=tile_n, **shared)  # type: ignore[arg-type]
    if problem.m > FEW_ROWS:
        return
    few = replace(base, epi_n=32)
    for tile_n in (16, 32, 64, 96, 128):
        across = -(-problem.m // tile_n)
        for split_k in (1, 2, 4):
            for tile_m in (64, 128):
                one = replace(
                    few, tile_m=tile_m, tile_n=tile_n, warpgroups=tile_m // 64, split_k=split_k,
                    swap_ab=True, epi_n=min(tile_n, 32), columns=across,
                )  # fmt: skip
                yield one
                if across == 1:
                    yield replace(one, cluster_m=2)
    for tile_m in (64, 128):
        down = -(-problem.m // tile_m)
        for tile_n in (32, 64):
            for cluster_n in (1, 2, 4):
                for split_k in (1, 2):
                    yield replace(
                        few, tile_m=tile_m, tile_n=tile_n, warpgroups=tile_m // 64, epi_n=32,
                        rows=down, cluster_n=cluster_n, split_k=split_k,
                    )  # fmt: skip


def deepest(tiles: Fp8Config, arch: Arch) -> Fp8Config | None:
    """`tiles` with as many slots as smem has room for; None if they do not fit."""
    for num_stages in range(DEEPEST, 1, -1):
        found = replace(tiles, num_stages=num_stages)
        if found.why_not(None, arch) is None:
            return found
    return None


def predict(tiles: Fp8Config, problem: Fp8Problem, arch: Arch) -> float:
    """Microseconds."""
    rows, columns = problem.m, problem.n
    if tiles.swap_ab:
        rows, columns = columns, rows
    down, across = ceil_div(rows, tiles.tile_m), ceil_div(columns, tiles.tile_n)
    down = ceil_div(down, tiles.cluster_m) * tiles.cluster_m
    across = ceil_div(across, tiles.cluster_n) * tiles.cluster_n
    group = tiles.cluster_m * tiles.cluster_n * tiles.split_k
    at_once = arch.num_sms // group * group
    rounds = ceil_div(down * across * tiles.split_k, at_once)
    blocks = ceil_div(ceil_div(problem.k, BLOCK), tiles.split_k)
    waves = tiles.tile_m // 64
    wave = max(MMA_CLOCK * tiles.tile_n, (64 + tiles.tile_n) * BLOCK / SMEM_BYTES)
    mma = waves * (wave + (ALONE_CLOCKS if tiles.mma_warpgroups == 1 else 10))
    loaded = tiles.tile_m / tiles.cluster_n + tiles.tile_n / tiles.cluster_m
    busy = min(1.0, down * across * tiles.split_k / arch.num_sms)
    block = max(mma, loaded * BLOCK / L2_BYTES * max(busy, 0.6))
    clocks = rounds * (blocks * block + ROUND_CLOCKS)
    clocks += SPLIT_CLOCKS * (tiles.split_k > 1)
    return FIXED_US + max(clocks / MHZ, problem.bytes / MEMORY)


def ranked(problem: Fp8Problem, arch: Arch) -> list[Fp8Config]:
    """The candidate configs of `problem`, fastest predicted first."""
    found = (deepest(tiles, arch) for tiles in candidates(problem))
    fits = [c for c in found if c is not None and c.why_not(problem, arch) is None]  # type: ignore[arg-type]
    return sorted(dict.fromkeys(fits), key=lambda c: predict(c, problem, arch))


def shortlist(problem: Fp8Problem, arch: Arch, count: int) -> list[Fp8Config]:
    """The first `count` of the ranking."""
    return ranked(problem, arch)[:count]


def choose(problem: Fp8Problem, arch: Arch) -> Fp8Config:
    """The config that the cost model ranks first."""
    return ranked(problem, arch)[0]


def configs_for(mnk: tuple[int, int, int], recipe: str) -> list[Fp8Config]:
    """The ranking for calls of these sizes, which are rounded up to classes, so that few kernels
    serve all M."""
    m, n, k = mnk
    n, k = -(-n // 8) * 8, -(-k // 16) * 16
    problem = Fp8Problem(rows_class(m), n, k, dtype=recipe)
    return ranked(problem, arch_named("sm_90a"))
