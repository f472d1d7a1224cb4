"""Hopper's cost model, judged by what was measured on an H200: results/configs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from cutex.arch import arch
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm90.cost_model import candidates, predict
from cutex.problem.gemm import GemmProblem

H200 = arch("sm_90a")
MEASURED = Path(__file__).parent.parent / "results" / "configs" / "gemm-nvidia-h200.jsonl"
MAJORS = {"forward": (True, True), "dgrad": (True, False), "wgrad": (False, False)}

Times = dict[Sm90Config, float]


@pytest.fixture(scope="module")
def measured() -> list[tuple[dict[str, Any], Times]]:
    """Each problem that was timed, with the configs that are candidates for it."""
    head, *rows = map(json.loads, MEASURED.read_text().splitlines())
    configs = [Sm90Config.from_row(row) for row in head["configs"]]
    found = []
    for row in rows:
        problem, majors = GemmProblem(row["m"], row["n"], row["k"]), MAJORS[row["pass"]]
        allowed = {geometry(c) for c in candidates(problem, H200, majors)}
        times = {configs[int(i)]: us for i, us in row["us"].items()}
        times = {c: us for c, us in times.items() if geometry(c) in allowed}
        if len(times) > 1:
            found.append((row, times))
    return found


def geometry(c: Sm90Config) -> tuple[Any, ...]:
    """A config but for its slots."""
    return (
        *(c.tile_m, c.tile_n, c.tile_k, c.cluster_m, c.cluster_n, c.split_k),
        *(c.swap_ab, c.pingpong, c.columns, c.rows, c.spread),
    )


def chosen(row: dict[str, Any], times: Times) -> Sm90Config:
    problem, majors = GemmProblem(row["m"], row["n"], row["k"]), MAJORS[row["pass"]]
    return min(times, key=lambda c: predict(c, problem, H200, 1, majors))


def test_what_the_model_ranks_first_is_close_to_the_best_that_was_timed(measured) -> None:
    assert len(measured) > 400
    losses = [times[chosen(row, times)] / min(times.values()) - 1 for row, times in measured]
    assert sum(losses) / len(losses) <= 0.02
    assert sum(loss > 0.1 for loss in losses) <= 0.06 * len(losses)


@pytest.mark.parametrize(
    ("least", "most", "mean"),
    [(1, 64, 1.10), (65, 128, 1.10), (129, 384, 1.05), (1025, 1 << 20, 1.0)],
)
def test_the_choice_is_faster_than_others_in_the_mean(measured, least, most, mean) -> None:
    """Than the best of cuBLAS and quack, in the same run."""
    ratios = [
        min(row["others"].values()) / times[chosen(row, times)]
        for row, times in measured
        if least <= row["m"] <= most
    ]
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) >= mean


def test_predicted_times_are_within_a_tenth(measured) -> None:
    """Root mean square, of those that are within a quarter of the best."""
    errors = []
    for row, times in measured:
        problem, majors = GemmProblem(row["m"], row["n"], row["k"]), MAJORS[row["pass"]]
        best = min(times.values())
        errors += [
            math.log(predict(c, problem, H200, 1, majors) / us)
            for c, us in times.items()
            if us < 1.25 * best
        ]
    assert math.sqrt(sum(e * e for e in errors) / len(errors)) <= 0.1
