"""The configs that Blackwell's chosen kernel is tried with, and a model of their time.

No B200 was at hand: the model counts cycles by published figures (docs/facts.md), and its one free
constant, what loads cost beside their bandwidth, is set by the tiles that ThunderKittens chose on a
B200. It agrees with them at 2048 and from 8192 up, not at 1024 cubed (256x96 here, 256x64 there)
nor at 4096 cubed (512x160, 512x256). Imports neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from cutex.arch import arch as arch_named
from cutex.kernels.gemm.config import BARRIERS, ELEMENT, ceil_div
from cutex.kernels.gemm.sm100.config import Sm100Config

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.problem.gemm import GemmProblem

TILE_NS = range(64, 257, 32)
SPLITS = (1, 2, 4)
GROUPS = (8, 4)  # clusters across a band of the raster order
EPI_N = 32
DEEPEST = 12  # slots: more only cost barriers


@dataclass(frozen=True)
class Costs:
    """Cycles of a B200 beside the rates of its Arch; the sources are in docs/facts.md."""

    load_cost: float = 0.2  # of the cycles that loads take, even where MMAs take more
    fill: int = 3000  # launch, barriers, tensor memory, first loads
    sub_tile: int = 150  # of an epilogue: 32 columns out of tensor memory and into smem
    exchange: int = 2500  # two cluster barriers and the sums of the other pairs


B200 = Costs()


def _epi_stages(parts: int) -> int:
    """Slots of sub-tiles, up to 4, of which none is used twice in a row from tile to tile."""
    return next(s for s in (4, 3, 2) if parts % s == 0 or (parts > s and parts % s > 1))


@lru_cache
def configs(arch_name: str) -> tuple[Sm100Config, ...]:
    """All candidates."""
    arch = arch_named(arch_name)
    found: list[Sm100Config] = []
    for tile_m in (256, 512):
        for tile_n in TILE_NS:
            for split_k in SPLITS if tile_m == 256 else (1,):
                blocks = tile_m // 256
                num_acc = 1 if split_k > 1 else min(2, arch.tmem_columns // (blocks * tile_n))
                config = Sm100Config(
                    tile_m=tile_m,
                    tile_n=tile_n,
                    epi_n=EPI_N,
                    epi_stages=_epi_stages(tile_n // EPI_N),
                    pair=True,
                    num_acc=blocks * num_acc,
                    split_k=split_k,
                )
                config = deepest(config, arch)
                for swap_ab in (False, True):
                    for group in GROUPS:
                        c = replace(config, raster_group=group, swap_ab=swap_ab)
                        if c.why_not(None, arch) is None:
                            found.append(c)
    return tuple(found)


def candidates(problem: GemmProblem, arch: Arch) -> tuple[Sm100Config, ...]:
    return configs(arch.name)


def variants(config: Sm100Config) -> tuple[Sm100Config, ...]:
    """`config` alone: there is one way for its CTAs to find their tiles."""
    return (config,)


def deepest(config: Sm100Config, arch: Arch) -> Sm100Config:
    """`config` with as many slots as smem has room for."""
    room = arch.smem_per_cta - BARRIERS - replace(config, num_stages=0).smem_bytes
    slot = config.stage_bytes // config.ctas
    return replace(config, num_stages=min(DEEPEST, room // slot))


def predict(config: Sm100Config, problem: GemmProblem, arch: Arch, batch: int = 1) -> float:
    """Microseconds that the model expects of `batch` such problems in one launch."""
    c, costs = config, B200
    assert arch.l2_bytes_per_clock, f"{arch.name}: the rate of its L2 is not known"
    m, n = (problem.n, problem.m) if c.swap_ab else (problem.m, problem.n)
    tiles_m, tiles_n = ceil_div(m, c.tile_m), ceil_div(n, c.tile_n)
    tiles = tiles_m * tiles_n * batch
    at_once = min(tiles, arch.num_sms // (c.ctas * c.split_k))  # clusters
    waves = ceil_div(tiles, at_once)
    blocks = c.tile_m // 256

    # one step of K: MMAs, of which each reads 32 bytes of every row, against loads through L2
    mma = 2 * 256 * c.tile_n * 16 / (arch.mma_flops * c.ctas)
    port = 32 * (256 + c.tile_n) / c.ctas / arch.smem_bytes_per_clock
    compute = blocks * c.tile_k / 16 * max(mma, port)
    load = c.stage_bytes * at_once * c.split_k / arch.l2_bytes_per_clock
    step = max(compute, load) + costs.load_cost * load
    mainloop = ceil_div(ceil_div(problem.k, c.tile_k), c.split_k) * step

    # the epilogue of a tile: hidden with two tiles' accumulators; else, of two blocks, under the
    # steps that the other takes alone (sm100/mma.py)
    drain = c.tile_n // EPI_N * costs.sub_tile
    alone = c.num_stages // 2 * compute / blocks if blocks > 1 else 0
    shown = 0 if c.num_acc >= 2 * blocks else max(0, drain - alone)
    cycles = waves * max(mainloop + shown, blocks * drain)
    ends = costs.fill + blocks * drain
    if c.split_k > 1:  # every wave is of new CTAs
        cycles = waves * (mainloop + drain + costs.exchange + costs.fill) - ends

    # what a wave of tiles takes from memory: strips of A and B that it does not share
    entries = ceil_div(at_once, tiles_m * tiles_n)  # of the batch
    of_one = min(at_once, tiles_m * tiles_n)
    across = min(c.raster_group, tiles_m, of_one)
    strips = across * c.tile_m + min(ceil_div(of_one, across), tiles_n) * c.tile_n
    wave_bytes = entries * strips * problem.k * ELEMENT
    all_bytes = problem.bytes * batch
    moved = max(all_bytes, 0 if all_bytes < arch.l2_bytes else waves * wave_bytes)
    asking = min(1.0, at_once * c.ctas * c.split_k / arch.num_sms)  # few SMs cannot ask for all
    memory = moved / (arch.hbm_gbs * 0.9 * 1e9 * min(1.0, asking / 0.8) / arch.clock_hz)
    return (max(cycles, memory) + ends) / arch.clock_hz * 1e6
