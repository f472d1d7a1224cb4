"""The grouped GEMM: rows in groups, each times a matrix of its own; its ladders on both archs.

One kernel of each arch; each stage adds a part of its config. Importing this loads neither torch
nor the DSL.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cutex.kernels.gemm.config import GemmConfig
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm100.config import Sm100Config
from cutex.problem import stage as stage_of_any
from cutex.problem.grouped_gemm import MOST_GROUPS, GroupedGemmProblem

if TYPE_CHECKING:
    from cutex.compile import Kernel
    from cutex.problem.stage import Config


class Stage(stage_of_any.Stage[GroupedGemmProblem, GemmConfig]):
    """A stage: the kernel of rows in groups with another tile."""

    op = "gemm_grouped"

    def config_from_row(self, row: dict[str, Any]) -> GemmConfig:
        return type(self.default).from_row(row)

    @property
    def module(self) -> str:
        return f"{stage_of_any.package(self.op, self.arch)}.rows"

    def kernel(self, config: Config | None = None) -> Kernel:
        from cutex.kernels.gemm.grouped.config import ladder

        tiles: Any = config or self.default
        return import_module(self.module).GroupedRows(ladder(tiles, MOST_GROUPS))


# a ring as deep as it goes beside a slot for out
_HOPPER = Sm90Config(tile_n=128, num_stages=5, warpgroups=2, epi_n=64, epi_stages=2)
_WIDE = replace(_HOPPER, tile_n=256, num_stages=4, epi_stages=1)
_SHARED = replace(_WIDE, cluster_n=2)
_IN_TURN = replace(_WIDE, tile_n=192, num_stages=5, pingpong=True, cluster_m=2)
_PAIR = Sm100Config(tile_m=256, tile_n=256, num_stages=5, epi_n=32, epi_stages=4, pair=True)
_TWO = replace(_PAIR, num_acc=2)

_STAGES = (
    Stage(0, "sm_90a", "ragged tiles", "a warp reads where groups end; all roles walk", _HOPPER),
    Stage(1, "sm_90a", "wide tile", "256 columns: fewer loads of the rows", _WIDE),
    Stage(2, "sm_90a", "multicast", "two CTAs load their common rows once", _SHARED),
    Stage(3, "sm_90a", "ping-pong", "one warpgroup stores while the other computes", _IN_TURN),
    Stage(4, "sm_90a", "chosen", "tile and cluster by the mean of rows and by K", _SHARED, True),
    Stage(0, "sm_100a", "ragged tiles", "a warp reads where groups end; pairs walk", _PAIR),
    Stage(1, "sm_100a", "two accumulators", "a tile is stored under the next one's MMAs", _TWO),
    Stage(2, "sm_100a", "chosen", "the width by the columns", _TWO, True),
)

LADDERS = stage_of_any.Ladders("grouped GEMM", _STAGES)
stages, stage = LADDERS.stages, LADDERS.stage
