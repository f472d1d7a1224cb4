"""The choice of a config for an fp8 problem: candidates, ranked by a cost model.

The model counts clocks of a CTA per 128 of K, of the tensor core and of loads, the rounds of
tiles, and memory; its constants are of one H100 (docs/facts/scaled.md). Imports neither torch nor
the DSL.
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
LOAD_BYTES = 36  # per clock and SM, that TMA brings
MHZ = 1700  # clocks in a microsecond; at full power less, with few rows more
MEMORY = 2.8e6  # bytes in a microsecond
POWER = 3.0  # how sharply the larger one of computing and memory counts
FIXED_US, ROUND_CLOCKS, SPLIT_CLOCKS = 1.7, 1300, 2000  # of a launch, a round of tiles, an exchange
SMS_OF_FOURS = 0.9  # of the SMs, those that clusters of 4 and more fill at one time
SWAPPED, ALONE = 0.06, 0.03  # longer, transposed, and with one warpgroup
ALONE_CLOCKS = 90  # that one warpgroup waits while nothing else runs
DEEPEST = 8  # slots of a ring, beyond which nothing is gained
FEW_ROWS = 256


def candidates(problem: Fp8Problem) -> Iterator[Fp8Config]:
    """The configs that are worth a prediction."""
    base = Fp8Config(tile_m=128, tile_n=128, warpgroups=2, epi_n=64, epi_stages=1,
                     recipe=problem.dtype)  # fmt: skip
    # NOTE: pairs that share A, and all of C in smem: by the facts (#fp8-promotion-chain)
    yield replace(base, tile_m=256, epi_stages=4, cluster_n=2)
    for tile_m, tile_n in ((256, 128), (128, 192), (128, 128)):
        yield replace(base, tile_m=tile_m, tile_n=tile_n)
    for split_k in (2, 4):
        yield replace(base, split_k=split_k)
    if problem.m <= FEW_ROWS:
        yield from _of_few_rows(problem, replace(base, epi_n=32))


def _of_few_rows(problem: Fp8Problem, base: Fp8Config) -> Iterator[Fp8Config]:
    """Configs whose tiles have few rows of A: as the MMA's columns, or a round of tiles beside each
    other."""
    for tile_m in (64, 128):
        one = replace(base, tile_m=tile_m, warpgroups=tile_m // 64)
        for split_k in (1, 2, 4):
            for tile_n in (16, 32, 64, 96, 128):
                columns = ceil_div(problem.m, tile_n)
                swapped = replace(one, tile_n=tile_n, epi_n=min(tile_n, 32), split_k=split_k,
                                  swap_ab=True)  # fmt: skip
                yield replace(swapped, columns=columns)
                yield swapped
            for tile_n in (64, 128):
                rows = ceil_div(problem.m, tile_m)
                yield replace(one, tile_n=tile_n, split_k=split_k, rows=rows)
                yield replace(one, tile_n=tile_n, split_k=split_k)


def deepest(tiles: Fp8Config, arch: Arch) -> Fp8Config | None:
    """`tiles` with as many slots as smem has room for; None if they do not fit."""
    for num_stages in range(DEEPEST, 1, -1):
        found = replace(tiles, num_stages=num_stages)
        if found.why_not(None, arch) is None:
            return found
    return None


def predict(tiles: Fp8Config, problem: Fp8Problem, arch: Arch, batch: int = 1) -> float:
    """Microseconds, for `batch` such problems in one launch."""
    rows, columns = problem.m, problem.n
    if tiles.swap_ab:
        rows, columns = columns, rows
    down, across = ceil_div(rows, tiles.tile_m), ceil_div(columns, tiles.tile_n)
    down = ceil_div(down, tiles.cluster_m) * tiles.cluster_m
    across = ceil_div(across, tiles.cluster_n) * tiles.cluster_n
    group = tiles.cluster_m * tiles.cluster_n * tiles.split_k
    ctas = batch * down * across * tiles.split_k
    # NOTE: not every GPC has a multiple of 4 SMs left
    sms = arch.num_sms if group <= 2 else int(arch.num_sms * SMS_OF_FOURS)
    rounds = ceil_div(ctas, sms // group * group)
    blocks = ceil_div(ceil_div(problem.k, BLOCK), tiles.split_k)
    clocks = rounds * (blocks * block_clocks(tiles) + ROUND_CLOCKS)
    compute = (clocks + SPLIT_CLOCKS * (tiles.split_k > 1)) / MHZ
    compute *= 1 + SWAPPED * tiles.swap_ab + ALONE * (tiles.mma_warpgroups == 1)
    memory = batch * problem.bytes / MEMORY
    return FIXED_US + (compute**POWER + memory**POWER) ** (1 / POWER)


def block_clocks(tiles: Fp8Config) -> float:
    """Clocks of a CTA per 128 of K: of the tensor core, or of what TMA brings."""
    waves = tiles.tile_m // 64
    mma = waves * tiles.tile_n * MMA_CLOCK
    if tiles.mma_warpgroups == 1:
        mma += waves * (ALONE_CLOCKS + tiles.tile_n / 2)  # nothing else runs while it adds
    loaded = tiles.tile_m / tiles.cluster_n + tiles.tile_n / tiles.cluster_m
    return max(mma, loaded * BLOCK / LOAD_BYTES)


def ranked(problem: Fp8Problem, arch: Arch, batch: int = 1) -> list[Fp8Config]:
    """The candidate configs of `batch` such problems, fastest predicted first."""
    found = (deepest(tiles, arch) for tiles in candidates(problem))
    fits = [c for c in found if c is not None and c.why_not(problem, arch) is None]  # type: ignore[arg-type]
    return sorted(dict.fromkeys(fits), key=lambda c: predict(c, problem, arch, batch))


def shortlist(problem: Fp8Problem, arch: Arch, count: int) -> list[Fp8Config]:
    """The first `count` of the ranking."""
    return ranked(problem, arch)[:count]


def choose(problem: Fp8Problem, arch: Arch) -> Fp8Config:
    """The config that the cost model ranks first."""
    return ranked(problem, arch)[0]


def configs_for(mnk: tuple[int, int, int], recipe: str, batch: int = 1) -> list[Fp8Config]:
    """The ranking for calls of these sizes, which are rounded up to classes, so that few kernels
    serve all M."""
    m, n, k = mnk
    n, k = -(-n // 8) * 8, -(-k // 16) * 16
    problem = Fp8Problem(rows_class(m), n, k, dtype=recipe)
    return ranked(problem, arch_named("sm_90a"), batch)
