"""`cutex.pack_w4`: a weight of 4 bits in the layout that the kernel reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutex.ops.quantize import QuantizedTensor, check_quantized
from cutex.ops.torchao_tensors import is_torchao, quantized
from cutex.ops.w4.packed import W4Weight
from cutex.problem.scaled import layouts
from cutex.problem.scaled import quantization as reference
from cutex.problem.scaled.formats import FORMATS
from cutex.problem.w4 import packing
from cutex.problem.w4.layout import (
    BLOCK_K,
    DEFAULT_ZERO,
    E2M1_UNIT,
    LAYOUT_VERSION,
    TOP_SCALE,
    W4Format,
)

DTYPES = (torch.bfloat16, torch.float16)
FLOATS = (*DTYPES, torch.float32)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
KINDS = ("int4", "uint4", "mxfp4", "nvfp4")
LEAST_GROUP = 32
NVFP4_TOP = 2.0**9  # above every e4m3 factor


def pack_w4(
    w: Any,
    *,
    group_size: int | None = 128,
    kind: str = "int4",
    dtype: torch.dtype | None = None,
) -> W4Weight:
    """Pack a 4-bit weight (N, K), laid out like torch.nn.Linear's, for `cutex.matmul(x, packed)`.

    w: a float weight, which is quantized here; or (codes, scales) or (codes, scales, zeros),
        meaning (codes - zeros) * scales: codes (N, K) from 0 to 15, or uint8 (N, K / 2), two to a
        byte, the first in the low bits; scales and zeros (N, K / group_size); zeros are whole
        numbers from 0 to 15, by default 8. Or a result of `cutex.quantize` as "mxfp4" or "nvfp4";
        or torchao's fp4 MXTensor or NVFP4Tensor, (N, K).
    group_size: the elements of K that share a scale: 32, 64, a multiple of 128, or None for one
        scale per row. K is a multiple of it. For fp4 formats it is 32 (MX) or 16 (NV).
    kind: how a float weight is quantized: "int4" (zeros of 8), "uint4" (with zeros), "mxfp4" or
        "nvfp4".
    dtype: of the activations, bfloat16 or float16; by default that of a float w, otherwise
        bfloat16. Group scales are rounded to it. Scales of rows and tensors, and what exceeds
        float16's range within a row, or 256 for bfloat16, are applied in fp32.

    For the layout see `W4Weight.layout`. Packing takes several passes by torch, once. Raises
    TypeError or ValueError, in one sentence, for arguments that are not supported.
    """
    if dtype is None:
        dtype = w.dtype if isinstance(w, Tensor) and w.dtype in DTYPES else torch.bfloat16
    if dtype not in DTYPES:
        raise TypeError(f"dtype must be bfloat16 or float16, got {dtype!r:.60}")
    if is_torchao(w):
        w = quantized("a", w)
    if isinstance(w, QuantizedTensor):
        return _of_fp4(w, dtype)
    if isinstance(w, tuple | list):
        if len(w) not in (2, 3):
            raise ValueError(f"w has {len(w)} parts: takes (codes, scales) or with zeros a third")
        return _of_int4(*w, group_size=group_size, dtype=dtype)
    if not isinstance(w, Tensor):
        raise TypeError(f"w must be a torch.Tensor, a tuple or a QuantizedTensor, got "
                        f"{type(w).__name__}")  # fmt: skip
    if w.dtype not in FLOATS:
        raise TypeError(f"w must be of bfloat16, float16 or float32, got {w.dtype}; codes take "
                        "(codes, scales)")  # fmt: skip
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is not one of {', '.join(KINDS)}")
    if w.dim() != 2 or not w.numel():
        raise ValueError(f"w must be a matrix (N, K), got shape {tuple(w.shape)}")
    if w.layout is not torch.strided or w.is_meta:
        raise ValueError(f"w must be a strided tensor with values, got {w.layout} on {w.device}")
    w = w.detach()
    if kind in ("mxfp4", "nvfp4"):
        if w.shape[1] % 2:
            raise ValueError(f"K={w.shape[1]}: two elements of {kind} share a byte, it is even")
        q = reference.quantize(w, FORMATS[kind])
        own = None if q.tensor_scale is None else q.tensor_scale.reshape(1)
        return _of_fp4(QuantizedTensor(q.data, q.scale, kind, False, own), dtype)
    group = _group(group_size, w.shape[1])
    parts = quantized_int4(w, group or w.shape[1], zeros=kind == "uint4")
    return _of_int4(*parts, group_size=group_size, dtype=dtype)


def quantized_int4(w: Tensor, group: int, zeros: bool) -> tuple[Tensor, ...]:
    """Codes, scales and, with `zeros`, zeros of a float weight, each group rounded to nearest: its
    largest magnitude is 7.5 scales, or its range 15."""
    n, k = w.shape
    groups = w.float().reshape(n, k // group, group)
    if zeros:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = (high - low).clamp(min=2.0**-126) / 15
        zero = (-low / scales).round().clamp(0, 15).nan_to_num(0)
    else:
        scales = groups.abs().amax(-1).clamp(min=2.0**-126) / 7.5
        zero = torch.full_like(scales, DEFAULT_ZERO)
    codes = (groups / scales[..., None] + zero[..., None]).round().clamp(0, 15)
    whole = codes.nan_to_num(0).to(torch.uint8).reshape(n, k)  # a NaN is in its group's scale
    return (whole, scales, zero) if zeros else (whole, scales)


def _group(group_size: Any, k: int) -> int:
    """The elements of K that share a scale, 0 for all; ValueError if it is none that is taken."""
    if group_size is None:
        return 0
    if isinstance(group_size, bool) or not isinstance(group_size, int):
        raise TypeError(f"group_size must be an int or None, got {type(group_size).__name__}")
    if group_size == k:
        return 0
    if group_size not in (LEAST_GROUP, 64) and (group_size < BLOCK_K or group_size % BLOCK_K):
        raise ValueError(
            f"group_size={group_size}: takes {LEAST_GROUP}, 64, a multiple of {BLOCK_K}, or None"
        )
    if k % group_size:
        raise ValueError(f"K={k} is no multiple of group_size={group_size}")
    return group_size


def _of_int4(
    codes: Any, scales: Any, zeros: Any = None, *, group_size: int | None, dtype: torch.dtype
) -> W4Weight:
    """Pack integers with scales, and zeros."""
    codes, k = _codes(codes, scales, group_size)
    n, group = codes.shape[0], _group(group_size, k)
    due = n, (k // group if group else 1)
    for name, x, dtypes in (("scales", scales, FLOATS), ("zeros", zeros, (*FLOATS, *INTEGERS))):
        if x is None and name == "zeros":
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dtype not in dtypes:
            raise TypeError(f"{name} must be of a float dtype, got {x.dtype}")
        if tuple(x.shape) != due and not (not group and tuple(x.shape) == (n,)):
            raise ValueError(f"{name} must be (N, K / group_size) = {due}, got {tuple(x.shape)}")
        if x.device != codes.device:
            raise ValueError(f"{name} is on {x.device}, but codes are on {codes.device}")
    scales = scales.detach().reshape(due)
    if zeros is not None:
        zeros = _zeros(zeros.detach().reshape(due))
    if not group and zeros is None:
        return _packed(codes, None, None, scales.float().reshape(n), W4Format("int4", 0), dtype)
    factor = None
    small = torch.where(scales.isfinite(), scales.abs(), 0.0)
    if (dtype is torch.float16 and scales.dtype is not torch.float16) or (
        dtype is torch.bfloat16 and bool((small > TOP_SCALE).any())
    ):
        scales, factor = _in_range(scales.float())
    if group == 0 or group > BLOCK_K:  # the block's own
        times = -(-k // BLOCK_K) if not group else group // BLOCK_K
        scales = scales.repeat_interleave(times, 1)
        zeros = zeros if zeros is None else zeros.repeat_interleave(times, 1)
        group = BLOCK_K
    of = W4Format("int4", group, zeros is not None)
    return _packed(codes, scales.to(dtype), zeros, factor, of, dtype)


def _packed(
    codes: Tensor,
    scales: Tensor | None,
    zeros: Tensor | None,
    factor: Tensor | None,
    of: W4Format,
    dtype: torch.dtype,
    kind: str = "",
) -> W4Weight:
    kind = kind or ("uint4" if of.zeros else "int4")
    packed = packing.pack(codes, scales, zeros, of)
    n, k = codes.shape
    return W4Weight(packed, factor, n, k, of, dtype, kind, LAYOUT_VERSION)


def _codes(codes: Any, scales: Any, group_size: int | None) -> tuple[Tensor, int]:
    """The codes, one to a byte, and K."""
    if not isinstance(codes, Tensor):
        raise TypeError(f"codes must be a torch.Tensor, got {type(codes).__name__}")
    if codes.dtype not in INTEGERS:
        raise TypeError(f"codes must be of an integer dtype, got {codes.dtype}")
    if codes.dim() != 2 or not codes.numel():
        raise ValueError(f"codes must be (N, K) or, two to a byte, (N, K / 2), got "
                         f"{tuple(codes.shape)}")  # fmt: skip
    codes = codes.detach()
    two = codes.dtype is torch.uint8 and isinstance(scales, Tensor) and scales.dim() == 2
    if two and group_size and scales.shape[1] * group_size == 2 * codes.shape[1]:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    elif bool(((codes < 0) | (codes > 15)).any()):
        also = "two to a byte they are uint8 (N, K / 2), with scales (N, K / group_size)"
        raise ValueError(f"codes must be from 0 to 15; {also}")
    return codes.to(torch.uint8), codes.shape[1]


def _zeros(zeros: Tensor) -> Tensor:
    """Zeros as fp32; ValueError for one that is no code."""
    zeros = zeros.float()
    if bool(((zeros != zeros.round()) | (zeros < 0) | (zeros > 15)).any()):
        raise ValueError("zeros must be whole numbers from 0 to 15")
    return zeros


def _in_range(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Scales (N, groups) relative to a power of two per row (that of its largest), and these
    powers."""
    top = torch.where(scales.isfinite(), scales.abs(), 0.0).amax(1)
    factor = torch.exp2(top.clamp(min=2.0**-120).log2().floor())
    return scales / factor[:, None], factor


