"""The tiles of few rows whose warpgroups take blocks of K in turn, and a cost model of them.

A warpgroup widens a block while the wgmmas of the others run; with one for each 64 rows of a tile,
as of larger products, a CTA has too few that could. The model counts clocks of a CTA, fitted to the
times of an H200 (docs/facts/scaled.md#w4-in-turn). Imports neither torch nor the DSL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from cutex.kernels.gemm.choose import rows_class
from cutex.kernels.gemm.config import ceil_div
from cutex.kernels.gemm.w4.sm90.config import FEW, W4Config
from cutex.problem.w4.layout import BLOCK_K, HALF_K, STRIP

if TYPE_CHECKING:
    from cutex.arch import Arch

MOST_ROWS = 64
MANY_COLUMNS = 3 * 64  # of all strips of a tile: from there on accumulators leave few registers
FEWEST = 9  # blocks of a share of K, below which the ends of warpgroups are too large a part
# clocks of a strip's block, of each of its columns, and of one of few columns; what a warpgroup
# waits in a block, which the others fill; the end of each warpgroup but one, for a strip
STRIP_CLOCKS, COLUMN_CLOCKS, FEW_CLOCKS = 100, 3.61, 207
WAIT_CLOCKS, END_CLOCKS = 232, 251
SPLIT_CLOCKS, THREE_CLOCKS, FOUR_CLOCKS = 1233, 150, 2355  # of an exchange of CTAs, and what more
CLOCK, MEMORY = 0.929, 0.866  # as those of choose.py
POWER, FIXED_US, FEW_FIXED_US = 3.54, 2.39, 1.8
SMS_OF = {1: 1.0, 2: 1.0, 3: 0.86, 4: 0.8}  # of the SMs, those that clusters fill at one time


def candidates(base: W4Config, mnk: tuple[int, int, int], arch: Arch) -> Iterator[W4Config]:
    """Tiles of all rows of x, one for each CTA, K in up to four shares."""
    m, n, k = mnk
    tile_n = rows_class(m)
    if tile_n > MOST_ROWS:
        return
    # NOTE: by mma.sync where scales multiply sums, which takes fewer instructions than wgmma's rows
    few = tile_n <= FEW and base.format.kind == "int4" and base.format.group >= HALF_K
    epi_n = 16 if tile_n % 32 else 32
    columns = replace(base, tile_n=tile_n, epi_n=epi_n, columns=1, few=few, in_turn=True)
    for strips in (1, 2, 3, 4):
        for split_k, share in SMS_OF.items():
            ctas = ceil_div(n, strips * STRIP) * split_k
            if ctas > int(arch.num_sms * share) or ceil_div(k, BLOCK_K) < FEWEST * split_k:
                continue
            if strips * tile_n >= MANY_COLUMNS:
                continue
            for warpgroups in (2, 3) if strips <= 2 else (2,):
                yield replace(
                    columns, tile_m=strips * STRIP, warpgroups=warpgroups, split_k=split_k
                )


def predict(tiles: W4Config, mnk: tuple[int, int, int], arch: Arch) -> float:
    """Microseconds."""
    m, n, k = mnk
    blocks = ceil_div(k, BLOCK_K)
    few = tiles.tile_n <= FEW
    strip = FEW_CLOCKS if few else STRIP_CLOCKS + COLUMN_CLOCKS * tiles.tile_n
    block = tiles.strips * strip + WAIT_CLOCKS / tiles.turns
    clocks = ceil_div(blocks, tiles.split_k) * block
    clocks += 0 if few else END_CLOCKS * tiles.strips * (tiles.turns - 1)
    for split_k, more in ((2, SPLIT_CLOCKS), (3, THREE_CLOCKS), (4, FOUR_CLOCKS)):
        clocks += more * (tiles.split_k >= split_k)
    weight = 4 * tiles.format.words * ceil_div(n, STRIP) * blocks
    memory = (weight + 2 * m * (n + k)) / (MEMORY * arch.hbm_gbs * 1e3)
    compute = clocks / (CLOCK * arch.clock_hz * 1e-6)
    fixed = FEW_FIXED_US if few else FIXED_US
    return fixed + (compute**POWER + memory**POWER) ** (1 / POWER)
