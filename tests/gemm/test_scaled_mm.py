"""`cutex.scaled_mm` and `cutex.fp8_linear`, simulated, beside float64 of what was quantized."""

from __future__ import annotations

import importlib
import random

import pytest
import torch
from torch.nn.functional import ScalingType

import cutex
from cutex.arch import BOARDS, arch
from cutex.kernels.gemm.scaled.fp8.choose import choose, configs_for
from cutex.problem.scaled import Fp8Problem
from cutex.problem.scaled.formats import FORMATS
from cutex.problem.scaled.quantization import Quantized, dequantize, quantize

E4M3 = torch.float8_e4m3fn


def operands(m: int, n: int, k: int, dtype: str = "fp8_block", init: str = "normal", seed: int = 0):
    """A problem, with the arguments that it is for scaled_mm."""
    problem = Fp8Problem(m, n, k, dtype=dtype, init=init, seed=seed)
    a, b, scale_a, scale_b = problem.inputs()
    block = dtype == "fp8_block"
    kinds = {
        "scale_recipe_a": "BlockWise1x128",
        "scale_recipe_b": "BlockWise128x128" if block else "BlockWise1x128",
    }
    return problem, (a, b.mT, scale_a, scale_b.mT if block else scale_b), kinds


@pytest.mark.sweep(12)
@pytest.mark.parametrize("seed", range(6))
def test_randomized_products_are_within_the_bound(seed):
    r = random.Random(seed)
    m, n = r.choice((1, 3, 17, 64, 130, 300)), 8 * r.randint(1, 40)
    dtype, init = r.choice(("fp8_block", "fp8_1x128")), r.choice(("int", "normal", "spread"))
    problem, args, kinds = operands(m, n, 128 * r.randint(1, 5), dtype, init, seed)
    with cutex.ops.simulated("sm_90a"):
        c = cutex.scaled_mm(*args, **kinds)
    check = problem.check(*problem.inputs(), c)
    assert check.ok, check.message


@pytest.mark.slow
@pytest.mark.parametrize("form", ["factors", "lists", "quantized"])
def test_a_call_like_one_before_is_launched_without_its_checks(form, monkeypatch):
    _, args, kinds = operands(5, 136, 256)
    quantized = form == "quantized"
    if form == "lists":
        args = (*args[:2], *([scale] for scale in args[2:]))
        kinds = {name: [getattr(ScalingType, kind)] for name, kind in kinds.items()}
    x, w = (torch.randn(rows, 256).bfloat16() for rows in (5, 136))
    residual = torch.ones(5, 136).bfloat16()
    with cutex.ops.simulated("sm_90a"):
        if quantized:
            args, kinds = (cutex.quantize(x, "fp8_1x128"), cutex.quantize(w, "fp8_128x128")), {}
        first = cutex.scaled_mm(*args, **kinds)
        gated = cutex.scaled_mm(*args, **kinds, activation="gated_silu")
        with_residual = cutex.scaled_mm(*args, **kinds, residual=residual)
        monkeypatch.setattr(importlib.import_module("cutex.ops.scaled_mm"), "check_blocks", None)
        for _ in range(2):  # by its plan, and by the launch that the plan then knows
            assert torch.equal(cutex.scaled_mm(*args, **kinds), first)
            assert torch.equal(cutex.scaled_mm(*args, **kinds, activation="gated_silu"), gated)
        again = cutex.scaled_mm(*args, **kinds, residual=2 * residual)
        for other in ({"activation": "relu"}, {"output_dtype": torch.float32}):
            with pytest.raises(TypeError, match="not callable"):  # no plan takes other options
                cutex.scaled_mm(*args, **kinds, **other)
        a = args[0]
        other = a._replace(data=a.data[1:], scale=a.scale[1:]) if quantized else a[1:]
        with pytest.raises(TypeError, match="not callable"):  # or other sizes
            cutex.scaled_mm(other, *args[1:], **kinds)
    assert (again.double() - with_residual.double() - 1).abs().max() <= 2.0**-7 * again.abs().max()


