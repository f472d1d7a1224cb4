"""Norms quantized in the same pass: bit by bit what quantizing their results gives."""

from __future__ import annotations

import pytest
import torch
from row_calls import rows

import cutex
from cutex.ops.row.norm_quantized import NAMES
from cutex.problem.scaled import quantization
from cutex.problem.scaled.formats import FORMATS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def of_two_passes(y, format, tensor_scale):
    if format not in ("fp8", "fp8_row"):
        return cutex.quantize(y, format, tensor_scale=tensor_scale)
    found = quantization.quantize(y.flatten(0, -2), FORMATS["fp8_row"])
    return cutex.ops.quantize.QuantizedTensor(
        found.data.view(y.shape), found.scale, "fp8_row", False
    )


def same(found, wanted, rounded=True):
    """Check the bits, the layout and the format. rounded: to 16 bits, before it was quantized. The
    last bit of fp32 norms is that of the kernel, in which ptxas contracts as it likes and threads
    share a row as they are: an element beside a tie may have the next code then, one of a thousand
    of those that were rounded."""
    assert found.format == wanted.format and found.swizzled == wanted.swizzled
    codes, others = found.data.view(torch.uint8), wanted.data.view(torch.uint8)
    apart = (codes.int() - others.int()).abs()
    assert (apart <= 1).all() and (apart > 0).sum() <= apart.numel() // (1000 if rounded else 100)
    assert found.data.dtype == wanted.data.dtype and found.scale.dtype == wanted.scale.dtype
    assert found.scale.shape == wanted.scale.shape
    if wanted.scale.dtype == torch.float32:  # NaNs of any bits
        rtol = 0 if rounded else 2**-20
        torch.testing.assert_close(found.scale, wanted.scale, rtol=rtol, atol=0, equal_nan=True)
        assert found.scale.stride() == wanted.scale.stride()
    else:
        assert torch.equal(found.scale.view(torch.uint8), wanted.scale.view(torch.uint8))


