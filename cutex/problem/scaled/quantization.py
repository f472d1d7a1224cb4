"""Quantization and its reverse, bit by bit, in torch's own operations.

E8M0 scale factors (OCP Microscaling Formats 1.0, 6.3), of the largest magnitude of a block:

floor  2 to the power of its exponent less that of the format's largest value; elements above the
       largest value saturate. The specification's own rule, and torchao's default.
rceil  the least power of two with which no element saturates: that magnitude times the reciprocal
       of the largest value, rounded up. torchao's RCEIL, and NVIDIA's recipe.

A block with a NaN or an infinity has the scale factor NaN. NVFP4 has E4M3 factors, of magnitude / 6
relative to the tensor's own factor, clamped to [2^-6, 448], as torchao's nvfp4_quantize. fp32
factors are the largest magnitude / 448, as in DeepGEMM's casts. Elements are rounded to nearest
even and saturate; a NaN has the canonical bits of the GPU's conversion, 0x7F of fp8, and 0x7 of
e2m1, which has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutex.problem.scaled.formats import Format

ROUNDINGS = ("floor", "rceil")  # of E8M0 scale factors
E8M0_BIAS, E8M0_NAN = 127, 255
E4M3_LEAST = 2.0**-6  # the least factor of NVFP4: E4M3's least normal number
LEAST_TENSOR_SCALE = 2.0**-120
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1, by code
CANONICAL_NAN = 0x7F


@dataclass(frozen=True)
class Quantized:
    """A quantized operand: elements (rows, k), of e2m1 two to a byte, and plain scale factors."""

    format: Format
    data: Tensor
    scale: Tensor  # (factors along the rows, factors along K), row-major
    tensor_scale: Tensor | None = None  # fp32, of no dimension


def quantize(
    x: Tensor, format: Format, rounding: str = "floor", tensor_scale: Tensor | None = None
) -> Quantized:
    """Quantize x (rows, k) along its rows.

    `tensor_scale`: of NVFP4, by default the largest magnitude / (448 * 6). What a last block lacks
    counts as zero.
    """
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding {rounding!r} is not one of {', '.join(ROUNDINGS)}")
    rows, k = x.shape
    x = x.float()
    blocks = _in_blocks(x, format)  # (R, bR, C, bC)
    amax = _amax(blocks)  # (R, 1, C, 1)
    if format.tensor_scale and tensor_scale is None:
        tensor_scale = tensor_scale_of(x)
    if format.scale == "e8m0":
        scale, factor = _e8m0(amax, format, rounding)
    elif format.scale == "e4m3":
        assert tensor_scale is not None
        scale, factor = _e4m3(amax, tensor_scale.float().to(x.device))
    else:
        scale = _divided(_at_least(amax, format.least), format.largest)
        factor = 1.0 / scale
    scaled = (blocks * factor).flatten(2).flatten(0, 1)[:rows, :k]  # (rows, k)
    data = pack(to_e2m1(scaled)) if format.element == "e2m1" else to_fp8(scaled, format)
    return Quantized(format, data, scale[:, 0, :, 0].contiguous(), tensor_scale)


def tensor_scale_of(x: Tensor) -> Tensor:
    """The tensor's scale factor of NVFP4: with it, the largest block's own is 448. At least
    2^-120, so that the reciprocal of a block's factor times it is finite, in a tensor of zeros
    too."""
    return _at_least(_divided(_amax(x).reshape(()), 448.0 * 6.0), LEAST_TENSOR_SCALE)


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values (rows, k): element times scale factor, times the tensor's, exact in float64."""
    data = unpack(q.data) if q.format.element == "e2m1" else q.data.double()
    blocks = _in_blocks(data, q.format)  # (R, bR, C, bC)
    scale = from_e8m0(q.scale) if q.format.scale == "e8m0" else q.scale.double()
    values = blocks * scale[:, None, :, None]
    if q.tensor_scale is not None:
        values = values * q.tensor_scale.double()
    rows, k = data.shape
    return values.flatten(2).flatten(0, 1)[:rows, :k].to(dtype)


# ---- elements


def to_fp8(x: Tensor, format: Format) -> Tensor:
    """x rounded to nearest even, saturated, in the fp8 type of `format`."""
    kept = x.clamp(-format.largest, format.largest).to(format.dtype.torch)
    bits = torch.where(x.isnan(), CANONICAL_NAN, kept.view(torch.uint8))
    return bits.to(torch.uint8).view(kept.dtype)


def to_e2m1(x: Tensor) -> Tensor:
    """The codes of x, rounded to nearest even and saturated, one to a byte (uint8)."""
    size, code = x.abs(), torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for lower, upper in zip(range(7), range(1, 8), strict=True):
        middle = (MAGNITUDES[lower] + MAGNITUDES[upper]) / 2
        # a tie goes to the even code
        code += (size >= middle) if upper % 2 == 0 else (size > middle)
    sign = x.signbit().to(torch.uint8) << 3
    return torch.where(x.isnan(), 7, code | sign).to(torch.uint8)


