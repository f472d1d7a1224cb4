"""The ladder of an fp32 GEMM on plain CUDA cores, on any arch.

Importing this loads neither torch nor the DSL.
"""

from __future__ import annotations

from typing import Self

from cutex.arch import arch
from cutex.kernels.gemm.simt.config import TILES, SimtConfig, quickest
from cutex.problem import stage as stage_of_any
from cutex.problem.gemm_fp32 import Fp32GemmProblem
from cutex.problem.stage import Ladders, on_each

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")


class Stage(stage_of_any.Stage[Fp32GemmProblem, SimtConfig]):
    """A stage of the fp32 ladder."""

    op, by_arch = "gemm_fp32", False

    def fitted(self, problem: Fp32GemmProblem) -> Self:
        config = self.default
        if config == _AHEAD:
            config = quickest(problem, arch(self.arch).num_sms)
        return self.with_config(config.fitted(problem))


_NAIVE = SimtConfig(32, 32, 1)
_DOTS = SimtConfig(4, 8, 32)
_TILE = SimtConfig(32, 32, 32)
_SQUARES = SimtConfig(128, 128, 8, thread_m=8, thread_n=8)
_RING = SimtConfig(128, 128, 16, thread_m=8, thread_n=8, num_stages=2)
_WARPS = SimtConfig(128, 128, 16, thread_m=16, thread_n=8, num_stages=3)
_AHEAD = next(iter(TILES))

LADDERS: Ladders[Stage] = Ladders(
    "fp32 GEMM",
    on_each(
        ARCHS,
        Stage(0, "", "naive", "a thread an element of C, neighbours in neighbouring rows", _NAIVE),
        Stage(1, "", "coalesced", "a warp an element of C, its lanes along K", _DOTS),
        Stage(2, "", "smem tiles", "32x32 tiles in smem, each word used 32 times", _TILE),
        Stage(3, "", "padded", "a word after each row: no two lanes in one bank", _TILE),
        Stage(4, "", "swizzled", "columns XOR row instead: the same, and no word wasted", _TILE),
        Stage(5, "", "register tiles", "a thread 8x8 of C: 64 FMAs for 16 words", _SQUARES),
        Stage(6, "", "vectors", "loads of 16 bytes from memory and from smem", _SQUARES),
        Stage(7, "", "double buffering", "cp.async fills one buffer, the other is used", _RING),
        Stage(8, "", "warp tiles", "a thread 16x8 of C: 512 FMAs for 24 loads", _WARPS),
        Stage(9, "", "fragments ahead", "words of the next k come under this one's FMAs", _AHEAD),
    ),
)  # fmt: skip
stages, stage = LADDERS.stages, LADDERS.stage
