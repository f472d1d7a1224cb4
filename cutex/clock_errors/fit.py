"""A fit of constants of the clock: `python -m cutex.clock --fit power` or `--fit b200`.

For power, each constant in turn is made larger and smaller, and a change that lowers the mean error
of the rows that are not held out is kept; for a B200, where each try takes seconds, all constants
are moved together. Nothing is written: the output goes into cutex/sim/timing/gpus.py by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from cutex.clock_errors.b200 import B200Error, B200Model, B200Row
from cutex.clock_errors.b200 import errors as b200_errors
from cutex.clock_errors.rows import Error, Summary
from cutex.sim.timing.gpus import Gpu
from cutex.sim.timing.power import clock_ghz
from cutex.sim.timing.trace import Traced

T = TypeVar("T")
POWER = ("limit_w", "idle_w", "flop_pj", "issue_pj", "l2_pj", "hbm_pj", "burst_ghz", "volts_slope")
RATES = (
    "l2_bytes", "l2_copies", "l2_store", "l2_latency", "l2_ahead", "tmem_copy_bytes", "overhead",
)  # fmt: skip
EVERY = 3  # the fit uses one of so many rows of a B200, which is as good as all
ROUNDS = 3
NUDGE = 1.06  # the factor on a constant by which a slope is measured
LONGEST = 0.3  # the longest step of a constant's logarithm
RIDGE = 1.0  # weight that keeps constants which the rows do not determine at their values
STEPS = (0.2, 0.07, 0.025)  # relative changes of a constant
CAP = 0.3  # the relative error as which all larger ones count
SMALL = 50.0  # the start of a constant that is 0


def descend(
    start: Mapping[str, float], loss: Callable[[Mapping[str, float]], float]
) -> dict[str, float]:
    """Return values, found from ``start``, from which no step of any single one lowers ``loss``."""
    best, least = dict(start), loss(start)
    for step in STEPS:
        moved = True
        while moved:
            moved = False
            for name in best:
                for factor in (1 + step, 1 / (1 + step)):
                    tried = {**best, name: best[name] * factor}
                    if (found := loss(tried)) < least - 1e-6:
                        best, least, moved = tried, found, True
    return best


def changed(old: T, values: Mapping[str, Any]) -> T:
    return replace(old, **values)  # type: ignore[type-var]


def mean(values: Iterable[float]) -> float:
    found = [min(abs(v), CAP) for v in values]
    return sum(found) / len(found)


def fit_power(found: Sequence[Error], gpu: Gpu) -> dict[str, float]:
    """Fit the energies to measured clocks; the cycles of ``found`` stay as they are."""
    rows = [e for e in found if not e.row.held_out]

    def loss(values: Mapping[str, float]) -> float:
        board = replace(gpu, power=changed(gpu.power, values))
        return mean([clock_error(e, board) for e in rows])

    start = {name: getattr(gpu.power, name) or SMALL for name in POWER}
    return descend(start, loss)


def clock_error(e: Error, gpu: Gpu) -> float:
    return 1e3 * clock_ghz(e.timed, gpu, e.row.problem.init) / e.row.mhz - 1


def b200_model(traced: Mapping[str, Traced], values: Mapping[str, float]) -> B200Model:
    """A model with other constants, each the GPU's or the model's own."""
    model = B200Model(traced)
    own = {name: value for name, value in values.items() if hasattr(model, name)}
    board = changed(model.gpu, {k: v for k, v in values.items() if k not in own})
    return changed(model, {**own, "gpu": board, "runs": {}})


def fit_b200(rows: Sequence[B200Row], traced: Mapping[str, Traced]) -> dict[str, float]:
    """Fit the rates and latencies of a B200 to the published rows that are not held out."""
    mine = [r for r in rows if not r.held_out][::EVERY]
    model = B200Model(traced)

    def residuals(values: Mapping[str, float]) -> np.ndarray:
        found = b200_errors(mine, b200_model(traced, values))
        return np.array([math.log1p(e.relative) for e in found])

    start = {n: getattr(model if hasattr(model, n) else model.gpu, n) for n in RATES}
    return newton(start, residuals)


def newton(
    start: Mapping[str, float], residuals: Callable[[Mapping[str, float]], np.ndarray]
) -> dict[str, float]:
    """Return values, found from ``start``, at which the mean of the residuals is small, each
    counted as at most ``CAP``: the slope of each residual in each value is measured, and the best
    step of the linear model is taken as far as it helps."""
    best = dict(start)
    at = residuals(best)
    for _ in range(ROUNDS):
        nudged = [residuals({**best, name: best[name] * NUDGE}) for name in best]
        slopes = np.column_stack([(found - at) / math.log(NUDGE) for found in nudged])
        step = np.clip(_least_absolute(slopes, at), -LONGEST, LONGEST)
        for part in (1.0, 0.5, 0.25):
            factors = zip(best, np.exp(part * step), strict=True)
            tried = {name: float(best[name] * factor) for name, factor in factors}
            found = residuals(tried)
            if mean(found) < mean(at) - 1e-5:
                best, at = tried, found
                break
        else:
            break
    return best


def _least_absolute(slopes: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The step that minimizes the mean of ``|at + slopes @ step|``, by iteratively reweighted
    squares."""
    step = np.zeros(slopes.shape[1])
    for _ in range(50):
        left = np.abs(at + slopes @ step)
        weight = np.where(left < CAP, 1.0, 0.1) / np.maximum(left, 0.01)
        square = slopes.T @ (weight[:, None] * slopes)
        square += RIDGE * np.eye(len(step))
        step = np.linalg.solve(square, -slopes.T @ (weight * at))
    return step


def summary(values: Mapping[str, float], held: Sequence[float]) -> str:
    """The constants, and the errors of the rows that were held out."""
    lines = [f"{name:16} {value:.4g}" for name, value in values.items()]
    return "\n".join(
        [*lines, f"held out: rows | median | nine of ten | largest: {Summary.of(held)}"]
    )


def report_power(found: Sequence[Error], gpu: Gpu) -> str:
    values = fit_power(found, gpu)
    board = replace(gpu, power=changed(gpu.power, values))
    return summary(values, [clock_error(e, board) for e in found if e.row.held_out])


def report_b200(rows: Sequence[B200Row], traced: Mapping[str, Traced]) -> str:
    values = fit_b200(rows, traced)
    model = b200_model(traced, values)
    held: list[B200Error] = list(b200_errors([r for r in rows if r.held_out], model))
    return summary(values, [e.relative for e in held])
