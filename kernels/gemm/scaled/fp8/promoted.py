"""The choice of a config for products of fp8 whose sums are promoted, but not scaled, after each
128 of K; an epilogue may scale them. Imports neither torch nor the DSL.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from cutex.kernels.gemm.scaled.fp8 import choose
from cutex.kernels.gemm.scaled.fp8.config import PROMOTED, Fp8Config
from cutex.kernels.gemm.scaled.fp8.cost_model import candidates, predict
from cutex.problem.scaled import Fp8Problem

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.kernels.gemm.config import GemmConfig


def predictions(
    sizes: tuple[int, int, int, int], arch: Arch, configs: Iterable[GemmConfig] | None = None
) -> dict[GemmConfig, float]:
    """The predicted microseconds of the best configs, or those given, of a batch of products,
    `sizes` (M, N, K in units of 2 bytes, L)."""
    problem, batch = _problem(sizes), sizes[3]
    if configs is None:
        return _best(problem, arch, batch)
    given = [replace(c, recipe=problem.dtype) for c in configs if isinstance(c, Fp8Config)]
    fits = [c for c in given if c.why_not(problem, arch) is None]  # type: ignore[arg-type]
    found = [replace(c, recipe=PROMOTED) for c in fits]
    return {c: predict(c, problem, arch, batch) for c in found}


def _best(problem: Fp8Problem, arch: Arch, batch: int) -> dict[GemmConfig, float]:
    """The best candidates, and one that fits any call, with their predicted microseconds."""
    tiles = dict.fromkeys(candidates(problem, arch.num_sms, batch, PROMOTED))
    order = sorted(tiles, key=lambda c: predict(c, problem, arch, batch))
    fits = (choose.deepest(c, arch) for c in order)
    found = (c for c in fits if c is not None and c.why_not(problem, arch) is None)  # type: ignore[arg-type]
    some = [
        *islice(found, choose.MOST_RANKED),
        replace(choose.plain(problem, arch), recipe=PROMOTED),
    ]
    return {c: predict(c, problem, arch, batch) for c in dict.fromkeys(some)}


def ranked(sizes: tuple[int, int, int, int], arch: Arch) -> list[GemmConfig]:
    """The best configs for such products, fastest predicted first, and one that fits any call."""
    times = predictions(sizes, arch)
    return sorted(times, key=times.__getitem__)


def _problem(sizes: tuple[int, int, int, int]) -> Fp8Problem:
    """The scaled problem of such sizes, which a model knows."""
    m, n, k, _ = sizes
    return Fp8Problem(m, -(-n // 8) * 8, -(-k // 8) * 16)
