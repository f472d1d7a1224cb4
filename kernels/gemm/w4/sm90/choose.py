"""The choice of a config for a product with a packed weight: candidates, ranked by a cost model.

The model counts clocks of a CTA per block of 128 of K: of the tensor cores, of the instructions
that widen codes, and of loads; the rounds of tiles; and memory. Imports neither torch nor the DSL.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from cutex.arch import BOARDS
from cutex.arch import arch as arch_named
from cutex.kernels.gemm.config import ceil_div
from cutex.kernels.gemm.w4.sm90 import in_turn
from cutex.kernels.gemm.w4.sm90.config import EIGHT, FEW, W4Config
from cutex.kernels.gemm.w4.sm90.decode_config import W4DecodeConfig
from cutex.problem.w4.layout import BLOCK_K, STRIP, W4Format

if TYPE_CHECKING:
    from cutex.arch import Arch

MMA_CLOCKS = 4.1  # of 64 rows by one column by 128 of K, where the tensor core limits
STRIP_CLOCKS, COLUMN_CLOCKS = 195, 2.2  # of 64 rows by 128 of K, and of each column, where not
# more of a strip's block, to take zeros off for themselves, and to widen fp4
ZEROS_CLOCKS, FP4_CLOCKS = 50, 115
FEW_CLOCKS = 142  # of 64 rows by 128 of K with mma.sync
ALONE_CLOCKS, FEW_ALONE_CLOCKS = 215, 90  # that one warpgroup waits while nothing else runs
FEW_COLUMNS_TIMES = 1.35  # as long, where several tiles of few columns read the same weights
SHALLOW = 1.15  # times as long with a ring of two slots
CROWDED, CROWDED_TIMES = 192, 1.3  # accumulators a thread, beyond which registers are short
LOAD_BYTES = 36  # per clock and SM, that TMA brings
CLOCK = 0.929  # the SMs' clock, relative to that of the dense peak
MEMORY = 0.866  # bytes in a second, relative to memory's nominal rate
POWER = 3.0  # how sharply the larger one of computing and memory counts
FIXED_US, ROUND_CLOCKS, SPLIT_CLOCKS = 2.25, 1950, 2650
FEW_SPLIT_CLOCKS = (
    600  # of an exchange of few columns by two CTAs (docs/facts/scaled.md#w4-few-h200)
)
SPLIT_ROUND_CLOCKS = 5400  # of an exchange that the next tile's loads wait for
STREAM_CLOCKS, STREAM_COLUMN_CLOCKS = 9000, 0.37  # of sums through memory, and an element of them
FOURS_CLOCKS = 2000  # of splits by four and more that have one tile each
# the time with x as digits, relative to that without, and strips of a tile from which on it is less
# (docs/facts/scaled.md#w4-one-row-digits)
DIGITS_TIMES, DIGITS_STRIPS = 0.9, 3
DIGITS_STEP = 16  # blocks, so that few kernels serve all K
X_VECTOR = 8  # elements of x that a bulk copy has a multiple of
# of the kernel of up to eight rows (docs/facts/scaled.md#w4-decode): clocks of 32 rows by 128 of K
# on an SM, and what a CTA takes beside them where there are many
DECODE_CLOCKS, DECODE_ROUND_US = 120, 0.1
DECODE_ROWS, DECODE_COLUMNS = 32, 8
TWO_ROUNDS = 1.8  # the time of two CTAs that share an SM, relative to that of 16 warps of one


class Placed(NamedTuple):
    """The CTAs of the kernel of few rows: rows of a tile, warps, CTAs per SM, slots, and whether
    the next launch's begin behind their loads."""

    tile_m: int
    warps: int
    resident: int
    most_stages: int
    next_behind: bool = False


