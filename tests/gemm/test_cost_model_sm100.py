"""The configs of stage 9 on sm_100a and the model that ranks them, without the DSL."""

from __future__ import annotations

import csv
import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from cutex.arch import arch
from cutex.kernels.gemm.choose import choose, ranked
from cutex.kernels.gemm.sm100 import cost_model
from cutex.kernels.gemm.sm100.config import Sm100Config
from cutex.problem.gemm import GemmProblem

B200 = arch("sm_100a")


def chosen(m: int, n: int, k: int) -> tuple[int, int]:
    config = choose(GemmProblem(m, n, k), B200)
    return config.tile_m, config.tile_n


def test_every_candidate_fits_a_b200() -> None:
    for config in cost_model.configs(B200.name):
        assert config.why_not(None, B200) is None
        assert config.num_stages >= 2


@pytest.mark.parametrize("size", [8192, 16384])
def test_large_squares_take_the_tiles_that_share_b(size: int) -> None:
    assert chosen(size, size, size) == (512, 256)


def test_a_square_of_2048_takes_one_wave_of_large_tiles() -> None:
    assert chosen(2048, 2048, 2048) == (256, 256)


def test_a_narrower_tile_fills_the_wave() -> None:
    """74 tiles of 256x224 on 74 pairs, where 256x256 leaves ten of them idle."""
    assert chosen(512, 8192, 5376) == (256, 224)


@pytest.mark.parametrize("m", [1, 16, 64, 128])
def test_few_rows_are_swapped_and_share_k(m: int) -> None:
    config = choose(GemmProblem(m, 8192, 8192), B200)
    assert config.swap_ab and config.split_k > 1
    assert config.tile_n < 2 * max(m, 64)


def test_the_ranking_is_of_what_the_model_expects() -> None:
    problem = GemmProblem(4096, 4096, 4096)
    times = [cost_model.predict(c, problem, B200) for c in ranked(problem, B200)]
    assert times == sorted(times) and times[0] > 0


def test_no_config_is_expected_to_beat_the_tensor_cores() -> None:
    for problem in (GemmProblem(8192, 8192, 4096), GemmProblem(1, 8192, 8192)):
        peak_us = problem.flops / B200.dense_tflops["bf16"] / 1e6
        assert all(
            cost_model.predict(c, problem, B200) > peak_us for c in cost_model.configs(B200.name)
        )


# hbarclay/gemm-model, commit 0de20a8: one B200 with its clock locked, CUTLASS's persistent kernel
# in fp16 with pairs of 256 rows; microseconds by the columns of a tile
MEASURED = Path(__file__).parent / "b200_gemm_1300mhz.csv"
LOCKED = replace(
    B200, mma_tflops={kind: x * 1.3e9 / B200.clock_hz for kind, x in B200.mma_tflops.items()}
)


def fitted_on(mnk: tuple[int, int, int]) -> bool:
    """Whether the model's constants were fitted on this problem."""
    return hashlib.sha256("x".join(map(str, mnk)).encode()).digest()[0] % 2 == 0


def losses() -> dict[tuple[int, int, int], float]:
    """The time that the width ranked first by the model takes longer than the best, relative, by
    problem."""
    found = {}
    for row in csv.DictReader(MEASURED.read_text().splitlines()):
        m, n, k = (int(row[name]) for name in "mnk")
        times = {int(x.removeprefix("us_")): float(us) for x, us in row.items() if "us_" in x}
        pair = Sm100Config(tile_m=256, epi_n=32, epi_stages=2, pair=True, num_acc=2)
        configs = {x: cost_model.deepest(replace(pair, tile_n=x), B200) for x in times}
        problem = GemmProblem(m, n, k, "fp16")
        first = min(times, key=lambda x: cost_model.predict(configs[x], problem, LOCKED))
        found[m, n, k] = times[first] / min(times.values()) - 1
    return found


def test_widths_ranked_first_are_close_to_the_best_that_a_b200_measured() -> None:
    """Judged on problems that were held out of every fit."""
    judged = [loss for mnk, loss in losses().items() if not fitted_on(mnk)]
    assert len(judged) == 15
    assert sum(judged) / len(judged) <= 0.01
    assert max(judged) <= 0.04
