"""`cutex.quantize` and `cutex.dequantize`: elements of 4 or 8 bits with scale factors of blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutex.ops.device import current, launcher, per_device
from cutex.ops.number import check_flag
from cutex.ops.plain import check_strided
from cutex.ops.row.operators import define
from cutex.ops.row.rows import arch_of, as_rows, check_rows, dtype_of
from cutex.problem.scaled import layouts
from cutex.problem.scaled import quantization as reference
from cutex.problem.scaled.formats import FORMATS, Format, format_named

# those with blocks along K; a factor of a whole row or tensor takes a pass of its own
QUANTIZED = tuple(name for name, f in FORMATS.items() if f.block[1])
ALONG = ("rows", "columns", "both")
SCALES = {
    "e8m0": torch.float8_e8m0fnu,
    "e4m3": torch.float8_e4m3fn,
    "fp32": torch.float32,
}  # dtypes of factors
VALUES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # that dequantize gives
COLUMN_VECTOR = 32  # elements of a result along M, to be aligned


class QuantizedTensor(NamedTuple):
    """A quantized matrix (rows, K), possibly with more leading dimensions.

    data: float8, or float4_e2m1fn_x2 with two elements to a byte, (.., rows, K or K / 2).
    scale: factors. Swizzled: (rows / 128, K / (4 block), 32, 4, 4), in the order of torch's
        SWIZZLE_32_4_4 and torchao's `to_blocked`. Plain: (rows, K / block), for fp8_1x128 with
        contiguous rows at a pitch of a multiple of 16 bytes; for fp8_128x128 (rows / 128, K / 128).
    tensor_scale: one fp32 number, for nvfp4.
    """

    data: Tensor
    scale: Tensor
    format: str
    swizzled: bool
    tensor_scale: Tensor | None = None


# a tuple of tensors and plain values: `torch.load(weights_only=True)` may make it
torch.serialization.add_safe_globals([QuantizedTensor])


def quantize(
    x: Tensor,
    format: str,
    *,
    along: str = "rows",
    rounding: str = "floor",
    swizzled: bool | None = None,
    tensor_scale: Tensor | None = None,
) -> Any:
    """Quantize x (.., M, K) in blocks along K, or x transposed in blocks along M, or both in one
    pass.

    x: bfloat16, float16 or float32, any strides; copied first if K is not contiguous.
    format: "mxfp8", "mxfp8_e5m2", "mxfp4" (a power of two per 32 elements), "nvfp4" (an e4m3 factor
        per 16, relative to `tensor_scale`), "fp8_1x128" or "fp8_128x128" (a float32 factor, the
        largest magnitude / 448).
    along: "rows"; "columns", which quantizes the transpose (K, M) of a matrix x; or "both", which
        returns the two.
    rounding: of power-of-two factors: "floor", as in the OCP specification and torchao's default,
        or "rceil", the smallest for which nothing saturates, as in NVIDIA's recipe.
    swizzled: whether factors are in the layout that tensor cores read; the default for mx and
        nvfp4.
    tensor_scale: float32 with one element, for nvfp4; by default the largest magnitude of x / (448
        * 6), which takes another pass over x.

    The bits are those of torchao's to_mx and nvfp4_quantize and of DeepGEMM's casts: elements are
    rounded to nearest even and saturate; missing elements of a last block count as zero. Unlike in
    torchao, a block with a NaN or an infinity has a NaN factor and NaN elements (in nvfp4 an
    infinity saturates), and elements with the factor 2^-127 are multiples of it, not of 2^-126.

    Returns a QuantizedTensor, or two. Not differentiable. Raises TypeError or ValueError, in one
    sentence, for arguments that are not supported, and without an NVIDIA GPU from Ampere on.
    """
    check_rows("x", x)
    if x.dim() < 2:
        raise ValueError(f"x must have at least 2 dimensions, got {x.dim()}")
    of = _format_of(format)
    if along not in ALONG:
        raise ValueError(f"along={along!r} is not one of {', '.join(ALONG)}")
    if along != "rows" and x.dim() != 2:
        raise ValueError(f"along={along!r} takes a matrix x, got {x.dim()} dimensions")
    if rounding not in reference.ROUNDINGS:
        raise ValueError(f"rounding={rounding!r} is not one of {', '.join(reference.ROUNDINGS)}")
    swizzled = of.swizzled if swizzled is None else swizzled
    check_flag("swizzled", swizzled)
    if swizzled and not of.swizzled:
        raise ValueError(f"swizzled={swizzled}: factors of {format} are fp32, always plain")
    rows, columns = along != "columns", along != "rows"
    for on, size, name in ((rows, x.shape[-1], "K"), (columns, x.shape[-2], "M")):
        if on and of.element == "e2m1" and size % 2:
            raise ValueError(f"{name}={size}: two elements of {format} share a byte, it is even")
    x = x.detach()
    tensor_scale = _tensor_scale(x, of, tensor_scale)
    found = QUANTIZE(x, format, rows, columns, swizzled, rounding, tensor_scale)
    made = [
        QuantizedTensor(found[i], found[i + 1], format, swizzled, tensor_scale)
        for i in range(0, len(found), 2)
    ]
    return tuple(made) if len(made) > 1 else made[0]


def dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The values of a quantized matrix in `dtype`, rounded once: bfloat16, float16, float32 or
    float64. The reverse of `quantize`."""
    if not isinstance(q, QuantizedTensor):
        raise TypeError(f"q must be what cutex.quantize returns, got {type(q).__name__}")
    if dtype not in VALUES:
        raise TypeError(f"dtype must be bfloat16, float16, float32 or float64, got {dtype!r:.60}")
    of, rows, k = check_quantized("q", q)
    data = q.data.flatten(0, -2)
    shape = (*q.data.shape[:-1], k)
    if not data.numel():
        return torch.empty(shape, dtype=dtype, device=data.device)
    scale = layouts.unswizzle(q.scale, *of.factors(rows, k)) if q.swizzled else q.scale
    plain = reference.Quantized(of, data, scale, q.tensor_scale)
    # NOTE: torch's ldexp computes on the current GPU, whichever its tensors are on
    with current(data.device):
        return reference.dequantize(plain, torch.float64).to(dtype).view(shape)


