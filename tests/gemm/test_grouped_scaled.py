"""Grouped products of fp8: right against float64 whatever the groups and the factors are."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import cutlass
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import cutex
from cutex import ops
from cutex.arch import arch as arch_named
from cutex.compile import compile
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.grouped import choose
from cutex.kernels.gemm.grouped.config import BLOCKS, BlocksConfig
from cutex.kernels.gemm.grouped.fp8_config import RowBlocksConfig
from cutex.kernels.gemm.grouped.sm90 import blocks
from cutex.kernels.gemm.grouped.sm90.blocks import GroupedBlocks, PromoteRows
from cutex.kernels.gemm.grouped.sm90.narrow import GroupedNarrow
from cutex.kernels.gemm.signature import GeneralConfig, OperandLayout
from cutex.ops.grouped import launch, scaled
from cutex.ops.grouped.block_scaled import _in_chunks
from cutex.problem.grouped_scaled import FP32, KINDS, ScaledGroupedProblem, draw
from cutex.problem.scaled.layouts import rows_contiguous
from cutex.schedulers import narrow as schedule
from cutex.schedulers.narrow import ColumnTiles

e4m3 = torch.float8_e4m3fn
ORDERS = ("fifo", "eager", "starved", "peer-late", "random")
LAYOUTS = (
    OperandLayout("e4m3", scales=BLOCKS[0]),
    OperandLayout("e4m3", "column", batched=True, scales=BLOCKS[1]),
    OperandLayout("bf16"),
)


def wrong(problem: ScaledGroupedProblem, arch: str, device: str, **orders: Any) -> str | None:
    """What is wrong with the result of a problem, on the GPU or in the simulator."""
    with ops.simulated(arch, **orders) if device == "sim" else nullcontext():
        return problem.run("cpu" if device == "sim" else "cuda", cutex.scaled_grouped_mm)


RECIPES = {"sm_90a": FP32, "sm_100a": ("mxfp8_mxfp4", "mxfp4", "mxfp8", "nvfp4")}  # of each arch


@pytest.mark.sweep(48)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("arch", RECIPES)
def test_randomized_problems_are_right(arch: str, device: str, seed: int) -> None:
    problem = draw(seed, recipes=RECIPES[arch])
    found = wrong(problem, arch, device, order=ORDERS[seed % len(ORDERS)], seed=seed)
    assert found is None, f"{found}: {problem}"


@pytest.mark.slow
@pytest.mark.parametrize("tenth", range(10))
@pytest.mark.parametrize("arch", RECIPES)
def test_a_hundred_randomized_problems_are_right(arch: str, device: str, tenth: int) -> None:
    for seed in range(100 + 10 * tenth, 110 + 10 * tenth):
        problem = draw(seed, 150 if device == "sim" else 1000, recipes=RECIPES[arch])
        found = wrong(problem, arch, device, order=ORDERS[seed % len(ORDERS)], seed=seed)
        assert found is None, f"{found}: {problem}"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("recipe", ["fp8_row", "fp8_tensor"])
@pytest.mark.parametrize("arch", ["sm_100a"])
def test_whole_rows_on_blackwell(arch: str, device: str, recipe: str) -> None:
    problem = ScaledGroupedProblem((60, 0, 131), 72, 80, recipe, rest=9, bias=True)
    found = wrong(problem, arch, device)
    assert found is None, found


@pytest.mark.sweep(2)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_gate_whose_result_is_fp32(arch: str, device: str) -> None:
    recipe = "fp8_row" if arch == "sm_90a" else "mxfp8"
    problem = ScaledGroupedProblem(
        (9, 0, 30), 66, 256, recipe, rest=2, activation="gated_silu", dtype=torch.float32
    )
    found = wrong(problem, arch, device)
    assert found is None, found


def test_each_groups_factors_begin_with_a_chunk_of_their_own() -> None:
    g = torch.Generator().manual_seed(0)
    scale = torch.randint(0, 255, (300, 5), generator=g).to(torch.uint8)
    for edges, spans in (
        ([0, 129, 129, 300], [(0, 0), (0, 129), (129, 129), (129, 300)]),
        ([-5, 200, 100, 900], [(0, 0), (0, 200), (200, 200), (100, 300)]),
    ):
        found = _in_chunks(scale, torch.tensor(edges, dtype=torch.int32), (300,), False)
        at = 0
        for begin, end in spans:
            assert torch.equal(found[at : at + end - begin], scale[begin:end])
            rest = -(end - begin) % 128
            assert not found[at + end - begin : at + end - begin + rest].any()
            at += end - begin + rest
    counts = torch.tensor([150, 0, 7], dtype=torch.int32)
    found = _in_chunks(scale, counts, (3, 100), True)
    assert torch.equal(found[:100], scale[:100]) and torch.equal(found[128:135], scale[200:207])


def without_a_block(factors: str) -> str | None:
    """What the check says if the second block's factors are those of the first."""

    def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **rest: Any) -> Tensor:
        given = {"scale_a": scale_a, "scale_b": scale_b}
        side = 1 if factors == "scale_a" else 2
        other = given[factors].clone()
        other.select(side - (side == 2), 1).copy_(given[factors].select(side - (side == 2), 0))
        given[factors] = other
        return cutex.scaled_grouped_mm(a, b, **given, **rest)

    with ops.simulated("sm_90a"):
        return ScaledGroupedProblem((70, 0, 9), 64, 256, rest=3).run("cpu", product)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("factors", ["scale_a", "scale_b"])
