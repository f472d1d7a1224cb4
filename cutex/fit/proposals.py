"""Proposals of (problem, config) pairs whose timing would most improve Hopper's cost model.

A problem is worth timing if a config that was not timed on it might be faster than today's choice:
if it is by the model where doubt counts for a config instead of against it
(cutex/measured/nearby.py).
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cutex.arch import arch
from cutex.bench.progress import progress
from cutex.fit import costs as fit
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm90.cost_model import candidates, predictions
from cutex.measured.nearby import CAUTION
from cutex.ops.matmul.arrange import Arranged, arrange
from cutex.ops.matmul.checks import Call, check
from cutex.ops.matmul.choices import CallClass
from cutex.ops.matmul.plan import bits_of, call_class, config_for, fitted, majors_of, problem_of
from cutex.problem.models import DTYPES, Entry, corpus, fitting

ARCH = "sm_90a"
LOOKED_AT = 4  # problems that are looked at for each that is proposed
SLOWER = 1.01  # times the choice, of a config that is worth timing if doubt counts for it


@dataclass(frozen=True)
class Proposal:
    """A problem, its choice and other configs to time, the most promising first."""

    entry: Entry
    choice: Sm90Config
    others: list[Sm90Config]
    promise: float  # logarithm of the choice's time over the shortest that is thinkable


def proposals(count: int, seed: int, most: int) -> list[Proposal]:
    """`count` problems of the fitting half with up to `most` configs each, sampled by `seed`: half
    of them at random, half because they promise most; as many of each dtype."""
    known = timed()
    found: list[Proposal] = []
    each = max(1, count // len(DTYPES))
    with progress("problems are looked at", LOOKED_AT * each * len(DTYPES)) as step:
        for dtype in DTYPES:
            reported = {e.name for e in corpus(dtype) if not e.fits}
            every = {n: e for n, e in sorted(fitting(dtype).items()) if n not in reported}
            rng = random.Random(f"{seed} {dtype}")
            names = rng.sample(list(every), min(LOOKED_AT * each, len(every)))
            of_dtype = []
            for name in names:
                if proposal := propose(every[name], known.get(name, ()), most):
                    of_dtype.append(proposal)
                step()
            of_dtype.sort(key=lambda p: -p.promise)
            best, rest = of_dtype[: each // 2], of_dtype[each // 2 :]
            found += best + rng.sample(rest, min(each - len(best), len(rest)))
    return found


def propose(entry: Entry, known: Collection[tuple[Any, ...]], most: int) -> Proposal | None:
    """The configs to time on a problem, of which those of the geometries `known` were timed; None
    if none promises anything."""
    found, calls = arranged(*entry.problem.inputs("meta"), *entry.problem.outputs("meta"))
    choice = config_for(found.sizes, (found.a, found.b, found.out), found.ops, ARCH).tiles
    assert isinstance(choice, Sm90Config)
    hoped = predicted(calls, -CAUTION)
    feared = predicted(calls, CAUTION)
    alike = [us for c, us in feared.items() if fit.geometry(c) == fit.geometry(choice)]
    of_choice = min(alike or feared.values())
    untimed = [c for c in hoped if fit.geometry(c) not in known and c != choice]
    others = [c for c in untimed if hoped[c] <= SLOWER * of_choice][: most - 1]
    if not others:
        return None
    return Proposal(entry, choice, others, math.log(of_choice / hoped[others[0]]))


def arranged(a: Tensor, b: Tensor, out: Tensor) -> tuple[Arranged, CallClass]:
    """The call out = a @ b as the kernel takes it, and the class of its choice."""
    call = Call(a, b, out_dtype=out.dtype)
    check(call)
    found = arrange(call, out, ARCH)
    return found, call_class(found.sizes, (found.a, found.b, found.out), found.ops, ARCH)


def predicted(calls: CallClass, caution: float) -> dict[Sm90Config, float]:
    """The microseconds of the configs that can run `calls`, the fastest first."""
    problem, majors, target = problem_of(calls), majors_of(calls), arch(ARCH)
    every = candidates(problem, target, majors)
    fits = [c for c in every if c.why_not(problem, target) is None and fitted(c, calls)]
    times = predictions(fits, problem, target, 1, majors, bits_of(calls), caution)
    return dict(sorted(zip(fits, times, strict=True), key=lambda pair: pair[1]))


def timed() -> Mapping[str, set[tuple[Any, ...]]]:
    """The geometries of the configs that were timed, by the problem's name."""
    configs, rows = fit.measured_rows()
    found: dict[str, set[tuple[Any, ...]]] = defaultdict(set)
    for row in rows:
        m, n, k, direction, dtype = fit.problem_of(row)
        name = f"{m}x{n}x{k} {direction} {dtype}"
        found[name].update(fit.geometry(configs[int(i)]) for i in row["us"])
    return found
