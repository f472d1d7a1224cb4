from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cutex.problem.gemm import DTYPES, INITS, GemmProblem

SMALL = {"m": 200, "n": 136, "k": 72}


def solved(problem: GemmProblem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b = problem.inputs()
    c = problem.output()
    c.copy_(a @ b.T)
    return a, b, c


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("init", INITS)
def test_torchs_own_product_passes_the_check(dtype, init):
    problem = GemmProblem(**SMALL, dtype=dtype, init=init)
    check = problem.check(*solved(problem))
    assert check.ok, check.message
    assert check.max_error <= check.tolerance


def test_flops_and_bytes_are_those_of_the_definition():
    problem = GemmProblem(8192, 4096, 1024)
    assert problem.flops == 2 * 8192 * 4096 * 1024
    assert problem.bytes == 2 * (8192 * 1024 + 4096 * 1024 + 8192 * 4096)


@pytest.mark.parametrize("init", INITS)
def test_the_seed_fixes_the_inputs_and_a_copy_changes_them(init):
    def draw(copy: int = 0, seed: int = 0) -> list[torch.Tensor]:
        return list(GemmProblem(**SMALL, init=init, seed=seed).inputs(copy=copy))

    def same(x: list[torch.Tensor], y: list[torch.Tensor]) -> bool:
        return all(map(torch.equal, x, y))

    assert same(draw(), draw())
    if init != "zeros":
        assert not same(draw(), draw(copy=1))
        assert not same(draw(), draw(seed=1))


@given(st.integers(0, 2**31), st.integers(0, 100))
def test_integers_are_whole_and_small(seed, copy):
    a, b = GemmProblem(8, 8, 8, init="int", seed=seed).inputs(copy=copy)
    for x in (a, b):
        assert torch.equal(x, x.round())
        assert x.abs().max() <= 2


@pytest.mark.parametrize("init", INITS)
def test_an_unwritten_element_is_named(init):
    problem = GemmProblem(**SMALL, init=init)
    a, b, c = solved(problem)
    c[130, 7] = torch.nan
    check = problem.check(a, b, c, tile=(128, 64))
    assert not check.ok
    assert math.isnan(check.max_error)
    assert "C[130, 7] (tile 1, 0) is NaN" in check.message
    assert "1 of 27200 elements" in check.message


def test_an_untouched_output_fails():
    problem = GemmProblem(**SMALL)
    assert not problem.check(*problem.inputs(), problem.output()).ok


@pytest.mark.parametrize("init", ["int", "normal", "uniform", "zeros"])
def test_the_first_bad_coordinate_is_named(init):
    problem = GemmProblem(**SMALL, init=init)
    a, b, c = solved(problem)
    c[3, 130] += 3
    c[150, 0] += 3
    check = problem.check(a, b, c, tile=(128, 128))
    assert not check.ok
    assert "C[3, 130] (tile 0, 1)" in check.message
    assert "2 of 27200 elements" in check.message
    assert check.max_error > check.tolerance


@pytest.mark.parametrize("init", ["int", "normal"])
def test_a_dropped_k_slice_fails(init):
    problem = GemmProblem(**SMALL, init=init)
    a, b, c = solved(problem)
    c.copy_(a[:, :-1] @ b[:, :-1].T)
    assert not problem.check(a, b, c).ok


def test_an_error_spread_below_the_largest_is_still_found():
    problem = GemmProblem(512, 512, 512)
    a, b, c = solved(problem)
    largest = (c.double() - a.double() @ b.double().T).abs().max()
    c += (torch.rand(c.shape) < 0.5) * largest * 0.9
    check = problem.check(a, b, c)
    assert not check.ok


def test_integer_products_are_exact_at_the_largest_sizes_timed():
    problem = GemmProblem(8, 8, 1 << 16, init="int")
    a, b = problem.inputs()
    exact = a.double() @ b.double().T
    assert torch.equal(a.float() @ b.float().T, exact.float())
