"""The attention ladders: the stages of each arch, in order. Imports neither torch nor the DSL."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

from cutex.arch import arch
from cutex.kernels.attention.choose import choose
from cutex.kernels.attention.config import ForwardConfig
from cutex.kernels.attention.ladder import LadderConfig
from cutex.problem import stage as stage_of_any

if TYPE_CHECKING:
    from cutex.compile import Kernel
    from cutex.problem.attention import AttentionProblem


class Stage(stage_of_any.Stage):
    """A rung of an attention ladder."""

    op = "attention"

    def fitted(self, problem: AttentionProblem) -> Self:  # type: ignore[override]
        return replace(self, default=self.default.fitted(problem.head_dim, problem.causal))


class Forward(Stage):
    """The production kernel at the top of a ladder, with a config for each problem."""

    def fitted(self, problem: AttentionProblem) -> Self:  # type: ignore[override]
        return replace(self, default=choose(problem, arch(self.arch)))

    @property
    def module(self) -> str:
        return f"{stage_of_any.package(self.op, self.arch)}.forward"

    def kernel(self, config: Any = None) -> Kernel:
        return import_module(self.module).Forward(config or self.default)


_IN_ORDER = LadderConfig(p_in_smem=True)
_REGISTERS = LadderConfig()
_RING = LadderConfig(num_stages=2)
_PERSISTENT = replace(_RING, q_stages=2, own_o=True)

_STAGES = (
    Stage(0, "sm_90a", "in order", "two products, a softmax between them, P in smem", _IN_ORDER),
    Stage(1, "sm_90a", "P in registers", "the softmax leaves the second operand A", _REGISTERS),
    Stage(2, "sm_90a", "rings", "loads of K and V run ahead through rings of slots", _RING),
    Stage(3, "sm_90a", "warp roles", "one warp loads, two warpgroups only compute", _RING),
    Stage(4, "sm_90a", "overlap", "the next QK and the last PV run under the softmax", _RING),
    Stage(5, "sm_90a", "ping-pong", "the warpgroups take turns at the tensor cores", _RING),
    Stage(6, "sm_90a", "edges", "only the blocks at an edge of the band are masked", _RING),
    Stage(7, "sm_90a", "persistent", "a CTA per SM takes the longest tiles first", _PERSISTENT),
    Stage(8, "sm_90a", "slack", "sums are scaled down only where they may overflow", _PERSISTENT),
    Forward(
        9, "sm_90a", "forward", "what cutex.flash_attn_func runs, per problem", ForwardConfig()
    ),
)

LADDERS = stage_of_any.Ladders("attention", _STAGES)
stages, stage = LADDERS.stages, LADDERS.stage
