"""The tile of a norm that keeps its rows in registers. Loads no DSL."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from cutex.kernels.row import ladder

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.problem.rows import RowProblem


@dataclass(frozen=True)
class WholeConfig(ladder.WholeConfig):
    """A tile that holds its rows in registers, and the weight's dtype."""

    weight: str = "bf16"
    shared = True

    def fitted(self, problem: RowProblem, arch: Arch) -> Self:
        return replace(super().fitted(problem, arch), weight=problem.dtype)
