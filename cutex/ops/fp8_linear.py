"""`cutex.fp8_linear`: a linear layer whose three products are of fp8, DeepSeek-V3's recipe."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from cutex.ops.quantize import QuantizedTensor, quantize
from cutex.ops.scaled_mm import UNIT, product

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ACTIVATIONS, WEIGHTS = "fp8_1x128", "fp8_128x128"


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, and its gradients, in fp8 with fp32 factors of blocks, on Hopper.

    x (.., K) and its gradient are quantized in blocks of 1x128 along what is added up, weight (N,
    K) in blocks of 128x128: for dx from weight transposed, which has the same blocks; for dweight
    along the rows, M, of copies of x and dy transposed, which one pass over x and one over dy make
    beside the others. Products are those of `cutex.scaled_mm`; dweight and dbias have the dtypes of
    weight and bias. x, weight: bfloat16, float16 or float32, alike; K and N are multiples of 16.
    Differentiable once. Raises TypeError or ValueError, with one sentence, for arguments that do
    not fit, and where there is no Hopper GPU.

    Source: DeepSeek-V3, arXiv 2412.19437, 3.3.
    """
    for name, y in (("x", x), ("weight", weight), ("bias", bias)):
        if name == "bias" and y is None:
            continue
        if not isinstance(y, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(y).__name__}")
        if y.dtype not in DTYPES:
            raise TypeError(f"{name} must be of bfloat16, float16, float32, got {y.dtype}")
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}: x is (.., K), weight "
            "is (N, K)"
        )
    if x.dtype != weight.dtype:
        raise TypeError(f"weight is {weight.dtype}, but x is {x.dtype}: they must be alike")
    for name, size in (("N", weight.shape[0]), ("K", weight.shape[1])):
        if size % UNIT or not size:
            raise ValueError(f"{name}={size}: must be a multiple of {UNIT}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}, not ({weight.shape[0]},)")
    y = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    """The three products; what backward needs of x and weight is kept quantized, transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        rows, turned = _both(x, ACTIVATIONS, turned=of_weight)
        blocks, blocks_turned = _both(weight, WEIGHTS, turned=of_x)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.weight_dtype = weight.dtype
        kept = [y for q in (turned, blocks_turned) if q is not None for y in (q.data, q.scale)]
        ctx.save_for_backward(*kept)
        return _product(rows, blocks, "fp8_block", x.dtype, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight, of_bias = ctx.needs_input_grad
        kept = list(ctx.saved_tensors)
        dx = dweight = dbias = None
        rows, turned = _both(dy, ACTIVATIONS, turned=of_weight, rows=of_x)
        if of_weight:
            x = QuantizedTensor(kept.pop(0), kept.pop(0), ACTIVATIONS, False)
            dweight = _product(turned, x, "fp8_1x128", ctx.weight_dtype)
        if of_x:
            weight = QuantizedTensor(kept.pop(0), kept.pop(0), WEIGHTS, False)
            dx = _product(rows, weight, "fp8_block", dy.dtype)
        if of_bias:
            dbias = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dweight, dbias


def _both(
    x: Tensor, format: str, turned: bool, rows: bool = True
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """x quantized along its rows, and x transposed along its, as far as asked for.

    NOTE: rows of x transposed are a multiple of 16 bytes, with zeros behind what x has.
    """
    if not turned:
        return (quantize(x, format) if rows else None), None
    more = -x.shape[0] % UNIT
    whole = pad(x, (0, 0, 0, more)) if more else x
    if not rows:
        return None, quantize(whole, format, along="columns")
    of_rows, of_columns = quantize(whole, format, along="both")
    if more:
        m = x.shape[0]
        scale = of_rows.scale[:m] if format == ACTIVATIONS else of_rows.scale
        of_rows = of_rows._replace(data=of_rows.data[:m], scale=scale)
    return of_rows, of_columns


def _product(
    a: QuantizedTensor | None,
    b: QuantizedTensor | None,
    recipe: str,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """a (M, K) @ b (N, K) transposed, of quantized matrices."""
    assert a is not None and b is not None
    if not a.data.shape[1]:  # nothing to add up
        return torch.zeros((a.data.shape[0], b.data.shape[0]), dtype=dtype, device=a.data.device)
    return product(a.data, b.data.mT, a.scale, b.scale, recipe, bias, output_dtype=dtype)
