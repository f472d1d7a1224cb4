"""A simulator that is slow is not used: 512x512x512 within a second per stage, once compiled.

CPU time: other processes may hold the cores for a while.
"""

from __future__ import annotations

import time

import pytest

from cutex.compile import compile
from cutex.kernels.gemm import stages
from cutex.problem import GemmProblem
from cutex.sim import simulate

PROBLEM = GemmProblem(512, 512, 512, dtype="bf16", init="int")


@pytest.mark.parametrize(
    "stage",
    [s for arch in ("sm_90a", "sm_100a") for s in stages(arch)],
    ids=lambda s: f"{s.arch}-{s.number}",
)
def test_512_cubed_takes_less_than_a_second(stage):
    kernel = compile(stage.kernel(), "bf16", stage.arch)
    a, b = PROBLEM.inputs()
    times = []
    for _ in range(3):
        c = PROBLEM.output()
        start = time.process_time()
        simulate(kernel, a, b, c)
        times.append(time.process_time() - start)
        if times[-1] < 1:
            break
    assert PROBLEM.check(a, b, c).ok
    assert min(times) < 1
