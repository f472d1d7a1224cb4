"""The attention ladders: the stages of each arch, in order. Imports neither torch nor the DSL."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

from cutex.kernels.attention.config import ForwardConfig
from cutex.problem import stage as stage_of_any

if TYPE_CHECKING:
    from cutex.compile import Kernel
    from cutex.problem.attention import AttentionProblem


class Stage(stage_of_any.Stage):
    """A rung of an attention ladder."""

    op = "attention"

    def fitted(self, problem: AttentionProblem) -> Self:  # type: ignore[override]
        left, right = problem.bounds
        config = replace(
            self.default,
            head_dim=problem.head_dim,
            head_dim_v=problem.head_dim_v,
            causal=problem.causal,
            window=(left is not None, right is not None and not problem.causal),
            varlen_q=problem.varlen,
            varlen_k=problem.varlen,
            softcap=bool(problem.softcap),
        )
        return replace(self, default=config)


class Forward(Stage):
    """The production kernel at the top of a ladder."""

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
