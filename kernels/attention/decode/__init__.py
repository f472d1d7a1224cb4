"""The ladder of attention to caches: keys in pages or not, split over CTAs.

Importing this loads neither torch nor the DSL.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Self

from cutex.kernels.attention.decode.config import DecodeConfig
from cutex.kernels.attention.decode.sm100.config import Sm100DecodeConfig
from cutex.problem import stage as stage_of_any
from cutex.problem.attention.decode import DecodeProblem

if TYPE_CHECKING:
    from cutex.compile import Kernel
    from cutex.problem.stage import Config


class Stage(stage_of_any.Stage[DecodeProblem, DecodeConfig]):
    """A stage: the same kernel with another distribution of its work."""

    op = "attention_decode"

    def fitted(self, problem: DecodeProblem) -> Self:
        pack = problem.heads_q // problem.heads_kv if self.default.packed else 1
        blocks = -(-problem.seqlen_q * pack // self.default.tile_m)
        units = problem.batch * (problem.heads_q // pack) * blocks
        choice = import_module(self.chooser)  # of which no kernel is built
        config = choice.fitted(self.default.of(problem), problem.seqlen_k, units)
        return self.with_config(config)

    @property
    def module(self) -> str:
        return f"{stage_of_any.package(self.op, self.arch)}.decode"

    def kernel(self, config: Config | None = None) -> Kernel:
        return import_module(self.module).Decode(config or self.default)


_STAGES = (
    Stage(0, "sm_90a", "a CTA a head", "a query head's rows, all keys", DecodeConfig(
        packed=False, parts="one")),
    Stage(1, "sm_90a", "packed heads", "heads that share K and V share a CTA", DecodeConfig(
        parts="one")),
    Stage(2, "sm_90a", "split keys", "each head's keys in as many parts as fill the SMs",
          DecodeConfig(parts="even")),
    Stage(3, "sm_90a", "equal shares", "CTAs take as many keys each, whatever the lengths",
          DecodeConfig()),
    Stage(0, "sm_100a", "a CTA a head", "a query head's rows, all keys", Sm100DecodeConfig(
        packed=False, parts="one")),
    Stage(1, "sm_100a", "packed heads", "heads that share K and V share a CTA", Sm100DecodeConfig(
        parts="one")),
    Stage(2, "sm_100a", "split keys", "each head's keys in as many parts as fill the SMs",
          Sm100DecodeConfig(parts="even")),
    Stage(3, "sm_100a", "equal shares", "CTAs take as many keys each, whatever the lengths",
          Sm100DecodeConfig()),
)  # fmt: skip

LADDERS = stage_of_any.Ladders("attention to caches", _STAGES)
stages, stage = LADDERS.stages, LADDERS.stage
