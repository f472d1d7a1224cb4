"""The ladder of fp8 GEMM with fp32 scale factors of blocks, on Hopper.

One kernel; each stage adds a part of its config. Importing this loads neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

from cutex.kernels.gemm.scaled.fp8.config import Fp8Config
from cutex.problem import stage as stage_of_any
from cutex.problem.scaled import Fp8Problem

if TYPE_CHECKING:
    from cutex.compile import Kernel
    from cutex.problem.stage import Config


class Stage(stage_of_any.Stage[Fp8Problem, Fp8Config]):
    """A stage: the promoting kernel with another tile."""

    op = "gemm_fp8"

    def fitted(self, problem: Fp8Problem) -> Self:
        return self.with_config(replace(self.default, recipe=problem.dtype))

    def config_from_row(self, row: dict[str, Any]) -> Fp8Config:
        return Fp8Config.from_row(row)

    @property
    def module(self) -> str:
        return f"{stage_of_any.package(self.op, self.arch)}.ladder"

    def kernel(self, config: Config | None = None) -> Kernel:
        return import_module(self.module).Ladder(config or self.default)


# the first has one warpgroup, of two waves of 64 rows, whose additions nothing hides
_ALONE = Fp8Config(tile_m=128, tile_n=128, num_stages=5, warpgroups=1, epi_n=64, epi_stages=2)
_TWO = replace(_ALONE, warpgroups=2, epi_stages=1)
_TALL = replace(_TWO, tile_m=256, num_stages=4)

_STAGES = (
    Stage(0, "sm_90a", "promotion", "each 128 of K is scaled and added in fp32", _ALONE),
    Stage(1, "sm_90a", "two warpgroups", "one adds while the other's wgmma run", _TWO),
    Stage(2, "sm_90a", "tall tile", "256 rows, of which 64 at a time are in wgmma", _TALL),
    Stage(3, "sm_90a", "chosen", "tile, split K, operands exchanged per problem", _TALL, True),
)

LADDERS = stage_of_any.Ladders("fp8 GEMM", _STAGES)
stages, stage = LADDERS.stages, LADDERS.stage
