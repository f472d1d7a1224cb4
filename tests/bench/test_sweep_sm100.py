"""Forty randomized problems for each of the upper stages of sm_100a, each in five random orders.

pytest -m slow tests/bench/test_sweep_sm100.py            all: 24 minutes
pytest -m slow tests/bench/test_sweep_sm100.py -k stage6  a part: or "stage6 and bf16 and seed0"
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cutex.arch import arch
from cutex.compile import compile
from cutex.kernels.gemm import Stage, stages
from cutex.kernels.gemm.config import GemmConfig
from cutex.kernels.gemm.sm100 import cost_model
from cutex.kernels.gemm.sm100.config import Sm100Config
from cutex.problem.gemm import DTYPES, GemmProblem
from cutex.sim import simulate

B200 = arch("sm_100a")
UPPER = [s for s in stages(B200.name) if s.number >= 4]
PROBLEMS, SEEDS = 40, 5

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def only_when_asked_for(request: pytest.FixtureRequest) -> None:
    if "slow" not in request.config.option.markexpr:
        pytest.skip("takes 24 minutes: pytest -m slow")


def randomized(seed: int, dtype: str) -> GemmProblem:
    """Draw sizes of one tile and of many, most of them odd; every fourth on Gaussian data."""
    r = random.Random(f"{seed} {dtype}")
    m = r.choice([r.randint(1, 128), r.randint(129, 700), 256 * r.randint(1, 3)])
    n = 8 * r.choice([r.randint(1, 16), r.randint(17, 90), 32 * r.randint(1, 3)])
    k = r.choice([8 * r.randint(1, 8), 64 * r.randint(1, 10), 8 * r.randint(9, 80)])
    init = "normal" if seed % 4 == 3 else "int"
    return GemmProblem(m, n, k, dtype=dtype, init=init, seed=seed)


def config_for(stage: Stage, seed: int) -> GemmConfig:
    """The stage's own config; for a persistent grid with few CTAs; for stage 9 any of the space."""
    if stage.chooses:
        return random.Random(seed).choice(cost_model.configs(B200.name))
    own = stage.config()
    return replace(own, num_ctas=4) if isinstance(own, Sm100Config) and own.num_acc > 1 else own


@pytest.mark.parametrize("seed", range(SEEDS), ids=lambda s: f"seed{s}")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", UPPER, ids=lambda s: f"stage{s.number}")
def test_randomized_problems_come_out_right_in_any_order(
    stage: Stage, dtype: str, seed: int
) -> None:
    for number in range(PROBLEMS):
        problem, config = randomized(number, dtype), config_for(stage, number)
        compiled = compile(stage.kernel(config), dtype, stage.arch)
        a, b = problem.inputs()
        c = problem.output()
        report = simulate(compiled, a, b, c, order="random", seed=seed)
        found = problem.check(a, b, c, tile=(config.tile_m, config.tile_n))
        assert found.ok and not report.findings, f"{problem}, {config}: {found.message}"
