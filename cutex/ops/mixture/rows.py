"""Rows of tokens to those of their experts, and weighted back to tokens, as torch sees them.

    moe_spread     rows[places[t, j]] = x[t]
    moe_combine    out[t] = sum over j of weights[t, j] * z[places[t, j]], in fp32, j by j

Without weights, which are 1 then, each is the other's gradient. Nothing is added atomically.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutex.ops.matmul.arrange import aligned, normal, repacked
from cutex.ops.mixture.launch import combine, combine_gradient, spread
from cutex.ops.mixture.routing import Routing
from cutex.ops.row.operators import define

UNIT, MOST = 8, 32  # elements of 16 bytes; experts of a token


def takes(x: Tensor, routing: Routing) -> bool:
    """Whether there are kernels for rows like those of x (T, D)."""
    return x.shape[1] % UNIT == 0 and routing.places.shape[1] <= MOST


def spread_rows(x: Tensor, routing: Routing) -> Tensor:
    """The rows (R, D) of x (T, D) in the order of a routing; those of no expert hold anything."""
    tokens, places, order, offs = routing
    return torch.ops.cutex.moe_spread(x, tokens, places, order, offs)


def combined_rows(z: Tensor, weights: Tensor, routing: Routing) -> Tensor:
    """The sums (T, D) of each token's rows of z (R, D) times its weights (T, J)."""
    tokens, places, order, offs = routing
    return torch.ops.cutex.moe_combine(z, weights.float(), tokens, places, order, offs)


def _spread(x: Tensor, tokens: Tensor, places: Tensor, order: Tensor, offs: Tensor) -> Tensor:
    return spread(x, places, offs) if places.numel() else _fake_spread(x, tokens)


def _fake_spread(x: Tensor, tokens: Tensor, *_: Tensor) -> Tensor:
    return x.new_empty((tokens.shape[0], x.shape[1]))


def _setup_spread(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _spread_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    of_x = torch.ops.cutex.moe_combine(grad, None, *ctx.saved_tensors)
    return of_x, None, None, None, None


def _combine(
    z: Tensor, weights: Tensor | None, tokens: Tensor, places: Tensor, order: Tensor, offs: Tensor
) -> Tensor:
    out = _fake_combine(z, weights, tokens, places)
    if out.numel():
        combine(_rows(z), places, offs, out, weights)
    return out


def _fake_combine(z: Tensor, _: Any, tokens: Tensor, places: Tensor, *__: Tensor) -> Tensor:
    return z.new_empty((places.shape[0], z.shape[1]))


def _setup_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    z, weights, *routing = inputs
    ctx.save_for_backward(None if weights is None else z, weights, *routing)


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    z, weights, *routing = ctx.saved_tensors
    if weights is None:
        rows = torch.ops.cutex.moe_spread(grad, *routing)
        of_none = torch.arange(rows.shape[0], device=rows.device) >= routing[-1][-1]
        of_z, of_weights = rows.masked_fill(of_none[:, None], 0), None
    else:
        of_z, of_weights = torch.ops.cutex.moe_combine_gradient(grad, z, weights, *routing)
    return of_z, of_weights, None, None, None, None


def _gradient(
    grad: Tensor, z: Tensor, weights: Tensor, tokens: Tensor, places: Tensor, order: Tensor,
    offs: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    of_z, of_weights = _fake_gradient(grad, z, weights)
    if not of_z.numel():
        return of_z, of_weights.zero_()
    s, ds = weights.contiguous().view(-1), of_weights.view(-1)
    combine_gradient(_rows(grad), _rows(z), s, tokens, order, offs, of_z, ds)
    return of_z, of_weights


def _fake_gradient(grad: Tensor, z: Tensor, weights: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape), weights.new_empty(weights.shape)


def _setup_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs)


def _gradient_backward(ctx: Any, of_dz: Tensor, of_ds: Tensor) -> tuple[Tensor | None, ...]:
    grad, z, weights, *routing = ctx.saved_tensors
    sums, gradient = torch.ops.cutex.moe_combine, torch.ops.cutex.moe_combine_gradient
    of_grad = sums(of_dz, weights, *routing) + sums(z, of_ds, *routing)
    of_z, _ = gradient(grad, z, of_ds, *routing)
    _, of_weights = gradient(grad, of_dz, weights, *routing)
    return of_grad, of_z, of_weights, None, None, None, None


def _rows(x: Tensor) -> Tensor:
    """x (R, D) with rows that are whole vectors apart."""
    return normal(x, -1) if aligned(x, -1) else repacked(x, -1)


LISTS = "Tensor tokens, Tensor places, Tensor order, Tensor offs"
define(
    "moe_spread",
    f"(Tensor x, {LISTS}) -> Tensor",
    _spread,
    _fake_spread,
    _setup_spread,
    _spread_backward,
)
define(
    "moe_combine",
    f"(Tensor z, Tensor? weights, {LISTS}) -> Tensor",
    _combine,
    _fake_combine,
    _setup_combine,
    _combine_backward,
)
define(
    "moe_combine_gradient",
    f"(Tensor grad, Tensor z, Tensor weights, {LISTS}) -> (Tensor of_z, Tensor of_weights)",
    _gradient,
    _fake_gradient,
    _setup_gradient,
    _gradient_backward,
)
