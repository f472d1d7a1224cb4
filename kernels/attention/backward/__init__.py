"""The ladder of attention's backward: dQ, dK and dV given dO.

Importing this loads neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

from cutex.kernels.attention.backward.config import BackwardConfig
from cutex.kernels.attention.backward.sm100.config import Sm100BackwardConfig
from cutex.kernels.attention.backward.sm100.pairs.config import PairConfig, pairs_of
from cutex.problem import stage as stage_of_any
from cutex.problem.attention.backward import BackwardProblem

if TYPE_CHECKING:
    from cutex.compile import Kernel
    from cutex.problem.stage import Config


class Stage(stage_of_any.Stage[BackwardProblem, Any]):
    """A stage: the same kernel with another schedule of its products."""

    op = "attention_backward"

    def fitted(self, problem: BackwardProblem) -> Self:
        return self.with_config(self.default.of(problem))

    @property
    def choice(self) -> Any:
        """The module that chooses configs, of which no kernel is built."""
        return import_module(self.chooser)

    @property
    def module(self) -> str:
        return f"{stage_of_any.package(self.op, self.arch)}.{self.default.kernel_module}"

    def kernel(self, config: Config | None = None) -> Kernel:
        settled = config or self.default
        return import_module(self.with_config(settled).module).Backward(settled)


class Chosen(Stage):
    """The top of the ladder, with the config chosen for each problem."""

    def fitted(self, problem: BackwardProblem) -> Self:
        return self.with_config(self.choice.fitted(self.default.of(problem)))


@dataclass(frozen=True)
class Sm100Stage(Stage):
    """A stage on Blackwell: the chosen config, except for the fields in `held`, which the stage
    fixes."""

    held: tuple[str, ...] = ()

    def fitted(self, problem: BackwardProblem) -> Self:
        chosen = self.choice.fitted(self.default.of(problem), problem.dtype)
        config = replace(chosen, **{name: getattr(self.default, name) for name in self.held})
        if config.halves and config.dq_slots:  # which leave no room for a second slot of Q
            config = replace(config, num_stages=1, ahead=False)
        return self.with_config(config)


class Pairs(Stage):
    """The stage with pairs of CTAs, or the chosen config where pairs do not apply."""

    def fitted(self, problem: BackwardProblem) -> Self:
        chosen = self.choice.fitted(Sm100BackwardConfig().of(problem), problem.dtype)
        return self.with_config(pairs_of(chosen) or chosen)


_ONE = Sm100BackwardConfig(num_stages=1, dq_slots=1, folded=False, ahead=False, dq_in_turn=False)
_HELD = ("early_s", "persistent", "late_dk", "dq_in_turn", "folded", "dq_slots", "ahead")
_STAGES = (
    Stage(0, "sm_90a", "in order", "S, dP, P, dS, dV, dK, each waited for", BackwardConfig(
        num_stages=2, overlap=False)),
    Stage(1, "sm_90a", "three slots", "loads run two blocks ahead", BackwardConfig(
        overlap=False)),
    Stage(2, "sm_90a", "overlap", "dV and dK under the next exponentials", BackwardConfig()),
    Chosen(3, "sm_90a", "backward", "the kernel behind flash_attn_func's gradient",
           BackwardConfig()),
    Sm100Stage(0, "sm_100a", "in order", "one block after the other through one slot each", _ONE,
               held=("num_stages", "do_stages", "halves", *_HELD)),
    Sm100Stage(1, "sm_100a", "rings", "loads run a block ahead", _ONE, held=_HELD),
    Sm100Stage(2, "sm_100a", "ahead", "S of the next block under this one's dK and dQ",
               replace(_ONE, num_stages=2, ahead=True), held=_HELD[:6]),
    Sm100Stage(3, "sm_100a", "adds from registers", "dQ does not pass through smem",
               Sm100BackwardConfig(folded=False, dq_in_turn=False), held=_HELD[:5]),
    Sm100Stage(4, "sm_100a", "subtractions", "tensor cores subtract LSE and delta",
               Sm100BackwardConfig(dq_in_turn=False), held=_HELD[:4]),
    Sm100Stage(5, "sm_100a", "adds hidden", "dQ is read under dK, or under its next part",
               Sm100BackwardConfig(), held=_HELD[:2]),
    Pairs(6, "sm_100a", "pairs", "two CTAs own 256 keys, and exchange dS", PairConfig()),
    Sm100Stage(7, "sm_100a", "persistent", "CTAs take one tile of keys after the other",
               Sm100BackwardConfig(), held=_HELD[:1]),
    Sm100Stage(8, "sm_100a", "backward", "S is started with half of Q's columns",
               Sm100BackwardConfig()),
)  # fmt: skip

LADDERS = stage_of_any.Ladders("attention backward", _STAGES, relatives=True)
stages, stage = LADDERS.stages, LADDERS.stage
