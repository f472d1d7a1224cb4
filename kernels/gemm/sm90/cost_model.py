"""The configs that Hopper's chosen kernel is tried with, and a model of their time.

The model counts what a config spends: tensor core cycles, bytes that each SM gets through L2, bytes
from memory, energy, and what is not hidden: the first loads, the last stores, sums exchanged. Tiles
that all run at once (one_round.py, spread.py) and tiles that are walked have constants of their
own. Both sets are fitted on times of some 3,000 pairs of a problem and a config, measured on one
H200 (docs/facts.md), of the half of the corpus that is for fitting (cutex/problem/models.py).

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cutex.arch import arch as arch_named
from cutex.kernels.gemm.config import BARRIERS, ELEMENT, ceil_div
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.problem.gemm import GemmProblem

if TYPE_CHECKING:
    from cutex.arch import Arch

Majors = tuple[bool, bool]  # whether K is contiguous in A, in B

PINGPONG = [(128, n) for n in range(96, 209, 16)] + [(192, n) for n in (64, 80, 96, 112, 128)]
PINGPONG += [(64, n) for n in (128, 160, 192, 224, 256)]
COOPERATIVE = [(128, n) for n in range(64, 257, 16)] + [(256, n) for n in range(64, 209, 16)]
COOPERATIVE += [(192, n) for n in range(64, 193, 16)] + [(64, n) for n in range(16, 257, 16)]
CLUSTERS = ((1, 1), (2, 1), (1, 2))  # of CTAs that walk tiles
WARPGROUPS = {64: 1, 128: 2, 192: 3, 256: 2}  # by rows of a tile that they share
FEW = 4  # clusters along the side of C that is cut into few, at most
# CTAs that run at one time, by those of a cluster: some GPCs have SMs left over
AT_ONCE = {1: 132, 2: 132, 3: 108, 4: 120}
TPCS = 66  # pairs of SMs; CTAs take one of each first
ROWS_OUTSIDE = 8  # of a box, that cost nothing
SHALLOW = 164 * 1024  # 1.01 times as fast as all of smem with M = 1 to 16: SMs stay together
SPREAD = 0.99  # of the time of tiles that leave a few SMs without
NARROW = 32  # rows of an operand that TMA loads one box each of, where K is not contiguous


@dataclass(frozen=True)
class Costs:
    """Rates and times that an Arch does not state: fitted on one H200, Gaussian bf16 data."""

    clock_ghz: float
    mma: float  # cycles of wgmma, times those that its shape takes
    l2_bytes: float  # that one SM gets through L2 in a cycle, however many ask
    paired: float  # the share of a load's time that it takes because a TPC's other SM loads, too
    received: float  # what a byte costs that another CTA of the cluster has asked for
    latency: float  # cycles in which the ring must be filled once
    overlap: float  # of MMAs, loads and latency: infinite if the longest hid the others
    step: float  # cycles to hand over a slot of the ring
    epilogue_bytes: float  # a cycle
    tile: float  # cycles beside
    flop_us: float  # energy at the power limit: microseconds of the GPU a FLOP,
    l2_us: float  # a byte through L2
    memory_us: float  # and a byte of memory
    memory_gbs: float
    again: float  # what a byte costs that further clusters ask for, of the larger operand
    sm_gbs: float  # that an SM gets from memory while all TPCs have both SMs at work
    lone_sm_gbs: float  # and with one SM of each TPC at most
    balance: float  # of all three
    launch_us: float
    exchange_us: float  # of sums between the CTAs of a split
    exchange_gbs: float  # at which their bytes are read
    narrow: float  # loads of boxes of NARROW rows, times others
    outside: float  # cycles for a row of a TMA box that lies outside of the operand


ROUND = Costs(
    clock_ghz=2.04,
    mma=1.24,
    l2_bytes=61.0,
    paired=0.173,
    received=0.451,
    latency=2070.0,
    overlap=10.0,
    step=23.0,
    epilogue_bytes=30.3,
    tile=7.62,
    flop_us=1.16e-09,
    l2_us=6.33e-12,
    memory_us=6.38e-10,
    memory_gbs=4220.0,
    again=0.236,
    sm_gbs=41.3,
    lone_sm_gbs=236.0,
    balance=4.34,
    launch_us=1.65,
    exchange_us=0.818,
    exchange_gbs=25.8,
    narrow=1.15,
    outside=2.48,
)
WALK = Costs(
    clock_ghz=1.94,
    mma=1.34,
    l2_bytes=58.8,
    paired=0.9,
    received=0.702,
    latency=2550.0,
    overlap=10.0,
    step=1.48,
    epilogue_bytes=30.8,
    tile=15.5,
    flop_us=8.77e-10,
    l2_us=2.25e-11,
    memory_us=1.22e-10,
    memory_gbs=4300.0,
    again=0.207,
    sm_gbs=67.7,
    lone_sm_gbs=104.0,
    balance=3.52,
    launch_us=1.97,
    exchange_us=1.0,
    exchange_gbs=40.0,
    narrow=1.22,
    outside=6.82,
)


def _deepest(config: Sm90Config, arch: Arch) -> Sm90Config:
    """`config` with as many slots as smem holds, or SHALLOW bytes of the narrowest tiles."""
    room = arch.smem_per_cta - BARRIERS - config.epi_bytes
    if config.tile_n == 16:
        room = min(room, SHALLOW)
    return replace(config, num_stages=max(2, min(24, room // config.stage_bytes)))


def _tile_k(tile_m: int, tile_n: int) -> int:
    """K of a slot: narrow tiles take more, so that they hand over fewer slots."""
    return 128 if tile_m + tile_n <= 128 or (tile_m == 128 and tile_n <= 32) else 64


def _epilogue(tile_n: int) -> int:
    """Columns of C that are stored at a time: a divisor of tile_n, up to a line of 128 bytes, or
    all where they are an odd multiple of 8."""
    if tile_n % 16:
        return tile_n
    return next(n for n in (64, 32, 16) if tile_n % n == 0)


@lru_cache
def walked(arch_name: str) -> tuple[Sm90Config, ...]:
    """The configs whose CTAs walk tiles."""
    arch = arch_named(arch_name)
    found: dict[Sm90Config, None] = {}
    for pingpong, tiles in ((True, PINGPONG), (False, COOPERATIVE)):
        for m, n in tiles:
            for cluster_m, cluster_n in CLUSTERS:
                for swap_ab in (False, True):
                    config = Sm90Config(
                        tile_m=m,
                        tile_n=n,
                        tile_k=_tile_k(m, n),
                        epi_n=_epilogue(n),
                        epi_stages=1 if pingpong else 2,
                        warpgroups=2 if pingpong else WARPGROUPS[m],
                        pingpong=pingpong,
                        cluster_m=cluster_m,
                        cluster_n=cluster_n,
                        swap_ab=swap_ab,
                    )
                    config = _deepest(config, arch)
                    if config.why_not(None, arch) is None:
                        found[config] = None
    return tuple(found)


@lru_cache(maxsize=256)
def of_one_round(mnk: tuple[int, int, int], arch_name: str) -> tuple[Sm90Config, ...]:
    """The configs whose tiles, fitted to M, N and K, all run at once."""
    arch, problem = arch_named(arch_name), GemmProblem(*mnk)
    found: dict[Sm90Config, None] = {}
    for config in (*_spread(*mnk), *_columns(*mnk), *_rows(*mnk)):
        config = _deepest(config, arch)
        if config.num_stages > 2 and config.why_not(problem, arch) is None:
            found[config] = None
    return tuple(found)


def _together() -> Iterator[tuple[int, int, int]]:
    """Clusters that share loads of the larger operand, and those that share K: CTAs along the side
    that is cut into few, along the other, and along K."""
    yield from ((1, 1, 1), (1, 2, 1), (1, 4, 1), (4, 1, 1))
    yield from ((1, 1, split_k) for split_k in (2, 3, 4))


def _columns(m: int, n: int, k: int) -> Iterator[Sm90Config]:
    """Swapped: few columns of tiles, as wide as M needs."""
    for cluster_m, cluster_n, split_k in _together():
        for columns in range(1, FEW + 1):
            unit = 16 if cluster_m < 4 else 32  # each CTA of a cluster loads whole rows by 8
            tile_n = ceil_div(m, unit * columns * cluster_n) * unit
            if tile_n > 256 or ceil_div(m, tile_n * cluster_n) != columns:
                continue
            for tile_m, warpgroups in WARPGROUPS.items():
                ctas = ceil_div(n, tile_m * cluster_m) * cluster_m * columns * cluster_n * split_k
                if ctas <= AT_ONCE[cluster_m * cluster_n * split_k]:
                    yield _tile(tile_m, tile_n, warpgroups, cluster_m, cluster_n, split_k,
                                swap_ab=True, columns=columns)  # fmt: skip


def _rows(m: int, n: int, k: int) -> Iterator[Sm90Config]:
    """Not swapped: few rows of tiles, as wide as N needs to give a tile to every SM."""
    for cluster_n, cluster_m, split_k in _together():
        size = cluster_m * cluster_n * split_k
        for tile_m in WARPGROUPS:
            rows = ceil_div(m, tile_m * cluster_m)
            most = AT_ONCE[size] // (rows * size)
            if rows > FEW or not most:
                continue
            unit = 8 * cluster_m  # each CTA of a cluster loads whole rows by 8
            tile_n = ceil_div(n, unit * most * cluster_n) * unit
            even = ceil_div(tile_n, 16) * 16
            for wider in dict.fromkeys((tile_n, even, even + 16)):
                if 16 <= wider <= 256:
                    yield _tile(tile_m, wider, WARPGROUPS[tile_m], cluster_m, cluster_n, split_k,
                                rows=rows)  # fmt: skip


def _spread(m: int, n: int, k: int) -> Iterator[Sm90Config]:
    """Swapped: tiles that overlap, one for each SM."""
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
        tile_k=_tile_k(tile_m, tile_n),
        epi_n=_epilogue(tile_n),
        epi_stages=1,
        warpgroups=warpgroups,
        cluster_m=cluster_m,
        cluster_n=cluster_n,
        split_k=split_k,
        **more,
    )


def candidates(problem: GemmProblem, arch: Arch, majors: Majors = (True, True)) -> list[Sm90Config]:
    """All configs that are worth a look."""
    every = (*of_one_round(problem.mnk, arch.name), *walked(arch.name))
    return [c for c in every if _shares_the_larger(c, problem) and _loads_well(c, majors)]


def _shares_the_larger(config: Sm90Config, problem: GemmProblem) -> bool:
    """Whether pairs share the operand that is at least twice as large as the other: the other stays
    in L2, and a pair that shares it loses 10 to 20 %."""
    m, n = config.computed(problem)
    return not ((m >= 2 * n and config.cluster_m == 2) or (n >= 2 * m and config.cluster_n == 2))


def _rows_outside(c: Sm90Config, m: int, n: int) -> float:
    """Rows of the smaller operand's last tile that lie outside of it, but for ROWS_OUTSIDE; where
    tiles are walked, in the mean of all of them."""
    if c.spread:
        return 0
    tile, cluster, size = (c.tile_n, c.cluster_n, n) if n <= m else (c.tile_m, c.cluster_m, m)
    tiles = ceil_div(ceil_div(size, tile), cluster) * cluster
    inside = max(0, size - (tiles - 1) * tile)
    return max(0, tile - inside - ROWS_OUTSIDE) / (1 if c.one_tile else tiles)


def _loads_well(config: Sm90Config, majors: Majors) -> bool:
    """Whether TMA's boxes are not narrower than NARROW rows where rows are what is contiguous."""
    a, b = reversed(majors) if config.swap_ab else majors
    return (a or config.tile_m % NARROW == 0) and (b or config.tile_n % NARROW == 0)


