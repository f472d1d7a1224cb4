"""Which config for which problem: a frozen space of candidates, and a model that ranks them.

The model counts what a config spends: tensor core cycles, in whole rounds of tiles over the SMs;
bytes that each SM gets through L2 in the same time; bytes that come from memory; and what is not
hidden, the way in and out. Its few constants were measured on one H200 (docs/facts.md). It is
there to leave a dozen candidates out of a hundred; cutex/autotune.py times those.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from cutex.arch import arch as arch_named
from cutex.kernels.gemm.config import BARRIERS, ELEMENT, GemmConfig
from cutex.kernels.gemm.sm100 import space

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
class Machine:
    """What the model knows of a GPU beside its Arch: measured on one H200, Gaussian bf16 data."""

    pingpong_tflops: float = 706.0  # with every SM at work, at the clock that the power limit gives
    cooperative_tflops: float = 695.0  # beside its way out
    l2_gbs: float = 85.0  # that one SM gets through L2
    smem_gbs: float = 25.0  # at which a tile leaves where nothing hides it, of one SM
    memory_gbs: float = 4350.0
    step_us: float = 0.002  # to hand over one slot of the ring
    launch_us: float = 1.5  # way in and out of a kernel that no other work hides
    exchange_us: float = 5.5  # of sums between the CTAs of a split


MACHINE = Machine()


def _deepest(config: GemmConfig, arch: Arch, limit: int | None = None) -> GemmConfig:
    """With as many slots as smem, or `limit` bytes, hold."""
    room = min(arch.smem_per_cta - BARRIERS - config.epi_bytes, limit or arch.smem_per_cta)
    return replace(config, num_stages=max(2, min(24, room // config.stage_bytes)))


def _ways_to_a_tile(config: GemmConfig) -> tuple[GemmConfig, ...]:
    """`config` in each way that its CTAs may know their tiles, best first."""
    plain = replace(config, spread=False, column=False)
    return replace(plain, spread=True), replace(plain, column=True), plain


def _epilogue(tile_n: int) -> int:
    """Columns of C that leave at a time: a divisor of tile_n, up to a line of 128 bytes."""
    return next(n for n in (64, 32, 16) if tile_n % n == 0)


@lru_cache
def candidates(arch_name: str, small: bool) -> tuple[GemmConfig, ...]:
    """The space: for large problems, or for those with a side of at most 128."""
    arch = arch_named(arch_name)
    found: list[GemmConfig] = []

    def add(config: GemmConfig, limit: int | None = None) -> None:
        config = _deepest(config, arch, limit)
        if config.why_not(None, arch) is None and config not in found:
            found.append(config)

    for pingpong, tiles in ((True, PINGPONG), (False, COOPERATIVE)):
        for m, n in tiles:
            if n % 16 or small:
                continue
            for cluster_m, cluster_n in CLUSTERS:
                add(
                    GemmConfig(
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
                    config = GemmConfig(
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
                            for way in _ways_to_a_tile(replace(config, swap_ab=True, cluster_n=2)):
                                add(way)
                        for way in _ways_to_a_tile(replace(config, swap_ab=swap_ab)):
                            add(way)
                            add(way, SHALLOW)
    return tuple(found)


def predict(config: GemmConfig, problem: GemmProblem, arch: Arch, batch: int = 1) -> float:
    """Microseconds that the model expects of `batch` such problems in one launch."""
    if arch.tmem_columns:
        return space.predict(config, problem, arch, batch)
    c, machine = config, MACHINE
    m, n = (problem.n, problem.m) if c.swap_ab else (problem.m, problem.n)
    ctas_m = _up(_up(m, c.tile_m), c.cluster_m) * c.cluster_m
    ctas_n = _up(_up(n, c.tile_n), c.cluster_n) * c.cluster_n
    tiles = ctas_m * ctas_n * batch
    k_tiles = _up(_up(problem.k, c.tile_k), c.split_k)
    rounds = _up(tiles * c.split_k, arch.num_sms)

    # of one CTA, for one step of K; wgmma of fewer than 32 columns is no faster than of 32
    rate = machine.pingpong_tflops if c.pingpong else machine.cooperative_tflops
    flops = 2 * c.tile_m * max(c.tile_n, 32) * c.tile_k
    tensor = flops / (rate / arch.num_sms) / 1e6
    loaded = (c.tile_m / c.cluster_n + c.tile_n / c.cluster_m) * c.tile_k * ELEMENT
    load = loaded / machine.l2_gbs / 1e3
    step = max(tensor, load) + 0.02 * load  # bytes cost power, too
    leaving = c.tile_m * c.tile_n * ELEMENT / machine.smem_gbs / 1e3
    leaving *= 1 if c.epi_n > 16 else 1.5  # lines in parts of 32 bytes
    out = 0.0 if c.pingpong else leaving
    compute = rounds * max(k_tiles * step + out, leaving)

    memory = problem.bytes * batch / machine.memory_gbs / 1e3
    useful = _up(m, c.tile_m) * _up(n, c.tile_n) * batch * c.split_k
    asking = min(1.0, useful / arch.num_sms)  # SMs: few cannot ask for all of it
    memory /= min(1.0, asking / 0.9)
    memory *= FEW_SLOTS.get(c.num_stages, 1.0)
    split = machine.exchange_us if c.split_k > 1 else 0.0
    handing = rounds * k_tiles * machine.step_us
    hidden = 0.1 * min(compute, memory)  # what is the less is not quite for nothing
    return max(compute, memory) + hidden + handing + split + machine.launch_us


def ranked(problem: GemmProblem, arch: Arch, batch: int = 1) -> list[GemmConfig]:
    """All candidates that can run `batch` of `problem`, by the model of `arch`, best first."""
    small = min(problem.m, problem.n) <= 128
    pairs = arch.tmem_columns > 0
    space_of = space.candidates(arch.name) if pairs else candidates(arch.name, small)
    fits = [c for c in space_of if c.why_not(problem, arch) is None]
    return sorted(fits, key=lambda c: predict(c, problem, arch, batch))


def shortlist(problem: GemmProblem, arch: Arch, count: int) -> list[GemmConfig]:
    """The first `count` of the ranking that are worth a try: of those that differ only in how a CTA
    knows its tile, the first."""
    fits = ranked(problem, arch)
    known = set(fits)
    best = [next(way for way in _ways_to_a_tile(c) if way in known) for c in fits]
    return list(dict.fromkeys(best))[:count]


def choose(problem: GemmProblem, arch: Arch) -> GemmConfig:
    """The model's best."""
    return ranked(problem, arch)[0]


def _up(a: int, b: int) -> int:
    return -(-a // b)
