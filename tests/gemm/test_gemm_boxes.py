"""Tiles that are loaded in boxes, of which none lies outside of its operand."""

from __future__ import annotations

import pytest

from cutex.arch import arch
from cutex.kernels.gemm.sm90.config import Sm90Config, box_rows
from cutex.ops import simulated
from cutex.ops.device import launcher
from cutex.ops.matmul.arrange import arrange
from cutex.ops.matmul.checks import Call
from cutex.ops.matmul.plan import call_class, fitted, kernel_for
from cutex.problem.layer import LayerProblem

ARCH = "sm_90a"
SLOW = pytest.mark.slow
TILES = Sm90Config(tile_n=128, num_stages=3, epi_n=64, epi_stages=1, warpgroups=2)
SMALL = {"tile_m": 64, "warpgroups": 1, "swap_ab": True}
# tokens, out and in features, the pass, the dtype, the rows of a box, and further fields
CASES = {
    "whole rows": ((200, 136, 200), "forward", "bf16", 64, {}),
    "2x1": ((200, 136, 200), "forward", "bf16", 32, {"cluster_m": 2}),
    "rows of B contiguous": ((200, 200, 136), "dgrad", "bf16", 64, {}),
    "rows contiguous, 2x2": (
        (200, 200, 328), "wgrad", "bf16", 32, {"cluster_m": 2, "cluster_n": 2}
    ),
    "fp8, 1x2": ((200, 136, 320), "forward", "e4m3", 32, {"cluster_n": 2}),
    "two boxes of K": (
        (200, 136, 200), "forward", "bf16", 32,
        {"tile_n": 32, "k_bytes": 256, "epi_n": 32, "swap_ab": True},
    ),
    "in turn": (
        (200, 136, 200), "forward", "bf16", 32,
        {**SMALL, "tile_n": 80, "epi_n": 16, "cluster_m": 4},
    ),
    "fewer rows than a box": ((5, 136, 200), "forward", "fp16", 64, {"pingpong": True}),
    "K split in two": (
        (130, 104, 520), "forward", "bf16", 32,
        {"tile_n": 96, "epi_n": 32, "split_k": 2, "num_stages": 5, "rows": 2},
    ),
    "stream-K": (
        (300, 264, 520), "forward", "bf16", 32,
        {"tile_n": 96, "epi_n": 32, "stream_k": 1, "num_stages": 4},
    ),
}  # fmt: skip
LONG = ("rows contiguous, 2x2", "stream-K", "K split in two", "in turn")


@pytest.mark.sweep(4)
@pytest.mark.parametrize("most", [16, 32, 64])
@pytest.mark.parametrize("rows", [8, 16, 40, 64, 88, 96, 104, 128, 176, 192, 208, 256])
def test_boxes_divide_a_tile_into_whole_swizzle_atoms(rows: int, most: int) -> None:
    box = box_rows(rows, most)
    assert rows % box == 0 and box % 8 == 0
    assert box <= most or box == min(
        n for n in range(most + 1, rows + 1) if rows % n == 0 and n % 8 == 0
    )


@pytest.mark.sweep(16)
@pytest.mark.parametrize("case", [pytest.param(x, marks=SLOW) if x in LONG else x for x in CASES])
def test_a_product_whose_tiles_reach_outside_comes_out_exact(case: str) -> None:
    sizes, direction, dtype, most, more = CASES[case]
    problem = LayerProblem(*sizes, direction, dtype)
    a, b = ((2 * x.float()).round().clamp(-4, 4).to(x.dtype) for x in problem.inputs())
    (out,) = problem.outputs()
    found = arrange(Call(a, b, out_dtype=out.dtype), out, ARCH)
    layouts = found.a, found.b, found.out
    tiles = Sm90Config(**{**vars(TILES), "box_rows": most, **more})
    config = fitted(tiles, call_class(found.sizes, layouts, (), ARCH))
    assert config is not None, tiles.why_not(None, arch(ARCH))
    with simulated(ARCH):
        launcher(kernel_for(config, ARCH), [a, b, out], config.tiles.workspace)(a, b, out)
    assert out.float().equal((a.float() @ b.float()).to(out.dtype).float())
