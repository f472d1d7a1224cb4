"""The ladder of the grouped GEMM, and its problem: groups by a rule, exact on integers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cutex.bench import run as bench
from cutex.kernels.gemm.grouped import LADDERS
from cutex.problem.grouped_gemm import SKEWS, GroupedGemmProblem

STAGES = [stage for arch in LADDERS.archs for stage in LADDERS.stages(arch)]
PROBLEM = GroupedGemmProblem(5, 421, 264, 328, "zipf", init="int")


@pytest.mark.sweep(12)
@pytest.mark.parametrize("stage", STAGES, ids=lambda s: f"{s.arch}-{s.number}")
def test_each_stage_is_exact(stage) -> None:
    skew = SKEWS[stage.number % len(SKEWS)]
    result = bench.run(replace(PROBLEM, skew=skew), stage, "sim")
    assert result.ok, result.message


@pytest.mark.parametrize("skew", SKEWS)
def test_rows_are_shared_out_by_a_rule(skew: str) -> None:
    rows = GroupedGemmProblem(7, 1000, 8, 8, skew).rows
    assert len(rows) == 7 and sum(rows) == 1000 and min(rows) >= 0
    most, least = max(rows), min(rows)
    assert {"even": most - least <= 1, "hot": most == 500, "empty": rows.count(0) == 3}.get(
        skew, most > 300 and least > 40
    )


def test_a_row_of_another_group_is_found() -> None:
    x, w, ends = PROBLEM.inputs()
    (out,) = PROBLEM.outputs()
    starts = [0, *ends.tolist()[:-1]]
    for e, (begin, end) in enumerate(zip(starts, ends.tolist(), strict=True)):
        out[begin:end] = (x[begin:end].float() @ w[e].float().mT).to(out.dtype)
    assert PROBLEM.check(x, w, ends, out).ok
    end = int(ends[1])
    out[end] = (x[end].float() @ w[1].float().mT).to(out.dtype)
    found = PROBLEM.check(x, w, ends, out)
    assert not found.ok and f"out[{end}, 0] of group 2" in found.message
    out[end] = torch.nan
    assert not PROBLEM.check(x, w, ends, out).ok


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"groups": 129}, "groups=129: there may be 1 to 128"),
        ({"n": 12}, "N=12: must be a multiple of 8"),
        ({"skew": "odd"}, "skew 'odd' is not one of even"),
        ({"m": 0}, "M=0: every size must be at least 1"),
    ],
)
def test_a_problem_that_is_none_gets_one_sentence(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(PROBLEM, **given)  # type: ignore[arg-type]