@pytest.mark.parametrize("kind", ["RowWise", pytest.param("TensorWise", marks=pytest.mark.slow)])
def test_factors_of_rows_find_a_plan_however_torch_names_them(kind, monkeypatch):
    """By a name, a member of torch's enumeration or, as torch allows, a list of one; each with a
    plan of its own, which has the tensors of the call that it is used for."""
    a, b = torch.randn(32, 64).to(E4M3), torch.randn(48, 64).to(E4M3).mT
    scales = (torch.rand(32, 1), torch.rand(1, 48)) if kind == "RowWise" else (torch.rand(1),) * 2
    bias = torch.randn(48).bfloat16()
    member = getattr(ScalingType, kind)
    forms = [(x, x) for x in (kind, member, [member], (kind,))]

    def call(a, form, scales):
        recipes = dict(zip(("scale_recipe_a", "scale_recipe_b"), form, strict=True))
        return cutex.scaled_mm(a, b, *scales, bias=bias, **recipes)

    with cutex.ops.simulated("sm_90a"):
        for form in forms:
            first = call(a, form, [[x] for x in scales])
        monkeypatch.setattr(importlib.import_module("cutex.ops.scaled_mm"), "_check_whole", None)
        for form in forms:
            assert torch.equal(call(a, form, scales), first)
            other = torch.randn(32, 64).to(E4M3)
            other_scales = [x + 1 for x in scales] if kind == "RowWise" else scales
            want = (other.double() @ b.double()) * other_scales[0] * other_scales[1] + bias
            got = call(other, form, other_scales)
            assert (got.double() - want).abs().max() <= 2.0**-7 * want.abs().max()
        with pytest.raises(TypeError, match="not callable"):  # another kind is no such call
            call(a, ("RowWise", "TensorWise"), scales)


def test_epilogues_odd_sizes_and_copied_operands():
    problem, (a, b, scale_a, scale_b), kinds = operands(37, 72, 256, init="int")
    a_values, b_values = problem.values(problem.inputs())
    n = 67  # rows of out are no whole units of 16 bytes
    bias, residual = torch.randn(n).bfloat16(), torch.randn(37, n).bfloat16()
    want = torch.relu(a_values @ b_values[:n].mT + bias.double()) + residual.double()
    with cutex.ops.simulated("sm_90a"):
        c = cutex.scaled_mm(
            a, b.contiguous()[:, :n], scale_a.contiguous(), scale_b, **kinds, bias=bias,
            activation="relu", residual=residual, output_dtype=torch.float32,
        )  # fmt: skip
    assert c.dtype == torch.float32
    assert (c.double() - want).abs().max() <= 2.0**-20 * want.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "m", "n"),
    [("fp8_block", 131, 200), pytest.param("fp8_1x128", 20, 136, marks=pytest.mark.slow)],
)
def test_batches_have_factors_of_their_own(dtype, m, n):
    """Entry by entry as matrices are, also where one b, or one matrix of factors, serves all."""
    entries = [operands(m, n, 384, dtype, "int", seed) for seed in range(3)]
    kinds = entries[0][2]
    a, b, scale_a, scale_b = (torch.stack(x) for x in zip(*(e[1] for e in entries), strict=True))
    bias, residual = torch.randn(n).bfloat16(), torch.randn(3, m, n).bfloat16()
    with cutex.ops.simulated("sm_90a"):
        plain = cutex.scaled_mm(a, b, scale_a, scale_b, **kinds)
        fused = cutex.scaled_mm(
            a, b, scale_a, scale_b, **kinds, bias=bias, residual=residual,
            output_dtype=torch.float32,
        )  # fmt: skip
        one_b = cutex.scaled_mm(
            a, b[1].expand_as(b), scale_a, scale_b[1].expand_as(scale_b), **kinds
        )
    for i, (problem, _, _) in enumerate(entries):
        check = problem.check(*problem.inputs(), plain[i])
        assert check.ok, check.message
        values_a, values_b = problem.values(problem.inputs())
        want = values_a @ values_b.mT + bias.double() + residual[i].double()
        assert (fused[i].double() - want).abs().max() <= 2.0**-20 * want.abs().max()
        values_b = entries[1][0].values(entries[1][0].inputs())[1]
        want = values_a @ values_b.mT
        assert (one_b[i].double() - want).abs().max() <= 2.0**-8 * want.abs().max()


