"""The choice of tiles for the block-scaled GEMM, without the DSL."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cutex.arch import arch
from cutex.clock_errors import b200
from cutex.kernels.gemm.scaled.choose import choose, ranked
from cutex.kernels.gemm.scaled.sm100 import cost_model
from cutex.kernels.gemm.scaled.sm100.config import ScaledTiles
from cutex.kernels.gemm.sm100.cost_model import deepest
from cutex.problem.scaled import BlockScaledProblem

B200 = arch("sm_100a")
LOCKED = replace(
    B200,
    mma_tflops={kind: x * b200.GHZ * 1e9 / B200.clock_hz for kind, x in B200.mma_tflops.items()},
)
OPERANDS = {"fp8": ("e4m3", "e4m3", 32), "nvfp4": ("e2m1", "e2m1", 16)}


@pytest.mark.parametrize("operands", OPERANDS.values())
def test_every_candidate_fits_a_b200(operands) -> None:
    found = cost_model.candidates(B200.name, *operands)
    assert {(c.tile_m, c.pair) for c in found} == {(128, False), (256, True)}
    for config in found:
        assert config.why_not(None, B200) is None
        assert config.num_stages >= 2


def losses(dtype: str) -> list[float]:
    """The time that the width ranked first takes longer than the best one measured, relative, for
    each problem that was held out of every fit: pairs of 256 rows, CUTLASS's kernel."""
    times: dict[tuple[int, int, int], dict[int, float]] = {}
    for row in b200.measured():
        if row.dtype == dtype and row.held_out and (row.tile[0], row.cluster) == (256, (2, 1)):
            times.setdefault(row.mnk, {})[row.tile[1]] = row.us
    pair = ScaledTiles(tile_m=256, epi_n=32, epi_stages=2, pair=True, num_acc=2)
    found = []
    for mnk, of in times.items():
        tiles = {n: deepest(replace(pair.of(*OPERANDS[dtype]), tile_n=n), B200) for n in of}
        first = min(of, key=lambda n: cost_model.predict(tiles[n], mnk, LOCKED))
        found.append(of[first] / min(of.values()) - 1)
    return found


@pytest.mark.parametrize(("dtype", "mean", "most"), [("fp8", 0.018, 0.10), ("nvfp4", 0.01, 0.07)])
def test_widths_ranked_first_are_close_to_the_best_that_a_b200_measured(dtype, mean, most) -> None:
    found = losses(dtype)
    assert len(found) == 22
    assert sum(found) / len(found) <= mean
    assert max(found) <= most


def test_large_products_take_the_widest_tile_and_small_ones_more_ctas() -> None:
    large = choose(BlockScaledProblem(8192, 8192, 4096, "mxfp8"), B200)
    assert (large.tile_m, large.tile_n, large.num_acc, large.overlap) == (256, 256, 2, 12)
    small = choose(BlockScaledProblem(16, 4096, 4096, "nvfp4"), B200)
    assert small.swap_ab and small.tile_n <= 64
    assert small.split_k > 1


def test_fp4_beside_fp8_is_refused_where_tma_cannot_unpack_it() -> None:
    problem = BlockScaledProblem(256, 256, 192, "mxfp8_mxfp4")
    assert ranked(problem, B200) == []
    with pytest.raises(ValueError, match="K=192: elements of 4 bits beside 8-bit ones"):
        choose(problem, B200)