def _of_fp4(q: QuantizedTensor, dtype: torch.dtype) -> W4Weight:
    """Pack the result of `cutex.quantize` for a weight: fp4 codes, with scales that absorb the
    powers of two by which a code's bits, read as a float of `dtype`, differ from its value."""
    if q.format not in ("mxfp4", "nvfp4"):
        raise ValueError(f"w is quantized as {q.format}, which is not mxfp4 or nvfp4")
    if q.data.dim() != 2 or not q.data.numel():
        raise ValueError(f"w must be a matrix (N, K), got shape {tuple(q.data.shape)}")
    of, *_ = check_quantized("w", q)
    byte = q.data.detach().view(torch.uint8)
    codes = torch.stack((byte & 15, byte >> 4), -1).flatten(-2)
    n, k = codes.shape
    plain = layouts.unswizzle(q.scale, *of.factors(n, k)) if q.swizzled else q.scale
    scales = reference.from_e8m0(plain) if of.scale == "e8m0" else plain.double()
    if of.scale == "e8m0":  # relative to the largest of a row
        factor = torch.where(scales.isfinite(), scales, 0.0).amax(1).clamp(min=2.0**-127)
        scales, factor = scales / factor[:, None], factor.float()
    else:
        own = (
            torch.ones(1, dtype=torch.float32, device=codes.device)
            if q.tensor_scale is None
            else q.tensor_scale
        )
        scales, factor = scales / NVFP4_TOP, own.detach() * NVFP4_TOP
    unit = E2M1_UNIT[packing.NAMES[dtype]]
    scales = (scales * 2.0**unit).to(dtype)
    return _packed(codes, scales, None, factor, W4Format("fp4", of.block[1]), dtype, q.format)
