"""Gradients of attention from its O and LSE: by our kernels where there are some for the GPU and
the head dims, else by torch's own flash backward; with ALiBi by definition.

A sink is part of LSE, so the probabilities are right without it, and its own gradient is a sum over
rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cutex.ops.attention import definition, own_backward, torch_backward
from cutex.ops.attention.call import AttentionCall

Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k and v

MOST_PRODUCTS = 1 << 24  # products of O and its gradient that are kept at one time: 64 MB


def why_no_gradient(call: AttentionCall) -> str | None:
    """The reason why nothing computes the gradients of the call, or None."""
    if own_backward.why_not(call) is None or definition.takes(call):
        return None
    return torch_backward.why_not(call)


def check_gradient(call: AttentionCall) -> None:
    """Raise ValueError if nothing computes the gradients of the call."""
    reason = why_no_gradient(call)
    if reason is not None:
        raise ValueError(f"there is no gradient with {reason}; call it under torch.no_grad()")


def gradients(
    call: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None
) -> Gradients:
    """The gradients of q, k and v, given those of out and, if it has one, of lse."""
    plan = own_backward.plan_for(call, grad_out, out, grad_lse)
    if plan is not None:
        return plan(call, grad_out, out, lse, grad_lse)
    if own_backward.is_empty(call, out):
        dq, dk, dv = map(torch.zeros_like, (call.q, call.k, call.v))
        return dq, dk, dv
    if definition.takes(call):
        return definition.gradients(call, grad_out, out, lse, grad_lse)
    return torch_backward.gradients(call, grad_out, out, lse, grad_lse)


def gradients_with_sink(
    call: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and the sink."""
    plan = own_backward.plan_for(call, grad_out, out, grad_lse, sink=True)
    if plan is None:
        found = gradients(call, grad_out, out, lse, grad_lse)
        return *found, sink_gradient(call, grad_out, out, lse, grad_lse)
    delta = torch.empty(lse.shape, dtype=torch.float32, device=lse.device)
    found = plan(call, grad_out, out, lse, grad_lse, delta)
    return *found, sum_of_sink(call, lse, delta)


def sink_gradient(
    call: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None
) -> Tensor:
    """The gradient of the sink, (heads,)."""
    delta = row_products(grad_out, out).transpose(-1, -2)  # (.., heads, rows)
    if grad_lse is not None:
        delta = delta - grad_lse
    return sum_of_sink(call, lse, delta)


def sum_of_sink(call: AttentionCall, lse: Tensor, delta: Tensor) -> Tensor:
    """The gradient of the sink: less its probability times `delta`, (.., heads, rows), a row's sum
    of grad_out * out less the gradient of LSE."""
    sink = call.learnable_sink
    assert sink is not None
    mine = rows_of_sequences(call)
    if mine is not None:  # other rows hold anything
        delta = delta.where(mine[..., None, :], 0.0)
    share = torch.exp(sink.float()[:, None] - lse)
    rows = [d for d in range(lse.dim()) if d != lse.dim() - 2]
    return torch.where(delta == 0, 0.0, share * -delta).sum(rows).to(sink.dtype)


def row_products(grad_out: Tensor, out: Tensor) -> Tensor:
    """The sum of grad_out * out of each row, (.., rows, heads), in float32, by as many rows at once
    as leave little to be kept beside it."""
    rows = max(1, out.shape[-3] * MOST_PRODUCTS // max(1, out.numel()))
    parts = zip(grad_out.split(rows, -3), out.split(rows, -3), strict=True)
    return torch.cat([torch.mul(g, o.float()).sum(-1) for g, o in parts], -2)


def rows_of_sequences(call: AttentionCall) -> Tensor | None:
    """Which rows of q belong to a sequence: (batch, seqlen_q) or, packed, (total_q); None if all
    do."""
    ends, used = call.cu_seqlens_q, call.seqused_q
    if ends is None and used is None:
        return None
    rows = torch.arange(call.q.shape[-3], device=call.q.device)
    if ends is None:
        assert used is not None
        return rows < used[:, None]
    if used is None:
        return rows < ends[-1]
    begins = ends[:-1, None]
    return ((rows >= begins) & (rows < begins + used[:, None])).any(0)
