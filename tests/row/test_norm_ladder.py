"""The ladder of an RMS norm: right on each family of data and any length, in every order."""

from __future__ import annotations

import pytest
import torch

from cutex.compile import compile
from cutex.kernels.norm import ARCHS, LADDERS
from cutex.kernels.row import choose
from cutex.ops.row.rows import tile_of
from cutex.problem.norm import EPS, NormProblem
from cutex.sim import simulate

STAGES = LADDERS.stages("sm_90a")


def run(stage, problem, x=None, **order) -> torch.Tensor:
    """The results, checked, of one launch."""
    compiled = compile(stage.fitted(problem).kernel(), problem.dtype, stage.arch)
    given, weight = problem.inputs()
    (y,) = problem.outputs()
    x = given if x is None else x

    def launch(*operands):
        simulate(compiled, *operands, **order)

    names = ("x", "y", "weight", "eps")
    problem.launcher(launch, names)(x, weight, y)
    found = problem.check(x, weight, y)
    assert found.ok, found.message
    return y


@pytest.mark.sweep(240)
@pytest.mark.parametrize("init", NormProblem.inits)
@pytest.mark.parametrize("columns", [1, 33, 1024, 3001])
@pytest.mark.parametrize("dtype", NormProblem.dtypes)
@pytest.mark.parametrize("stage", STAGES, ids=lambda s: str(s.number))
def test_a_stage_is_right(stage, dtype, columns, init):
    run(stage, NormProblem(3, columns, dtype, init))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("arch", [x for x in ARCHS if x != "sm_90a"])
def test_it_runs_on_any_arch(arch):
    stage = LADDERS.stages(arch)[-1]
    assert stage.number == (2 if arch == "sm_80" else 3)
    run(stage, NormProblem(2, 1002, "fp16"))


@pytest.mark.slow
@pytest.mark.parametrize("order, seed", [("random", 1), ("starved", 0), ("peer-late", 0)])
def test_ctas_that_share_a_row_meet_in_every_order(order, seed):
    problem = NormProblem(2, 9001, "bf16")
    assert STAGES[3].fitted(problem).default.ctas > 1
    run(STAGES[3], problem, order=order, seed=seed)


@pytest.mark.parametrize("columns", [64, 4104, 9001, 50264])
def test_the_last_stage_has_the_tile_of_the_function(columns):
    problem = NormProblem(2, columns)
    x, weight = problem.inputs()
    how = {"wide": choose.NORM_WIDE, "least": choose.LEAST_THREADS, "in_warp": choose.IN_WARP}
    wanted = tile_of((x, torch.empty_like(x)), (weight,), "sm_90a", **how)
    assert STAGES[3].fitted(problem).default.tile == wanted


def test_a_wrong_result_is_refused():
    problem = NormProblem(2, 50)
    x, weight = problem.inputs()
    wide = x.double()
    y = (wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()).bfloat16()
    assert problem.check(x, weight, y).ok
    for wrong in (y[1, 7] * 1.02, torch.nan):
        spoilt = y.clone()
        spoilt[1, 7] = wrong
        assert problem.check(x, weight, spoilt).message.startswith("y[1, 7] is")