# where there are no more tiles of 32 rows than SMs, CTAs of half an SM, beside which the next
# launch's find room, one on each SM; of longer K all of an SM. With a tile on every SM the next
# launch may start at once for K beyond FULL_K (docs/facts/scaled.md#w4-next-behind)
ONE_ROUND, ALONE, ROUND_K, FULL_K = Placed(32, 8, 2, 8, True), Placed(32, 16, 1, 4), 12288, 6144
# by how many tiles of 32 rows there are for each SM, up to so many, more than one: of one row of x,
# two, four and eight (docs/facts/scaled.md#w4-decode-placed, #w4-decode-waves, #w4-rows-placed).
# Slots are as many as keep another CTA from an SM: a launch that begins under the one before would
# leave some SMs more CTAs than others
OF_ONE_ROW = (
    (1.1, ONE_ROUND),
    (1.3, Placed(16, 8, 3, 4)),
    (1.6, Placed(32, 8, 3, 3)),
    (2.0, Placed(32, 8, 2, 4)),
    (2.6, Placed(16, 8, 4, 4)),
    (3.0, Placed(32, 8, 3, 3)),
    (4.0, Placed(32, 8, 4, 2)),
    (6.0, Placed(32, 8, 3, 3)),
    (10.0, Placed(32, 4, 5, 4)),
    (math.inf, Placed(32, 8, 3, 3)),
)
OF_TWO_ROWS = (
    (1.3, Placed(32, 8, 2, 4)),
    (1.6, Placed(32, 8, 3, 3)),
    (2.0, Placed(32, 8, 2, 4)),
    (3.0, Placed(32, 8, 3, 3)),
    (3.6, Placed(32, 8, 2, 4)),
    (4.4, Placed(32, 8, 3, 3)),
    (math.inf, Placed(32, 4, 4, 4)),
)
OF_FOUR_ROWS = (
    (1.6, Placed(16, 8, 3, 4)),
    (3.0, Placed(32, 8, 2, 4)),
    (4.0, Placed(32, 4, 4, 4)),
    (5.5, Placed(32, 4, 5, 3)),
    (math.inf, Placed(32, 4, 4, 4)),
)
OF_EIGHT_ROWS = (
    (1.25, ONE_ROUND),
    (2.0, Placed(32, 8, 2, 4)),
    (3.0, Placed(32, 8, 3, 2)),
    (4.0, Placed(32, 4, 4, 3)),
    (5.5, Placed(32, 4, 5, 2)),
    (math.inf, Placed(32, 4, 4, 3)),
)
OF_ROWS = {1: OF_ONE_ROW, 2: OF_TWO_ROWS, 4: OF_FOUR_ROWS, 8: OF_EIGHT_ROWS}
# up to half a tile an SM: tiles of 16 rows, and K of fewer than eight rows of x, and tiles an SM of
# one, for which CTAs of half an SM are the faster
HALF, HALF_ROUND, HALF_ALONE, HALF_K, THIN = (
    0.5, Placed(16, 8, 2, 8, True), Placed(16, 16, 1, 6), 5120, 0.27,
)  # fmt: skip
# of little more than one by one row, and K that it may not have
SOME_MORE, LONG_K, WHOLE = 1.3, 6144, Placed(32, 8, 2, 4)
DEEPEST = 16  # slots of a ring, beyond which nothing is gained
FEW_ROWS = 256
# of 9 to 64 rows by up to 8448 of a weight (docs/facts/scaled.md#w4-shared-sms): clocks of 64 rows
# by 128 of K, and of each column, by wgmma, of which few columns take as long, and by mma.sync;
# what a warpgroup waits alone on an SM; an exchange of two CTAs, and what more take; the time of
# two CTAs that share most SMs, by wgmma and by mma.sync, relative to one with as many warpgroups
SMALL_ROWS, SMALL_N, SMALL_K, SMALL_FIXED_US = 64, 8448, 8192, 1.77
SMALL_STRIP, SMALL_COLUMN, SMALL_STRIP_LEAST, SMALL_ALONE, SMALL_SPLIT = 175, 2.58, 245, 134, 1060
SMALL_FEW_STRIP, SMALL_FEW_ALONE, SMALL_FEW_SPLIT = 316, 72, 602
SMALL_FOURS, SHARED_TIMES, SHARED_FEW_TIMES, MOST_SMS = 3054, 1.05, 0.97, 1.25
SMS_OF_FOURS = 0.9  # of the SMs, those that clusters of 4 and more fill at one time


def base_of(of: W4Format) -> W4Config:
    """The fields that all candidates for a weight of a format share."""
    return W4Config(swap_ab=True, k_bytes=2 * BLOCK_K, epi_stages=1, format=of)


def candidates(m: int, n: int, of: W4Format) -> Iterator[W4Config]:
    """The configs worth predicting."""
    base = base_of(of)
    for tile_m, warpgroups in ((64, 1), (128, 2), (256, 2), (192, 3)):
        for tile_n in (16, 32, 48, 64, 96, 128, 192, 256):
            epi_n = next(e for e in (64, 32, 16) if tile_n % e == 0)
            tile = replace(base, tile_m=tile_m, warpgroups=warpgroups, tile_n=tile_n, epi_n=epi_n)
            if tile_n >= 128 and m > FEW_ROWS and warpgroups > 1:
                yield tile
                yield replace(tile, cluster_m=2)
            if m <= FEW_ROWS:
                if tile_n <= FEW:
                    few = replace(tile, few=True, eight=m <= EIGHT)
                    yield from _of_few_rows(few, ceil_div(m, tile_n))
                yield from _of_few_rows(tile, ceil_div(m, tile_n))


