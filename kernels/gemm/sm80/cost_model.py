"""The candidate configs of the kernels by mma.sync, and a model of their time.

The model counts cycles of one SM: what the tensor cores, L2 and memory take of all tiles that it
gets, whichever is longest, and what nothing hides, once a round. Its constants are estimates, not
fitted: no GPU of these archs was at hand. Imports neither torch nor the DSL.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from cutex.arch import arch as arch_named
from cutex.kernels.gemm.config import ELEMENT, ceil_div
from cutex.kernels.gemm.sm80.config import Sm80Config

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.problem.gemm import GemmProblem

# tile_m, tile_n, warps along each, k_bytes: a warp has at most 64x64, 128 sums a thread; of small
# tiles 64 of K, 128 bytes, at a time, 1.1 to 2 times as fast (docs/facts/gemm.md#mma-sync-tiles)
TILES = (
    (128, 128, 2, 2, 64), (128, 128, 2, 4, 64), (128, 256, 2, 4, 64), (256, 128, 4, 2, 64),
    (128, 64, 2, 2, 128), (64, 128, 2, 2, 128), (64, 64, 2, 2, 128), (64, 256, 1, 4, 64),
)  # fmt: skip
STAGES = (4, 3, 2)
SYSTEM = 1024  # bytes of smem that the system keeps of each CTA
SM_REGISTERS = 65536
WARPS = 8  # of an SM that keep its tensor cores busy: two a sub-core
FILL = 2500  # cycles: a launch's start, the first tiles, the last stores of a round


def ctas_per_sm(c: Sm80Config, arch: Arch) -> int:
    """The CTAs that fit an SM by smem, registers and threads."""
    by_smem = (arch.smem_per_cta + SYSTEM) // (c.smem_bytes + SYSTEM)
    by_registers = SM_REGISTERS // (c.num_threads * (c.registers + 7) // 8 * 8)
    return max(1, min(by_smem, by_registers, arch.sm_threads // c.num_threads))


@lru_cache
def configs(arch_name: str) -> tuple[Sm80Config, ...]:
    """All candidate configs of the arch: of each tile the deepest ring of which two CTAs fit an SM,
    or else one."""
    arch = arch_named(arch_name)
    found: list[Sm80Config] = []
    for tile_m, tile_n, warps_m, warps_n, k_bytes in TILES:
        rings = [
            Sm80Config(tile_m, tile_n, k_bytes, n, warps_m=warps_m, warps_n=warps_n) for n in STAGES
        ]
        fit = [c for c in rings if c.why_not(None, arch) is None]
        if fit:
            found.append(max(fit, key=lambda c: (min(2, ctas_per_sm(c, arch)), c.num_stages)))
    return tuple(found)


def candidates(
    problem: GemmProblem, arch: Arch, majors: tuple[bool, bool] = (True, True)
) -> tuple[Sm80Config, ...]:
    """All candidate configs, for every problem and every major of its operands."""
    return configs(arch.name)


def predict(
    c: Sm80Config, problem: GemmProblem, arch: Arch, batch: int = 1, bits: int = 16
) -> float:
    """The microseconds that a launch of `c` takes."""
    tiles = ceil_div(problem.m, c.tile_m) * ceil_div(problem.n, c.tile_n) * batch
    at_once = min(ctas_per_sm(c, arch), ceil_div(tiles, arch.num_sms))
    each = ceil_div(tiles, arch.num_sms)  # tiles of the busiest SM
    busy = min(1.0, 0.4 + 0.6 * at_once * c.warps_m * c.warps_n / WARPS)
    mma = each * 2 * c.tile_m * c.tile_n * problem.k / (arch.mma_flops * busy)
    loaded = each * (c.tile_m + c.tile_n) * problem.k * ELEMENT
    l2 = loaded * arch.num_sms / arch.l2_bytes_per_clock
    memory = batch * problem.bytes / (arch.hbm_gbs * 1e9) * arch.clock_hz
    rounds = ceil_div(each, at_once)
    return (max(mma, l2, memory) + rounds * FILL) / arch.clock_hz * 1e6


def predictions(
    found: Sequence[Sm80Config],
    problem: GemmProblem,
    arch: Arch,
    batch: int = 1,
    majors: tuple[bool, bool] = (True, True),
    bits: int = 16,
) -> list[float]:
    """`predict` for each config; majors cost nothing: ldmatrix transposes."""
    return [predict(c, problem, arch, batch, bits) for c in found]
