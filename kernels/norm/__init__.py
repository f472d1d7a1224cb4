"""The ladder of an RMS norm of rows, on any arch.

Importing this loads neither torch nor the DSL.
"""

from __future__ import annotations

from typing import Any, Self

from cutex.arch import arch
from cutex.kernels.norm.config import WholeConfig
from cutex.kernels.row.ladder import PassesConfig
from cutex.problem import stage as stage_of_any
from cutex.problem.norm import NormProblem
from cutex.problem.stage import Ladders, on_each

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
WITH_CLUSTERS = ("sm_90a", "sm_100a", "sm_120a")


class Stage(stage_of_any.Stage[NormProblem, Any]):
    """A stage of the norm ladder."""

    op, by_arch = "norm", False

    def fitted(self, problem: NormProblem) -> Self:
        return self.with_config(self.default.fitted(problem, arch(self.arch)))


_WHOLE = WholeConfig(clusters=False)

LADDERS: Ladders[Stage] = Ladders(
    "RMS norm",
    on_each(
        ARCHS,
        Stage(0, "", "two passes", "the sum of squares, then the results", PassesConfig()),
        Stage(1, "", "vectors", "four loads of 16 bytes a thread", PassesConfig(vectors=4)),
        Stage(2, "", "registers", "a row is read once, and kept by its CTA", _WHOLE),
    )
    + on_each(
        WITH_CLUSTERS,
        Stage(3, "", "clusters", "CTAs share rows, as in cutex.rms_norm", WholeConfig()),
    ),
)
