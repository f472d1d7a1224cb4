"""Hopper's cost model, against measurements on H200s: results/configs."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from cutex.arch import arch
from cutex.dtypes import DTYPES
from cutex.fit import costs as fit
from cutex.fit.trees import grown
from cutex.kernels.gemm.choose import sizes_class
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm90.cost_model import MEASURED as MODEL
from cutex.kernels.gemm.sm90.cost_model import candidates, predictions
from cutex.measured.nearby import file_of
from cutex.measured.trees import trees
from cutex.problem import any_shapes
from cutex.problem.gemm import GemmProblem
from cutex.problem.models import corpus

H200 = arch("sm_90a")
MEASURED = Path(__file__).parents[2] / "results" / "configs" / "gemm-nvidia-h200.jsonl"
MAJORS = {"forward": (True, True), "dgrad": (True, False), "wgrad": (False, False)}

Times = dict[Sm90Config, float]


class Timed(NamedTuple):
    """A problem that was timed, with the microseconds of the candidate configs: measured, and
    predicted by the model."""

    row: dict[str, Any]
    times: Times
    predicted: Times

    @property
    def chosen(self) -> Sm90Config:
        return min(self.predicted, key=self.predicted.__getitem__)


@pytest.fixture(scope="module")
def measured() -> list[Timed]:
    head, *rows = map(json.loads, MEASURED.read_text().splitlines())
    configs = [Sm90Config.from_row(row) for row in head["configs"]]
    found = []
    for row in rows[::14]:
        majors = MAJORS[row["pass"]]
        problem = GemmProblem(*sizes_class(fit.sizes_of(row), majors))  # as the choice sees it
        bits = DTYPES[fit.dtype_of(row)].bits
        allowed = {geometry(c) for c in candidates(problem, H200, majors)}
        times = {configs[int(i)]: us for i, us in row["us"].items()}
        times = {c: us for c, us in times.items() if geometry(c) in allowed}
        if len(times) > 1:
            predicted = predictions(list(times), problem, H200, 1, majors, bits)
            found.append(Timed(row, times, dict(zip(times, predicted, strict=True))))
    return found


def geometry(c: Sm90Config) -> tuple[Any, ...]:
    """A config without its number of slots."""
    return (
        *(c.tile_m, c.tile_n, c.k_bytes, c.cluster_m, c.cluster_n, c.split_k),
        *(c.swap_ab, c.pingpong, c.columns, c.rows, c.spread),
    )


@pytest.mark.slow
def test_what_the_model_ranks_first_is_close_to_the_best_that_was_timed(measured) -> None:
    assert len(measured) > 160
    losses = [x.times[x.chosen] / min(x.times.values()) - 1 for x in measured]
    assert sum(losses) / len(losses) <= 0.02
    assert sum(loss > 0.1 for loss in losses) <= 0.06 * len(losses)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("least", "most", "mean"),
    [(1, 64, 1.10), (65, 128, 1.10), (129, 384, 1.05), (1025, 1 << 20, 1.0)],
)
def test_the_choice_is_faster_than_others_in_the_mean(measured, least, most, mean) -> None:
    """Faster than the best of cuBLAS and quack, in the same run."""
    ratios = [
        min(x.row["others"].values()) / x.times[x.chosen]
        for x in measured
        if least <= x.row["m"] <= most
    ]
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) >= mean


def test_predicted_times_are_within_a_tenth(measured) -> None:
    """The root mean square error of the configs within a quarter of the best."""
    errors = []
    for x in measured:
        best = min(x.times.values())
        errors += [math.log(x.predicted[c] / us) for c, us in x.times.items() if us < 1.25 * best]
    assert math.sqrt(sum(e * e for e in errors) / len(errors)) <= 0.1


@pytest.fixture(scope="module")
def pairs() -> fit.Pairs:
    return fit.read()


@pytest.mark.slow  # reads the measured pairs
def test_what_is_known_of_pairs_is_what_was_measured(pairs: fit.Pairs) -> None:
    """cutex/measured keeps what fit --write makes of results/configs and the present costs."""
    places, errors = fit.known(fit.Model(), trees(MODEL), pairs)
    with np.load(file_of(MODEL)) as file:
        assert np.array_equal(file["places"], places)
        assert np.abs(file["errors"] - errors).max() < 2e-3


@pytest.mark.slow
def test_the_choice_is_good_where_nothing_of_the_problem_was_measured(pairs: fit.Pairs) -> None:
    """Errors of neighbours are those of other problems; the costs were fitted on all of them."""
    verdict = fit.judge(pairs, fit.held_out(fit.Model(), pairs, passes=0))
    found = re.match(r"(\d+) problems: ([\d.]+) times .*?([\d.]+)% below 0.97", verdict)
    assert found is not None, verdict
    assert int(found[1]) > 1000 and float(found[2]) >= 1.09 and float(found[3]) <= 5, verdict


@pytest.mark.slow
def test_the_trees_are_those_that_the_fit_grows(pairs: fit.Pairs) -> None:
    grown, kept = fit.trees_of(fit.Model(), pairs), trees(MODEL)
    assert np.array_equal(grown.features, kept.features)
    assert np.allclose(grown.values, kept.values, atol=1e-5)


def test_trees_find_steps_of_several_features() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 1, (4000, 4))
    y = 0.3 * (x[:, 0] > 0.5) * (x[:, 1] > 0.25) - 0.2 * (x[:, 2] > 0.75)
    found = grown(x, y, np.ones(len(x)))
    others = rng.uniform(0, 1, (500, 4))
    steps = 0.3 * (others[:, 0] > 0.5) * (others[:, 1] > 0.25) - 0.2 * (others[:, 2] > 0.75)
    assert np.sqrt(((found.predict(others) - steps) ** 2).mean()) < 0.04
    assert np.ptp(found.predict(np.full((1, 4), 9.0)) - found.predict(np.full((1, 4), 1.0))) == 0


def test_only_problems_that_are_for_fitting_were_measured() -> None:
    reported = any_shapes.reported().keys()
    rows = [row for file in fit.files() for row in fit.measured_rows(file)[1]]
    names = {f"{r['m']}x{r['n']}x{r['k']} {r['pass']} {r.get('dtype', 'bf16')}" for r in rows}
    fitted = {e.name for dtype in ("bf16", "e4m3") for e in corpus(dtype) if e.fits}
    assert len(rows) > 2000 and len(names & fitted) > 200 and not names & reported
