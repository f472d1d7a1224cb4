"""Constants of the clock, fitted anew: `python -m cutex.clock --fit power` or `--fit b200`.

By turns each constant is made larger and smaller, and what lowers the mean error of the rows that
are not held out is kept. Nothing is written: what it prints goes into cutex/sim/timing/gpus.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from cutex.bench.clock_b200 import B200Error, B200Model, B200Row
from cutex.bench.clock_b200 import errors as b200_errors
from cutex.bench.clock_errors import Error, Summary
from cutex.sim.timing.gpus import Gpu
from cutex.sim.timing.power import clock_ghz
from cutex.sim.timing.trace import Traced

T = TypeVar("T")
POWER = ("limit_w", "idle_w", "flop_pj", "issue_pj", "l2_pj", "hbm_pj", "burst_ghz", "volts_slope")
RATES = ("l2_bytes", "l2_latency", "hbm_latency", "tma_store_bytes", "try_wait")
STEPS = (0.2, 0.07, 0.025)  # relative
CAP = 0.3  # an error counts for no more
SMALL = 50.0  # where a constant of 0 starts


def descend(
    start: Mapping[str, float], loss: Callable[[Mapping[str, float]], float]
) -> dict[str, float]:
    """The values, from ``start``, from which no step of any one lowers ``loss``."""
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


def mean(values: Sequence[float]) -> float:
    return sum(min(abs(v), CAP) for v in values) / len(values)


def fit_power(found: Sequence[Error], gpu: Gpu) -> dict[str, float]:
    """Energies from measured clocks; the cycles of ``found`` are taken as they are."""
    rows = [e for e in found if not e.row.held_out]

    def loss(values: Mapping[str, float]) -> float:
        board = replace(gpu, power=changed(gpu.power, values))
        return mean([clock_error(e, board) for e in rows])

    start = {name: getattr(gpu.power, name) or SMALL for name in POWER}
    return descend(start, loss)


def clock_error(e: Error, gpu: Gpu) -> float:
    return 1e3 * clock_ghz(e.timed, gpu, e.row.problem.init) / e.row.mhz - 1


def fit_b200(rows: Sequence[B200Row], traced: Mapping[str, Traced]) -> dict[str, float]:
    """Rates and latencies of a B200 from the published rows."""
    mine = [r for r in rows if not r.held_out]
    gpu = B200Model(traced).gpu

    def loss(values: Mapping[str, float]) -> float:
        model = B200Model(traced, changed(gpu, values))
        return mean([e.relative for e in b200_errors(mine, model)])

    return descend({name: getattr(gpu, name) for name in RATES}, loss)


def told(values: Mapping[str, float], held: Sequence[float]) -> str:
    """The constants, and the errors of the rows that nothing was fitted to."""
    lines = [f"{name:16} {value:.4g}" for name, value in values.items()]
    return "\n".join(
        [*lines, f"held out: rows | median | nine of ten | largest: {Summary.of(held)}"]
    )


def report_power(found: Sequence[Error], gpu: Gpu) -> str:
    values = fit_power(found, gpu)
    board = replace(gpu, power=changed(gpu.power, values))
    return told(values, [clock_error(e, board) for e in found if e.row.held_out])


def report_b200(rows: Sequence[B200Row], traced: Mapping[str, Traced]) -> str:
    values = fit_b200(rows, traced)
    model = B200Model(traced, changed(B200Model(traced).gpu, values))
    held: list[B200Error] = list(b200_errors([r for r in rows if r.held_out], model))
    return told(values, [e.relative for e in held])
