"""The ladder of a reduction: the sum of many numbers, on any arch.

Importing this loads neither torch nor the DSL.
"""

from __future__ import annotations

from cutex.kernels.reduce.config import ReduceConfig
from cutex.problem import stage as stage_of_any
from cutex.problem.reduce import ReduceProblem
from cutex.problem.stage import Ladders, on_each

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
WITH_CLUSTERS = ("sm_90a", "sm_100a", "sm_120a")


class Stage(stage_of_any.Stage[ReduceProblem, ReduceConfig]):
    """A stage of the reduction ladder."""

    op, by_arch = "reduce", False


_TREE = ReduceConfig()
_WIDE = ReduceConfig(512, vectors=4)
_ONCE = ReduceConfig(512, vectors=4, ctas=264)
_CLUSTERS = ReduceConfig(512, vectors=4, ctas=256, cluster=8)

LADDERS: Ladders[Stage] = Ladders(
    "reduction",
    on_each(
        ARCHS,
        Stage(0, "", "interleaved", "a tree in smem, neighbours first", _TREE),
        Stage(1, "", "sequential", "the first half of the threads adds the second", _TREE),
        Stage(2, "", "unrolled", "no loop, and no barrier once a warp is left", _TREE),
        Stage(3, "", "shuffles", "warps add in registers, smem has one word a warp", _TREE),
        Stage(4, "", "vectors", "each thread adds four loads of 16 bytes first", _WIDE),
        Stage(5, "", "one pass", "two CTAs an SM; the last to arrive adds up their sums", _ONCE),
    )
    + on_each(
        WITH_CLUSTERS,
        Stage(6, "", "clusters", "eight CTAs add up in distributed smem first", _CLUSTERS),
    ),
)  # fmt: skip
