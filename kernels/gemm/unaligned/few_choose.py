"""The choice of a config for few rows of an unaligned operand: candidates, and a cost model.

The model has three times: of loads, each of which a warp waits for; of the instructions that the
warps of an SM issue; and of memory. Its constants are fitted to 282 times of 28 products on an H200
(docs/facts/gemm.md#few-rows-choice). Imports neither torch nor the DSL.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cutex.kernels.gemm.config import ceil_div
from cutex.kernels.gemm.unaligned.few_config import ROWS, STEP_K, FewRowsConfig

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.problem.gemm import GemmProblem

FIXED_US, CLUSTER_US = 1.12, 0.5  # of a launch, and of sums sent within a cluster
LATENCY_US = 0.5  # of the steps that a warp has loaded at a time
ISSUE_CLOCKS = 3.15  # of an instruction
SCHEDULERS = 4  # of an SM
CLOCK = 0.957  # of that at which the board's peak holds
MEMORY = 0.95  # of the peak rate
POWER = 1.12  # how sharply the largest of the three times counts
SM_WARPS, SM_REGISTERS = 64, 65536
ROUND_WARPS = 16  # of an SM, beyond which clusters wait for others to end
COLUMNS = 16  # of out, that one mma.sync computes


def candidates(problem: GemmProblem, arch: Arch) -> Iterator[FewRowsConfig]:
    """The configs worth predicting."""
    if problem.m > 2 * ROWS:
        return
    tile_m = ceil_div(problem.m, ROWS) * ROWS
    for tile_n in (16, 32, 64):
        for split_k in (1, 2, 4, 8):
            for warps in (4, 8, 16):
                steps = 2 if tile_n == 64 else 4
                ctas = ceil_div(problem.n, tile_n) * split_k
                if split_k > 1 and ctas * warps > arch.num_sms * ROUND_WARPS:
                    continue
                found = FewRowsConfig(tile_m, tile_n, split_k=split_k, warps=warps, steps=steps)
                if found.why_not(problem, arch) is None:
                    yield found


def predict(c: FewRowsConfig, problem: GemmProblem, arch: Arch) -> float:
    """The predicted microseconds."""
    ctas = ceil_div(problem.n, c.tile_n) * c.split_k
    groups = ceil_div(ceil_div(problem.k, STEP_K * c.split_k), c.warps * c.steps)
    loads = ceil_div(ctas, arch.num_sms * resident(c)) * groups * LATENCY_US
    issued = max(1.0, ctas / arch.num_sms) * c.warps * groups * instructions(c)
    issue = issued * ISSUE_CLOCKS / SCHEDULERS / (CLOCK * arch.clock_hz / 1e6)
    memory = problem.bytes / (MEMORY * arch.hbm_gbs * 1e3)
    both = sum(time**POWER for time in (loads, issue, memory)) ** (1 / POWER)
    return FIXED_US + both + (CLUSTER_US if c.split_k > 1 else 0.0)


def resident(c: FewRowsConfig) -> int:
    """The CTAs resident on an SM, by warps and registers."""
    down, across = c.tile_m // ROWS, c.tile_n // COLUMNS
    needed = 48 + 4 * c.steps * (across + down) + 4 * across * down
    registers = min(SM_REGISTERS // c.num_threads, ceil_div(needed, 8) * 8)
    return max(1, min(SM_WARPS // c.warps, SM_REGISTERS // (registers * c.num_threads)))


def instructions(c: FewRowsConfig) -> int:
    """The instructions of a warp for the steps that it loads at a time."""
    down, across = c.tile_m // ROWS, c.tile_n // COLUMNS
    return 10 + c.steps * (8 + 8 * down + 5 * across)
