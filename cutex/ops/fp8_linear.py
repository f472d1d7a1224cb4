"""`cutex.fp8_linear`: a linear layer whose three products are of fp8.

DeepSeek-V3's recipe on Hopper, MXFP8 on Blackwell.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from cutex.ops.block_scaled import of_quantized
from cutex.ops.device import arch_of
from cutex.ops.fp8_blocks import UNIT, product
from cutex.ops.plain import check_strided
from cutex.ops.quantize import QuantizedTensor, quantize
from cutex.problem.scaled.formats import format_named

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, and its gradients, computed in fp8 with block scale factors.

    x: (.., K); weight: (N, K); both bfloat16, float16 or float32. K and N are multiples of 16, on
        Blackwell of 32. bias: (N,).

    On Hopper this is DeepSeek-V3's recipe: x and the gradient of the result are quantized in blocks
    of 1x128 along the summed dimension, weight in blocks of 128x128. dx uses the transposed weight,
    which has the same blocks. dweight sums over rows, so its operands are transposed copies of x
    and dy quantized along M, made in the same pass as the others. On Blackwell all operands are
    MXFP8: blocks of 1x32 along the summed dimension, both directions in one pass, with the smallest
    power of two for which nothing saturates.

    Products are those of `cutex.scaled_mm`. dweight and dbias have the dtypes of weight and bias.
    Differentiable once. Raises TypeError or ValueError, in one sentence, for arguments that are not
    supported, and without a Hopper or Blackwell GPU.

    Source: DeepSeek-V3, arXiv 2412.19437, 3.3; Mishra et al., arXiv 2506.08027.
    """
    for name, y in (("x", x), ("weight", weight), ("bias", bias)):
        if name == "bias" and y is None:
            continue
        check_strided(name, y)
        assert y is not None
        if y.dtype not in DTYPES:
            raise TypeError(f"{name} must be of bfloat16, float16, float32, got {y.dtype}")
        if y.device != x.device:
            raise ValueError(f"{name} is on {y.device}, not on {x.device} as x")
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
    for name, size in (("N", weight.shape[0]), ("K", weight.shape[1])):
        if size % (unit := _recipe(x).unit):
            raise ValueError(f"{name}={size}: must be a multiple of {unit} on this GPU")
    if not torch.compiler.is_dynamo_compiling() and torch._C._are_functorch_transforms_active():
        raise ValueError("fp8_linear is differentiated by autograd, not by torch.func's transforms")
    y = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


class LinearRecipe(NamedTuple):
    """How an arch computes the layer: formats, and products by scaled_mm's recipes."""

    activations: str
    weights: str
    rounding: str  # of powers of two
    unit: int  # that what is added up is a multiple of
    product: str  # activations by a weight; "" where tensor cores scale
    gradient: str  # activations by activations


RECIPES = {
    "sm_90a": LinearRecipe("fp8_1x128", "fp8_128x128", "floor", UNIT, "fp8_block", "fp8_1x128"),
    "sm_100a": LinearRecipe("mxfp8", "mxfp8", "rceil", 32, "", ""),
}


def _recipe(x: Tensor) -> LinearRecipe:
    return RECIPES[arch_of(x.device, "cutex.fp8_linear", "x", "torch.nn.functional.linear")]


class _Linear(torch.autograd.Function):
    """The three products; backward keeps what it needs of x and weight quantized and transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        how = ctx.how = _recipe(x)
        rows, turned = _both(x, how.activations, how, turned=of_weight)
        blocks, blocks_turned = _both(weight, how.weights, how, turned=of_x)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.weight_dtype = weight.dtype
        kept = [y for q in (turned, blocks_turned) if q is not None for y in (q.data, q.scale)]
        ctx.save_for_backward(*kept)
        return _product(rows, blocks, how.product, x.dtype, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight, of_bias = ctx.needs_input_grad
        kept, how = list(ctx.saved_tensors), ctx.how
        dx = dweight = dbias = None
        rows, turned = _both(dy, how.activations, how, turned=of_weight, rows=of_x)
        if of_weight:
            x = _kept(kept, how.activations)
            dweight = _product(turned, x, how.gradient, ctx.weight_dtype)
        if of_x:
            weight = _kept(kept, how.weights)
            dx = _product(rows, weight, how.product, dy.dtype)
        if of_bias:
            dbias = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dweight, dbias


def _kept(kept: list[Tensor], format: str) -> QuantizedTensor:
    """The next of the quantized matrices that were kept."""
    return QuantizedTensor(kept.pop(0), kept.pop(0), format, format_named(format).swizzled)


def _both(
    x: Tensor, format: str, how: LinearRecipe, turned: bool, rows: bool = True
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """x quantized along its rows, and its transpose along its own, as far as they are needed.

    NOTE: rows of the transpose are multiples of a unit, padded with zeros. Swizzled factors of zero
    rows are in a tile of 128 rows that exists anyway.
    """
    if not turned:
        return (quantize(x, format, rounding=how.rounding) if rows else None), None
    more = -x.shape[0] % how.unit
    whole = pad(x, (0, 0, 0, more)) if more else x
    if not rows:
        return None, quantize(whole, format, along="columns", rounding=how.rounding)
    of_rows, of_columns = quantize(whole, format, along="both", rounding=how.rounding)
    if more:
        m = x.shape[0]
        by_rows = format_named(format).block[0] == 1 and not of_rows.swizzled
        scale = of_rows.scale[:m] if by_rows else of_rows.scale
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
    if not recipe:
        return of_quantized(a, b, bias, None, None, dtype)[0]
    return product(a.data, b.data.mT, a.scale, b.scale, recipe, bias, output_dtype=dtype)
