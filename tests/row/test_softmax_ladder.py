"""The softmax ladder: right on each family of data and any length, in every order of events."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest
import torch

import cutex
from cutex.compile import compile
from cutex.kernels.softmax import ARCHS, LADDERS
from cutex.problem.softmax import SoftmaxProblem
from cutex.sim import simulate

STAGES = LADDERS.stages("sm_90a")


def run(stage, problem, x=None, **order) -> torch.Tensor:
    """The results, checked, of one launch."""
    kernel = stage.fitted(problem).kernel()
    compiled = compile(kernel, problem.dtype, stage.arch)
    inputs, outputs = problem.inputs() if x is None else (x,), problem.outputs()
    simulate(compiled, *inputs, *outputs, **order)
    found = problem.check(*inputs, *outputs)
    assert found.ok, found.message
    return outputs[0]


@pytest.mark.sweep(48)
@pytest.mark.parametrize("columns", [1, 33, 1024, 3001])
@pytest.mark.parametrize("dtype", SoftmaxProblem.dtypes)
@pytest.mark.parametrize("stage", STAGES, ids=lambda s: str(s.number))
def test_a_stage_is_right(stage, dtype, columns):
    run(stage, SoftmaxProblem(3, columns, dtype))


@pytest.mark.parametrize("stage", STAGES, ids=lambda s: str(s.number))
def test_wherever_a_hot_score_is_and_whatever_is_infinite(stage):
    problem = SoftmaxProblem(4, 700, "fp32", "hot")
    (x,) = problem.inputs()
    x[0, :600] = -torch.inf
    x[1], x[1, 699] = -1e30, 1e30
    run(stage, problem, x)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("arch", [x for x in ARCHS if x != "sm_90a"])
def test_it_runs_on_any_arch(arch):
    stage = LADDERS.stages(arch)[-1]
    assert stage.number == (3 if arch == "sm_80" else 4)
    run(stage, SoftmaxProblem(2, 2000, "fp16"))


@pytest.mark.parametrize("order, seed", [("random", 1), ("starved", 0), ("peer-late", 0)])
def test_ctas_that_share_a_row_meet_in_every_order(order, seed):
    problem = SoftmaxProblem(2, 9001, "bf16")
    assert STAGES[4].fitted(problem).default.ctas > 1
    run(STAGES[4], problem, order=order, seed=seed)


def test_a_wrong_result_is_refused():
    problem = SoftmaxProblem(2, 50)
    (x,) = problem.inputs()
    y = x.double().softmax(-1).bfloat16()
    assert problem.check(x, y).ok
    for wrong in (y[1, 7] * 1.02, torch.nan):
        spoilt = y.clone()
        spoilt[1, 7] = wrong
        assert problem.check(x, spoilt).message.startswith("y[1, 7] is")


def test_a_row_that_no_cta_holds_is_one_sentence():
    problem = SoftmaxProblem(1, 200_000)
    with pytest.raises(ValueError, match="does not fit into the registers of 1 CTA"):
        STAGES[3].fitted(problem)
    assert STAGES[2].fitted(problem).default.vectors == 4


def test_the_command_does_not_hide_the_function():
    """Importing a module makes it an attribute of its package, which torch.compile cannot call."""
    assert import_module("cutex.softmax").main is not None
    assert inspect.isfunction(cutex.softmax)
    x = torch.zeros(2, 4)
    with cutex.ops.simulated("sm_90a"):
        assert torch.equal(cutex.softmax(x), x + 0.25)


@pytest.mark.parametrize(
    "given, said",
    [((0, 4), "rows=0: every size"), ((1, 4, "e4m3"), "dtype 'e4m3' is not one of")],
)
def test_bad_problems_are_one_sentence(given, said):
    with pytest.raises(ValueError, match=said):
        SoftmaxProblem(*given)
