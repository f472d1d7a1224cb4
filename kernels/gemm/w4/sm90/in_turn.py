"""Tiles of few rows whose warpgroups process K blocks in rotation, and a cost model for them.

A warpgroup widens a block while the others' wgmmas run; with one warpgroup for each 64 rows of a
tile, as in larger products, a CTA would have too few for that. The model counts a CTA's clocks,
fitted to times of an H200 (docs/facts/scaled.md#w4-in-turn). Imports neither torch nor the DSL.
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
BY_SIXTEEN = 32  # columns, up to which they are multiples of 16
WIDE = 56  # columns of single strips that take most of a slot
MANY_COLUMNS = 3 * 64  # of all strips of a tile: from there on accumulators leave few registers
FEWEST = 9  # blocks of a share of K, below which the ends of warpgroups are too large a part
# shares of K of single strips, up to so many blocks: few columns by mma.sync, whose sums need less
FEW_BLOCKS = 32
# clocks of a strip's block, and of each of its columns, and more where zeros are taken off for
# themselves, or of fp4; of one of few columns by mma.sync; what a warpgroup waits in a block, which
# the others fill; a strip's column of sums of each turn but one; an exchange of CTAs, what more,
# and of each strip's column
STRIP_CLOCKS, COLUMN_CLOCKS, ZEROS_CLOCKS, FP4_CLOCKS, FEW_CLOCKS = 101, 1.65, 45, 60, 171
WAIT_CLOCKS, FEW_WAIT_CLOCKS, END_CLOCKS = 465, 359, 15.7
SPLIT_CLOCKS, THREE_CLOCKS, FOUR_CLOCKS, SPLIT_COLUMN_CLOCKS = 803, 154, 2355, 4.6
CLOCK, MEMORY = 0.929, 0.866  # as those of choose.py
POWER, FIXED_US = 3.52, 1.23
SMS_OF = {1: 1.0, 2: 1.0, 3: 0.86, 4: 0.8}  # of the SMs, those that clusters fill at one time


def candidates(
    base: W4Config, mnk: tuple[int, int, int], arch: Arch, dtype: str = "bf16"
) -> Iterator[W4Config]:
    """Tiles of all rows of x, of a dtype, one per CTA, with K in up to four shares."""
    columns = few_rows_class(mnk[0])
    if columns > MOST_ROWS:
        return
    # NOTE: an odd multiple of 8 is for the product alone, as 16 bits
    for tile_n in dict.fromkeys((columns, rows_class(columns))):
        yield from _of_columns(replace(base, tile_n=tile_n, columns=1), mnk, arch, dtype)


def _of_columns(
    base: W4Config, mnk: tuple[int, int, int], arch: Arch, dtype: str
) -> Iterator[W4Config]:
    """The tiles of so many columns."""
    _, n, k = mnk
    of, tile_n = base.format, base.tile_n
    # NOTE: where scales multiply sums
    by_sums = tile_n <= FEW and of.kind == "int4" and of.group >= HALF_K
    columns = replace(base, epi_n=next((e for e in (32, 16) if tile_n % e == 0), tile_n))
    for strips in (1, 2, 3, 4):
        for split_k, share in SMS_OF.items():
            ctas = ceil_div(n, strips * STRIP) * split_k
            if ctas > int(arch.num_sms * share) or ceil_div(k, BLOCK_K) < FEWEST * split_k:
                continue
            # NOTE: tall tiles in shares are the slower ones (docs/facts/scaled.md#w4-tall-shares)
            if strips * tile_n >= MANY_COLUMNS or strips + split_k > 5:
                continue
            short = strips == 1 and ceil_div(k, BLOCK_K) <= FEW_BLOCKS * split_k
            # NOTE: fp16 is not widened as tiny numbers where scales multiply weights
            few = by_sums and (of.zeros or short or dtype == "fp16")
            shared = replace(columns, tile_m=strips * STRIP, split_k=split_k, few=few)
            for turns in (2, 3) if strips <= 2 and not few_slots(shared) else (2,):
                # NOTE: two for the rows where there are the most of them, and registers
                rows = 2 if strips == 4 and tile_n <= FEW and not few else 1
                yield replace(shared, warpgroups=rows * turns, turns=turns)


def few_rows_class(m: int) -> int:
    """The columns that M rows are computed as: of BY_SIXTEEN to MOST_ROWS a multiple of 8. Columns
    in vain take time, and so do rows of x that TMA finds out of bounds
    (docs/facts/scaled.md#w4-columns-of-eight)."""
    return -(-m // 8) * 8 if BY_SIXTEEN < m <= MOST_ROWS else rows_class(m)


def few_slots(tiles: W4Config) -> bool:
    """Whether three turns would hold too many slots of the ring: of single strips, by so many
    columns that x takes most of a slot (docs/facts/scaled.md#w4-two-turns)."""
    return tiles.strips == 1 and tiles.tile_n >= WIDE


def predict(tiles: W4Config, mnk: tuple[int, int, int], arch: Arch) -> float:
    """The predicted microseconds."""
    m, n, k = mnk
    blocks = ceil_div(k, BLOCK_K)
    strip = FEW_CLOCKS if tiles.few else STRIP_CLOCKS + COLUMN_CLOCKS * tiles.tile_n
    if not tiles.few:
        strip += ZEROS_CLOCKS * tiles.format.zeros + FP4_CLOCKS * (tiles.format.kind == "fp4")
    wait = FEW_WAIT_CLOCKS if tiles.few else WAIT_CLOCKS
    block = tiles.strips * strip + wait / (3 if few_slots(tiles) else tiles.turns)
    clocks = ceil_div(blocks, tiles.split_k) * block
    clocks += END_CLOCKS * tiles.strips * tiles.tile_n * (tiles.turns - 1)
    if tiles.split_k > 1:
        clocks += SPLIT_COLUMN_CLOCKS * tiles.strips * tiles.tile_n
    for split_k, more in ((2, SPLIT_CLOCKS), (3, THREE_CLOCKS), (4, FOUR_CLOCKS)):
        clocks += more * (tiles.split_k >= split_k)
    weight = 4 * tiles.format.words * ceil_div(n, STRIP) * blocks
    memory = (weight + 2 * m * (n + k)) / (MEMORY * arch.hbm_gbs * 1e3)
    compute = clocks / (CLOCK * arch.clock_hz * 1e-6)
    return FIXED_US + (compute**POWER + memory**POWER) ** (1 / POWER)