def test_another_blocks_factor_is_off_by_more_than_the_tolerance(factors: str) -> None:
    assert " is " in (without_a_block(factors) or "")


TILES = {
    "one": RowBlocksConfig(
        tile_m=64, tile_n=64, num_stages=3, epi_n=64, epi_stages=1, warpgroups=1, num_ctas=3
    ),
    "tall": RowBlocksConfig(
        tile_m=256, tile_n=64, num_stages=2, epi_n=32, epi_stages=2, warpgroups=2, num_ctas=2
    ),
    "pair": RowBlocksConfig(
        tile_m=128, tile_n=192, num_stages=3, epi_n=64, epi_stages=3, warpgroups=2, cluster_m=2,
        num_ctas=4,
    ),
    "shared": RowBlocksConfig(
        tile_m=128, tile_n=64, num_stages=2, epi_n=32, epi_stages=2, warpgroups=2, cluster_n=2,
        num_ctas=4,
    ),
}  # fmt: skip
TILES["skips"] = replace(TILES["shared"], skips=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "order"),
    [("one", "fifo"), ("tall", "random"), ("pair", "random"), ("shared", "random")]
    + [("skips", order) for order in ORDERS],
)
def test_rows_of_no_group_and_memory_around_are_left_alone(name: str, order: str) -> None:
    """Few CTAs, several tiles each; the same kernel again with other groups."""
    config = BlocksConfig(GeneralConfig(TILES[name], *LAYOUTS))
    compiled = compile(GroupedBlocks(config), "e4m3", "sm_90a")
    for rows in ((30, 0, 277, 1), (0, 64, 65, 150)):
        problem = ScaledGroupedProblem(rows, 136, 256, rest=21, seed=len(name))
        given = problem.inputs()
        memory = torch.full((problem.length + 2, 144), torch.nan, dtype=torch.bfloat16)
        out = memory[1:-1, :136]
        passed = given["a"], given["b"], given["scale_a"], given["scale_b"].mT, out
        report = cutex.simulate(compiled, *passed, problem.edges, order=order, seed=1)
        assert not report.findings
        found = problem.error(out)
        assert found is None, found
        memory[1 : 1 + sum(rows), :136] = torch.nan
        assert memory.isnan().all()


class SkipsARow(PromoteRows):
    """A role that takes a tile of one row more than half for one of half."""

    def is_short(self, tile: WorkTile) -> cutlass.Boolean:
        return self.factors[0].groups.rows(tile.group) - tile.m * self.tiles.tile_m <= 129


