"""The candidate configs of Blackwell's general GEMM kernel, and a model of their time.

The model counts cycles; its constants are fitted on half of 37 problems measured on a B200 by
others (CUTLASS's persistent kernel, fp16, 1300 MHz, pairs of 256 rows, four tile widths). On the
other half, the width that the model ranks first loses 0.7 % to the best one in the mean, and 3.7 %
at worst (tests/gemm/test_cost_model_sm100.py). Imports neither torch nor the DSL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from cutex.arch import arch as arch_named
from cutex.kernels.gemm.config import BARRIERS, ELEMENT, ceil_div
from cutex.kernels.gemm.sm100.config import Sm100Config

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.problem.gemm import GemmProblem

C = TypeVar("C", bound=Sm100Config)
TILE_NS = range(64, 257, 32)
SPLITS = (1, 2, 4)
GROUPS = (8, 4)  # clusters across a band of the raster order
EPI_N = 32
DEEPEST = 12  # most slots of a ring: more only cost barriers


@dataclass(frozen=True)
class Costs:
    """The costs of a B200, in cycles, beside the rates of its Arch (docs/facts/blackwell.md): the
    first three and the last two are fitted on measured rows, the others are estimates from code."""

    l2_share: float = 0.8915  # achieved share of the Arch's L2 rate
    overlap: float = 6.3  # exponent of MMAs and loads: infinite if the longer hid the shorter
    tile: int = 30  # a tile, beside its epilogue and its mainloop
    sub_tile: int = 150  # an epilogue's 32 columns, from tensor memory to smem
    sub_tile_shown: int = 186  # the part of them that the next tile's mainloop does not hide
    fill: int = 11600  # launch, barriers, tensor memory, first loads
    exchange: int = 2500  # two cluster barriers and the sums of the other pairs


B200 = Costs()


def epi_stages(parts: int) -> int:
    """The slots for sub-tiles, up to 4, such that no slot is used twice in a row from tile to
    tile."""
    return next(s for s in (4, 3, 2) if parts % s == 0 or (parts > s and parts % s > 1))


@lru_cache
def configs(arch_name: str) -> tuple[Sm100Config, ...]:
    """All candidate configs of the arch."""
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
                    epi_stages=epi_stages(tile_n // EPI_N),
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


def candidates(
    problem: GemmProblem, arch: Arch, majors: tuple[bool, bool] = (True, True)
) -> tuple[Sm100Config, ...]:
    """All candidate configs, for every problem and every major of its operands."""
    return configs(arch.name)


def deepest(config: C, arch: Arch) -> C:
    """`config` with as many ring slots as fit in smem."""
    room = arch.smem_per_cta - BARRIERS - replace(config, num_stages=0).smem_bytes
    slot = config.stage_bytes // config.ctas
    return replace(config, num_stages=min(DEEPEST, room // slot))


def predict(
    config: Sm100Config,
    problem: GemmProblem,
    arch: Arch,
    batch: int = 1,
    majors: tuple[bool, bool] = (True, True),
) -> float:
    """The microseconds that the model predicts for `batch` such problems in one launch."""
    c, costs = config, B200
    m, n = (problem.n, problem.m) if c.swap_ab else (problem.m, problem.n)
    tiles_m, tiles_n = ceil_div(m, c.tile_m), ceil_div(n, c.tile_n)
    tiles = tiles_m * tiles_n * batch
    at_once = min(tiles, arch.num_sms // (c.ctas * c.split_k))  # clusters
    full, rest = divmod(tiles, at_once)
    steps = ceil_div(ceil_div(problem.k, c.k_of(16)), c.split_k)
    sub_tiles = c.tile_n // EPI_N
    blocks = c.num_blocks

    # the epilogue of a tile: hidden if tensor memory holds two tiles' accumulators; else one
    # block's is hidden under the steps that the other block takes alone (Mma.skew)
    drain = sub_tiles * costs.sub_tile
    alone = c.num_stages // 2 * _mma_cycles(c, arch) / blocks if blocks > 1 else 0
    shown = max(0, drain - alone)
    if c.num_acc >= 2 * blocks:
        shown = c.shown_parts * costs.sub_tile
    beside = costs.tile + sub_tiles * costs.sub_tile_shown + shown
    if c.split_k > 1 or not c.pair:  # every wave has new CTAs
        beside = drain + costs.exchange + costs.fill

    def wave(clusters: int) -> float:
        if not clusters:
            return 0
        return max(steps * _step_cycles(c, arch, clusters) + beside, blocks * drain)

    cycles = full * wave(at_once) + wave(rest)
    ends = costs.fill + blocks * drain if c.split_k == 1 else 0

    # bytes that a wave of tiles reads from memory: its distinct strips of A and B
    entries = ceil_div(at_once, tiles_m * tiles_n)  # batch entries in a wave
    of_one = min(at_once, tiles_m * tiles_n)
    across = min(c.raster_group, tiles_m, of_one)
    strips = across * c.tile_m + min(ceil_div(of_one, across), tiles_n) * c.tile_n
    wave_bytes = entries * strips * problem.k * ELEMENT
    all_bytes = problem.bytes * batch
    waves = full + (rest > 0)
    moved = max(all_bytes, 0 if all_bytes < arch.l2_bytes else waves * wave_bytes)
    # few SMs cannot saturate the memory
    asking = min(1.0, at_once * c.ctas * c.split_k / arch.num_sms)
    memory = moved / (arch.hbm_gbs * 0.9 * 1e9 * min(1.0, asking / 0.8) / arch.clock_hz)
    return (max(cycles, memory) + ends) / arch.clock_hz * 1e6


def predictions(
    configs: Sequence[Sm100Config],
    problem: GemmProblem,
    arch: Arch,
    batch: int = 1,
    majors: tuple[bool, bool] = (True, True),
    bits: int = 16,
) -> list[float]:
    """The microseconds that the model predicts for `batch` such problems in one launch, for each
    config, whatever the `bits` of an element."""
    return [predict(c, problem, arch, batch, majors) for c in configs]


def _mma_cycles(c: Sm100Config, arch: Arch) -> float:
    """The cycles of the MMAs of one step of K: FLOPs or smem reads, 32 bytes of every row per MMA,
    whichever takes longer; and the copies that no MMA runs beside."""
    rows = c.tile_m // c.num_blocks
    mma = 2 * rows * c.tile_n * 16 / (arch.mma_flops * c.ctas)
    port = 32 * (rows + c.tile_n) / c.ctas / arch.smem_bytes_per_clock
    return c.num_blocks * c.k_bytes / 32 * max(mma, port) + c.copy_cycles


def _step_cycles(c: Sm100Config, arch: Arch, clusters: int) -> float:
    """The cycles of one step of K when `clusters` are at work: the MMAs, overlapped with loads
    through L2."""
    assert arch.l2_bytes_per_clock, f"{arch.name}: the rate of its L2 is not known"
    load = c.stage_bytes * clusters * c.split_k / (arch.l2_bytes_per_clock * B200.l2_share)
    p = B200.overlap
    return (_mma_cycles(c, arch) ** p + load**p) ** (1 / p)
