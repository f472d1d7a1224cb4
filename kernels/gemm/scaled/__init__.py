"""The ladder of the block-scaled GEMM, on Blackwell. Imports neither torch nor the DSL."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

from cutex.arch import arch
from cutex.kernels.gemm.scaled.sm100.config import ScaledTiles
from cutex.kernels.gemm.sm100.cost_model import deepest
from cutex.problem import stage as stage_of_any
from cutex.problem.scaled import BlockScaledProblem

if TYPE_CHECKING:
    from cutex.compile import Kernel
    from cutex.problem.stage import Config


class Stage(stage_of_any.Stage[BlockScaledProblem, ScaledTiles]):
    """A stage: the same kernel, with one more idea allowed in its tiles."""

    op = "gemm_scaled"

    def fitted(self, problem: BlockScaledProblem) -> Self:
        """The stage with the dtypes of `problem`, and a ring as deep as their smem allows."""
        a, b = problem.recipe
        tiles = self.default.of(a.element, b.element, a.block[1])
        return self.with_config(deepest(tiles, arch(self.arch)))

    @property
    def module(self) -> str:
        return f"{stage_of_any.package(self.op, self.arch)}.general"

    def kernel(self, config: Config | None = None) -> Kernel:
        from cutex.kernels.gemm.scaled.sm100.signature import ladder

        tiles: Any = config or self.default
        return import_module(self.module).Scaled(ladder(tiles))


_ONE = ScaledTiles(tile_m=128, tile_n=128, num_stages=4, epi_n=32, epi_stages=4)
_PAIR = replace(_ONE, tile_m=256, tile_n=256, pair=True)
_TWO = replace(_PAIR, tile_n=192, num_acc=2, epi_stages=2)
_SHARED = replace(_TWO, tile_n=256)

_STAGES = (
    Stage(
        0, "sm_100a", "tmem factors", "TMA, then tcgen05.cp bring scale factors to the MMA", _ONE
    ),
    Stage(1, "sm_100a", "pair MMA", "two CTAs run one MMA; each has all factors of B", _PAIR),
    Stage(2, "sm_100a", "two accumulators", "192 columns each leave room for the factors", _TWO),
    Stage(3, "sm_100a", "shared columns", "256 columns each, of which both use some", _SHARED),
    Stage(4, "sm_100a", "chosen", "tile, order, split K, operands per problem", _SHARED, True),
)

LADDERS = stage_of_any.Ladders("block-scaled GEMM", _STAGES, relatives=True)
stages, stage = LADDERS.stages, LADDERS.stage
