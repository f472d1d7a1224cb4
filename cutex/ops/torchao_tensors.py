"""torchao's quantized tensors, MXTensor and NVFP4Tensor, as QuantizedTensors.

They are known by their attributes, with the names of torchao's newer versions and, underlined,
those of older ones; torchao is not imported.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cutex.problem.scaled import layouts
from cutex.problem.scaled.formats import format_named

SCALES = ("scale", "_scale_e8m0", "_scale_e4m3")
FORMAT_OF = {
    torch.float8_e4m3fn: "mxfp8",
    torch.float8_e5m2: "mxfp8_e5m2",
    torch.float4_e2m1fn_x2: "mxfp4",
    torch.uint8: "mxfp4",  # two elements to a byte
}


def is_torchao(x: Any) -> bool:
    """Whether x is an MXTensor or an NVFP4Tensor, or has their attributes."""
    return getattr(x, "qdata", None) is not None and _scale_of(x) is not None


def _scale_of(x: Any) -> Tensor | None:
    return next((s for n in SCALES if (s := getattr(x, n, None)) is not None), None)


def _attribute(x: Any, name: str, default: Any = None) -> Any:
    found = getattr(x, name, None)
    return getattr(x, f"_{name}", default) if found is None else found


def quantized(name: str, x: Any) -> Any:
    """x, an a (M, K) or a b (K, N) with blocks along K, as a QuantizedTensor (M, K) or (N, K).
    Nothing is copied except plain scale factors of a transposed b. ValueError for any other
    tensor."""
    from cutex.ops.quantize import QuantizedTensor

    data, scale = x.qdata, _scale_of(x)
    assert scale is not None
    if data.dim() != 2:
        raise ValueError(f"{name} must be a matrix, got {data.dim()} dimensions")
    turned = name == "b"
    if turned:
        data = data.mT
    if data.stride(1) != 1 and data.shape[1] > 1:
        takes = "b (K, N), the weight's .t()" if turned else "a (M, K)"
        raise ValueError(f"{name} has blocks along its other side: takes {takes}, of contiguous K")
    kind = scale.dtype
    if kind is torch.uint8:  # older versions keep E8M0 as bytes
        kind = torch.float8_e8m0fnu
    if kind is torch.float8_e4m3fn:
        format = "nvfp4"
    elif kind is torch.float8_e8m0fnu and data.dtype in FORMAT_OF:
        format = FORMAT_OF[data.dtype]
    else:
        raise TypeError(f"{name} has elements {data.dtype} with scales {scale.dtype}: takes MXFP8, "
                        "MXFP4 and NVFP4")  # fmt: skip
    of = format_named(format)
    block = _attribute(x, "block_size", of.block[1])
    if block != of.block[1]:
        raise ValueError(f"{name} has blocks of {block}: {format} has {of.block[1]}")
    if of.element == "e2m1":
        data = data.view(torch.float4_e2m1fn_x2)
    k = data.shape[1] * (2 if of.element == "e2m1" else 1)
    rows, columns = of.factors(data.shape[0], k)
    swizzled = bool(_attribute(x, "is_swizzled_scales", False))
    if scale.dim() == 2 and not scale.is_contiguous():
        scale = scale.mT  # those of a transposed tensor are transposed, too
    due = tuple(layouts.swizzled_shape(rows, columns)) if swizzled else (rows, columns)
    if scale.numel() != math.prod(due):
        raise ValueError(f"{name} has {scale.numel()} scales: {due} were due")
    own = _attribute(x, "per_tensor_scale")
    own = None if own is None else own.reshape(1).float()
    factors = scale.contiguous().view(kind).reshape(due)
    return QuantizedTensor(data, factors, format, swizzled, own)


def both(a: Any, b: Any) -> tuple[Any, Any]:
    """a and b, with torchao's tensors as QuantizedTensors."""
    return (quantized("a", a) if is_torchao(a) else a), (quantized("b", b) if is_torchao(b) else b)
