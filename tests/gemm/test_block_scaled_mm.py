"""`cutex.scaled_mm` with factors that tensor cores read, in the simulator of a Blackwell."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

import cutex
from cutex.ops import block_scaled
from cutex.problem.scaled import BlockScaledProblem
from cutex.problem.scaled.formats import BLOCK_SCALED
from cutex.problem.scaled.layouts import unswizzle

ONE_BY_32 = {"scale_recipe_a": "BlockWise1x32", "scale_recipe_b": "BlockWise1x32"}
SWIZZLED = {"swizzle_a": "SWIZZLE_32_4_4", "swizzle_b": "SWIZZLE_32_4_4"}


def arguments(problem: BlockScaledProblem):
    """The problem's operands as scaled_mm takes them, of NVFP4 with the tensors' own factors."""
    a, b, scale_a, scale_b, *own = problem.inputs()
    if not own:
        return (a, b.mT, scale_a, scale_b), ONE_BY_32
    kinds = ["BlockWise1x16", "TensorWise"]
    recipes = {"scale_recipe_a": kinds, "scale_recipe_b": kinds}
    return (a, b.mT, [scale_a, own[0]], [scale_b, own[1]]), recipes


@pytest.mark.sweep(48)
@pytest.mark.parametrize("seed", range(24))
def test_randomized_products_are_within_the_bound(seed):
    r = random.Random(seed)
    dtype, init = r.choice(list(BLOCK_SCALED)), r.choice(("int", "normal", "spread"))
    unit = 128 if dtype in ("mxfp8_mxfp4", "mxfp4_mxfp8") else 32
    m, n = r.choice((1, 17, 64, 130, 300)), 8 * r.randint(1, 40)
    problem = BlockScaledProblem(m, n, unit * r.randint(1, 512 // unit), dtype, init, seed)
    args, kinds = arguments(problem)
    with cutex.ops.simulated("sm_100a", order="random", seed=seed):
        c = cutex.scaled_mm(*args, **kinds)
    check = problem.check(*problem.inputs(), c)
    assert check.ok, f"{problem}: {check.message}"


def test_padding_that_is_nan_is_not_multiplied(monkeypatch):
    """Beyond M, N and K, in whole words and within them; the second call by the first one's plan
    where no factors are copied."""
    for dtype in ("mxfp8", "nvfp4"):
        problem = BlockScaledProblem(40, 72, 352, dtype, "int")
        args, kinds = arguments(problem)
        a, b, *scales = problem.inputs()
        for scale, rows in zip(scales, (40, 72), strict=False):
            columns = 352 // problem.recipe.a.block[1]
            tiles = scale.view(torch.uint8)  # (RestRows, RestK, 32, 4, 4)
            row = torch.arange(32)[:, None] + 32 * torch.arange(4)  # of the last tile of rows
            tiles[-1].permute(1, 2, 0, 3)[row >= rows % 128] = 0x7F if dtype == "nvfp4" else 0xFF
            tiles[:, -1, :, :, columns % 4 or 4 :] = 0x7F if dtype == "nvfp4" else 0xFF
        given = (
            scales[:2]
            if dtype == "mxfp8"
            else [list(x) for x in zip(scales[:2], scales[2:], strict=True)]
        )
        with cutex.ops.simulated("sm_100a"):
            c = cutex.scaled_mm(a, b.mT, *given, **kinds)
            if dtype == "mxfp8":
                monkeypatch.setattr(block_scaled, "check", None)
            want = cutex.scaled_mm(*args, **kinds)
            monkeypatch.undo()
        assert torch.equal(c, want) and not c.isnan().any()


PLANNED = {
    "mxfp8": ("mxfp8", 352, {}),
    "own factors": ("nvfp4", 320, {"bias": torch.ones(72).bfloat16()}),
    "quantized": ("mxfp8", 352, {"output_dtype": "mxfp4"}),
}


def parts(result):
    """The tensors of a result, which may be quantized."""
    return [result] if isinstance(result, torch.Tensor) else [result.data, result.scale]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANNED)
def test_a_call_like_one_before_is_launched_without_its_checks(name, monkeypatch):
    """Recipes and factors in lists, too; with other tensors alike, but no others."""
    dtype, k, rest = PLANNED[name]
    calls = [arguments(BlockScaledProblem(40, 72, k, dtype, "int", seed)) for seed in (0, 1)]
    with cutex.ops.simulated("sm_100a"):
        fresh = []
        for args, kinds in reversed(calls):  # each without a plan
            cutex.ops.device.forget_plans()
            fresh.insert(0, cutex.scaled_mm(*args, **kinds, **rest))
        cutex.ops.device.forget_plans()
        (args, kinds), (other, _) = calls
        cutex.scaled_mm(*args, **kinds, **rest)
        monkeypatch.setattr(block_scaled, "check", None)
        for want, given in zip(fresh, (args, other), strict=True):
            got = cutex.scaled_mm(*given, **kinds, **rest)
            for x, y in zip(parts(got), parts(want), strict=True):
                assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        for others in ({"activation": "relu"}, {"bias": torch.ones(72)}):
            with pytest.raises(TypeError, match="not callable"):  # no plan takes these
                cutex.scaled_mm(*args, **kinds, **{**rest, **others})
        with pytest.raises(TypeError, match="not callable"):  # or other sizes
            cutex.scaled_mm(args[0], args[1][:, :64], *args[2:], **kinds, **rest)


@pytest.mark.slow
def test_factors_come_swizzled_in_any_shape_or_plain():
    problem = BlockScaledProblem(40, 136, 160, "mxfp8", "int")
    (a, b, scale_a, scale_b), kinds = arguments(problem)
    plain = [unswizzle(x, rows, 5) for x, rows in ((scale_a, 40), (scale_b, 136))]
    no = {"swizzle_a": SimpleNamespace(name="NO_SWIZZLE"), "swizzle_b": ["NO_SWIZZLE"]}
    with cutex.ops.simulated("sm_100a"):
        want = cutex.scaled_mm(a, b, scale_a, scale_b, **kinds)
        assert torch.equal(
            cutex.scaled_mm(a, b, scale_a.flatten(), scale_b.view(64, -1), **kinds, **SWIZZLED),
            want,
        )
        assert torch.equal(cutex.scaled_mm(a, b, *plain, **kinds, **no), want)


def test_epilogues_batches_and_operands_that_tma_cannot_step():
    problem = BlockScaledProblem(40, 72, 96, "mxfp8", "int")
    (a, b, scale_a, scale_b), kinds = arguments(problem)
    values = problem.values(problem.inputs())
    n = 67
    bias, residual = torch.randint(-4, 5, (n,)).bfloat16(), torch.randint(-4, 5, (40, n)).bfloat16()
    want = torch.relu(values[0] @ values[1][:n].mT + bias.double()) + residual.double()
    odd = torch.empty(40, 97, dtype=torch.uint8).view(a.dtype)[:, 1:].copy_(a)
    with cutex.ops.simulated("sm_100a"):
        c = cutex.scaled_mm(
            odd, b[:, :n], scale_a, scale_b, **kinds, bias=bias, activation="relu",
            residual=residual, output_dtype=torch.float32,
        )  # fmt: skip
        assert torch.equal(c.double(), want)
        strided = a.view(torch.uint8).mT.contiguous().mT.view(a.dtype), b.contiguous()
        again = cutex.scaled_mm(*strided, scale_a, scale_b, **kinds)
        two = [torch.stack([x, x]) for x in (a.view(torch.uint8), b.mT.view(torch.uint8))]
        two = [x.view(a.dtype) for x in two]
        scales = [torch.stack([x, x]) for x in (scale_a, scale_b)]
        both = cutex.scaled_mm(two[0], two[1].mT, *scales, **kinds)
    first = (values[0] @ values[1].mT).bfloat16()
    assert torch.equal(again, first)
    assert torch.equal(both, torch.stack([first, first]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "out"),
    [
        (264, "mxfp8"),
        (67, "mxfp8_e5m2"),
        (256, "nvfp4"),
        pytest.param(264, "mxfp4", marks=pytest.mark.slow),
        pytest.param(66, "nvfp4", marks=pytest.mark.slow),
    ],
)
def test_a_quantized_result_is_that_of_quantize_bit_by_bit(n, out):
    """With NaN, infinities, zeros and numbers of all sizes; its factors serve the next product."""
    problem = BlockScaledProblem(140, 264, 96, "mxfp8", "spread")
    (a, b, scale_a, scale_b), kinds = arguments(problem)
    residual = torch.randn(140, n) * torch.exp2(torch.randint(-60, 60, (140, 1)).float())
    residual[3, 5], residual[64, 40], residual[139, n - 1] = torch.nan, torch.inf, -torch.inf
    a = a.clone()
    a[70:100] = 0
    residual[70:100] = 0
    more = {"residual": residual, **kinds}
    scale_b = scale_b[: -(-n // 128)]
    own = {"output_scale": torch.full((1,), 0.37)} if out == "nvfp4" else {}
    of_tensor = {"tensor_scale": own["output_scale"]} if own else {}
    with cutex.ops.simulated("sm_100a", order="random", seed=n):
        c = cutex.scaled_mm(a, b[:, :n], scale_a, scale_b, output_dtype=torch.float32, **more)
        q = cutex.scaled_mm(a, b[:, :n], scale_a, scale_b, output_dtype=out, **more, **own)
        want = cutex.quantize(c, out, **of_tensor)
        assert torch.equal(q.data.view(torch.uint8), want.data.view(torch.uint8))
        assert torch.equal(q.scale.view(torch.uint8), want.scale.view(torch.uint8))
        assert q.tensor_scale is None or torch.equal(q.tensor_scale, own["output_scale"])
        if n == 256:
            w = cutex.quantize(torch.randn(40, n), out)
            next_one = cutex.scaled_mm(q, w)
            assert torch.equal(next_one.nan_to_num(), cutex.scaled_mm(want, w).nan_to_num())


@pytest.mark.parametrize(
    ("out", "more", "says"),
    [
        ("mxfp6", {}, "output_dtype='mxfp6' is not one of mxfp8"),
        ("nvfp4", {}, "output_scale must be one float32 number for nvfp4, got None"),
        ("mxfp4", {"output_scale": torch.ones(1)}, 'output_scale is given: takes output_dtype="nv'),
        ("mxfp4", {"activation": "gated_silu"}, "output_dtype='mxfp4' takes no gated activation"),
    ],
)
def test_a_quantized_result_that_is_not_taken(out, more, says):
    (a, b, scale_a, scale_b), kinds = arguments(BlockScaledProblem(32, 64, 96, "mxfp8"))
    with cutex.ops.simulated("sm_100a"), pytest.raises((TypeError, ValueError), match=says):
        cutex.scaled_mm(a, b, scale_a, scale_b, output_dtype=out, **more, **kinds)


E8 = torch.float8_e8m0fnu
FP4 = torch.zeros(32, 64, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
FP8 = torch.zeros(32, 128).to(torch.float8_e4m3fn)
ONES = torch.ones(1, 1, 32, 4, 4).to(E8)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("args", "kinds", "error", "sentence"),
    [
        (
            (FP8, FP8.mT, ONES, ONES[0]),
            {},
            ValueError,
            r"scale_b must be \(1, 1, 32, 4, 4\), or as",
        ),
        (
            (FP8, FP8.mT, ONES.view(torch.uint8), ONES),
            {},
            TypeError,
            "must be torch.float8_e8",
        ),
        ((FP8[:, :80], FP8[:, :80].mT, ONES, ONES), {}, ValueError, "K=80: .* a multiple of 32"),
        (
            (FP8[:, :96], FP4[:, :48].mT, ONES, ONES),
            {},
            ValueError,
            "fp4 beside fp8",
        ),
        ((FP8, FP8[:, :64].mT, ONES, ONES), {}, ValueError, "b has K=64, but a has K=128"),
        ((FP8, FP8.mT, ONES, ONES), {"scale_recipe_b": "RowWise"}, ValueError, "with .* RowWise"),
        ((FP8, FP8.mT, ONES, ONES), {"swizzle_a": "ROWS"}, ValueError, "swizzle_a='ROWS' is not"),
        ((FP8, FP8.mT, ONES, ONES), {"swizzle_a": "NO_SWIZZLE"}, ValueError, r"must be \(32, 4\)"),
        (
            (FP8, FP8.mT, ONES, ONES),
            {"scale_recipe_a": "BlockWise1x16", "scale_recipe_b": "BlockWise1x16"},
            ValueError,
            "no MMA takes e4m3 and e4m3 with a scale factor for 16",
        ),
        ((FP8.float(), FP8.mT, ONES, ONES), {}, TypeError, "a must be float8_e4m3fn, .*float32"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(args, kinds, error, sentence):
    with cutex.ops.simulated("sm_100a"), pytest.raises(error, match=sentence):
        cutex.scaled_mm(*args, **{**ONE_BY_32, **kinds})


def test_a_hopper_is_told_what_it_has():
    with cutex.ops.simulated("sm_90a"), pytest.raises(ValueError, match="take Blackwell's tensor"):
        cutex.scaled_mm(FP8, FP8.mT, ONES, ONES, **ONE_BY_32)