def _of_few_rows(tile: W4Config, columns: int) -> Iterator[W4Config]:
    """Splits of a tile's K: by CTAs of a cluster, with one tile or several each, or in equal shares
    of all K."""
    for split_k in (1, 2, 4, 8):
        shared = replace(tile, split_k=split_k)
        if split_k > 1 and tile.tile_n == 64:  # sums in two parts are exchanged in 1 us less
            shared = replace(shared, epi_n=32)  # (docs/facts/scaled.md#w4-in-turn)
        yield replace(shared, columns=columns)
        yield shared
    yield replace(tile, stream_k=1)


def of_digits(tiles: W4Config) -> bool:
    """Whether tiles of one row of x may hold it as digits."""
    plain = tiles.format.kind == "int4" and not tiles.format.zeros
    few_ctas = tiles.columns == 1 and tiles.strips >= DIGITS_STRIPS
    return tiles.eight and few_ctas and plain and tiles.format.group in (0, BLOCK_K)


def as_digits(tiles: W4Config, k: int) -> W4Config:
    """The same with x as digits; smem holds all digits that a CTA multiplies."""
    blocks = ceil_div(ceil_div(k, BLOCK_K), tiles.split_k)
    return replace(tiles, digits=ceil_div(blocks, DIGITS_STEP) * DIGITS_STEP)


def deepest(tiles: W4Config, arch: Arch, shared: bool = False) -> W4Config | None:
    """`tiles` with as many slots as fit in smem, or in half of it if two CTAs are to share an SM;
    None if none do."""
    for num_stages in range(DEEPEST, 1, -1):
        found = replace(tiles, num_stages=num_stages)
        if found.why_not(None, arch) is None and (found.shares_sm or not shared):
            return found.on(arch.num_sms)
    return None


def is_small(mnk: tuple[int, int, int]) -> bool:
    """Whether predict_small applies to these sizes."""
    m, n, k = mnk
    return EIGHT < m <= SMALL_ROWS and n <= SMALL_N and k <= SMALL_K