@pytest.mark.slow
@pytest.mark.parametrize("fault", [False, True])
def test_a_row_of_the_second_half_left_out_is_found(
    fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault:
        monkeypatch.setattr(blocks, "PromoteRows", SkipsARow)
    config = BlocksConfig(GeneralConfig(replace(TILES["tall"], tile_n=128), *LAYOUTS))
    kernel = type("Changed", (GroupedBlocks,), {"name": f"sm90_gemm_grouped_fault_{fault}".lower()})
    compiled = compile(kernel(config), "e4m3", "sm_90a")
    problem = ScaledGroupedProblem((129, 3, 385, 128), 72, 256, rest=5)
    given = problem.inputs()
    out = torch.full((problem.length, 72), torch.nan, dtype=torch.bfloat16)
    passed = given["a"], given["b"], given["scale_a"], given["scale_b"].mT, out
    cutex.simulate(compiled, *passed, problem.edges)
    found = problem.error(out)
    assert (found is not None) == fault, found


def test_what_quantize_returns_is_taken() -> None:
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, generator=g).bfloat16() for s in ((70, 256), (2, 128, 256)))
    offs = torch.tensor([33, 70], dtype=torch.int32)
    with ops.simulated("sm_90a"):
        qx, qw = cutex.quantize(x, "fp8_1x128"), cutex.quantize(w, "fp8_128x128")
        y = cutex.scaled_grouped_mm(qx, qw, offs=offs)
        values = cutex.dequantize(qx, torch.float32)
        matrices = cutex.dequantize(qw._replace(data=qw.data.flatten(0, 1)), torch.float32)
    for e, (begin, end) in enumerate(((0, 33), (33, 70))):
        want = values[begin:end] @ matrices[128 * e : 128 * (e + 1)].mT
        assert torch.allclose(y[begin:end].float(), want, atol=0.2, rtol=0.01)