@pytest.mark.sweep(288)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", NAMES)
@pytest.mark.parametrize("n", [64, 264, 100, 1032, 4104])
def test_bits_are_those_of_two_passes(device, n, format, dtype):
    x, r = (rows(device, (2, 3, n), dtype, i) for i in range(2))
    weight = rows(device, (n,), torch.float32, 2)
    x[0, 1, n // 2], x[0, 2, 5] = 1e4, torch.nan
    x[1, 0] = 0
    scale = torch.tensor([0.01], device=device) if format == "nvfp4" else None
    found, h = cutex.rms_norm(x, weight, residual=r, quantize=format, tensor_scale=scale)
    y, summed = cutex.rms_norm(x, weight, residual=r)
    same(found, of_two_passes(y, format, scale), dtype != torch.float32)
    assert torch.equal(h.view(torch.uint8), summed.view(torch.uint8))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("format", ["mxfp8", "fp8"])
def test_layer_norm_too(device, format):
    x, bias = rows(device, (130, 96), torch.bfloat16), rows(device, (96,), torch.bfloat16, 1)
    found = cutex.layer_norm(x, None, bias, quantize=format)
    same(found, of_two_passes(cutex.layer_norm(x, None, bias), format, None))
    y = cutex.layer_norm(x, None, bias).float()
    error = (cutex.dequantize(found, torch.float32) - y).abs()
    assert (error <= y.abs() / 8 + 0.01).all()  # what saturates by MX's own rule loses an eighth


@pytest.mark.slow
def test_long_rows_of_a_layer_norm_meet_in_one_way(device):
    """In one pass and in two the threads of a row meet once: the bits are the same."""
    x = rows(device, (2, 33_024), torch.bfloat16) + 3
    weight = rows(device, (33_024,), torch.bfloat16, 1)
    found = cutex.layer_norm(x, weight, quantize="mxfp8")
    same(found, of_two_passes(cutex.layer_norm(x, weight), "mxfp8", None))


@pytest.mark.slow
@pytest.mark.parametrize("format", NAMES)
def test_views_that_begin_anywhere(device, format):
    whole = rows(device, (7, 300), torch.bfloat16)
    scale = torch.tensor([0.01], device=device) if format == "nvfp4" else None
    for x in (whole[1:4, 3:259], whole.mT[:256, :6], whole[::2, :256]):
        found = cutex.rms_norm(x, quantize=format, tensor_scale=scale)
        same(found, of_two_passes(cutex.rms_norm(x), format, scale))


def test_nvfp4_finds_its_own_scale(device):
    x = rows(device, (4, 64), torch.bfloat16)
    found, wanted = cutex.rms_norm(x, quantize="nvfp4"), cutex.quantize(cutex.rms_norm(x), "nvfp4")
    same(found, wanted)
    assert torch.equal(found.tensor_scale, wanted.tensor_scale)


def test_nothing_in_nothing_out(device):
    for format in ("fp8", "fp8_1x128", "mxfp8"):
        x = torch.empty(0, 64, device=device)
        found = cutex.rms_norm(x, quantize=format)
        assert found.data.shape == (0, 64) and found.scale.numel() == 0


@pytest.mark.slow
def test_a_product_takes_it(device):
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("fp32 factors are Hopper's")
    x, w = rows(device, (5, 256), torch.bfloat16), rows(device, (48, 256), torch.bfloat16, 1)
    wanted = cutex.rms_norm(x).double() @ w.double().T
    for format, of_w in (("fp8_1x128", cutex.quantize(w, "fp8_128x128")), ("fp8", None)):
        q = cutex.rms_norm(x, quantize=format)
        b = cutex.rms_norm(w, quantize="fp8") if of_w is None else of_w
        target = wanted if of_w else cutex.rms_norm(x).double() @ cutex.rms_norm(w).double().T
        found = cutex.scaled_mm(q, b, output_dtype=torch.float32).double()
        assert (found - target).norm() < 0.05 * target.norm()


def test_torch_compile_takes_it_whole(device):
    x = rows(device, (4, 64), torch.bfloat16)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x):
        q, h = cutex.rms_norm(2 * x, residual=x, quantize="mxfp8")
        return q.data, q.scale, h

    data, scale, h = step(x)
    wanted, summed = cutex.rms_norm(2 * x, residual=x, quantize="mxfp8")
    assert torch.equal(data.view(torch.uint8), wanted.data.view(torch.uint8))
    assert torch.equal(scale.view(torch.uint8), wanted.scale.view(torch.uint8))
    assert torch.equal(h, summed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sm_80", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("format", ["fp8", "mxfp8", "nvfp4"])
def test_on_any_arch(name, format):
    with cutex.ops.simulated(name):
        x = rows("cpu", (5, 264), torch.bfloat16)
        scale = torch.tensor([0.01]) if format == "nvfp4" else None
        found = cutex.rms_norm(x, quantize=format, tensor_scale=scale)
        same(found, of_two_passes(cutex.rms_norm(x), format, scale))


@pytest.mark.slow
@pytest.mark.parametrize("order, seed", [("random", 1), ("starved", 0), ("peer-late", 0)])
def test_in_every_order_of_events(order, seed):
    with cutex.ops.simulated("sm_90a", order=order, seed=seed):
        x = rows("cpu", (3, 8320), torch.bfloat16)  # CTAs share a row
        for format in ("fp8", "mxfp8"):
            found = cutex.rms_norm(x, quantize=format)
            same(found, of_two_passes(cutex.rms_norm(x), format, None))


BAD = [
    ({"quantize": "int8"}, ValueError, "quantize='int8' is not one of fp8, fp8_row, mxfp8"),
    ({"quantize": "mxfp8", "x": torch.zeros(8)}, ValueError, "at least 2 dimensions"),
    ({"quantize": "nvfp4", "x": torch.zeros(2, 7)}, ValueError, "N=7: two elements of nvfp4"),
    ({"quantize": "mxfp8", "tensor_scale": torch.ones(1)}, ValueError, "mxfp8 has none"),
    ({"quantize": "nvfp4", "tensor_scale": 1.0}, TypeError, "tensor_scale must be a float32"),
    ({"quantize": "nvfp4", "tensor_scale": torch.ones(2)}, ValueError, "must have 1 element"),
    ({"tensor_scale": torch.ones(1)}, ValueError, "quantize=None is not one of"),
    ({"quantize": "fp8", "x": torch.zeros(2, 8, requires_grad=True)}, ValueError, "gradient"),
    ({"quantize": "fp8", "weight": torch.zeros(3)}, ValueError, r"weight must have shape \(8,\)"),
]


@pytest.mark.parametrize("given, error, said", BAD)
def test_bad_input_is_one_sentence(given, error, said):
    with cutex.ops.simulated("sm_90a"), pytest.raises(error, match=said) as found:
        cutex.rms_norm(**({"x": torch.zeros(2, 8)} | given))
    assert "\n" not in str(found.value)