def check_quantized(name: str, q: QuantizedTensor) -> tuple[Format, int, int]:
    """The format of a quantized matrix, its rows and K. Raises ValueError, in one sentence, if
    elements, factors or the tensor's own factor do not have the format's dtype or shape or are on
    several devices, TypeError if they are no tensors, as in one made by hand."""
    of, data, scale = format_named(q.format), q.data, q.scale
    for field, x in (("data", data), ("scale", scale), ("tensor_scale", q.tensor_scale)):
        if x is None and field == "tensor_scale":
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}.{field} must be a torch.Tensor, got {type(x).__name__}")
        if x.device != data.device:
            raise ValueError(f"{name}.{field} is on {x.device}, its elements on {data.device}")
    packed = 2 if of.element == "e2m1" else 1
    dtypes = (torch.float4_e2m1fn_x2, torch.uint8) if packed > 1 else (of.dtype.torch,)
    if data.dim() < 2 or data.dtype not in dtypes:
        what = f"elements (.., rows, K{' / 2' if packed > 1 else ''}) of {dtypes[0]}"
        raise ValueError(f"{name} is of {of}: takes {what}, got {data.dtype} {tuple(data.shape)}")
    rows, k = data.shape[:-1].numel(), data.shape[-1] * packed
    due = layouts.swizzled_shape(*of.factors(rows, k)) if q.swizzled else of.factors(rows, k)
    same = scale.numel() == math.prod(due) if q.swizzled else tuple(scale.shape) == due
    if scale.dtype != SCALES[of.scale] or not same or (q.swizzled and not of.swizzled):
        kind = "swizzled" if q.swizzled else "plain"
        raise ValueError(
            f"{name} is of {of}, {rows}x{k}: takes {kind} factors {due} of {SCALES[of.scale]}, got "
            f"{scale.dtype} {tuple(scale.shape)}"
        )
    own = q.tensor_scale
    if own is not None and (not of.tensor_scale or own.dtype != torch.float32 or own.numel() != 1):
        due_own = "one number of float32" if of.tensor_scale else "no tensor_scale"
        raise ValueError(f"{name} is of {of}: takes {due_own}, got {own.dtype} {tuple(own.shape)}")
    return of, rows, k


def _format_of(name: str) -> Format:
    found = format_named(name)
    if name not in QUANTIZED:
        raise ValueError(f"format {name!r} is not one of {', '.join(QUANTIZED)}")
    return found


def _tensor_scale(x: Tensor, of: Format, given: Tensor | None) -> Tensor | None:
    """The tensor's own factor, of one element, or None for a format without."""
    if not of.tensor_scale:
        if given is not None:
            raise ValueError(f"tensor_scale is given, but {of} has none")
        return None
    if given is None:
        if not x.numel():
            return torch.ones(1, dtype=torch.float32, device=x.device)
        top = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
        return reference.tensor_scale_of(top.reshape(1, 1)).reshape(1)
    if not isinstance(given, Tensor) or given.dtype != torch.float32 or given.numel() != 1:
        what = given.dtype if isinstance(given, Tensor) else type(given).__name__
        size = f" of {given.numel()} elements" if isinstance(given, Tensor) else ""
        raise TypeError(f"tensor_scale must be a float32 tensor of 1 element, got {what}{size}")
    check_strided("tensor_scale", given)
    if given.device != x.device:
        raise ValueError(f"tensor_scale is on {given.device}, not on {x.device} as x")
    return given.detach().reshape(1)


# ---- the operator


