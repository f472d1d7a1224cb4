"""No finding above an advisory in correct kernels: 200 randomized problems, in turns on both archs,
of matmul and of attention, in every order of events.

    pytest -m slow tests/bench/test_no_false_alarm.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_attention import SIMULATOR, hold

import cutex
from cutex import ops
from cutex.problem import matmul
from cutex.problem.attention import randomized

ARCHS = ("sm_90a", "sm_100a")
ORDERS = (
    {}, {"order": "eager"}, {"order": "starved", "seed": 1}, {"order": "starved", "seed": 6},
    {"order": "peer-late"}, {"order": "peer-late", "seed": 1}, {"order": "elected", "seed": 9},
    {"order": "random", "seed": 1}, {"order": "random", "seed": 2},
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("number", range(200))
def test_a_randomized_problem_is_right_and_has_no_finding(number: int) -> None:
    arch, order = ARCHS[number % 2], ORDERS[number // 4 % len(ORDERS)]
    if number % 4 < 2:
        problem = matmul.draw(5000 + number)
        with ops.simulated(arch, **order):
            wrong = problem.run("cpu", cutex.matmul)
        assert wrong is None, f"{wrong}: {problem}"
    else:
        case = randomized.draw(6000 + number, largest=7.5, most_work=SIMULATOR.most_work)
        hold(replace(SIMULATOR, arch=arch), case, **order)
