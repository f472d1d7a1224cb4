"""The attention ladders: the stages of each arch, in order. Imports neither torch nor the DSL."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

from cutex.arch import arch
from cutex.kernels.attention.choose import choose
from cutex.kernels.attention.config import ForwardConfig
from cutex.problem import stage as stage_of_any

if TYPE_CHECKING:
    from cutex.compile import Kernel
    from cutex.problem.attention import AttentionProblem


# fields of a config that say what is computed
WHAT = ("head_dim", "head_dim_v", "causal", "window", "varlen_q", "varlen_k", "softcap")


class Stage(stage_of_any.Stage):
    """A rung of an attention ladder."""

    op = "attention"

    def fitted(self, problem: AttentionProblem) -> Self:  # type: ignore[override]
        """The stage's own way to do what the problem asks for."""
        chosen, own = choose(problem, arch(self.arch)), self.default
        return replace(self, default=replace(own, **{x: getattr(chosen, x) for x in WHAT}))


class Forward(Stage):
    """The production kernel at the top of a ladder, with the config for each problem."""

    def fitted(self, problem: AttentionProblem) -> Self:  # type: ignore[override]
        return replace(self, default=choose(problem, arch(self.arch)))

    @property
    def module(self) -> str:
        return f"cutex.kernels.attention.{self.arch.rstrip('a').replace('_', '')}.forward"

    def kernel(self, config: Any = None) -> Kernel:
        return import_module(self.module).Forward(config or self.default)


_STAGES = (
    Forward(9, "sm_90a", "forward", "the kernel behind cutex.flash_attn_func", ForwardConfig()),
)

LADDERS = stage_of_any.Ladders("attention", _STAGES)
stages, stage = LADDERS.stages, LADDERS.stage
