"""The ladder of a softmax of rows, on any arch.

Importing this loads neither torch nor the DSL.
"""

from __future__ import annotations

from typing import Any, Self

from cutex.arch import arch
from cutex.kernels.row.ladder import PassesConfig, WholeConfig
from cutex.problem import stage as stage_of_any
from cutex.problem.softmax import SoftmaxProblem
from cutex.problem.stage import Ladders, on_each

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
WITH_CLUSTERS = ("sm_90a", "sm_100a", "sm_120a")


class Stage(stage_of_any.Stage[SoftmaxProblem, Any]):
    """A stage of the softmax ladder."""

    op, by_arch = "softmax", False

    def fitted(self, problem: SoftmaxProblem) -> Self:
        return self.with_config(self.default.fitted(problem, arch(self.arch)))


_WHOLE = WholeConfig(clusters=False)

LADDERS: Ladders[Stage] = Ladders(
    "softmax",
    on_each(
        ARCHS,
        Stage(0, "", "three passes", "the maximum, the sum, then the results", PassesConfig()),
        Stage(1, "", "online", "maximum and sum in one pass, rescaled as it grows", PassesConfig()),
        Stage(2, "", "vectors", "four loads of 16 bytes a thread", PassesConfig(vectors=4)),
        Stage(3, "", "registers", "a row is read once, and kept by its CTA", _WHOLE),
    )
    + on_each(
        WITH_CLUSTERS,
        Stage(4, "", "clusters", "the kernel behind cutex.softmax: CTAs share rows", WholeConfig()),
    ),
)