def predict_small(tiles: W4Config, mnk: tuple[int, int, int], arch: Arch) -> float:
    """The predicted microseconds for few rows of x and few rows of weight, whose CTAs may share
    SMs."""
    m, n, k = mnk
    blocks = ceil_div(k, BLOCK_K)
    tall = ceil_div(ceil_div(n, STRIP), tiles.strips) * ceil_div(m, tiles.tile_n)
    ctas, sms = tall * tiles.split_k, arch.num_sms
    if tiles.split_k > 2:
        sms = max(1, int(sms * SMS_OF_FOURS) // tiles.split_k) * tiles.split_k
    strip = max(SMALL_STRIP + SMALL_COLUMN * tiles.tile_n, SMALL_STRIP_LEAST)
    alone, split = SMALL_ALONE, SMALL_SPLIT
    if tiles.few:
        strip, alone, split = SMALL_FEW_STRIP, SMALL_FEW_ALONE, SMALL_FEW_SPLIT
    strip += widening_clocks(tiles)
    if tiles.stream_k:
        block = tiles.strips * strip + alone * (tiles.warpgroups == 1)
        clocks = tall * blocks / sms * block + STREAM_CLOCKS
        clocks += STREAM_COLUMN_CLOCKS * tiles.tile_m * tiles.tile_n
    else:
        on_an_sm = min(tiles.shares_sm + 1, ceil_div(ctas, sms))
        block = on_an_sm * tiles.strips * strip + alone * (tiles.warpgroups == on_an_sm == 1)
        clocks = ceil_div(blocks, tiles.split_k) * block
        if on_an_sm > 1 and ctas > MOST_SMS * sms:
            clocks *= SHARED_FEW_TIMES if tiles.few else SHARED_TIMES
        clocks += split * (tiles.split_k > 1) + SMALL_FOURS * (tiles.split_k > 2)
        clocks += FOURS_CLOCKS * (tiles.columns > 0 and tiles.split_k > 2)
        clocks *= ceil_div(ctas, sms * on_an_sm)
    weight = 4 * tiles.format.words * ceil_div(n, STRIP) * blocks
    memory = (weight + 2 * m * (n + k)) / (MEMORY * arch.hbm_gbs * 1e3)
    compute = clocks / (CLOCK * arch.clock_hz * 1e-6)
    return SMALL_FIXED_US + (compute**POWER + memory**POWER) ** (1 / POWER)


def predict(tiles: W4Config, mnk: tuple[int, int, int], arch: Arch) -> float:
    """The predicted microseconds."""
    m, n, k = mnk
    if tiles.digits:
        return DIGITS_TIMES * predict(replace(tiles, digits=0), mnk, arch)
    strips, blocks = ceil_div(n, STRIP), ceil_div(k, BLOCK_K)
    down = ceil_div(ceil_div(strips, tiles.strips), tiles.cluster_m) * tiles.cluster_m
    across = ceil_div(m, tiles.tile_n)
    group = tiles.cluster_m * tiles.split_k
    sms = arch.num_sms if group <= 2 else int(arch.num_sms * SMS_OF_FOURS)
    ctas = max(1, sms // group) * group
    rounds = ceil_div(down * across * tiles.split_k, ctas)
    each = ceil_div(blocks, tiles.split_k)
    clocks = rounds * (each * block_clocks(tiles) + ROUND_CLOCKS)
    if tiles.stream_k:
        shares = down * across * blocks / ctas
        clocks = shares * block_clocks(tiles) + rounds * ROUND_CLOCKS + STREAM_CLOCKS
        clocks += STREAM_COLUMN_CLOCKS * tiles.tile_m * tiles.tile_n
    if tiles.split_k > 1 and rounds == 1:
        few = tiles.few and across == 1 and tiles.split_k == 2
        clocks += FEW_SPLIT_CLOCKS if few else SPLIT_CLOCKS
    elif tiles.split_k > 1:
        clocks += rounds * SPLIT_ROUND_CLOCKS
    clocks += FOURS_CLOCKS * (tiles.columns > 0 and tiles.split_k > 2)
    weight = 4 * tiles.format.words * strips * blocks
    memory = (weight + 2 * m * (n + k)) / (MEMORY * arch.hbm_gbs * 1e3)
    if tiles.num_stages < 3:
        clocks *= SHALLOW
    if tiles.few and across > 1:
        clocks *= FEW_COLUMNS_TIMES
    if tiles.accumulators >= CROWDED:
        clocks *= CROWDED_TIMES
    compute = clocks / (CLOCK * arch.clock_hz * 1e-6)
    return FIXED_US + (compute**POWER + memory**POWER) ** (1 / POWER)


def widening_clocks(tiles: W4Config) -> float:
    """Clocks of a strip's block beside those of integers without zeros."""
    of = tiles.format
    return FP4_CLOCKS * (of.kind == "fp4") + ZEROS_CLOCKS * (of.zeros and not tiles.few)


def block_clocks(tiles: W4Config) -> float:
    """A CTA's clocks per block of K."""
    strip = STRIP_CLOCKS + COLUMN_CLOCKS * tiles.tile_n
    if tiles.few:
        strip = FEW_CLOCKS + MMA_CLOCKS * tiles.columns_computed
    alone = FEW_ALONE_CLOCKS if tiles.few else ALONE_CLOCKS
    strip += widening_clocks(tiles) + alone * (tiles.warpgroups == 1)
    mma = tiles.strips * max(strip, MMA_CLOCKS * tiles.tile_n)
    loaded = tiles.weight_bytes + tiles.x_bytes / tiles.cluster_m
    return max(mma, loaded / LOAD_BYTES)


def ranked(
    mnk: tuple[int, int, int], of: W4Format, arch: Arch, dtype: str = "bf16"
) -> list[W4Config]:
    """The candidate configs for sizes (M, N, K), fastest predicted first."""
    m, n, k = mnk
    known = list(candidates(m, n, of))
    if m > EIGHT:
        known += in_turn.candidates(base_of(of), mnk, arch, dtype)
    known += [as_digits(tiles, k) for tiles in known if m == 1 and of_digits(tiles)]
    small = is_small(mnk)

    def time(tiles: W4Config, mnk: tuple[int, int, int], arch: Arch) -> float:
        if tiles.in_turn:
            return in_turn.predict(tiles, mnk, arch)
        return (predict_small if small else predict)(tiles, mnk, arch)

    found = (deepest(tiles, arch, small and tiles.may_share_sm) for tiles in known)
    fits = [c for c in found if c is not None and fit(c, mnk, arch)]
    return sorted(dict.fromkeys(fits), key=lambda c: time(c, mnk, arch))


def fit(tiles: W4Config, mnk: tuple[int, int, int], arch: Arch) -> bool:
    """Whether a config with one tile per CTA has no more tiles than CTAs, and every CTA of a split
    has a block."""
    _, n, k = mnk
    if tiles.cluster_m * tiles.split_k > arch.num_sms:
        return False
    if tiles.split_k > 1 and ceil_div(k, BLOCK_K) < 2 * tiles.split_k:
        return False
    if not tiles.columns:
        return True
    ctas = ceil_div(n, tiles.tile_m) * tiles.columns * tiles.split_k
    if ctas > arch.num_sms and is_small(mnk) and tiles.shares_sm:
        return ctas <= 2 * arch.num_sms and tiles.split_k <= 2
    return ctas <= arch.num_sms // tiles.split_k * tiles.split_k


@lru_cache(maxsize=4096)
def configs_for(
    mnk: tuple[int, int, int], of: W4Format, board: str = "", dtype: str = "bf16"
) -> list[W4Config | W4DecodeConfig]:
    """The ranking for calls of these sizes, with M rounded up to its class, so that few kernels
    serve all M. board: one of BOARDS, if the GPU is not on the arch's usual board. dtype: x's."""
    m, n, k = mnk
    arch = BOARDS[board] if board else arch_named("sm_90a")
    few = 1 if m == 1 else EIGHT
    found: list[W4Config | W4DecodeConfig] = []
    others = ranked((few if m <= EIGHT else in_turn.few_rows_class(m), n, k), of, arch, dtype)
    if m <= EIGHT and (decode := decode_config(mnk, of, arch)) is not None:
        least = predict(others[0], (few, n, k), arch)
        found = [decode] if predict_decode(decode, mnk, arch) < least else []
    return [*found, *others]


# ---- up to eight rows


def decode_config(mnk: tuple[int, int, int], of: W4Format, arch: Arch) -> W4DecodeConfig | None:
    """The config of the kernel of few rows for sizes (M, N, K); None if they are not for it.

    With up to one tile per SM 8 warps and half of an SM, so that the next launch's CTAs find room;
    with more 8 or 4, so that the end of one CTA overlaps the work of others on its SM.
    """
    m, n, k = mnk
    if m == 1 and k % X_VECTOR:
        return None
    columns = 1 << (m - 1).bit_length()
    a_sm = ceil_div(n, DECODE_ROWS) / arch.num_sms
    placed = next(placed for most, placed in OF_ROWS[columns] if a_sm <= most)
    if a_sm <= 1:
        placed = placed_once(columns, a_sm, k)
    if columns == 1 and 1 < a_sm <= SOME_MORE and k > LONG_K:
        placed = WHOLE
    tile = W4DecodeConfig(
        tile_m=placed.tile_m,
        tile_n=columns,
        format=of,
        warps=placed.warps,
        resident=placed.resident,
        next_behind=placed.next_behind,
    )
    for num_stages in range(placed.most_stages, 1, -1):
        found = replace(tile, num_stages=num_stages)
        if found.why_not(None, arch) is None:
            return found.on(arch.num_sms)
    return None


def placed_once(columns: int, a_sm: float, k: int) -> Placed:
    """The CTAs where there are no more tiles of 32 rows than SMs."""
    if a_sm > HALF:
        placed = ONE_ROUND if k <= ROUND_K else ALONE
        return placed._replace(next_behind=False) if a_sm == 1 and k > FULL_K else placed
    short = k <= (ROUND_K if columns == DECODE_COLUMNS else HALF_K)
    return HALF_ROUND if short and (columns > 1 or a_sm > THIN) else HALF_ALONE


def predict_decode(tiles: W4DecodeConfig, mnk: tuple[int, int, int], arch: Arch) -> float:
    """Microseconds."""
    _, n, k = mnk
    rounds = ceil_div(n, DECODE_ROWS) / arch.num_sms
    if rounds <= HALF:
        rounds = HALF
    elif rounds <= 2:
        rounds = 1 if rounds <= 1 else TWO_ROUNDS
    block = tiles.weight_bytes * DECODE_ROWS // tiles.tile_m
    each = block * arch.num_sms / (MEMORY * arch.hbm_gbs * 1e3)
    each = max(each, DECODE_CLOCKS / (CLOCK * arch.clock_hz * 1e-6))
    more = DECODE_ROUND_US * rounds if rounds > 2 else 0
    return FIXED_US + rounds * ceil_div(k, BLOCK_K) * each + more