def test_what_quantize_gives_and_torchs_padded_factors():
    """Of a K whose last block is shorter, with NaN behind it."""
    x, w = torch.randn(40, 352).bfloat16(), torch.randn(136, 352).bfloat16()
    with cutex.ops.simulated("sm_90a"):
        qx, qw = cutex.quantize(x, "fp8_1x128"), cutex.quantize(w, "fp8_128x128")
        c = cutex.scaled_mm(qx, qw)
        padded = torch.nn.functional.pad(qw.scale, (0, 1), value=torch.nan).mT  # (4, 2)
        named = {"scale_recipe_a": ["BlockWise1x128"], "scale_recipe_b": "BlockWise128x128"}
        wide = [
            torch.nn.functional.pad(q.data.view(torch.uint8), (0, 32), value=0x7F).view(
                torch.float8_e4m3fn
            )[:, :352]
            for q in (qx, qw)
        ]
        again = cutex.scaled_mm(wide[0], wide[1].mT, qx.scale, padded, **named)
        plain = cutex.matmul(qx, qw)
    values = [cutex.dequantize(q, torch.float64) for q in (qx, qw)]
    want = values[0] @ values[1].mT
    assert (c.double() - want).abs().max() <= 2.0**-8 * want.abs().max()
    assert torch.equal(c, again) and torch.equal(c, plain)


@pytest.mark.slow
@pytest.mark.parametrize(("m", "k"), [(3, 384), (200, 272)])
def test_factors_of_128x128_may_be_of_a(m, k):
    """As torch has them: the weight first, (K / 128, M / 128), K / 128 padded or not; the result is
    that of the same factors, one for each row."""
    w, x = torch.randn(m, k).bfloat16(), torch.randn(48, k).bfloat16()
    kinds = {"scale_recipe_a": "BlockWise128x128", "scale_recipe_b": "BlockWise1x128"}
    with cutex.ops.simulated("sm_90a"):
        qw, qx = cutex.quantize(w, "fp8_128x128"), cutex.quantize(x, "fp8_1x128")
        padded = torch.nn.functional.pad(qw.scale, (0, 1), value=torch.nan).mT
        args = qw.data, qx.data.mT, padded, qx.scale
        found = [cutex.scaled_mm(*args, **kinds) for _ in range(3)]  # the second by its plan
        whole = [cutex.scaled_mm(qw, qx) for _ in range(3)]
    values = [cutex.dequantize(q, torch.float64) for q in (qw, qx)]
    want = values[0] @ values[1].mT
    assert (found[0].double() - want).abs().max() <= 2.0**-8 * want.abs().max()
    assert all(torch.equal(found[0], c) for c in (*found, *whole))


