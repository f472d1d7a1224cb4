"""The choice of a config for a block-scaled problem: candidates, ranked by the cost model.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutex.kernels.gemm.scaled.sm100 import cost_model
from cutex.kernels.gemm.scaled.sm100.config import ScaledTiles

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.problem.scaled import BlockScaledProblem


def ranked(problem: BlockScaledProblem, arch: Arch) -> list[ScaledTiles]:
    """The candidate configs of `problem`, fastest predicted first."""
    a, b = problem.recipe
    found = ranked_for(problem.mnk, (a.element, b.element, a.block[1]), arch)
    return [c for c in found if c.why_not_problem(problem, arch) is None]


def ranked_for(
    mnk: tuple[int, int, int], operands: tuple[str, str, int], arch: Arch, batch: int = 1
) -> list[ScaledTiles]:
    """The candidate configs of `batch` products (M, N, K) of `operands`: dtypes of A and of B, and
    the elements that share a factor; fastest predicted first."""
    found = cost_model.candidates(arch.name, *operands)
    return sorted(found, key=lambda c: cost_model.predict(c, mnk, arch, batch))


def shortlist(problem: BlockScaledProblem, arch: Arch, count: int) -> list[ScaledTiles]:
    """The first `count` of the ranking."""
    return ranked(problem, arch)[:count]


def choose(problem: BlockScaledProblem, arch: Arch) -> ScaledTiles:
    """The config that the cost model ranks first; ValueError if none takes the problem."""
    found = ranked(problem, arch)
    if not found:
        a, b = problem.recipe
        of = cost_model.candidates(arch.name, a.element, b.element, a.block[1])[0]
        raise ValueError(of.why_not_problem(problem, arch))
    return found[0]
