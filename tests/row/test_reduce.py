"""The reduction ladder: exact on integers, whatever the count, in every order of events."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from cutex.compile import compile
from cutex.kernels.reduce import ARCHS, LADDERS
from cutex.problem.reduce import ReduceProblem
from cutex.sim import simulate

STAGES = LADDERS.stages("sm_90a")
SIZES = (1, 33, 5000, 34_567)


def run(stage, problem, arch="sm_90a", repeats=1, **order):
    """The check of the last of so many runs, which share what the launches pass to each other."""
    kernel = stage.kernel()
    compiled = compile(kernel, problem.dtype, arch)
    names = [x.name for x in kernel.operands(problem.dtype)]
    launch = problem.launcher(partial(simulate, compiled, **order), names)
    for copy in range(repeats):
        tensors = *problem.inputs(copy=copy), *problem.outputs()
        launch(*tensors)
        found = problem.check(*tensors)
        assert found.ok, found.message
    return tensors[-1]


@pytest.mark.sweep(96)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", ReduceProblem.dtypes)
@pytest.mark.parametrize("stage", STAGES, ids=lambda s: str(s.number))
def test_a_stage_is_exact_on_integers(stage, dtype, n):
    run(stage, ReduceProblem(n, dtype, "int"), repeats=2)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("arch", [x for x in ARCHS if x != "sm_90a"])
def test_it_runs_on_any_arch(arch):
    stage = LADDERS.stages(arch)[-1]
    assert stage.number == (5 if arch == "sm_80" else 6)
    run(stage, ReduceProblem(20_003, "fp32", "normal"), arch)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("order, seed", [("random", 1), ("random", 2), ("starved", 0)])
@pytest.mark.parametrize("number", [5, 6])
def test_the_last_to_arrive_has_the_same_bits_in_every_order(number, order, seed):
    problem = ReduceProblem(40_001, "bf16", "normal")
    options = {"order": order, "seed": seed}
    first, other = (run(STAGES[number], problem, **o) for o in ({}, options))
    assert torch.equal(first, other)


def test_a_total_that_misses_one_number_is_refused():
    problem = ReduceProblem(1000, "fp32", "normal")
    (x,) = problem.inputs()
    wanted = x.double().sum().float()[None]
    assert problem.check(x, wanted).ok
    assert not problem.check(x, wanted - x[7]).ok
    assert not problem.check(x, torch.full((1,), torch.nan)).ok


@pytest.mark.parametrize(
    "given, said",
    [({"n": 0}, "N=0: must be from 1"), ({"n": 4, "dtype": "e4m3"}, "dtype 'e4m3' is not one of")],
)
def test_bad_problems_are_one_sentence(given, said):
    with pytest.raises(ValueError, match=said):
        ReduceProblem(**given)