@pytest.mark.slow
def test_whole_rows_and_tensors_are_matmuls():
    """Also where a factor alone leaves the range of fp32, and sums of the largest elements alone,
    of which tensor cores keep 13 bits."""
    a, b = torch.randn(32, 1088).to(E4M3), torch.randn(48, 1088).to(E4M3)
    scale_a, scale_b = torch.rand(32, 1), torch.rand(1, 48)
    rows = {"scale_recipe_a": "RowWise", "scale_recipe_b": "RowWise"}
    one = {"scale_recipe_a": "TensorWise", "scale_recipe_b": "TensorWise"}
    largest = torch.full_like(a.float(), 448.0).to(E4M3), torch.full_like(b.float(), 448.0).to(E4M3)
    with cutex.ops.simulated("sm_90a"):
        for times in (1.0, 2.0**126, 2.0**-126):
            by_a, by_b = scale_a * times, scale_b / times
            for x, w in ((a, b), largest):
                product = x.double() @ w.double().mT
                got = cutex.scaled_mm(x, w.mT, by_a, by_b, **rows)
                want = product * scale_a * scale_b
                assert (got.double() - want).abs().max() <= 2.0**-8 * want.abs().max()
                options = one | {"output_dtype": torch.float32}
                got = cutex.scaled_mm(x, w.mT, by_a[:1], by_b[:, :1], **options)
                want = product * scale_a[0] * scale_b[0, 0]
                # NOTE: of Gaussian data, sums of 128 lose 2^-13 of their largest term
                assert (got.double() - want).abs().max() <= 2.0**-12 * want.abs().max()
        # NOTE: by their own product these two would be infinite, those be rounded to a denormal
        for element, scales in ((2.0**-8, (3e38, 1.5)), (448.0, (2.0**-149, 0.75))):
            x, w = (torch.full_like(y.float(), element).to(E4M3) for y in (a, b))
            by_a, by_b = (torch.tensor(scale) for scale in scales)
            got = cutex.scaled_mm(x, w.mT, by_a, by_b, **one, output_dtype=torch.float32)
            want = (1088 * element**2 * by_a.double() * by_b).float()
            assert (got == want).all()


A, B = torch.zeros(32, 256).to(E4M3), torch.zeros(200, 256).to(E4M3).mT
SA, SB = torch.ones(32, 2), torch.ones(2, 2)
BLOCK = {"scale_recipe_a": "BlockWise1x128", "scale_recipe_b": "BlockWise128x128"}
ROWS = {"scale_recipe_a": "RowWise", "scale_recipe_b": "RowWise"}


@pytest.mark.parametrize(
    ("args", "more", "says"),
    [
        ((A, B, SA.mT, SB), {}, r"scale_a of BlockWise1x128 must be \(M, K / 128\) = \(32, 2\), "
                                r"got \(2, 32\)"),
        ((A, B, SA, SB[:1]), {}, r"scale_b of BlockWise128x128 must be \(K / 128, N / 128\) = "
                                 r"\(2, 2\), got \(1, 2\)"),
        ((A, B, SA, torch.ones(200, 2)), {}, r"must be \(K / 128, N / 128\) = \(2, 2\), got \(200"),
        ((A, B, SA.bfloat16(), SB), {}, "scale_a must be float32, got torch.bfloat16"),
        ((A, B, None, SB), {}, "scale_a must be a torch.Tensor, got NoneType"),
        ((A[:, :200], B[:200], SA, SB), {}, "K=200: with factors of 128 it must be a multiple"),
        ((A[:, :96], B[:96], SA, SB), {}, r"must be \(M, ceil\(K / 128\)\) = \(32, 1\), got \(32"),
        ((A, B[:128], SA, SB), {}, r"b has K=128 \(its first size\), but a has K=256"),
        ((A.bfloat16(), B, SA, SB), {}, "a must be float8_e4m3fn with factors of blocks, got"),
        ((A[None], B, SA, SB), {}, r"matrices or batches of as many, got \(1, 32, 256\) and \(256"),
        ((A[None, None], B, SA, SB), {}, "a must be a matrix or a batch, got 4 dimensions"),
        ((A[None], B[None], SA, SB), {}, r"scale_a of BlockWise1x128 must be \(L, M, K / 128\) = "
                                         r"\(1, 32, 2\), got \(32, 2\)"),
        ((A, B, SB.mT, torch.ones(200, 2)), {"scale_recipe_a": "BlockWise128x128",
          "scale_recipe_b": "BlockWise1x128"}, r"must be \(K / 128, M / 128\) = \(2, 1\), got"),
        ((A, B, SA, SB), {"scale_recipe_a": "BlockWise128x128"}, "BlockWise128x128 with scale_rec"),
        ((A, B, SA, SB), {"scale_recipe_a": None}, "scale_recipe_a=None is not one of"),
        ((A, B, SA, SB), {"scale_recipe_a": "RowWise"}, "scale_recipe_a RowWise with"),
        ((A, B, SA.mT[:1], SB), ROWS, r"scale_a of RowWise must have shape \(32, 1\), got \(1, 3"),
        ((A, B, SA[:, :1], torch.ones(200, 1)), ROWS, r"scale_b of RowWise must have shape \(1, 2"),
        ((A, B, SA, SB), {"scale_recipe_a": "BlockWise1x32"}, "scale_recipe_a BlockWise1x32 with"),
        ((A, B, SA, SB), {"activation": "tanh"}, "activation 'tanh' is not one of relu"),
        ((A, B, SA, SB), {"output_dtype": torch.int8}, "output_dtype torch.int8 is not bfloat16"),
        ((A, B, SA, SB), {"output_scale": torch.ones(1)}, "output_scale is given: takes output_dt"),
        ((A, B, SA, SB), {"bias": torch.ones(3)}, "bias has shape"),
        ((A, B, SA, SB), {}, "a is on cpu: cutex.matmul runs on a Hopper or Blackwell GPU"),
    ],
)  # fmt: skip
def test_bad_arguments_are_answered_in_a_sentence(args, more, says):
    with pytest.raises((TypeError, ValueError), match=says):
        cutex.scaled_mm(*args, **{**BLOCK, **more})