def pack(codes: Tensor) -> Tensor:
    """e2m1 codes (rows, k), one to a byte, as (rows, k / 2) of torch.float4_e2m1fn_x2: the first
    of two in the low bits. ValueError for an odd k."""
    if codes.shape[-1] % 2:
        raise ValueError(f"K={codes.shape[-1]}: two elements of e2m1 share a byte, K must be even")
    return (codes[..., ::2] | codes[..., 1::2] << 4).view(torch.float4_e2m1fn_x2)


def magnitudes(codes: Tensor) -> Tensor:
    """MAGNITUDES of codes below 8, in float32, by arithmetic: a table would have to be copied to
    the GPU, which no CUDA graph can capture."""
    whole = codes.int()
    large = (2 + (whole & 1)) << ((whole >> 1) - 1).clamp(min=0)
    return torch.where(whole < 2, whole, large).float() / 2


def unpack(data: Tensor) -> Tensor:
    """The values (rows, k) of packed e2m1, in float64."""
    byte = data.view(torch.uint8)
    codes = torch.stack((byte & 15, byte >> 4), -1).flatten(-2).int()
    size = magnitudes(codes & 7).double()
    return torch.where(codes >= 8, -size, size)


# ---- scale factors


def from_e8m0(scale: Tensor) -> Tensor:
    """The values of E8M0 factors in float64."""
    code = scale.view(torch.uint8).to(torch.int32)
    one = torch.ones(code.shape, dtype=torch.float64, device=scale.device)
    value = torch.ldexp(one, code - E8M0_BIAS)
    return torch.where(code == E8M0_NAN, torch.nan, value)


def _e8m0(amax: Tensor, format: Format, rounding: str) -> tuple[Tensor, Tensor]:
    """The factors of blocks with these largest magnitudes, and what elements are multiplied by."""
    bits = amax.view(torch.int32)
    if rounding == "floor":
        exponent = (bits >> 23) - exponent_of(format.largest)
    else:
        bits = (amax * reciprocal(format.largest)).view(torch.int32)
        fraction = bits & 0x7FFFFF
        # of subnormal numbers, code 0 is 2^-127
        up = torch.where(bits >> 23 == 0, fraction > 0x400000, fraction != 0)
        exponent = (bits >> 23) + up
    code = torch.where(amax.isfinite(), exponent.clamp(0, E8M0_NAN), E8M0_NAN)
    scale = code.to(torch.uint8).view(torch.float8_e8m0fnu)
    inverse = (2 * E8M0_BIAS - code).clamp(0, None)
    factor = torch.where(inverse == 0, 0x400000, inverse << 23).int().view(torch.float32)
    return scale, torch.where(code == E8M0_NAN, torch.nan, factor)


def _e4m3(amax: Tensor, tensor_scale: Tensor) -> tuple[Tensor, Tensor]:
    relative = _divided(amax, 6.0) / tensor_scale
    relative = _at_least(relative, E4M3_LEAST).clamp(max=448.0)
    scale = relative.to(torch.float8_e4m3fn)
    scale = torch.where(relative.isnan(), CANONICAL_NAN, scale.view(torch.uint8)).to(torch.uint8)
    scale = scale.view(torch.float8_e4m3fn)
    return scale, (1.0 / tensor_scale) / scale.float()


def exponent_of(value: float) -> int:
    """The exponent of a number's leading bit."""
    return int(torch.tensor(value).frexp().exponent) - 1


def reciprocal(value: float) -> float:
    """1 / value, rounded to fp32."""
    return float(torch.tensor(1.0 / value, dtype=torch.float32))


def _divided(x: Tensor, by: float) -> Tensor:
    # NOTE: torch on a GPU multiplies by the reciprocal of a Python number
    return x / torch.full((), by, device=x.device)


def _at_least(x: Tensor, least: float) -> Tensor:
    return x.clamp(min=least)  # a NaN stays one


def _amax(x: Tensor) -> Tensor:
    """The largest magnitude of blocks (R, bR, C, bC), or of all of x; NaN where there is one."""
    x = x.abs()
    return x.amax((1, 3), keepdim=True) if x.dim() == 4 else x.amax()


def _in_blocks(x: Tensor, format: Format) -> Any:
    """x (rows, k) as (R, bR, C, bC), with zeros in what a last block lacks."""
    rows, k = x.shape
    block_rows, block_k = format.block[0] or max(rows, 1), format.block[1] or max(k, 1)
    more = -k % block_k, -rows % block_rows
    x = torch.nn.functional.pad(x, (0, more[0], 0, more[1]))
    return x.reshape(x.shape[0] // block_rows, block_rows, x.shape[1] // block_k, block_k)
