"""The choice of a config for a problem: candidates of its arch, ranked by the cost model.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutex.kernels.gemm.config import GemmConfig
from cutex.kernels.gemm.sm90 import cost_model as sm90
from cutex.kernels.gemm.sm100 import cost_model as sm100

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.problem.gemm import GemmProblem

COST_MODELS: dict[str, Any] = {"sm_90a": sm90, "sm_100a": sm100}  # modules that are alike


def ranked(problem: GemmProblem, arch: Arch, batch: int = 1) -> list[GemmConfig]:
    """All candidates that can run `batch` of `problem`, by the model of `arch`, best first."""
    model = COST_MODELS[arch.name]
    fits = [c for c in model.candidates(problem, arch) if c.why_not(problem, arch) is None]
    return sorted(fits, key=lambda c: model.predict(c, problem, arch, batch))


def shortlist(problem: GemmProblem, arch: Arch, count: int) -> list[GemmConfig]:
    """The first `count` of the ranking that are worth a try: of those that differ only in how a CTA
    finds its tile, the first."""
    model = COST_MODELS[arch.name]
    fits = ranked(problem, arch)
    known = set(fits)
    best = [next(variant for variant in model.variants(c) if variant in known) for c in fits]
    return list(dict.fromkeys(best))[:count]


def choose(problem: GemmProblem, arch: Arch) -> GemmConfig:
    """The model's best."""
    return ranked(problem, arch)[0]
