"""The ladders of attention's forward: the stages of each arch, in order.

Importing this loads neither torch nor the DSL.
"""

from __future__ import annotations

from typing import Self

from cutex.kernels.attention.forward.config import ForwardConfig
from cutex.kernels.attention.forward.ladder import LadderConfig
from cutex.kernels.attention.forward.sm90.config import Sm90ForwardConfig
from cutex.kernels.attention.forward.sm100.config import Sm100ForwardConfig
from cutex.kernels.attention.forward.sm100.ladder import Sm100LadderConfig
from cutex.problem import stage as stage_of_any
from cutex.problem.attention import AttentionProblem

# the steps are blocks of keys, which a warp takes in one of these ways
WAYS = {
    "sm_90a": stage_of_any.Ways(
        steps={
            "first": ("Softmax.first",),
            "searched": ("Softmax.next",),
            "tame": ("Softmax.add", "Softmax.add_within"),
            "guarded": ("Softmax.guard",),
        },
        events={"raised": ("WatchedSoftmax._raise_above",), "lowered": ("TameSoftmax.lower",)},
    ),
    "sm_100a": stage_of_any.Ways(
        steps={"searched": ("ScoreRow.search",), "tentative": ("ScoreRow.tentative",)},
        events={"O scaled": ("RowLoop.scale_output",)},
        tried="tentative",
        held=("keep",),
    ),
}


class Stage(stage_of_any.Stage[AttentionProblem, LadderConfig]):
    """A stage of an attention ladder."""

    op = "attention"

    def fitted(self, problem: AttentionProblem) -> Self:
        return self.with_config(self.default.fitted(problem.head_dim, problem.causal))


class Forward(stage_of_any.Stage[AttentionProblem, ForwardConfig]):
    """The production kernel at the top of a ladder, with the config chosen for each problem."""

    op = "attention"

    def fitted(self, problem: AttentionProblem) -> Self:
        return self.with_config(self.choose(problem))

    @property
    def module(self) -> str:
        return f"{stage_of_any.package(self.op, self.arch)}.forward"

    @property
    def class_name(self) -> str:
        return "Forward"

    @property
    def ways(self) -> stage_of_any.Ways:
        return WAYS[self.arch]


_IN_ORDER = LadderConfig(p_in_smem=True)
_ONE_BUFFER = LadderConfig()
_RINGS = LadderConfig(num_stages=2)
_PERSISTENT = LadderConfig(num_stages=2, q_stages=2, own_o=True, dispatch="dynamic")

_P_IN_SMEM = Sm100LadderConfig(p_in_smem=True)
_IN_TMEM = Sm100LadderConfig()
_ROLES = Sm100LadderConfig(num_stages=2)
_TWO_TILES = Sm100LadderConfig(tile_m=256, num_stages=2)
_ASKING = Sm100LadderConfig(tile_m=256, num_stages=2, dispatch="dynamic")

_STAGES = (
    Stage(0, "sm_90a", "in order", "TMA, wgmma, softmax, P by smem, wgmma, each waits", _IN_ORDER),
    Stage(1, "sm_90a", "P in registers", "the softmax leaves P where wgmma reads it", _ONE_BUFFER),
    Stage(2, "sm_90a", "rings", "loads run ahead through rings of K and V", _RINGS),
    Stage(3, "sm_90a", "warp roles", "one warp loads, two warpgroups only compute", _RINGS),
    Stage(4, "sm_90a", "overlap", "the next Q K^T and the last P V under the softmax", _RINGS),
    Stage(5, "sm_90a", "ping-pong", "the warpgroups take turns at the tensor cores", _RINGS),
    Stage(6, "sm_90a", "edges", "only the blocks at an edge are masked", _RINGS),
    Stage(7, "sm_90a", "persistent", "a CTA per SM asks for tiles, longest first", _PERSISTENT),
    Stage(8, "sm_90a", "no maximum", "references need not be maxima, sums tell", _PERSISTENT),
    Forward(9, "sm_90a", "forward", "the kernel behind cutex.flash_attn_func", Sm90ForwardConfig()),
    Stage(0, "sm_100a", "in order", "TMA, tcgen05, softmax, P by smem, each waits", _P_IN_SMEM),
    Stage(1, "sm_100a", "P over S", "P stays in tensor memory, and is read from there", _IN_TMEM),
    Stage(2, "sm_100a", "warp roles", "load, MMA and softmax warps, rings of K and V", _ROLES),
    Stage(3, "sm_100a", "two Q tiles", "one's products under the other's softmax", _TWO_TILES),
    Stage(4, "sm_100a", "edges", "only the blocks at an edge are masked", _TWO_TILES),
    Stage(5, "sm_100a", "threshold", "O is scaled only where a reference moves far", _TWO_TILES),
    Stage(6, "sm_100a", "persistent", "longest first; O leaves under the next tile", _ASKING),
    Stage(7, "sm_100a", "no maximum", "a row is one stream, P leaves in parts", _ASKING),
    Stage(8, "sm_100a", "FMA units", "a quarter of the exponentials without MUFU", _ASKING),
    Forward(
        9, "sm_100a", "forward", "the kernel behind cutex.flash_attn_func", Sm100ForwardConfig()
    ),
)

LADDERS = stage_of_any.Ladders("attention", _STAGES, relatives=True)
stages, stage = LADDERS.stages, LADDERS.stage
