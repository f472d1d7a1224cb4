"""A mixture of experts as torch sees it: an operator of the forward pass, one of the gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutex.ops.grouped import launch as products
from cutex.ops.mixture.launch import combine, gate, gate_gradient, spread
from cutex.ops.mixture.routing import route
from cutex.ops.mixture.stored_gate import gated_and_kept, gates_in_store
from cutex.ops.row.operators import define

SILU = "gated_silu"
PLAIN = (None, None, False)  # no bias, no activation; rows by the ends of groups


def _forward(
    x: Tensor, weights: Tensor, ids: Tensor, w_up: Tensor, w_down: Tensor, keep: bool
) -> tuple[Tensor, ...]:
    out, h, tokens, places, order, offs = _fake(x, weights, ids, w_up, w_down, keep)
    experts, _, f2 = w_up.shape
    if not x.shape[0]:
        products.arch_for(x)
        return out, h, tokens, places, order, offs.zero_()
    tokens, places, order, offs = route(ids, experts)
    y = x.new_empty((tokens.shape[0], f2 // 2))
    if keep and gates_in_store(x, tokens.shape[0], w_up):
        gated_and_kept(spread(x, places, offs), w_up, offs, y, h)
    else:
        to, options = (h, PLAIN) if keep else (y, (None, SILU, False))
        if products.gathers_in_load(x, tokens, w_up, options[1], ragged=True):
            products.gathered(x, tokens, w_up, offs, to, options, ragged=True)
        else:
            products.rows(spread(x, places, offs), w_up, offs, to, options, ragged=True)
        if keep:
            gate(h, y, offs)
    z = x.new_empty((tokens.shape[0], x.shape[1]))
    products.rows(y, w_down, offs, z, PLAIN, ragged=True)
    combine(z, places, offs, out, weights.float())
    return out, h, tokens, places, order, offs


def _fake(
    x: Tensor, weights: Tensor, ids: Tensor, w_up: Tensor, w_down: Tensor, keep: bool
) -> tuple[Tensor, ...]:
    count = ids.shape[0] * ids.shape[1]
    h = x.new_empty((count if keep else 0, w_up.shape[2]))
    tokens, order = (x.new_empty(count, dtype=torch.int32) for _ in range(2))
    places = x.new_empty(ids.shape, dtype=torch.int32)
    offs = x.new_empty(w_up.shape[0], dtype=torch.int32)
    return x.new_empty(x.shape), h, tokens, places, order, offs


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weights, _, w_up, w_down, keep = inputs
    _, h, tokens, places, order, offs = output
    if not keep:
        raise ValueError("cutex::moe has no gradient without what it keeps: call cutex.moe")
    ctx.mark_non_differentiable(h, tokens, places, order, offs)
    ctx.set_materialize_grads(False)  # of h, zeros as large as it is
    ctx.save_for_backward(x, weights, w_up, w_down, h, tokens, places, order, offs)


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    x, weights, w_up, w_down, *kept = ctx.saved_tensors
    of_x, of_weights, of_up, of_down = torch.ops.cutex.moe_gradient(
        grad, x, weights, w_up, w_down, *kept
    )
    return of_x, of_weights, None, of_up, of_down, None


def _gradient(
    grad: Tensor, x: Tensor, weights: Tensor, w_up: Tensor, w_down: Tensor, h: Tensor,
    tokens: Tensor, places: Tensor, order: Tensor, offs: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    of_x, of_weights, of_up, of_down = _fake_gradient(
        grad, x, weights, w_up, w_down, h, tokens, places, order, offs
    )
    if not x.shape[0]:
        return of_x, of_weights, of_up.zero_(), of_down.zero_()
    dz, dy = spread(grad, places, offs), h.new_empty((h.shape[0], h.shape[1] // 2))
    products.rows(dz, w_down.mT, offs, dy, PLAIN, ragged=True)
    scales = weights.float().contiguous().view(-1)
    ds = of_weights.view(-1) if of_weights.dtype == torch.float32 else torch.empty_like(scales)
    y, dh = torch.empty_like(dy), torch.empty_like(h)
    gate_gradient(h, y, offs, scales, dy, dh, ds, order)
    if ds.dtype != of_weights.dtype:
        of_weights.view(-1).copy_(ds)
    _sums(y, dz, offs, of_down)
    rows = spread(x, places, offs)
    _sums(rows, dh, offs, of_up)
    dx = torch.empty_like(rows)
    products.rows(dh, w_up.mT, offs, dx, PLAIN, ragged=True)
    combine(dx, places, offs, of_x, None)
    return of_x, of_weights, of_up, of_down


def _sums(x: Tensor, dy: Tensor, offs: Tensor, out: Tensor) -> None:
    """out[e] = x[rows of e]^T @ dy[rows of e], in out's layout."""
    if out.stride(-1) == 1:
        products.sums(x.mT, dy, offs, out, False)
    else:
        products.sums(dy.mT, x, offs, out.mT, False)


def _fake_gradient(
    grad: Tensor, x: Tensor, weights: Tensor, w_up: Tensor, w_down: Tensor, h: Tensor,
    tokens: Tensor, places: Tensor, order: Tensor, offs: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    def like(w: Tensor) -> Tensor:
        """A gradient whose contiguous side is that of w."""
        e, k, n = w.shape
        return w.new_empty((e, n, k)).mT if w.stride(-2) == 1 else w.new_empty((e, k, n))

    of_weights = weights.new_empty(weights.shape)
    return x.new_empty(x.shape), of_weights, like(w_up), like(w_down)


define(
    "moe_gradient",
    "(Tensor grad, Tensor x, Tensor weights, Tensor w_up, Tensor w_down, Tensor h, Tensor tokens, "
    "Tensor places, Tensor order, Tensor offs) "
    "-> (Tensor of_x, Tensor of_weights, Tensor of_up, Tensor of_down)",
    _gradient,
    _fake_gradient,
)
MOE: Any = define(
    "moe",
    "(Tensor x, Tensor weights, Tensor ids, Tensor w_up, Tensor w_down, bool keep) "
    "-> (Tensor out, Tensor h, Tensor tokens, Tensor places, Tensor order, Tensor offs)",
    _forward,
    _fake,
    _setup,
    _backward,
)
