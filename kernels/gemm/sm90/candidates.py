"""The candidate configs of Hopper's general GEMM kernel.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

from cutex.arch import arch as arch_named
from cutex.kernels.gemm.config import BARRIERS, ELEMENT, ceil_div
from cutex.kernels.gemm.sm90.config import FEW_COLUMNS, MOST_SHARES, Sm90Config
from cutex.kernels.gemm.sm90.loading import (
    LONG,
    NARROW,
    SMALL,
    Majors,
    in_boxes,
    loads_well,
    of_slow_loads,
    shares_well,
    straddles,
)
from cutex.kernels.gemm.sm90.tile_order import SMS, in_order
from cutex.problem.gemm import GemmProblem

if TYPE_CHECKING:
    from cutex.arch import Arch

PINGPONG = [(128, n) for n in range(96, 209, 16)] + [(192, n) for n in (64, 80, 96, 112, 128)]
PINGPONG += [(64, n) for n in (128, 160, 192, 224, 256)]
COOPERATIVE = [(128, n) for n in range(64, 257, 16)] + [(256, n) for n in range(64, 209, 16)]
COOPERATIVE += [(192, n) for n in range(64, 193, 16)] + [(64, n) for n in range(16, 257, 16)]
FLAT = [(m, n) for m in (64, 128, 192, 256) for n in (8, 16, 32)]  # for few columns of C
CLUSTERS = ((1, 1), (2, 1), (1, 2))  # of CTAs that take whole tiles
FOURS = ((2, 2), (4, 1), (1, 4))  # further ones, where loads take longer than MMAs
STREAMED_CLUSTERS = (*CLUSTERS, (4, 1), (1, 4))  # of CTAs that take shares of K (stream-K)
FITTED_CLUSTERS = (*CLUSTERS, *FOURS)  # of those whose columns are fitted to C
FITTED_LEAST = 40  # columns of a tile
DEEPER = [(192, 192)]  # of COOPERATIVE: one slot for C leaves room for another of the ring
WARPGROUPS = {64: 1, 128: 2, 192: 3, 256: 2}  # by rows of a tile that they share
FEW = 6  # clusters along the side of C that is cut into few, at most
# CTAs that run at one time there, by the size of a cluster: some GPCs have SMs left over
AT_ONCE = {1: 132, 2: 132, 3: 108, 4: 120, 6: 96, 8: 120}
SHALLOW = 164 * 1024  # 1.01 times as fast as all of smem with M = 1 to 16: SMs stay together
# tiles are streamed where their rounds are fewer, and the last leaves more of the GPU without work
FEW_ROUNDS, IDLE = 8, 0.04
# slots of A and B that storing a tile whole has to leave, and K, in units of 2 bytes, up to which
# ping-pong gains by it
RING, WHOLE_K = 4, 2048
LEAST_STEPS = 8  # of 64 along K, in a cluster's share
MOST_STREAMED = 40
# rows and columns of tiles, and clusters, whose K is cut into more shares than a cluster has CTAs;
# further widths are fitted to C
SHARED_ROWS, SHARED_COLUMNS = (64, 128), (64, 96, 128)
SHARED_CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2))
L2_RATE = 64  # bytes that an SM gets through L2 in a cycle, at most


def at_once(size: int, num_sms: int) -> int:
    """How many CTAs of clusters of `size` run at once on a GPU of `num_sms`: on GPUs other than
    SMS, the same fraction of them."""
    most = AT_ONCE.get(size, SMS)
    return most if num_sms == SMS else max(1, num_sms * most // SMS // size) * size


def _grid(size: int, arch: Arch) -> int:
    """The num_ctas of a config of persistent CTAs: 0 where the kernel uses as many by itself."""
    most = at_once(size, arch.num_sms)
    return 0 if most == arch_named(arch.name).num_sms else most


def _on(arch_name: str, num_sms: int) -> Arch:
    return replace(arch_named(arch_name), num_sms=num_sms)


def _deepest(config: Sm90Config, arch: Arch) -> Sm90Config:
    """`config` with as many ring slots as fit in smem, or in SHALLOW bytes for the narrowest
    tiles."""
    room = arch.smem_per_cta - BARRIERS - config.epi_bytes
    if config.tile_n == 16:
        room = min(room, SHALLOW)
    return replace(config, num_stages=max(2, min(24, room // config.stage_bytes)))


def _with_second_slot(config: Sm90Config, arch: Arch) -> Sm90Config:
    """`config` with two slots for parts of C, if the ring keeps all its slots
    (docs/facts/gemm.md#second-slot)."""
    two = _deepest(replace(config, epi_stages=2), arch)
    return two if two.num_stages == config.num_stages else config


def _stored_at_once(config: Sm90Config, arch: Arch) -> Sm90Config:
    """`config` with a slot for each part of C that it stores, or as many as fit beside the ring: a
    part then waits for no other part's store."""
    c = config
    if c.odd_rows or (c.few_columns and c.split_k == 1):
        return c
    parts = ceil_div(c.warpgroup_rows // 64 * c.epi_parts, c.split_k)
    more = (replace(c, epi_stages=n) for n in range(parts, c.epi_stages, -1))
    return next((x for x in more if x.why_not(None, arch) is None), c)


def _k_bytes(tile_m: int, tile_n: int) -> int:
    """The bytes of K in a slot: narrow tiles take more, so that slots change hands less often."""
    return 256 if tile_m + tile_n <= 128 or (tile_m == 128 and tile_n <= 32) else 128


def _epilogue(tile_n: int) -> int:
    """The columns of C that are stored at a time: a divisor of tile_n, up to a line of 128 bytes;
    or all of tile_n if it is an odd multiple of 8."""
    if tile_n % 16:
        return tile_n
    return next(n for n in (64, 32, 16) if tile_n % n == 0)


@lru_cache
def walked(arch_name: str, num_sms: int = SMS) -> tuple[Sm90Config, ...]:
    """The configs whose persistent CTAs loop over whole tiles."""
    return _walked(arch_name, num_sms, PINGPONG, COOPERATIVE, tuple(_walked_together()))


@lru_cache
def walked_in_fours(arch_name: str, num_sms: int = SMS) -> tuple[Sm90Config, ...]:
    """The configs with clusters of four CTAs, which load the least: for operands whose loads are
    slow."""
    shapes = [(*cluster, swap_ab) for cluster in FOURS for swap_ab in (False, True)]
    shapes.remove((4, 1, True))
    return _walked(arch_name, num_sms, PINGPONG, COOPERATIVE, tuple(shapes))


@lru_cache
def walked_flat(arch_name: str, num_sms: int = SMS) -> tuple[Sm90Config, ...]:
    """The configs for few columns of C, whose clusters share B."""
    shapes = tuple((cluster, 1, False) for cluster in (1, 2, 4))
    return _walked(arch_name, num_sms, [], FLAT, shapes)


def _walked(
    arch_name: str,
    num_sms: int,
    ping_pong: list[tuple[int, int]],
    cooperative: list[tuple[int, int]],
    together: tuple[tuple[int, int, bool], ...],
) -> tuple[Sm90Config, ...]:
    """Persistent configs of these tiles, and shapes of clusters and whether A and B are swapped."""
    arch = _on(arch_name, num_sms)
    found: dict[Sm90Config, None] = {}
    for pingpong, tiles in ((True, ping_pong), (False, cooperative)):
        for m, n in tiles:
            for cluster_m, cluster_n, swap_ab in together:
                config = Sm90Config(
                    tile_m=m,
                    tile_n=n,
                    k_bytes=_k_bytes(m, n),
                    epi_n=_epilogue(n),
                    epi_stages=1 if pingpong or n % 16 else 2,
                    num_ctas=_grid(cluster_m * cluster_n, arch),
                    warpgroups=2 if pingpong else WARPGROUPS[m],
                    pingpong=pingpong,
                    cluster_m=cluster_m,
                    cluster_n=cluster_n,
                    swap_ab=swap_ab,
                )
                config = _deepest(config, arch)
                if (m, n) in DEEPER:
                    config = _deepest(replace(config, epi_stages=1), arch)
                if pingpong and config.epi_n == 16:
                    config = _with_second_slot(config, arch)
                if config.why_not(None, arch) is None:
                    found[in_order(config)] = None
    return tuple(found)


def _walked_together() -> Iterator[tuple[int, int, bool]]:
    """The cluster shapes for CTAs that compute whole tiles, and whether A and B are swapped;
    clusters of four share only the activations, where these have few rows."""
    yield from ((*cluster, swap_ab) for cluster in CLUSTERS for swap_ab in (False, True))
    yield 4, 1, True


@lru_cache(maxsize=256)
def of_one_round(
    mnk: tuple[int, int, int], arch_name: str, num_sms: int = SMS
) -> tuple[Sm90Config, ...]:
    """The configs whose tiles, fitted to M, N and K, all run at once."""
    arch, problem = _on(arch_name, num_sms), GemmProblem(*mnk)
    found: dict[Sm90Config, None] = {}
    m, n, _ = mnk
    every = [*_spread(*mnk, arch), *_columns(m, n, arch, swap_ab=True), *_rows(*mnk, arch)]
    if n <= SMALL < m:
        every += _columns(n, m, arch, swap_ab=False)
    for config in every:
        config = replace(_deepest(config, arch), num_ctas=_grid(1, arch))
        config = _stored_at_once(config, arch)
        if config.num_stages > 2 and config.why_not(problem, arch) is None:
            found[config] = None
    return tuple(found)


@lru_cache(maxsize=256)
def in_whole_rounds(
    mnk: tuple[int, int, int], arch_name: str, num_sms: int = SMS
) -> tuple[Sm90Config, ...]:
    """The persistent configs whose tiles are as narrow as one or two whole rounds allow, with
    widths (multiples of 8) that other tiles do not have. Where C has few tiles along one side,
    one-round configs do the same."""
    arch, (m, n, _) = _on(arch_name, num_sms), mnk
    found: dict[Sm90Config, None] = {}
    if min(m, n) <= SMALL:
        return ()
    for swap_ab in (False, True):
        rows, columns = (n, m) if swap_ab else (m, n)
        for tile_m, (cluster_m, cluster_n), rounds in product(WARPGROUPS, FITTED_CLUSTERS, (1, 2)):
            size = cluster_m * cluster_n
            across = at_once(size, num_sms) // size * rounds // ceil_div(rows, tile_m * cluster_m)
            if not across:
                continue
            tile_n = ceil_div(columns, 8 * across * cluster_n) * 8
            usual = tile_n % 16 == 0 and size < 4
            if usual or not FITTED_LEAST <= tile_n <= 256:
                continue
            tile = _tile(tile_m, tile_n, WARPGROUPS[tile_m], cluster_m, cluster_n, 1,
                         swap_ab=swap_ab, num_ctas=_grid(size, arch))  # fmt: skip
            pingpong = replace(tile, warpgroups=2, pingpong=True)
            for config in (tile, pingpong) if rounds == 2 and tile_m < 256 else (tile,):
                config = _stored_at_once(_deepest(config, arch), arch)
                if config.num_stages > 2 and config.why_not(None, arch) is None:
                    found[in_order(config)] = None
    return tuple(found)


@lru_cache(maxsize=256)
def streamed(
    mnk: tuple[int, int, int], arch_name: str, num_sms: int = SMS
) -> tuple[Sm90Config, ...]:
    """The stream-K configs, whose CTAs take equal shares of the tiles' steps along K, where that
    leaves fewer CTAs idle than whole tiles do; at most MOST_STREAMED of them, those needing the
    fewest cycles."""
    problem = GemmProblem(*mnk)
    rounds = {c: _rounds(c, problem, num_sms) for c in _streamed(arch_name, num_sms)}
    found = [c for c, r in rounds.items() if _gains_by_streaming(c, problem, r)]
    return tuple(sorted(found, key=lambda c: _least_cycles(c, problem, rounds[c]))[:MOST_STREAMED])


@lru_cache(maxsize=256)
def in_shares(
    mnk: tuple[int, int, int], arch_name: str, num_sms: int = SMS
) -> tuple[Sm90Config, ...]:
    """The configs that cut K into as many shares as give a tile to all CTAs that run at one time,
    where that are more than a cluster's."""
    arch, problem = _on(arch_name, num_sms), GemmProblem(*mnk)
    found: dict[Sm90Config, None] = {}
    every = (
        (tile_m, tile_n, *cluster, swap_ab)
        for tile_m, cluster, swap_ab in product(SHARED_ROWS, SHARED_CLUSTERS, (False, True))
        for tile_n in _shared_columns(mnk[0] if swap_ab else mnk[1])
    )
    for tile_m, tile_n, cluster_m, cluster_n, swap_ab in every:
        tile = _tile(tile_m, tile_n, WARPGROUPS[tile_m], cluster_m, cluster_n, 1, swap_ab=swap_ab)
        m, n = tile.computed(problem)
        tiles = ceil_div(m, tile_m * cluster_m) * ceil_div(n, tile.cluster_columns)
        size = cluster_m * cluster_n
        steps = ceil_div(problem.k, 64)
        shares = min(at_once(size, num_sms) // (tiles * size), steps // LEAST_STEPS, MOST_SHARES)
        if shares < 2:
            continue
        shares = ceil_div(steps, ceil_div(steps, shares))  # none without any of K
        plain = replace(tile, k_bytes=128, k_shares=shares, num_ctas=_grid(size, arch))
        if tile_n % 16 == 0:
            plain = replace(plain, epi_n=16)
        config = in_order(_deepest(plain, arch))
        if config.num_stages > 2 and config.why_not(problem, arch) is None:
            found[config] = None
    return tuple(found)


def _shared_columns(columns: int) -> tuple[int, ...]:
    """The widths of tiles whose K is cut into shares, for this many columns of C: SHARED_COLUMNS,
    and those that leave the least outside of it (docs/facts/gemm.md#shares-fitted)."""
    widths = dict.fromkeys(SHARED_COLUMNS)
    widths |= dict.fromkeys(ceil_div(columns, 8 * c) * 8 for c in range(1, FEW + 1))
    return tuple(w for w in widths if FITTED_LEAST <= w <= max(SHARED_COLUMNS))


def _rounds(config: Sm90Config, problem: GemmProblem, num_sms: int) -> float:
    """The rounds of concurrently running CTAs that a streamed config's tiles make, tiles outside of
    C included."""
    c = config
    m, n = c.computed(problem)
    size = c.cluster_m * c.cluster_n
    clusters = ceil_div(m, c.tile_m * c.cluster_m) * ceil_div(n, c.cluster_columns)
    return clusters / (at_once(size, num_sms) // size)


def _least_cycles(config: Sm90Config, problem: GemmProblem, rounds: float) -> float:
    """The cycles of a CTA if neither L2 nor the tensor cores stall, the exchange of sums
    included."""
    c = config
    asked = (c.tile_m / c.cluster_n + c.tile_n / c.cluster_m) * ELEMENT / L2_RATE
    step = max(asked, c.tile_m * c.tile_n / 2048)  # for one of K
    return rounds * problem.k * step + (1 + max(1, 1 / rounds - 1)) * c.partial_bytes / L2_RATE


@lru_cache
def _streamed(arch_name: str, num_sms: int) -> tuple[Sm90Config, ...]:
    arch = _on(arch_name, num_sms)
    found: list[Sm90Config] = []
    for m, n in COOPERATIVE:
        for cluster_m, cluster_n in STREAMED_CLUSTERS:
            for swap_ab in (False, True):
                tile = _tile(m, n, WARPGROUPS[m], cluster_m, cluster_n, 1, swap_ab=swap_ab)
                num_ctas = _grid(cluster_m * cluster_n, arch)
                config = replace(tile, epi_stages=2, stream_k=1, num_ctas=num_ctas)
                config = _stored_at_once(_deepest(config, arch), arch)
                if config.num_stages > 2 and config.why_not(None, arch) is None:
                    found += [config, replace(config, stream_k=2)]
    return tuple(found)


def _gains_by_streaming(config: Sm90Config, problem: GemmProblem, rounds: float) -> bool:
    c = config
    m, n = c.computed(problem)
    # NOTE: with more than a round, the last and the one before: a tile is then cut once at most
    return (
        c.stream_k == min(math.ceil(rounds), 2)
        and rounds < min(FEW_ROUNDS, (1 - IDLE) * math.ceil(rounds))
        and rounds * problem.k >= LEAST_STEPS * 64
        and not (m >= 2 * n and c.cluster_m > 1)
        and not (n >= 2 * m and c.cluster_n > 1)
    )


def _together() -> Iterator[tuple[int, int, int]]:
    """The cluster shapes that share loads (of the larger operand, of the other, or of both), that
    share K, and that do both: CTAs along the long side of C, along the short one, and along K."""
    yield from ((1, 1, 1), (1, 2, 1), (1, 4, 1), (4, 1, 1), (2, 4, 1), (4, 2, 1))
    yield from ((1, 1, split_k) for split_k in (2, 3, 4, 8))
    yield from ((*pair, split_k) for split_k in (2, 3, 4) for pair in ((1, 2), (2, 1)))
    yield from ((1, 4, 2), (4, 1, 2), (2, 2, 2))


def _tile_rows(sharers: int, split_k: int) -> tuple[int, ...]:
    """The rows of the tiles for which this many CTAs may share loads: eight only for small tiles,
    which L2 limits; and few where they share K as well, since the sums they exchange grow."""
    small = sharers == 8 or (sharers > 1 and split_k > 1)
    return (64, 128) if small else tuple(WARPGROUPS)


def _columns(few: int, many: int, arch: Arch, swap_ab: bool) -> Iterator[Sm90Config]:
    """Configs with few columns of tiles, as wide as the side `few` of C needs: M, swapped, or N."""
    for cluster_m, cluster_n, split_k in _together():
        # B is loaded in turn, or by parts
        units = (16, 32) if cluster_m == 4 else (16,)
        widths = {(c, ceil_div(few, unit * c * cluster_n) * unit): None
                  for c in range(1, FEW + 1) for unit in units}  # fmt: skip
        for columns, tile_n in widths:
            if tile_n > 256 or ceil_div(few, tile_n * cluster_n) != columns:
                continue
            for tile_m in _tile_rows(cluster_m * cluster_n, split_k):
                rows = ceil_div(many, tile_m * cluster_m) * cluster_m
                ctas = rows * columns * cluster_n * split_k
                if ctas <= at_once(cluster_m * cluster_n * split_k, arch.num_sms):
                    yield _tile(tile_m, tile_n, WARPGROUPS[tile_m], cluster_m, cluster_n, split_k,
                                swap_ab=swap_ab, columns=columns)  # fmt: skip


def _rows(m: int, n: int, k: int, arch: Arch) -> Iterator[Sm90Config]:
    """Configs without swapping: few rows of tiles, as wide as it takes to give every SM a tile
    along N."""
    for cluster_n, cluster_m, split_k in _together():
        size = cluster_m * cluster_n * split_k
        for tile_m in _tile_rows(cluster_m * cluster_n, split_k):
            rows = ceil_div(m, tile_m * cluster_m)
            most = at_once(size, arch.num_sms) // (rows * size)
            if rows > FEW or not most:
                continue
            tile_n = ceil_div(n, 8 * most * cluster_n) * 8
            parts = ceil_div(tile_n, 8 * cluster_m) * 8 * cluster_m
            even = ceil_div(parts, 16) * 16
            for wider in dict.fromkeys((tile_n, parts, even, even + 16)):
                if 8 <= wider <= 256:
                    yield _tile(tile_m, wider, WARPGROUPS[tile_m], cluster_m, cluster_n, split_k,
                                rows=rows)  # fmt: skip


def _spread(m: int, n: int, k: int, arch: Arch) -> Iterator[Sm90Config]:
    """Swapped configs of overlapping tiles, one for each SM."""
    for tile_m in (64, 128):
        if m <= 64:
            yield _tile(tile_m, ceil_div(m, 16) * 16, WARPGROUPS[tile_m], 1, 1, 1,
                        swap_ab=True, spread=True)  # fmt: skip


def _tile(
    tile_m: int,
    tile_n: int,
    warpgroups: int,
    cluster_m: int,
    cluster_n: int,
    split_k: int,
    **more: Any,
) -> Sm90Config:
    return Sm90Config(
        tile_m=tile_m,
        tile_n=tile_n,
        k_bytes=_k_bytes(tile_m, tile_n),
        epi_n=_epilogue(tile_n),
        epi_stages=1,
        warpgroups=warpgroups,
        cluster_m=cluster_m,
        cluster_n=cluster_n,
        split_k=split_k,
        **more,
    )


def candidates(
    problem: GemmProblem, arch: Arch, majors: Majors = (True, True), fitted: bool = False
) -> list[Sm90Config]:
    """All configs worth predicting for `problem`. `fitted`: also those no longer chosen, whose
    times the model is fitted to."""
    mnk, here = problem.mnk, (arch.name, arch.num_sms)
    every = [*of_one_round(mnk, *here), *walked(*here), *streamed(mnk, *here)]
    slow = straddles(problem, majors)
    if slow:
        every += walked_in_fours(*here)
    if problem.n <= NARROW:
        every += walked_flat(*here)
    if not slow:
        every = [c for c in every if not of_slow_loads(c, problem)]
    every = [c for c in every if shares_well(c, problem, slow)]
    every += in_whole_rounds(mnk, *here)
    if majors != (True, True):
        every += in_shares(mnk, *here)
    found = (c for c in every if loads_well(c, problem, majors, fitted))
    whole = (_stored_whole(_within_k(c, problem), problem, arch) for c in found)
    within = dict.fromkeys(_in_turns(c, problem, arch) for c in whole)
    return [x for c in within for x in in_boxes(c, problem, majors)]


def _within_k(config: Sm90Config, problem: GemmProblem) -> Sm90Config:
    """`config` with slots of 128 bytes of K if K has no more: TMA takes as long for bytes outside
    (docs/facts/gemm.md#short-k)."""
    return replace(config, k_bytes=128) if problem.k * ELEMENT <= 128 else config


def _stored_whole(config: Sm90Config, problem: GemmProblem, arch: Arch) -> Sm90Config:
    """`config`, whose CTAs walk over tiles, with one slot for all columns of a transposed C instead
    of storing 16 at a time, if the ring keeps RING slots and, with ping-pong, K is not long
    (docs/facts/gemm.md#transposed-whole)."""
    c = config
    parts = c.swap_ab and c.epi_n == 16 and c.tile_n > FEW_COLUMNS
    walks = not c.one_tile and c.split_k == c.k_shares == 1 and not c.stream_k
    if not (parts and walks) or (c.pingpong and problem.k > WHOLE_K):
        return c
    whole = _deepest(replace(c, epi_n=c.tile_n, epi_stages=1), arch)
    return whole if whole.num_stages >= RING and whole.why_not(None, arch) is None else c


def _in_turns(config: Sm90Config, problem: GemmProblem, arch: Arch) -> Sm90Config:
    """`config`, whose tiles are stored whole, with one slot for C that its warpgroups take in turn,
    if the ring has RING slots then and fewer without (docs/facts/gemm.md#stores-in-turns)."""
    c = config
    whole = c.stored_whole and c.mma_warpgroups > 1 and not c.pingpong
    if not whole or c.num_stages >= RING or c.split_k * c.k_shares > 1 or c.stream_k:
        return c
    turned = _deepest(replace(c, in_turns=True), arch)
    fits = turned.num_stages >= RING and turned.why_not(None, arch) is None
    return turned if fits and problem.k >= LONG else c


def in_parts(config: Sm90Config, arch: Arch) -> Sm90Config:
    """`config`, whose tiles are stored whole, with slots for 16 columns of C instead."""
    slots = 1 if config.pingpong else 2
    return _deepest(replace(config, epi_n=16, epi_stages=slots, in_turns=False), arch)


def by_warpgroups(config: Sm90Config, arch: Arch) -> Sm90Config:
    """`config`, whose warpgroups take turns at a slot for C, with a slot for each of them."""
    return _deepest(replace(config, in_turns=False), arch)