def test_blackwell_is_told_what_to_take_instead():
    with (
        cutex.ops.simulated("sm_100a"),
        pytest.raises(ValueError, match="Blackwell: fp32 factors of blocks run on Hopper"),
    ):
        cutex.scaled_mm(A, B, SA, SB, **BLOCK)


@pytest.mark.sweep(8)
@pytest.mark.parametrize(("m", "bias"), [(40, True), (16, False)])
@pytest.mark.parametrize(("arch_name", "k", "n"), [("sm_90a", 144, 272), ("sm_100a", 160, 288)])
def test_a_linear_layer_and_its_gradients(m, bias, arch_name, k, n):
    torch.manual_seed(m)
    x, w, dy = (torch.randn(*s).bfloat16() for s in ((2, m // 2, k), (n, k), (2, m // 2, n)))
    x, w = x.requires_grad_(), w.requires_grad_()
    b = torch.randn(n).bfloat16().requires_grad_() if bias else None
    with cutex.ops.simulated(arch_name):
        y = cutex.fp8_linear(x, w, b)
        y.backward(dy)
    flat, dflat = x.detach().double().flatten(0, 1), dy.double().flatten(0, 1)
    wants = {
        "y": (
            y.flatten(0, 1),
            flat @ w.detach().double().mT + (b.detach().double() if bias else 0),
        ),
        "dx": (x.grad.flatten(0, 1), dflat @ w.detach().double()),
        "dw": (w.grad, dflat.mT @ flat),
    }
    for name, (got, want) in wants.items():
        error = (got.double() - want).norm() / want.norm()
        assert error < 0.05, (name, float(error))  # two operands of 3 bits of mantissa
    if b is not None:
        assert torch.allclose(b.grad.double(), dflat.sum(0), rtol=2.0**-7, atol=0.02)


@pytest.mark.slow
def test_mxfp8_gradients_are_those_of_operands_quantized_both_ways():
    """All three products on Blackwell, M no multiple of a block, beside float64."""
    x, dy = torch.randn(40, 128).bfloat16(), torch.randn(40, 64).bfloat16()
    x, w = x.requires_grad_(), torch.randn(64, 128).bfloat16().requires_grad_()
    with cutex.ops.simulated("sm_100a"):
        y = cutex.fp8_linear(x, w)
        y.backward(dy)

    def values(t, turned):
        t = t.detach().mT if turned else t.detach()
        whole = torch.nn.functional.pad(t, (0, -t.shape[1] % 32))
        return dequantize(quantize(whole, FORMATS["mxfp8"], "rceil"), torch.float64)

    for got, want in (
        (y, values(x, False) @ values(w, False).mT),
        (x.grad, values(dy, False) @ values(w, True).mT),
        (w.grad, values(dy, True) @ values(x, True).mT),
    ):
        assert (got.double() - want).abs().max() <= 2.0**-8 * want.abs().max()
    with cutex.ops.simulated("sm_100a"), pytest.raises(ValueError, match="K=48: must be a mult"):
        cutex.fp8_linear(torch.ones(4, 48), torch.ones(32, 48))


@pytest.mark.slow
def test_the_gradient_of_a_weight_is_that_of_its_quantized_operands():
    x, dy = torch.randn(64, 128).bfloat16(), torch.randn(64, 256).bfloat16()
    w = torch.zeros(256, 128).bfloat16().requires_grad_()
    with cutex.ops.simulated("sm_90a"):
        cutex.fp8_linear(x, w).backward(dy)
        turned = [cutex.quantize(y, "fp8_1x128", along="columns") for y in (dy, x)]
    values = [
        dequantize(Quantized(FORMATS["fp8_1x128"], q.data, q.scale), torch.float64) for q in turned
    ]
    want = values[0] @ values[1].mT
    assert (w.grad.double() - want).abs().max() <= 2.0**-8 * want.abs().max()


@pytest.mark.slow
def test_a_layer_and_its_gradients_are_one_graph_of_torch_compile():
    x, dy = torch.randn(64, 128).bfloat16(), torch.randn(64, 64).bfloat16()
    w = torch.randn(64, 128).bfloat16().requires_grad_()
    found = []
    with cutex.ops.simulated("sm_90a"):
        for layer in (cutex.fp8_linear, torch.compile(fullgraph=True, backend="aot_eager")(
                lambda x, w: cutex.fp8_linear(x, w))):  # fmt: skip
            w.grad = None
            given = x.clone().requires_grad_()
            layer(given, w).backward(dy)
            found.append((given.grad, w.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("x", "w", "b", "says"),
    [
        (
            torch.ones(4, 64),
            torch.ones(32, 48),
            None,
            r"x has shape \(4, 64\) and weight \(32, 48\)",
        ),
        (torch.ones(4, 40), torch.ones(32, 40), None, "K=40: must be a multiple of 16"),
        (torch.ones(4, 64), torch.ones(32, 64).half(), None, "weight is torch.float16, but x is"),
        (
            torch.ones(4, 64),
            torch.ones(32, 64),
            torch.ones(3),
            r"bias has shape \(3,\), not \(32,\)",
        ),
        (torch.ones(4, 64).int(), torch.ones(32, 64), None, "x must be of bfloat16"),
    ],
)
def test_bad_arguments_of_a_layer_are_answered_in_a_sentence(x, w, b, says):
    with pytest.raises((TypeError, ValueError), match=says):
        cutex.fp8_linear(x, w, b)


def test_every_size_has_a_config_of_its_class():
    for m in (1, 7, 64, 100, 257, 4096):
        for n, k in ((8, 128), (576, 7168), (24576, 1536)):
            found = configs_for((m, n, k), "fp8_block")[0]
            problem = Fp8Problem(m, n, k)
            assert found.why_not(problem, arch("sm_90a")) is None
            assert choose(problem, arch("sm_90a")).why_not(problem, arch("sm_90a")) is None
            of_board = configs_for((m, n, k), "fp8_block", board="H100 PCIe")
            assert {c.num_ctas for c in of_board} == {BOARDS["H100 PCIe"].num_sms}


def test_tiles_are_those_that_were_the_fastest():
    """256x128 where they fill whole rounds of SMs, otherwise 128 rows, whose columns share few
    factors; few rows as columns, in shares of K (docs/facts/scaled.md#one-model)."""
    for mnk, tile in (
        ((4096, 7168, 16384), (256, 128)),
        ((2954, 8192, 3072), (256, 128)),
        ((2505, 3584, 14336), (128, 192)),
        ((1335, 40960, 7168), (128, 192)),
        ((769, 5120, 13824), (128, 144)),
        ((31, 1536, 8960), (64, 32)),
    ):
        found = configs_for(mnk, "fp8_block")[0]
        assert (found.tile_m, found.tile_n) == tile, mnk
