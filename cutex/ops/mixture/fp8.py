"""A mixture of experts whose weights are fp8 with a factor for each 128x128: forward alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutex.ops.grouped import launch as products
from cutex.ops.grouped.scaled import SCALED_GROUPED
from cutex.ops.mixture.launch import combine, spread
from cutex.ops.mixture.routing import route
from cutex.ops.quantize import QuantizedTensor, quantize
from cutex.ops.row.operators import define

ROWS, BLOCKS = "fp8_1x128", "fp8_128x128"
BLOCK = 128
WORD = torch.bfloat16  # in which rows of bytes are copied


def moe_fp8(x: Tensor, weights: Tensor, ids: Tensor, up: Any, down: Any) -> Tensor:
    """`cutex.moe` with weights (E, 2 F, D) and (E, D, F) quantized by blocks."""
    return MOE_FP8(x, weights, ids, up.data, up.scale, down.data, down.scale)


def check_weights(w_up: Any, w_down: Any) -> None:
    """Raise TypeError or ValueError, in one sentence, unless both are quantized as the kernel reads
    them."""
    for name, w in (("w_up", w_up), ("w_down", w_down)):
        if not isinstance(w, QuantizedTensor):
            raise TypeError(f"{name} must be quantized as the other, got {type(w).__name__}")
        if w.format != BLOCKS:
            raise ValueError(f"{name} is quantized as {w.format}: takes {BLOCKS}")
        if w.data.dim() != 3:
            raise ValueError(f"{name} must be of (E, N, K), got {tuple(w.data.shape)}")
        if w.data.shape[1] % BLOCK or w.data.shape[2] % BLOCK:
            n, k = w.data.shape[1:]
            raise ValueError(f"{name} is of {n} x {k}: multiples of {BLOCK} have whole blocks")


def _forward(
    x: Tensor, weights: Tensor, ids: Tensor, up: Tensor, of_up: Tensor, down: Tensor,
    of_down: Tensor,
) -> Tensor:  # fmt: skip
    out = _fake(x, weights, ids, up, of_up, down, of_down)
    if not x.shape[0]:
        products.arch_for(x)
        return out
    tokens, places, _, offs = route(ids, up.shape[0])
    whole = quantize(x, ROWS)
    rows = spread(whole.data.view(WORD), places, offs).view(whole.data.dtype)
    factors = whole.scale.mT.index_select(1, tokens).mT
    y = _product((rows, factors), (up, of_up), offs, "gated_silu", x.dtype)
    part = quantize(y, ROWS)
    z = _product((part.data, part.scale), (down, of_down), offs, None, x.dtype)
    combine(z, places, offs, out, weights.float())
    return out


def _product(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    offs: Tensor,
    activation: str | None,
    dtype: torch.dtype,
) -> Tensor:
    """activation(a[rows of e] @ b[e]^T), of elements and factors."""
    of_b = b[1].unflatten(0, (b[0].shape[0], -1))  # (E, N / 128, K / 128)
    rest = "fp8_block", None, activation, dtype, False, False
    return SCALED_GROUPED(a[0], b[0].mT, a[1], of_b, offs, *rest)


def _fake(
    x: Tensor, weights: Tensor, ids: Tensor, up: Tensor, of_up: Tensor, down: Tensor,
    of_down: Tensor,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape)


MOE_FP8: Any = define(
    "moe_fp8",
    "(Tensor x, Tensor weights, Tensor ids, Tensor up, Tensor of_up, Tensor down, Tensor of_down) "
    "-> Tensor",
    _forward,
    _fake,
)
