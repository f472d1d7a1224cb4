"""The choice of a config for a problem: candidates of its arch, ranked by the cost model.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from cutex.arch import instructions_of
from cutex.kernels.gemm.config import GemmConfig
from cutex.kernels.gemm.sm80 import cost_model as sm80
from cutex.kernels.gemm.sm90 import cost_model as sm90
from cutex.kernels.gemm.sm100 import cost_model as sm100
from cutex.problem.protocol import size_class

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.problem.gemm import GemmProblem

T = TypeVar("T")

# modules of one interface, by the arch of whose tensor core instructions the kernels consist
COST_MODELS: dict[str, Any] = {"sm_80": sm80, "sm_90a": sm90, "sm_100a": sm100}


def rows_class(m: int) -> int:
    """M rounded up to the sizes that configs are chosen for, so that serving compiles few kernels:
    multiples of 16 up to 1024, of 32 up to 2048, of 64 up to 32768, and above that 256 sizes from
    one power of two to the next.

    NOTE: 8 steps cost 1 % in the mean and up to 10 %: tiles that fit the largest M of a class leave
    more SMs idle at others (docs/facts/matmul.md#classes-of-rows).
    """
    power = 1 << (m.bit_length() - 1)
    step = max(16, min(64, power // 32), power // 256)
    return -(-m // step) * step


def sizes_class(mnk: tuple[int, int, int], majors: tuple[bool, bool]) -> tuple[int, int, int]:
    """M, N and K rounded up to the sizes that configs are chosen for: multiples of 8, and the
    number of tokens to its class. That is K in a weight's gradient, where K is contiguous in
    neither matrix (`majors`), otherwise M."""
    m, n, k = (max(8, -(-size // 8) * 8) for size in mnk)
    return (m, n, size_class(k)) if majors == (False, False) else (rows_class(mnk[0]), n, k)


def predictions(
    problem: GemmProblem,
    arch: Arch,
    batch: int = 1,
    majors: tuple[bool, bool] = (True, True),
    bits: int = 16,
    hopeful: bool = False,
    configs: Sequence[GemmConfig] | None = None,
) -> dict[GemmConfig, float]:
    """The microseconds that the model of `arch` predicts for each candidate config (or each config
    given) that can run `batch` of `problem`.

    `majors` says whether K is contiguous in A and in B; `bits` is the size of their elements. K
    counts 2 bytes. `hopeful`: where the model is unsure, count the doubt in a config's favour
    instead of against it."""
    model = COST_MODELS[instructions_of(arch.name)]
    every = model.candidates(problem, arch, majors) if configs is None else configs
    fits = [c for c in every if c.why_not(problem, arch) is None]
    doubt = {"caution": -model.CAUTION} if hopeful and hasattr(model, "CAUTION") else {}
    times = model.predictions(fits, problem, arch, batch, majors, bits, **doubt)
    return dict(zip(fits, times, strict=True))


def ranked(
    problem: GemmProblem,
    arch: Arch,
    batch: int = 1,
    majors: tuple[bool, bool] = (True, True),
    bits: int = 16,
    hopeful: bool = False,
) -> list[GemmConfig]:
    """The candidate configs of `problem`, fastest predicted first."""
    times = predictions(problem, arch, batch, majors, bits, hopeful)
    return sorted(times, key=times.__getitem__)


def shortlist(problem: GemmProblem, arch: Arch, count: int) -> list[GemmConfig]:
    """The first `count` of the ranking, among configs that need no workspace."""
    return [c for c in ranked(problem, arch) if c.workspace is None][:count]


def choose(problem: GemmProblem, arch: Arch) -> GemmConfig:
    """The config that the cost model ranks first."""
    return shortlist(problem, arch, 1)[0]


def cover(times: Sequence[Mapping[T, float]], count: int) -> list[T]:
    """Choose up to `count` configs that together cost little more than the best config of each
    problem.

    `times` holds, for each problem, the microseconds of the configs that can run it. Greedy: each
    config in turn is the one that gains most; at the end every problem has one that can run it.
    ValueError if `count` is too small for that.
    """
    worst = [math.log(100.0)] * len(times)  # where no config found so far can run the problem
    loss = [{c: math.log(us / min(t.values())) for c, us in t.items()} for t in times]
    found: list[T] = []
    for _ in range(count):
        gains: dict[T, float] = {}
        for now, losses in zip(worst, loss, strict=True):
            for config, lost in losses.items():
                if lost < now:
                    gains[config] = gains.get(config, 0.0) + now - lost
        if not gains:
            break
        found.append(max(gains, key=gains.__getitem__))
        worst = [min(now, x.get(found[-1], now)) for now, x in zip(worst, loss, strict=True)]
    if any(now == math.log(100.0) for now in worst):
        raise ValueError(f"{count} kernels are too few for these problems")
    return found
