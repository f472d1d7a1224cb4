"""`cutex.rms_norm` and `cutex.layer_norm`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cutex.ops.row.norm import norm
from cutex.ops.row.norm_quantized import norm_quantized


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    quantize: str | None = None,
    tensor_scale: Tensor | None = None,
) -> Any:
    """x / sqrt(mean of x^2 + eps) * weight over the last dimension. With a residual, of x +
    residual, and that sum is returned, too.

    x: (.., N), bfloat16, float16 or float32, any strides; computed in float32, each row read once.
    weight: (N,), any of these dtypes. residual: like x.
    quantize: "fp8" (e4m3 with a float32 factor per row, "fp8_row" in FORMATS), "fp8_1x128",
        "mxfp8", "mxfp8_e5m2", "mxfp4" or "nvfp4": y is quantized in the same pass, bit by bit
        `cutex.quantize` of y, for `cutex.scaled_mm`. No tensor may require a gradient then. Rows
        that are not whole vectors of 16 bytes take another pass.
    tensor_scale: float32 with one element, for nvfp4, as in `cutex.quantize`; without it the
        largest y is searched first, which takes two more passes.

    Returns y, like x, or a QuantizedTensor; with a residual (y, x + residual). Differentiable once
    in all tensors. Raises TypeError or ValueError, in one sentence that names the argument, for
    arguments that are not supported, and without an NVIDIA GPU from Ampere on.

    Source: Zhang and Sennrich, Root mean square layer normalization, 2019.
    """
    if quantize is not None or tensor_scale is not None:
        return norm_quantized(False, (x, weight, None, residual), eps, quantize, tensor_scale)
    return norm(False, x, weight, None, residual, eps)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    quantize: str | None = None,
    tensor_scale: Tensor | None = None,
) -> Any:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, like
    torch.nn.functional.layer_norm. With a residual, of x + residual, and that sum is returned, too.

    x, weight, residual, quantize, tensor_scale and errors: as in `cutex.rms_norm`. bias: (N,), like
    weight. The variance is computed from differences from the mean, so rows far from 0 lose no
    precision.
    """
    if quantize is not None or tensor_scale is not None:
        return norm_quantized(True, (x, weight, bias, residual), eps, quantize, tensor_scale)
    return norm(True, x, weight, bias, residual, eps)
