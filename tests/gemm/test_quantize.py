"""`cutex.quantize`, compiled and simulated, gives the reference's bits on every arch."""

from __future__ import annotations

import io
import math

import pytest
import torch

import cutex
from cutex.kernels.quantize import config
from cutex.ops.quantize import QUANTIZED
from cutex.problem.scaled.formats import FORMATS
from cutex.problem.scaled.layouts import swizzle
from cutex.problem.scaled.quantization import quantize as reference

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def values(m: int, k: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows of very different magnitudes, with NaN, infinities, zeros of both signs, denormals, the
    largest number, and numbers half way between elements."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=g) * torch.exp2(torch.randint(-30, 30, (m, 1), generator=g))
    rows = torch.randperm(m, generator=g)[:8].tolist()
    halves = [448.0, 464.0, 465.0, -6.0, 0.25, 0.75, 5.0, 2.5, -1.25, 3.5, 0.0, -0.0, 1.75]
    x[rows[0]] = torch.tensor(halves).repeat(k // len(halves) + 1)[:k]
    x[rows[1], k // 3], x[rows[2], k // 2], x[rows[3], 0] = math.nan, math.inf, -math.inf
    x[rows[4]], x[rows[5]] = 0.0, -0.0
    x[rows[6]] *= 2.0**-120
    x[rows[7]] = torch.finfo(dtype).max
    return x.to(dtype)


def alike(found: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether the bits are the same; of a NaN in fp32 any."""
    if found.shape != want.shape or found.dtype != want.dtype:
        return False
    if found.dtype == torch.float32:
        same = found.contiguous().view(torch.int32) == want.contiguous().view(torch.int32)
        return bool((same | (found.isnan() & want.isnan())).all())
    return torch.equal(found.view(torch.uint8), want.view(torch.uint8))


def check(found, x: torch.Tensor, rounding: str = "floor") -> None:
    format = FORMATS[found.format]
    own = None if found.tensor_scale is None else found.tensor_scale[0]
    want = reference(x, format, rounding, own)
    assert alike(found.data, want.data)
    assert alike(found.scale, swizzle(want.scale) if found.swizzled else want.scale)


CASES = [
    # (format, arch, M, K, dtype, rounding, swizzled)
    ("mxfp4", "sm_90a", 136, 160, torch.bfloat16, "floor", None),
    *((format, ARCHS[(i + j) % 5], *size, DTYPES[(i + 2 * j) % 3], ("floor", "rceil")[(i + j) % 2],
     [None, False][j % 2])
    for i, format in enumerate(QUANTIZED)
    for j, size in enumerate([(136, 160), (70, 90), (32, 392)])),
]  # fmt: skip


@pytest.mark.sweep(40)
@pytest.mark.parametrize(("format", "arch", "m", "k", "dtype", "rounding", "swizzled"), CASES)
def test_both_sides_have_the_references_bits(format, arch, m, k, dtype, rounding, swizzled):
    x = values(m, k, dtype, seed=m)
    own = torch.tensor([0.37]) if format == "nvfp4" else None
    with cutex.ops.simulated(arch):
        rows, columns = cutex.quantize(
            x, format, along="both", rounding=rounding, swizzled=swizzled, tensor_scale=own
        )
    check(rows, x, rounding)
    check(columns, x.mT, rounding)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "own"),
    [
        (torch.bfloat16, 0.37),
        (torch.float16, 0.37),
        (torch.bfloat16, -0.5),
        (torch.bfloat16, 1e-30),
        (torch.bfloat16, 2.0**105),
        (torch.float32, 1e36),
        (torch.float32, 1.0),
    ],
)
def test_hoppers_fp4_has_the_references_bits_in_blocks_cut_off_and_not(dtype, own):
    x, own = values(32, 48, dtype, seed=3), torch.tensor([own])
    factors = x.float().unflatten(1, (3, 16)).abs().amax(2).nan_to_num(torch.inf) / (6 * own)
    assert (factors.abs() > 500).any() and (own < 0.1 or (factors.abs() < 400).any())
    with cutex.ops.simulated("sm_90a"):
        rows, columns = cutex.quantize(x, "nvfp4", along="both", tensor_scale=own)
    check(rows, x)
    check(columns, x.mT)


@pytest.mark.slow
@pytest.mark.parametrize("along", ["columns", "both"])
def test_ctas_that_stay_have_the_references_bits(along, monkeypatch):
    """Two CTAs take many tiles each, whole ones and others, in any order of warps."""
    monkeypatch.setattr(config, "STAYING", (2, 2))
    monkeypatch.setattr("cutex.ops.quantize._KNOWN", {})
    for i, (m, k) in enumerate([(416, 144), (96, 656), (70, 400)]):
        x, own = values(m, k, DTYPES[i % 2], seed=m), torch.tensor([0.37])
        with cutex.ops.simulated("sm_90a", order=("random", "starved", "eager")[i], seed=i):
            q = cutex.quantize(x, "nvfp4", along=along, tensor_scale=own)
        if along == "both":
            check(q[0], x)
        check(q[1] if along == "both" else q, x.mT)


@pytest.mark.slow
@pytest.mark.parametrize("along", ["columns", "both"])
def test_whole_tiles_of_nvfp4_have_the_references_bits(along, monkeypatch):
    """Tensors' factors with which products may and may not be half way between elements, or factors
    between factors; with which some blocks are cut off; every mantissa of bf16; NaN and infinities
    in single blocks."""
    monkeypatch.setattr(config, "STAYING", (2, 2))
    torch.manual_seed(2)
    mantissas = (1 + torch.arange(128) / 128) * torch.exp2(torch.arange(128)[:, None] % 9 - 4.0)
    mantissas = mantissas[:, torch.randperm(128)] * (1 - 2 * (torch.randn(128, 128) > 0))
    odd = torch.randn(128, 256)
    odd[3, 40], odd[70, 200], odd[90, 7], odd[5] = math.nan, math.inf, -math.inf, 0.0
    for x, own in (
        *((mantissas, own) for own in (1e-3, 1.0, 0.37, 0.01, 3 / 448, 5.6875 / 2688)),
        *((torch.randn(128, 128), own) for own in (2.0**-60, 2.0**-61, 1e-3 / 7)),
        (odd, 1e-3), (odd, 5.5 / 2688), (odd, 0.37), ((odd * 8).round() / 16 * 3, 1.0),
    ):  # fmt: skip
        x, scale = x.bfloat16(), torch.tensor([own])
        monkeypatch.setattr("cutex.ops.quantize._KNOWN", {})
        with cutex.ops.simulated("sm_90a"):
            q = cutex.quantize(x, "nvfp4", along=along, tensor_scale=scale)
        if along == "both":
            check(q[0], x)
        check(q[1] if along == "both" else q, x.mT)


@pytest.mark.slow
@pytest.mark.parametrize("stride", [0, 8])
def test_rows_that_overlap_take_no_tensor_map(stride):
    x, own = values(32, 400, DTYPES[0]).flatten()[:5000], torch.tensor([0.37])
    x = x.as_strided((64, 256), (stride, 1))
    with cutex.ops.simulated("sm_90a"):
        q = cutex.quantize(x, "nvfp4", along="columns", tensor_scale=own)
    check(q, x.mT)


@pytest.mark.slow
@pytest.mark.parametrize("format", QUANTIZED)
def test_either_side_alone_views_and_the_reverse(format):
    torch.manual_seed(1)
    memory = torch.randn(3, 40, 80).bfloat16()
    x = memory[1:, :, 3:67]  # rows that begin anywhere
    with cutex.ops.simulated("sm_90a"):
        q = cutex.quantize(x, format)
        turned = cutex.quantize(x[0].mT, format, along="columns")
        none = cutex.quantize(x[:, :0], format)
    assert q.data.shape[:2] == x.shape[:2] and none.data.numel() == 0
    flat = cutex.ops.quantize.QuantizedTensor(q.data.flatten(0, 1), *q[1:])
    check(flat, x.flatten(0, 1))
    check(turned, x[0])
    got = cutex.dequantize(q, torch.float32)
    assert got.shape == x.shape and cutex.dequantize(none).shape == x[:, :0].shape
    # with "floor" the largest values of a block are cut from below twice the power of two
    cut = {"e4m3": 1 / 8, "e5m2": 1 / 8, "e2m1": 1 / 4}[FORMATS[format].element]
    assert (got - x.float()).abs().max() <= 1.01 * cut * x.float().abs().max()


def test_a_tensor_of_nans_zeros_or_none_has_a_tensor_scale():
    with cutex.ops.simulated("sm_100a"):
        for value, want in ((0.0, 0.0), (math.nan, math.nan)):
            q = cutex.quantize(torch.full((32, 32), value), "nvfp4")
            got = cutex.dequantize(q, torch.float32)
            assert torch.equal(got.nan_to_num(7.0), torch.full((32, 32), want).nan_to_num(7.0))


X = torch.zeros(32, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("x", "format", "more", "says"),
    [
        (X, "fp6", {}, "format 'fp6' is not one of mxfp8"),
        (X, "fp8_row", {}, "format 'fp8_row' is not one of mxfp8"),
        (X, "mxfp8", {"along": "k"}, "along='k' is not one of rows, columns, both"),
        (X[None], "mxfp8", {"along": "both"}, "along='both' takes a matrix x, got 3"),
        (X, "mxfp8", {"rounding": "up"}, "rounding='up' is not one of floor, rceil"),
        (X, "fp8_1x128", {"swizzled": True}, "factors of fp8_1x128 are fp32, always plain"),
        (X[:, :63], "mxfp4", {}, "K=63: two elements of mxfp4 share a byte"),
        (X[:31], "nvfp4", {"along": "columns"}, "M=31: two elements of nvfp4 share a byte"),
        (X[0], "mxfp8", {}, "x must have at least 2 dimensions, got 1"),
        (X.int(), "mxfp8", {}, "x must be of bfloat16, float16, float32, got torch.int32"),
        (X, "mxfp8", {"tensor_scale": torch.ones(1)}, "tensor_scale is given, but mxfp8 has none"),
        (X, "nvfp4", {"tensor_scale": torch.ones(2)}, "float32 tensor of 1 element, got"),
        (X, "mxfp8", {}, "x is on cpu: cutex.quantize runs on an NVIDIA GPU from Ampere on"),
    ],
)
def test_bad_arguments_are_answered_in_a_sentence(x, format, more, says):
    with pytest.raises((TypeError, ValueError), match=says):
        cutex.quantize(x, format, **more)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"swizzled": False}, r"takes plain factors \(32, 4\) of torch.float8_e4m3fn, got"),
        ({"format": "mxfp4"}, r"takes swizzled factors \(1, 1, 32, 4, 4\) of torch.float8_e8m0fnu"),
        ({"format": "mxfp8"}, r"takes elements \(.., rows, K\) of torch.float8_e4m3fn, got"),
        ({"scale": torch.zeros(1, 1, 32, 4, 4, dtype=torch.uint8)}, "got torch.uint8"),
        ({"scale": torch.zeros(1, 2, 32, 4, 4).to(torch.float8_e4m3fn)}, r"\(1, 1, 32, 4, 4\) of"),
        ({"tensor_scale": torch.ones(2)}, r"takes one number of float32, got torch.float32 \(2,\)"),
        ({"tensor_scale": 2.0}, r"\.tensor_scale must be a torch.Tensor, got float"),
        ({"tensor_scale": torch.ones(1, device="meta")}, "is on meta, its elements on cpu"),
    ],
)
def test_what_is_no_quantized_matrix_is_not_read(change, says):
    """As one made by hand, or saved with another layout of its factors."""
    scale = torch.ones(1, 1, 32, 4, 4).to(torch.float8_e4m3fn)
    data = torch.zeros(32, 32, dtype=torch.uint8)
    q = cutex.ops.quantize.QuantizedTensor(data, scale, "nvfp4", True, torch.ones(1))
    assert cutex.dequantize(q).shape == (32, 64)
    for use in (cutex.dequantize, cutex.pack_w4)[: 1 if change.get("format") == "mxfp8" else 2]:
        with pytest.raises((TypeError, ValueError), match=says):
            use(q._replace(**change))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, 3, "cpu"])
def test_values_are_given_as_numbers_of_16_bits_and_more(dtype: object) -> None:
    """A number is no device here, as it is to `Tensor.to`."""
    q = cutex.ops.quantize.QuantizedTensor(
        torch.zeros(2, 16).to(torch.float8_e4m3fn), torch.ones(2, 1), "fp8_1x128", False
    )
    with pytest.raises(TypeError, match="dtype must be bfloat16, float16, float32 or float64, got"):
        cutex.dequantize(q, dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", QUANTIZED)
def test_what_is_saved_is_read_again_as_weights_alone(format: str) -> None:
    with cutex.ops.simulated("sm_90a"):
        q = cutex.quantize(torch.randn(32, 128), format)
    torch.save({"layer.weight": q}, file := io.BytesIO())
    file.seek(0)
    back = torch.load(file, weights_only=True)["layer.weight"]
    assert type(back) is type(q) and torch.equal(cutex.dequantize(back), cutex.dequantize(q))
    assert (back.format, back.swizzled) == (format, q.swizzled)


def test_it_is_one_node_of_a_graph():
    fake = torch.ops.cutex.quantize(
        torch.empty(130, 64, device="meta"), "mxfp8", True, True, True, "floor", None
    )
    assert [tuple(y.shape) for y in fake] == [
        (130, 64), (2, 1, 32, 4, 4), (64, 130), (1, 2, 32, 4, 4)
    ]  # fmt: skip
