"""A simulator that is slow is not used: 512x512x512 within a second per stage, once compiled.

CPU time: other processes may hold the cores for a while. They also slow the code that runs beside
them, and machines differ; so a second is scaled by the time of a Python loop relative to the
machine on which it was set.
"""

from __future__ import annotations

import time

import pytest

from cutex.compile import compile
from cutex.kernels.gemm import stage, stages
from cutex.problem.gemm import GemmProblem
from cutex.sim import simulate

PROBLEM = GemmProblem(512, 512, 512, dtype="bf16", init="int")
LOOP_SECONDS = 0.06  # of `loop` where the second was set


def loop() -> float:
    """CPU seconds of a million steps of plain Python."""
    start, total = time.process_time(), 0
    for i in range(1_000_000):
        total += i * i % 7
    return time.process_time() - start


IN_CI = (0, 3, 5, 8, 9)  # the stages between run the instructions of these


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(
            s, id=f"{s.arch}-{s.number}", marks=() if s.number in IN_CI else pytest.mark.slow
        )
        for arch in ("sm_90a", "sm_100a")
        for s in stages(arch)
    ],
)
def test_512_cubed_takes_less_than_a_second(stage):
    kernel = compile(stage.kernel(), "bf16", stage.arch)
    a, b = PROBLEM.inputs()
    seconds = []
    for _ in range(5):
        c = PROBLEM.output()
        before = loop()
        start = time.process_time()
        simulate(kernel, a, b, c)
        took = time.process_time() - start
        seconds.append(took / max(1.0, (before + loop()) / 2 / LOOP_SECONDS))
        if seconds[-1] < 1:
            break
    assert PROBLEM.check(a, b, c).ok
    assert min(seconds) < 1


@pytest.mark.slow
def test_looking_for_races_costs_less_than_as_much_again():
    """The best of several runs, in turns, so that other work of the machine affects both."""
    kernel = compile(stage("sm_100a", 6).kernel(), "bf16", "sm_100a")
    a, b = PROBLEM.inputs()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for checks in [True, False] * 3:
        start = time.process_time()
        simulate(kernel, a, b, PROBLEM.output(), checks=checks)
        seconds[checks].append(time.process_time() - start)
    assert min(seconds[True]) < 2 * min(seconds[False])
