"""Grouped products of fp8 with factors of tensors or rows: sums of each 128 of K leave Hopper's
tensor cores, unless `use_fast_accum` asks for these alone."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import cutex
from cutex import ops
from cutex.arch import arch as arch_named
from cutex.compile import compile
from cutex.device.epilogue.epilogue_ops import Scales
from cutex.kernels.gemm.grouped import choose
from cutex.kernels.gemm.grouped.config import PromotedConfig
from cutex.kernels.gemm.grouped.fp8_config import RowBlocksConfig
from cutex.kernels.gemm.grouped.sm90.promoted import GroupedPromoted
from cutex.kernels.gemm.scaled.fp8.config import PROMOTED
from cutex.kernels.gemm.signature import GeneralConfig, OperandLayout
from cutex.ops.grouped import scaled
from cutex.problem.grouped_scaled import ScaledGroupedProblem

e4m3 = torch.float8_e4m3fn
ORDERS = ("fifo", "eager", "starved", "peer-late", "random")
LAYOUTS = (OperandLayout("e4m3"), OperandLayout("e4m3", "column", batched=True), OperandLayout())
BY_ROWS = (Scales("row", "column"),)


def tiles(tile_m: int, tile_n: int, num_stages: int, **more: int) -> RowBlocksConfig:
    """Tiles of a few CTAs."""
    given = {"epi_n": 32, "epi_stages": 2, "warpgroups": 2, "num_ctas": 4, **more}
    return RowBlocksConfig(tile_m, tile_n, num_stages=num_stages, recipe=PROMOTED, **given)


TILES = {
    "one": tiles(64, 64, 3, epi_n=64, epi_stages=1, warpgroups=1, num_ctas=3),
    "tall": tiles(256, 64, 2, num_ctas=2),
    "pair": tiles(128, 192, 3, epi_n=64, epi_stages=3, cluster_m=2),
    "shared": tiles(128, 64, 2, cluster_n=2),
    "rounds": tiles(128, 64, 4, epi_n=64, epi_stages=1, num_ctas=2, rounds=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("of_a", [2.0**-10, 2.0**120, 2.0**-125])
@pytest.mark.parametrize("kinds", ["RowWise", "TensorWise"])
@pytest.mark.parametrize("arch", ["sm_90a"])
def test_448s_alone_are_added_up_in_fp32(
    arch: str, device: str, kinds: str, of_a: float, fast: bool
) -> None:
    """Sums that are each larger than the one before, with factors that are huge or tiny, and whose
    product is neither; tensor cores alone lose 1.9 % of them."""
    k, place = 4096, "cpu" if device == "sim" else "cuda"
    a, b = (torch.full(size, 448.0, device=place).to(e4m3) for size in ((40, k), (2, 64, k)))
    sizes = ((40,), (2, 64)) if kinds == "RowWise" else ((1,), (2,))
    scales = [
        torch.full(size, x, device=place) for size, x in zip(sizes, (of_a, 1 / of_a), strict=True)
    ]
    offs = torch.tensor([13, 40], dtype=torch.int32, device=place)
    options = {"scale_recipe_a": kinds, "scale_recipe_b": kinds, "output_dtype": torch.float32}
    with ops.simulated(arch) if device == "sim" else nullcontext():
        y = cutex.scaled_grouped_mm(a, b.mT, *scales, offs, **options, use_fast_accum=fast)
    lost = (y.double() / (448.0**2 * k) - 1).abs().max()
    assert lost < 1e-6 if not fast else 0.01 < lost < 0.03


def test_fast_sums_are_by_tensor_cores_alone() -> None:
    """And those of one block of K, of which none leaves them before the end."""
    edges, out = torch.zeros(2, dtype=torch.int32), torch.empty((6, 16), dtype=torch.bfloat16)
    for k, fast in ((128, False), (256, False), (256, True)):
        a, b = torch.zeros(6, k).to(e4m3), torch.zeros(2, 16, k).to(e4m3).mT
        options = scaled._Options("fp8_row", None, False, fast)
        with ops.simulated("sm_90a"):
            passed = [a, b, out, edges, torch.ones(6), torch.ones(2, 16)]
            config, arch, _ = scaled._rows_call(options, passed)
        assert isinstance(config, PromotedConfig) == (k > 128 and not fast)
        assert config.why_not(arch_named(arch)) is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", TILES)
def test_sums_without_factors_in_the_mainloop(name: str, seed: int) -> None:
    """Few CTAs with several tiles each; the same kernel again with other groups."""
    product = GeneralConfig(TILES[name], *LAYOUTS, ops=BY_ROWS)
    compiled = compile(GroupedPromoted(PromotedConfig(product)), "e4m3", "sm_90a")
    k = 1024 if name == "rounds" else 208
    for rows in ((30, 0, 277, 1), (0, 7, 129, 150)):
        problem = ScaledGroupedProblem(rows, 136, k, "fp8_row", rest=21, seed=seed)
        given = problem.inputs()
        memory = torch.full((problem.length + 2, 144), torch.nan, dtype=torch.bfloat16)
        out, edges = memory[1:-1, :136], problem.edges
        order = ORDERS[(len(name) + seed) % len(ORDERS)]
        passed = given["a"], given["b"], out, edges, given["scale_a"], given["scale_b"]
        report = cutex.simulate(compiled, *passed, order=order, seed=seed)
        assert not report.findings
        found = problem.error(out)
        assert found is None, found
        memory[1 : 1 + sum(rows), :136] = torch.nan
        assert memory.isnan().all()


@pytest.mark.parametrize("groups", [1, 33, 1024])
def test_the_tiles_that_are_chosen_fit(groups: int) -> None:
    most = choose.most_groups(groups)
    for mean in (1, 64, 97, 200, 600, 4096):
        for n in (8, 65, 192, 2880, 7168):
            for k in (256, 7168):
                found = choose.promoted_tiles(mean, (k, n), most)
                config = PromotedConfig(GeneralConfig(found, *LAYOUTS, ops=BY_ROWS), most)
                assert config.why_not(arch_named("sm_90a")) is None
