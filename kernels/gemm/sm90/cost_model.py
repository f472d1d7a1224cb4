"""The configs that Hopper's chosen kernel is tried with, and a model of their time.

The model counts what a config spends: tensor core cycles, in whole rounds of tiles over the SMs;
bytes that each SM gets through L2 in the same time; bytes that come from memory; and what is not
hidden, the first loads and the last stores. Its few constants were measured on one H200
(docs/facts.md). It leaves a dozen candidates out of a hundred, which cutex/bench/autotune.py times.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from cutex.arch import arch as arch_named
from cutex.kernels.gemm.config import BARRIERS, ELEMENT, ceil_div
from cutex.kernels.gemm.sm90.config import Sm90Config

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.problem.gemm import GemmProblem

PINGPONG = [(128, n) for n in (128, 144, 160, 176, 192, 208)] + [(192, 128), (64, 256), (64, 224)]
COOPERATIVE = [(128, 256), (256, 128), (256, 112), (256, 152), (256, 160), (256, 192), (128, 224)]
SMALL_ROWS = (64, 128)  # of a tile where the other side has at most 128
SMALL_COLUMNS = (16, 32, 64, 128)
CLUSTERS = [(1, 1), (2, 1), (1, 2)]
SPLITS = (1, 2)
FEW_SLOTS = {2: 1.6, 3: 1.2, 4: 1.06}  # what memory takes longer: M = 16 and 64, 64 to 160 KB
SHALLOW = 164 * 1024  # bytes of another ring to try: small problems fill it sooner


@dataclass(frozen=True)
class Costs:
    """Rates and times that an Arch does not state: measured on one H200, Gaussian bf16 data."""

    pingpong_tflops: float = 706.0  # with every SM at work, at the clock that the power limit gives
    cooperative_tflops: float = 695.0  # beside its epilogue
    l2_gbs: float = 85.0  # that one SM gets through L2
    smem_gbs: float = 25.0  # at which a tile leaves where nothing hides it, of one SM
    memory_gbs: float = 4350.0
    step_us: float = 0.002  # to hand over one slot of the ring
    launch_us: float = 1.5  # first loads and last stores of a kernel, which no other work hides
    exchange_us: float = 5.5  # of sums between the CTAs of a split


H200 = Costs()


def _deepest(config: Sm90Config, arch: Arch, limit: int | None = None) -> Sm90Config:
    """`config` with as many slots as smem, or `limit` bytes, hold."""
    room = min(arch.smem_per_cta - BARRIERS - config.epi_bytes, limit or arch.smem_per_cta)
    return replace(config, num_stages=max(2, min(24, room // config.stage_bytes)))


def variants(config: Sm90Config) -> tuple[Sm90Config, ...]:
    """`config` with each way for its CTAs to find their tiles, best first."""
    plain = replace(config, spread=False, columns=0)
    return replace(plain, spread=True), replace(plain, columns=1), plain


def _epilogue(tile_n: int) -> int:
    """Columns of C that are stored at a time: a divisor of tile_n, up to a line of 128 bytes."""
    return next(n for n in (64, 32, 16) if tile_n % n == 0)


@lru_cache
def configs(arch_name: str, small: bool) -> tuple[Sm90Config, ...]:
    """All candidates: for large problems, or for those with a side of at most 128."""
    arch = arch_named(arch_name)
    found: list[Sm90Config] = []

    def add(config: Sm90Config, limit: int | None = None) -> None:
        config = _deepest(config, arch, limit)
        if config.why_not(None, arch) is None and config not in found:
            found.append(config)

    for pingpong, tiles in ((True, PINGPONG), (False, COOPERATIVE)):
        for m, n in tiles:
            if n % 16 or small:
                continue
            for cluster_m, cluster_n in CLUSTERS:
                add(
                    Sm90Config(
                        tile_m=m,
                        tile_n=n,
                        epi_n=_epilogue(n),
                        epi_stages=1 if pingpong else 2,
                        warpgroups=2,
                        pingpong=pingpong,
                        cluster_m=cluster_m,
                        cluster_n=cluster_n,
                    )
                )
    for m in SMALL_ROWS:
        for n in SMALL_COLUMNS:
            for split_k in SPLITS:
                for tile_k in (64, 128):
                    config = Sm90Config(
                        tile_m=m,
                        tile_n=n,
                        tile_k=tile_k,
                        epi_n=_epilogue(n),
                        epi_stages=1,
                        warpgroups=m // 64,
                        split_k=split_k,
                    )
                    for swap_ab in (True, False):  # the better one where the model sees none
                        if m == 128 and swap_ab:  # what memory must bring is asked of L2 once
                            for variant in variants(replace(config, swap_ab=True, cluster_n=2)):
                                add(variant)
                        for variant in variants(replace(config, swap_ab=swap_ab)):
                            add(variant)
                            add(variant, SHALLOW)
    return tuple(found)


def candidates(problem: GemmProblem, arch: Arch) -> tuple[Sm90Config, ...]:
    return configs(arch.name, min(problem.m, problem.n) <= 128)


def predict(config: Sm90Config, problem: GemmProblem, arch: Arch, batch: int = 1) -> float:
    """Microseconds that the model expects of `batch` such problems in one launch."""
    c, costs = config, H200
    m, n = (problem.n, problem.m) if c.swap_ab else (problem.m, problem.n)
    ctas_m = ceil_div(ceil_div(m, c.tile_m), c.cluster_m) * c.cluster_m
    ctas_n = ceil_div(ceil_div(n, c.tile_n), c.cluster_n) * c.cluster_n
    tiles = ctas_m * ctas_n * batch
    k_tiles = ceil_div(ceil_div(problem.k, c.tile_k), c.split_k)
    rounds = ceil_div(tiles * c.split_k, arch.num_sms)

    # of one CTA, for one step of K; wgmma of fewer than 32 columns is no faster than of 32
    rate = costs.pingpong_tflops if c.pingpong else costs.cooperative_tflops
    flops = 2 * c.tile_m * max(c.tile_n, 32) * c.tile_k
    tensor = flops / (rate / arch.num_sms) / 1e6
    loaded = (c.tile_m / c.cluster_n + c.tile_n / c.cluster_m) * c.tile_k * ELEMENT
    load = loaded / costs.l2_gbs / 1e3
    step = max(tensor, load) + 0.02 * load  # bytes cost power, too
    leaving = c.tile_m * c.tile_n * ELEMENT / costs.smem_gbs / 1e3
    leaving *= 1 if c.epi_n > 16 else 1.5  # lines in parts of 32 bytes
    out = 0.0 if c.pingpong else leaving
    compute = rounds * max(k_tiles * step + out, leaving)

    memory = problem.bytes * batch / costs.memory_gbs / 1e3
    useful = ceil_div(m, c.tile_m) * ceil_div(n, c.tile_n) * batch * c.split_k
    asking = min(1.0, useful / arch.num_sms)  # SMs: few cannot ask for all of it
    memory /= min(1.0, asking / 0.9)
    memory *= FEW_SLOTS.get(c.num_stages, 1.0)
    split = costs.exchange_us if c.split_k > 1 else 0.0
    handing = rounds * k_tiles * costs.step_us
    hidden = 0.1 * min(compute, memory)  # what is the less is not quite for nothing
    return max(compute, memory) + hidden + handing + split + costs.launch_us