def _results(
    shape: tuple[int, ...], of: Format, swizzled: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Uninitialised elements and factors for rows (.., rows, K)."""
    *before, k = shape
    if of.element == "e2m1":
        bytes_ = torch.empty((*before, k // 2), dtype=torch.uint8, device=device)
        data = bytes_.view(torch.float4_e2m1fn_x2)
    else:
        data = torch.empty(shape, dtype=of.dtype.torch, device=device)
    rows = 1
    for size in before:
        rows *= size
    down, along = of.factors(rows, k)
    if swizzled:
        scale = torch.empty(
            layouts.swizzled_shape(down, along), dtype=SCALES[of.scale], device=device
        )
    elif of.scale == "fp32" and of.block[0] == 1:
        pitch = -(-down // layouts.PITCH) * layouts.PITCH
        scale = torch.empty((along, pitch), dtype=torch.float32, device=device)[:, :down].mT
    else:
        scale = torch.empty((down, along), dtype=SCALES[of.scale], device=device)
    return data, scale


def _run(
    x: Tensor,
    format: str,
    rows: bool,
    columns: bool,
    swizzled: bool,
    rounding: str,
    tensor_scale: Tensor | None,
) -> list[Tensor]:
    of, made = FORMATS[format], _fake(x, format, rows, columns, swizzled, rounding, tensor_scale)
    if not x.numel():
        arch_of(x.device, "cutex.quantize")
        return made
    flat, options = as_rows(x), (format, rows, columns, swizzled, rounding)
    key = options, x.device, flat.dtype, flat.shape, flat.stride(), flat.data_ptr() % 16
    known = _KNOWN.get(key)
    config, arch = known[:2] if known is not None else _config_for(options, flat)
    if config.aligned and flat.shape[0] == 1:
        unit = 16 // flat.element_size()
        flat = flat.as_strided(flat.shape, (-(-flat.shape[1] // unit) * unit, 1))
    passed: list[Any] = [] if tensor_scale is None else [tensor_scale]
    for data, scale in zip(made[::2], made[1::2], strict=True):
        passed.append(data.view(torch.uint8).view(-1, data.shape[-1]))
        kept = scale if of.scale == "fp32" else scale.view(torch.uint8)
        passed.append(kept.view(-1) if swizzled else kept)
    tensors = [flat, *passed]
    with current(x.device):
        if known is None:
            launch = launcher(_kernel(config, dtype_of(flat), arch), tensors)
            known = _KNOWN[key] = config, arch, launch
        known[2](*tensors)
    return made


# configs, archs and launches that have checked their tensors, by options and layout of x
_KNOWN: dict[Any, tuple[Any, str, Callable[..., None]]] = per_device({})


def _config_for(options: tuple[str, bool, bool, bool, str], flat: Tensor) -> tuple[Any, str]:
    """The config of a call with x (M, K), and the arch to compile it for."""
    from cutex.kernels.quantize.config import NATIVE, QuantizeConfig, fitted

    format = options[0]
    arch, of = arch_of(flat.device, "cutex.quantize"), FORMATS[format]
    m, k = flat.shape
    odd_pitch = m > 1 and flat.stride(0) % (16 // flat.element_size())
    single = QuantizeConfig(format).packed == 1 and k % QuantizeConfig(format).width > 0
    width = QuantizeConfig(format, single=single).width
    config = QuantizeConfig(
        *options,
        aligned=not (k % width or flat.data_ptr() % 16 or odd_pitch),
        aligned_columns=m % COLUMN_VECTOR == 0,
        single=single,
        native=arch in NATIVE[of.element],
        native_e4m3=arch in NATIVE["e4m3"],
    )
    # NOTE: a tensor map takes no rows that overlap
    mapped = m == 1 or flat.stride(0) >= k
    return fitted(config, 8 * flat.element_size(), arch, mapped), arch


@lru_cache(maxsize=4096)
def _kernel(config: Any, dtype: str, arch: str) -> Any:
    from cutex.compile import compile
    from cutex.kernels.quantize.loop import QuantizeLoop
    from cutex.kernels.quantize.tile import Quantize

    kernel = QuantizeLoop if config.num_ctas else Quantize
    return compile(kernel(config), dtype, arch)


def _fake(
    x: Tensor,
    format: str,
    rows: bool,
    columns: bool,
    swizzled: bool,
    rounding: str,
    tensor_scale: Tensor | None,
) -> list[Tensor]:
    of, shapes = FORMATS[format], []
    if rows:
        shapes.append(tuple(x.shape))
    if columns:
        shapes.append((x.shape[1], x.shape[0]))
    return [y for shape in shapes for y in _results(shape, of, swizzled, x.device)]


QUANTIZE = define(
    "quantize",
    "(Tensor x, str format, bool rows, bool columns, bool swizzled, str rounding, "
    "Tensor? tensor_scale) -> Tensor[]",
    _run,
    _fake,
)
