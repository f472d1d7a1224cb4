"""Attention of values that break shortcuts, on every arch: 200 randomized calls of each."""

from __future__ import annotations

import pytest
from flash_attn_calls import call
from spoiled_values import SPOILS, fault, name_of, spoil, spoiled_case

import cutex
from cutex.arch import ARCHS, local_arch

KERNELS, CASES = 20, 10
# the first always runs: a kernel of head dim 64, quick to compile
ORDER = (9, *(k for k in range(KERNELS) if k != 9))
SEEDS = [(kernel, 7000 + CASES * kernel + n) for kernel in ORDER for n in range(CASES)]


@pytest.mark.sweep(1000)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("kernel", "seed"), SEEDS)
def test_two_hundred_calls_of_spoiled_values(arch, kernel, seed):
    here = local_arch()
    if here is not None and here.name == arch:
        case = spoiled_case(seed, 11, 2**30, kernel)
        inputs = case.inputs("cuda")
        spoil(case, inputs)
        out, lse = call(case, inputs)
    else:
        case = spoiled_case(seed, 8, 2**21, kernel)
        inputs = case.inputs()
        spoil(case, inputs)
        with cutex.ops.simulated(arch):
            out, lse = call(case, inputs)
    found = fault(case, inputs, out, lse)
    assert not found, f"{case}: {found}"


def test_all_values_are_drawn():
    assert {name_of(seed) for _, seed in SEEDS} == set(SPOILS)