@pytest.mark.parametrize("quantized", [False, True], ids=["factors", "quantized"])
def test_a_call_like_one_before_is_launched_without_its_checks(
    quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = torch.Generator().manual_seed(1)
    x, w = (torch.randn(s, generator=g).bfloat16() for s in ((70, 128), (2, 128, 128)))
    offs = torch.tensor([33, 70], dtype=torch.int32)
    with ops.simulated("sm_90a"):
        qx, qw = cutex.quantize(x, "fp8_1x128"), cutex.quantize(w, "fp8_128x128")
        given: dict[str, Any] = {"a": qx, "b": qw}
        if not quantized:
            of_w = qw.scale.unflatten(0, (2, 1)).mT
            recipes = {name: [kind] for name, kind in BLOCK.items()}  # torch takes lists, too
            given = {"a": qx.data, "b": qw.data.mT, "scale_a": [qx.scale], "scale_b": of_w}
            given |= recipes
        first = cutex.scaled_grouped_mm(**given, offs=offs)
        with pytest.raises(ValueError, match="takes offs or counts"):
            cutex.scaled_grouped_mm(**given, offs=offs, counts=offs)
        with pytest.raises(ValueError, match="activation must be one of"):
            cutex.scaled_grouped_mm(**given, offs=offs, activation="none")
        monkeypatch.setattr(scaled, "_side", None)
        offs.copy_(torch.tensor([12, 70]))
        again = cutex.scaled_grouped_mm(**given, offs=offs)
        given["a"] = qx._replace(data=qx.data[:69]) if quantized else qx.data[:69]
        with pytest.raises(TypeError, match="not callable"):  # no plan takes other rows
            cutex.scaled_grouped_mm(**given, offs=offs)
        matrices = cutex.dequantize(qw._replace(data=qw.data.flatten(0, 1)), torch.float32)
        want = cutex.dequantize(qx, torch.float32)[12:33] @ matrices[128:].mT
    assert torch.equal(again[:12], first[:12]) and torch.equal(again[33:], first[33:])
    assert torch.allclose(again[12:33].float(), want, atol=0.2, rtol=0.01)


@pytest.mark.parametrize(
    ("arch", "dtype", "m", "n"),
    [
        ("sm_90a", torch.float32, 72, 104),
        pytest.param("sm_90a", torch.bfloat16, 31, 203, marks=pytest.mark.slow),
        pytest.param("sm_100a", torch.float16, 130, 9, marks=pytest.mark.slow),
    ],
)
def test_sums_over_the_rows_of_groups(
    arch: str, device: str, dtype: torch.dtype, m: int, n: int
) -> None:
    """A group may begin anywhere; NaN of rows of no group, and factors of an empty one, are not
    read."""
    a, b = (torch.randn(size, 200).to(e4m3) for size in (m, n))
    a.view(torch.uint8)[:, 190:] = 0x7F  # NaN
    offs = torch.tensor([10, 10, 77, 190], dtype=torch.int32)
    scales = [torch.rand(4, size) + 0.5 for size in (m, n)]
    scales[0][1], scales[1][1, 3] = torch.nan, torch.inf
    want = torch.zeros(4, m, n, dtype=torch.float64)
    for e, (lo, hi) in enumerate(((0, 10), (10, 10), (10, 77), (77, 190))):
        if lo < hi:
            want[e] = a[:, lo:hi].double() @ b[:, lo:hi].double().mT
            want[e] *= scales[0][e, :, None].double() * scales[1][e].double()
    given = [x.to("cuda" if device == "cuda" else "cpu") for x in (a, b, *scales, offs)]
    with ops.simulated(arch) if device == "sim" else nullcontext():
        first, second, of_a, of_b, edges = given
        found = cutex.scaled_grouped_mm(
            first, second.mT, of_a.flatten(), of_b, edges, **ROW, output_dtype=dtype
        ).cpu()
    # fp32 sums of 113 exact products round at some 2^-24 of their magnitudes each
    assert (found.double() - want).abs().max() <= (torch.finfo(dtype).eps + 2e-6) * want.abs().max()
    assert not found[1].any()


# ---- limits, torch

A, B = torch.zeros(6, 128).to(e4m3), torch.zeros(2, 16, 128).to(e4m3).mT
OFFS = torch.tensor([2, 6], dtype=torch.int32)
OF_A, OF_B = torch.ones(6, 1), torch.ones(2, 1, 1)
BLOCK = {"scale_recipe_a": "BlockWise1x128", "scale_recipe_b": "BlockWise128x128"}
ROW = {"scale_recipe_a": "RowWise", "scale_recipe_b": "RowWise"}
BAD: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "no tensor": (TypeError, "a must be a torch.Tensor, got list", {"a": [1]}),
    "dtype": (TypeError, "b must be float8_e4m3fn, got torch.bfloat16", {"b": B.bfloat16()}),
    "no edges": (ValueError, "takes offs or counts", {"offs": None}),
    "int64": (TypeError, "offs must be int32, got torch.int64", {"offs": OFFS.long()}),
    "groups": (ValueError, "b has 2 matrices, but offs has 1 groups", {"offs": OFFS[:1]}),
    "form": (ValueError, r"with offs, a must be \(T, K\)", {"a": A[None]}),
    "inner": (ValueError, r"b has K=128 .*, but a has K=112", {"a": A[:, :112]}),
    "blocks": (ValueError, "K=104: with factors of 128", {"a": A[:, :104], "b": B[:, :104]}),
    "scale": (TypeError, "scale_a must be a torch.Tensor, got NoneType", {"scale_a": None}),
    "scale dtype": (TypeError, "scale_b must be float32", {"scale_b": OF_B.half()}),
    "sparse scale": (ValueError, "scale_b must be a strided tensor, got torch.sparse_coo", {
        "scale_b": OF_B.to_sparse()}),
    "scale shape": (ValueError, r"scale_a must be \(6, 1\), got \(5, 1\)", {"scale_a": OF_A[1:]}),
    "rows": (ValueError, r"scale_a must be \(6,\), got \(6, 1\)", ROW),
    "recipes": (ValueError, "BlockWise1x128 with scale_recipe_b RowWise: takes", {
        "scale_recipe_b": "RowWise"}),
    "recipe": (ValueError, "scale_recipe_a='none' is not one of", {"scale_recipe_a": "none"}),
    "bias": (ValueError, r"bias must have shape \(2, 16\)", {"bias": torch.zeros(2)}),
    "activation": (ValueError, "activation must be one of relu", {"activation": "tanh"}),
    "sums": (ValueError, "scale_recipe_a BlockWise1x128: sums take", {"b": A[0, :, None]}),
    "sums' scale": (ValueError, r"scale_b must be \(2,\) or \(2, 1\), got", {
        "b": A[0, :, None], "scale_a": torch.ones(12), **ROW}),
    "sums' bias": (ValueError, "bias, activation: sums", {"b": A[0, :, None], "bias": OF_A, **ROW}),
    "output": (TypeError, "output_dtype torch.int8 is not", {"output_dtype": torch.int8}),
    "gradient": (ValueError, "scale_a requires a gradient, and cutex.scaled_grouped_mm has none", {
        "scale_a": OF_A.clone().requires_grad_()}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_sentence(name: str) -> None:
    error, sentence, given = BAD[name]
    arguments: dict[str, Any] = {
        "a": A, "b": B, "scale_a": OF_A, "scale_b": OF_B, "offs": OFFS, **BLOCK, **given
    }  # fmt: skip
    with ops.simulated("sm_90a"), pytest.raises(error, match=sentence):
        cutex.scaled_grouped_mm(**arguments)


def test_blocks_on_blackwell_get_one_sentence() -> None:
    with ops.simulated("sm_100a"), pytest.raises(ValueError, match="blocks run on Hopper"):
        cutex.scaled_grouped_mm(A, B, OF_A, OF_B, OFFS, **BLOCK)


@pytest.mark.slow
def test_factors_of_32_get_one_sentence_where_they_do_not_fit() -> None:
    x, w = torch.zeros(6, 128).bfloat16(), torch.zeros(2, 16, 128).bfloat16()
    with ops.simulated("sm_100a"):
        qx, qw = cutex.quantize(x, "mxfp8"), cutex.quantize(w, "mxfp8", swizzled=False)
        with pytest.raises(ValueError, match="swizzled over all rows, not each group's"):
            cutex.scaled_grouped_mm(qx, qw, offs=OFFS)
        qx = cutex.quantize(x, "mxfp8", swizzled=False)
        with pytest.raises(ValueError, match=r"scale_a must be \(5, 4\) with NO_SWIZZLE"):
            cutex.scaled_grouped_mm(qx._replace(data=qx.data[:5]), qw, offs=OFFS)
    with ops.simulated("sm_90a"), pytest.raises(ValueError, match="take Blackwell's tensor cores"):
        cutex.scaled_grouped_mm(qx, qw._replace(scale=qw.scale.unflatten(0, (2, 16))), offs=OFFS)


def test_shapes_are_known_without_memory() -> None:
    with FakeTensorMode() as mode:
        a, b, of_a, of_b, offs = (mode.from_tensor(t) for t in (A, B, OF_A, OF_B, OFFS))
        y = cutex.scaled_grouped_mm(a, b, of_a, of_b, offs, activation="gated_silu", **BLOCK)
    assert y.shape == (6, 8) and y.dtype == torch.bfloat16


@pytest.mark.parametrize("groups", [1, 33, 1024])
def test_the_tiles_that_are_chosen_fit(groups: int) -> None:
    most = choose.most_groups(groups)
    for mean in (1, 64, 97, 200, 600, 4096):
        for n in (8, 65, 192, 2880, 7168):
            for fused in (False, True):
                for k, padded in ((256, False), (7168, False), (2048, True)):
                    tiles = choose.blocks_tiles(mean, (k, n), fused, most, groups, padded)
                    config = BlocksConfig(GeneralConfig(tiles, *LAYOUTS), most)
                    assert config.why_not(arch_named("sm_90a")) is None


ROUNDS = RowBlocksConfig(
    tile_m=128,
    tile_n=64,
    num_stages=4,
    warpgroups=2,
    epi_n=64,
    epi_stages=1,
    num_ctas=2,
    rounds=True,
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("blocks", "changes"), [
    (4, {}), (36, {}), (8, {"num_stages": 2, "cluster_m": 2}), (8, {"tile_m": 256}),
    (8, {"tile_n": 192, "epi_stages": 3}),
])  # fmt: skip
def test_blocks_of_k_that_are_whole_rounds_of_the_ring(
    blocks: int, changes: dict[str, Any], seed: int
) -> None:
    problem = ScaledGroupedProblem((100, 0, 37, 129 + seed), 136, 128 * blocks, rest=3, seed=seed)
    config = BlocksConfig(GeneralConfig(replace(ROUNDS, **changes), *LAYOUTS))
    compiled = compile(GroupedBlocks(config), "e4m3", "sm_90a")
    given, out = problem.inputs(), torch.full((problem.length, 136), torch.nan).bfloat16()
    names = "a", "b", "scale_a", "scale_b"
    tensors = [given[name] for name in names]
    tensors[3] = tensors[3].mT
    order = ORDERS[seed % len(ORDERS)]
    report = cutex.simulate(compiled, *tensors, out, problem.edges, order=order, seed=seed)
    assert not report.findings
    assert problem.error(out) is None and out[sum(problem.rows) :].isnan().all()


NARROW = replace(ROUNDS, tile_n=192, epi_stages=3, num_ctas=3, narrow=True)


def of_narrow(
    kernel: type[GroupedNarrow],
    n: int,
    seed: int,
    k: int = 512,
    gated: bool = False,
    **changes: Any,
) -> str:
    """What is wrong with a product by narrow tiles; "" if nothing is."""
    problem = ScaledGroupedProblem((100, 0, 37, 129 + seed), n, k, rest=3, seed=seed)
    problem = replace(problem, activation="gated_silu" if gated else None)
    ops, _ = launch.fused(None, activation=problem.activation)
    config = BlocksConfig(GeneralConfig(replace(NARROW, **changes), *LAYOUTS, ops=ops))
    compiled = compile(kernel(config), "e4m3", "sm_90a")
    width = n // 2 if gated else n
    given, out = problem.inputs(), torch.full((problem.length, width), torch.nan).bfloat16()
    tensors = [given[name] for name in ("a", "b", "scale_a", "scale_b")]
    tensors[3] = tensors[3].mT
    order = ORDERS[seed % len(ORDERS)]
    report = cutex.simulate(compiled, *tensors, out, problem.edges, order=order, seed=seed)
    untouched = out[sum(problem.rows) :].isnan().all()
    return str(report.findings or problem.error(out) or ("" if untouched else "rows of no group"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("n", "changes"), [
    (72, {}), (264, {}), (448, {}), (520, {"num_ctas": 1}), (320, {"rounds": False}),
    (400, {"gated": True}),
    (640, {"num_ctas": 5}),
])  # fmt: skip
def test_rows_of_tiles_end_with_narrower_ones(n: int, changes: dict[str, Any], seed: int) -> None:
    assert of_narrow(GroupedNarrow, n, seed, **changes) == ""


class NarrowFirst(ColumnTiles):
    def first(self, n: Any) -> Any:
        return n * self.widest


class NarrowSooner(ColumnTiles):
    def is_narrow(self, n: Any) -> Any:
        return n >= self.wide - 1


class FewerNarrow(ColumnTiles):
    @staticmethod
    def of(*args: Any) -> ColumnTiles:
        tiles = ColumnTiles.of(*args)
        return replace(tiles, narrow=tiles.narrow - 1)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [NarrowFirst, NarrowSooner, FewerNarrow])
def test_faults_of_narrow_tiles_are_found(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "ColumnTiles", fault)
    name = f"sm90_gemm_grouped_{fault.__name__}".lower()
    assert of_narrow(type("Changed", (GroupedNarrow,), {"name": name}), 448, 0)


def test_rounds_are_taken_where_k_has_them() -> None:
    for k, whole in ((7168, True), (2048, True), (500, True), (640, False), (128 * 7, False)):
        tiles = choose.blocks_tiles(512, (k, 4096), False)
        assert (tiles.num_stages, tiles.rounds) == (4, whole)
        fused = choose.blocks_tiles(512, (k, 4096), True)
        assert (fused.num_stages, fused.rounds) == ((4, True) if whole else (5, False))
    shapes = (7168, 4096), (14336, 4096), (4096, 4096), (7168, 7168), (7168, 1536)
    narrow = [choose.blocks_tiles(512, shape, False).narrow for shape in shapes]
    assert narrow == [True, True, False, False, False]
    odd = replace(ROUNDS, num_stages=3)
    config = BlocksConfig(GeneralConfig(odd, *LAYOUTS))
    assert "num_stages=3" in (config.why_not(arch_named("sm_90a")) or "")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", FP32)
def test_a_graph_is_replayed_with_other_groups(recipe: str) -> None:
    problem = ScaledGroupedProblem((100, 0, 300, 5), 264, 256, recipe, rest=95)
    kinds = dict(zip(("scale_recipe_a", "scale_recipe_b"), KINDS[recipe], strict=True))
    given = {name: x.cuda() for name, x in problem.inputs().items()}
    offs = problem.edges.cuda()
    cutex.scaled_grouped_mm(**given, offs=offs, **kinds)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = cutex.scaled_grouped_mm(**given, offs=offs, **kinds)
    for rows in ((100, 0, 300, 5), (0, 500, 0, 0), (1, 2, 3, 494)):
        other = replace(problem, rows=rows, rest=500 - sum(rows), seed=sum(rows[:2]))
        for name, x in other.inputs().items():
            if name == "scale_a" and recipe == "fp8_block":
                x = rows_contiguous(x)
            given[name].copy_(x)
        offs.copy_(other.edges)
        y.fill_(torch.nan)
        graph.replay()
        found = other.error(y.cpu())
        assert found is None, found
        assert y[sum(rows) :].isnan().all()
