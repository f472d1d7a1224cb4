"""The reference of quantization, bit by bit, the layouts of scale factors, and the check of a
scaled GEMM."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from cutex.problem.scaled import INITS, BlockScaledProblem, Fp8Problem
from cutex.problem.scaled.formats import FORMATS
from cutex.problem.scaled.layouts import rows_contiguous, swizzle, swizzled_shape, unswizzle
from cutex.problem.scaled.quantization import (
    MAGNITUDES,
    Quantized,
    dequantize,
    from_e8m0,
    quantize,
    to_e2m1,
    to_fp8,
    unpack,
)

RECIPES = [(kind, name) for kind in (BlockScaledProblem, Fp8Problem) for name in kind.dtypes]
BLOCKED = [f for f in FORMATS.values() if f.block[1]]


def nearest(x: float, values: list[float]) -> float:
    """The value nearest to x; of two the one at an even place, which has an even mantissa."""
    x = min(x, values[-1])
    return min(values, key=lambda v: (abs(v - x), values.index(v) % 2))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "mxfp4"])
def test_elements_are_rounded_to_nearest_even_and_saturate(name):
    format = FORMATS[name]
    if format.element == "e2m1":
        values = list(MAGNITUDES)
    else:
        codes = torch.arange(128, dtype=torch.uint8).view(format.dtype.torch).double()
        values = [float(v) for v in codes if math.isfinite(v)]
    middles = [(a + b) / 2 for a, b in pairwise(values)]
    at = torch.tensor(middles)  # exact in fp32
    near = [at.nextafter(torch.tensor(way)).tolist() for way in (0.0, math.inf)]
    asked = [*values, *middles, *near[0], *near[1], values[-1] * 1.5, math.inf]
    x = torch.tensor([*asked, *(-v for v in asked)], dtype=torch.float64).float()
    want = [math.copysign(nearest(abs(float(v)), values), float(v)) for v in x]
    if format.element == "e2m1":
        code = to_e2m1(x).int()
        got = torch.tensor(values)[code & 7] * torch.where(code >= 8, -1, 1)
        assert to_e2m1(torch.tensor([math.nan, -0.0, 0.0])).tolist() == [7, 8, 0]
    else:
        got = to_fp8(x, format)
        bits = to_fp8(torch.tensor([math.nan, -math.nan, -0.0, 0.0]), format).view(torch.uint8)
        assert bits.tolist() == [0x7F, 0x7F, 0x80, 0]
    assert got.double().tolist() == want


@pytest.mark.sweep(2)
@pytest.mark.parametrize("rounding", ["floor", "rceil"])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "mxfp4"])
def test_e8m0_factors_are_those_of_the_specification(name, rounding):
    format = FORMATS[name]
    tops = [2.0**e * f for e in (-149, -130, -127, -20, 0, 5, 127) for f in (1, 1.5, 1.75, 1.875)]
    tops = [t for t in tops if torch.tensor(t).isfinite()] + [0.0, 448.0, 449.0, 6.0, 6.5]
    x = torch.zeros(len(tops), 32)
    x[:, 5] = torch.tensor(tops)
    x[:, 9] = -x[:, 5] / 3
    q = quantize(x, format, rounding)
    for top, scale in zip(x[:, 5].tolist(), from_e8m0(q.scale)[:, 0].tolist(), strict=True):
        power = -127
        if top and rounding == "floor":
            power = math.frexp(top)[1] - math.frexp(format.largest)[1]
        elif top:  # the least power of two that holds it, of the product rounded to fp32
            inverse = torch.tensor(1 / format.largest, dtype=torch.float32)
            fraction, power = math.frexp(float(torch.tensor(top) * inverse))
            power = power - (fraction == 0.5) if fraction else -127
        assert scale == 2.0 ** max(power, -127), (top, power)
    if rounding == "rceil":
        held = torch.tensor([t > 2.0**-100 for t in tops])
        largest = dequantize(q, torch.float64).abs().amax(-1)
        assert (largest >= 0.8 * x.double().abs().amax(-1))[held].all()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("format", BLOCKED, ids=str)
def test_a_nan_or_an_infinity_spoils_its_own_block_alone(format):
    rows, k = 256, 2 * format.block[1]
    for value in (math.nan, -math.nan, math.inf, -math.inf):
        x = torch.randn(rows, k)
        clean = quantize(x, format)
        x[1, 3] = value
        q = quantize(x, format, tensor_scale=clean.tensor_scale)
        values = dequantize(q)
        block = torch.zeros(rows, k, dtype=torch.bool)
        block[1 : format.block[0] if format.block[0] > 1 else 2, : format.block[1]] = True
        block[0, : format.block[1]] |= format.block[0] > 1
        assert torch.equal(values[~block], dequantize(clean)[~block])
        if format.name == "nvfp4" and math.isinf(value):  # E4M3 factors saturate
            assert values[1, 3] == math.copysign(448 * 6, value) * float(q.tensor_scale)
        else:
            assert values[block].isnan().all()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_what_a_format_holds_is_kept_and_zeros_stay_zeros(format):
    zeros = dequantize(quantize(torch.zeros(5, 64), format))
    assert torch.equal(zeros, torch.zeros(5, 64))
    x = torch.randint(-2, 3, (130, 40)) * 1.0
    x[:, 0] = x[:, 16] = x[:, 32] = format.largest
    own = torch.ones(()) if format.tensor_scale else None
    q = quantize(x, format, tensor_scale=own)
    assert tuple(q.scale.shape) == format.factors(130, 40)
    assert torch.equal(dequantize(q, torch.float64), x.double())


@pytest.mark.sweep(2)
@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_the_error_is_that_of_an_element(format):
    x = torch.randn(200, 400) * torch.exp2(torch.randint(-9, 9, (200, 1)).float())
    if format.block == (0, 0):
        x = torch.randn(200, 400)
    q = quantize(x, format, "rceil")
    scale = from_e8m0(q.scale) if format.scale == "e8m0" else q.scale.double()
    if q.tensor_scale is not None:
        scale = scale * q.tensor_scale.double()
    for side, block in enumerate(format.block):
        scale = scale.repeat_interleave(block or x.shape[side], side)[: x.shape[0], : x.shape[1]]
    # half a unit in the last place of the element, or of its least subnormal number
    bits, least = {"e4m3": (4, 2.0**-9), "e5m2": (3, 2.0**-16), "e2m1": (2, 0.5)}[format.element]
    allowed = torch.maximum(x.double().abs() * 2.0**-bits, scale * least / 2) * 1.0001
    over = x.double().abs() > scale * format.largest  # NVFP4's factors are rounded down, too
    error = (dequantize(q, torch.float64) - x.double()).abs()
    allowed[over] = (x.double().abs() - scale * format.largest)[over]
    assert (error <= allowed * 1.0001).all()
    assert over.float().mean() < 0.05


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 4), (131, 9), (300, 5)])
def test_the_swizzled_layout_is_the_one_that_tensor_cores_read(rows, columns):
    scales = torch.randint(0, 255, (2, rows, columns), dtype=torch.uint8)
    found = swizzle(scales)
    assert tuple(found.shape) == (2, *swizzled_shape(rows, columns))
    down, along = found.shape[1:3]
    for entry, plain in zip(found, scales, strict=True):
        flat, want = entry.flatten(), torch.zeros(entry.numel(), dtype=torch.uint8)
        for r in range(rows):
            for c in range(columns):
                tile = r // 128 * along + c // 4
                want[512 * tile + 16 * (r % 32) + r % 128 // 32 * 4 + c % 4] = plain[r, c]
        assert torch.equal(flat, want) and down == -(-rows // 128)
        assert torch.equal(unswizzle(flat, rows, columns), plain)


def test_fp32_factors_have_contiguous_rows_of_whole_units():
    scales = torch.rand(131, 7)
    found = rows_contiguous(scales)
    assert torch.equal(found, scales) and found.stride() == (1, 132)


@pytest.mark.sweep(5)
@pytest.mark.parametrize(("kind", "dtype"), RECIPES)
@pytest.mark.parametrize("init", INITS)
def test_the_rounded_product_passes_and_a_wrong_one_does_not(kind, dtype, init):
    problem = kind(200, 136, 416, dtype=dtype, init=init)
    tensors = problem.inputs()
    a, b = problem.values(tensors)
    c = (a @ b.mT).bfloat16()
    check = problem.check(*tensors, c)
    assert check.ok, check.message
    assert not problem.check(*tensors, *problem.outputs()).ok
    c[131, 77] += 0.05 * float(c.abs().max()) + 1
    check = problem.check(*tensors, c, tile=(128, 64))
    assert not check.ok and "C[131, 77] (tile 1, 1) is " in check.message


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("kind", "dtype"), RECIPES)
@pytest.mark.parametrize("init", ["int", "spread"])
def test_a_factor_of_another_block_is_found(kind, dtype, init):
    problem = kind(200, 264, 416, dtype=dtype, init=init, seed=3)
    tensors = problem.inputs()
    for side, rows in ((2, 200), (3, 264)):
        format = problem.recipe[side - 2]
        both = list(problem.operands())
        both[side - 2] = Quantized(
            format, both[side - 2].data, both[side - 2].scale.roll(1, -1),
            both[side - 2].tensor_scale,
        )  # fmt: skip
        values = [dequantize(q, torch.float64) for q in both]
        assert values[side - 2].shape == (rows, 416)
        assert not problem.check(*tensors, (values[0] @ values[1].mT).bfloat16()).ok


def test_work_and_bytes_count_scale_factors():
    mx = BlockScaledProblem(256, 512, 1024, dtype="mxfp8")
    assert mx.bytes == (256 + 512) * (1024 + 32) + 2 * 256 * 512
    assert mx.needs.mma == {"mxf8f6f4": mx.flops} and mx.needs.fp32 == 0
    nv = BlockScaledProblem(100, 512, 1024, dtype="nvfp4")
    assert nv.bytes == 612 * 512 + (128 + 512) * 64 + 8 + 2 * 100 * 512
    assert nv.needs.mma == {"mxf4nvf4": nv.flops}
    mixed = BlockScaledProblem(128, 128, 1024, dtype="mxfp4_mxfp8")
    assert mixed.needs.mma == {"mxf8f6f4": mixed.flops}
    fp8 = Fp8Problem(256, 512, 1024)
    assert fp8.bytes == 768 * 1024 + 4 * (256 * 8 + 4 * 8) + 2 * 256 * 512
    assert fp8.needs.mma == {"f8f6f4": fp8.flops} and fp8.needs.fp32 == 2 * 256 * 512 * 8


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("kind", "more", "says"),
    [
        (Fp8Problem, {"k": 24}, "K=24: must be a multiple of 16"),
        (BlockScaledProblem, {"k": 16, "dtype": "nvfp4"}, "K=16: must be a multiple of 32"),
        (Fp8Problem, {"n": 12}, "N=12: must be a multiple of 8"),
        (Fp8Problem, {"m": 0}, "M=0: every size must be at least 1"),
        (Fp8Problem, {"dtype": "mxfp8"}, "dtype 'mxfp8' is not one of fp8_block, fp8_1x128"),
        (Fp8Problem, {"init": "odd"}, "init 'odd' is not one of int"),
    ],
)
def test_bad_values_are_answered_in_a_sentence(kind, more, says):
    with pytest.raises(ValueError, match=says):
        kind(**{"m": 64, "n": 64, "k": 128, **more})


def test_unpacked_elements_are_the_first_in_the_low_bits():
    q = quantize(torch.tensor([[1.0, -6.0] * 16]), FORMATS["mxfp4"])
    assert q.data.view(torch.uint8)[0, 0] == 0xF2
    assert unpack(q.data)[0, :2].tolist() == [1.0, -6.0]