def predict(
    config: Sm90Config,
    problem: GemmProblem,
    arch: Arch,
    batch: int = 1,
    majors: Majors = (True, True),
) -> float:
    """Microseconds that the model expects of `batch` such problems in one launch."""
    c = config
    at_once = c.one_tile or c.split_k > 1
    costs = ROUND if at_once else WALK
    m, n = c.computed(problem)
    size = c.cluster_m * c.cluster_n * c.split_k
    down, across = ceil_div(m, c.tile_m), ceil_div(n, c.tile_n)
    useful = arch.num_sms if c.spread else down * across * batch * c.split_k  # CTAs
    down = ceil_div(down, c.cluster_m) * c.cluster_m
    across = ceil_div(across, c.cluster_n) * c.cluster_n
    ctas = arch.num_sms if c.spread else down * across * batch * c.split_k
    room = min(AT_ONCE.get(size, arch.num_sms), arch.num_sms)
    rounds = ceil_div(ctas, room)
    lone = size <= 2 and useful <= TPCS
    k_tiles = ceil_div(ceil_div(problem.k, c.tile_k), c.split_k)

    # one step of K of one CTA, in cycles; wgmma of few columns takes as long as its A from smem
    narrow = not (majors[0] if c.swap_ab else majors[1]) and c.tile_n % 64
    mma = c.tile_m / 64 * max(c.tile_n / 2, 16 + c.tile_n / 4) * c.tile_k / 16 * costs.mma
    asked = (c.tile_m / c.cluster_n + c.tile_n / c.cluster_m) * c.tile_k * ELEMENT
    from_others = c.stage_bytes - asked
    load = (asked + costs.received * from_others) / costs.l2_bytes * (costs.narrow if narrow else 1)
    load *= 1 - costs.paired * (size == 1 and ctas <= TPCS)
    load += costs.outside * _rows_outside(c, m, n) * c.tile_k / 64
    wait = costs.latency / (c.num_stages - 1)
    p = costs.overlap
    step = (mma**p + load**p + wait**p) ** (1 / p) + costs.step

    leaving = c.tile_m * c.tile_n * ELEMENT / costs.epilogue_bytes
    tile = k_tiles * step + costs.tile + (0 if c.pingpong else leaving)
    busy = rounds * tile / costs.clock_ghz / 1e3
    flops = 2 * useful * c.tile_m * c.tile_n * k_tiles * c.tile_k
    memory_bytes = problem.bytes * batch
    energy = flops * costs.flop_us + asked * ctas * k_tiles * costs.l2_us
    energy += memory_bytes * costs.memory_us
    sharers = ceil_div(across, c.cluster_n) if m >= n else ceil_div(down, c.cluster_m)
    again = 0 if c.spread else (min(sharers, FEW) - 1) * max(m, n) * problem.k * ELEMENT * batch
    gbs = min(costs.memory_gbs, useful * (costs.lone_sm_gbs if lone else costs.sm_gbs))
    memory = (memory_bytes + costs.again * again) / gbs / 1e3
    q = costs.balance
    time = (busy**q + energy**q + memory**q) ** (1 / q)
    if c.split_k > 1:
        others = c.partial_bytes * (c.split_k - 1) / c.split_k
        time += costs.exchange_us + others / costs.exchange_gbs / 1e3
    time += costs.launch_us + leaving / costs.clock_ghz / 2e3
    return time * (SPREAD if c.spread else 1)
