"""The choice of a config for an fp8 problem with factors: candidates, ranked by the cost model.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from cutex.arch import BOARDS
from cutex.arch import arch as arch_named
from cutex.kernels.gemm.choose import rows_class
from cutex.kernels.gemm.scaled.fp8.config import Fp8Config
from cutex.kernels.gemm.scaled.fp8.cost_model import candidates, predict
from cutex.problem.scaled import Fp8Problem

if TYPE_CHECKING:
    from cutex.arch import Arch

DEEPEST = 8  # slots of a ring, beyond which nothing is gained
MOST_RANKED = 12


def deepest(tiles: Fp8Config, arch: Arch) -> Fp8Config | None:
    """`tiles` with as many slots as fit in smem; None if none do."""
    for num_stages in range(DEEPEST, 1, -1):
        found = replace(tiles, num_stages=num_stages)
        if found.why_not(None, arch) is None:
            return found.on(arch.num_sms)
    return None


def ranked(problem: Fp8Problem, arch: Arch, batch: int = 1) -> list[Fp8Config]:
    """The best candidates for `batch` such problems, fastest predicted first, and one that fits any
    call."""
    every = dict.fromkeys(candidates(problem, arch.num_sms, batch))
    order = sorted(every, key=lambda tiles: predict(tiles, problem, arch, batch))
    last = plain(problem, arch)
    fits = (deepest(tiles, arch) for tiles in (*order, last))
    found = (c for c in fits if c is not None and c.why_not(problem, arch) is None)  # type: ignore[arg-type]
    return list(dict.fromkeys((*islice(found, MOST_RANKED), last)))


def plain(problem: Fp8Problem, arch: Arch) -> Fp8Config:
    """The config that fits any call."""
    tiles = deepest(
        Fp8Config(tile_m=128, tile_n=128, warpgroups=2, epi_n=32, epi_stages=1, num_stages=2,
                  recipe=problem.dtype), arch)  # fmt: skip
    assert tiles is not None  # on any board
    return tiles


def shortlist(problem: Fp8Problem, arch: Arch, count: int) -> list[Fp8Config]:
    """The first `count` of the ranking."""
    return ranked(problem, arch)[:count]


def choose(problem: Fp8Problem, arch: Arch) -> Fp8Config:
    """The config that the cost model ranks first."""
    return ranked(problem, arch)[0]


def configs_for(
    mnk: tuple[int, int, int], recipe: str, batch: int = 1, board: str = ""
) -> list[Fp8Config]:
    """The ranking for calls of these sizes, which are rounded up to classes, so that few kernels
    serve all M. board: one of BOARDS, if the GPU is not on the arch's usual board."""
    m, n, k = mnk
    n, k = -(-n // 8) * 8, -(-k // 16) * 16
    problem = Fp8Problem(rows_class(m), n, k, dtype=recipe)
    return ranked(problem, BOARDS[board] if board else arch_named("sm_90a"), batch)
