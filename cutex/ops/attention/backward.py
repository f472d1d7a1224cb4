"""Gradients of attention by torch's own flash backward, from our O and LSE.

torch.ops.aten._flash_attention_backward supports what FlashAttention-2 supports: one head dim, a
band, no softcap, no sink, no seqused. A sink needs no support: it is part of LSE, so the
probabilities are right, and its own gradient is a sum over rows. Where v has another head dim, it
is padded with zeros to that of q.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from cutex.ops.attention.call import MAX_LENGTH, AttentionCall
from cutex.ops.attention.plan import ALIGN, longest_k, longest_q, packed


def why_no_gradient(call: AttentionCall) -> str | None:
    """The reason why torch's flash backward does not support the call, or None."""
    if call.softcap:
        return f"softcap={call.softcap}, which torch's flash backward does not know"
    for name in ("seqused_q", "seqused_k"):
        if getattr(call, name) is not None:
            return f"{name}, which torch's flash backward does not know"
    if call.head_dims[1] > call.head_dims[0]:
        return (
            f"head dims {call.head_dims[0]} of q and {call.head_dims[1]} of v, of which v's is "
            "larger"
        )
    if (call.cu_seqlens_q is None) != (call.cu_seqlens_k is None):
        return "cu_seqlens_q or cu_seqlens_k alone: torch's flash backward takes both or none"
    return None


def gradients(
    call: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and learnable_sink, given that of out."""
    dsink = None
    if call.learnable_sink is not None:
        dsink = sink_gradient(call, grad_out, out, lse)
    q, k, v = map(readable, (call.q, call.k, call.v))
    if 0 in (*out.shape, call.batch, longest_q(call), longest_k(call)):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), dsink
    head_dim, head_dim_v = call.head_dims
    if head_dim_v != head_dim:
        v, out, grad_out = (pad(x, (0, head_dim - head_dim_v)) for x in (v, out, grad_out))
    # NOTE: a row without keys has exp(-inf - lse), which is 0 with +inf and NaN with -inf
    lse = torch.where(lse == -torch.inf, torch.inf, lse)
    left, right = window(call)
    longest = [
        x.shape[-3] if most is None else most
        for x, most in ((q, call.max_seqlen_q), (k, call.max_seqlen_k))
    ]
    nothing = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of a dropout of 0
    try:
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad_out.contiguous(),
            q,
            k,
            v,
            out,
            lse,
            *(
                None if x is None else x.contiguous()
                for x in (call.cu_seqlens_q, call.cu_seqlens_k)
            ),
            *longest,
            0.0,
            call.causal,
            nothing,
            torch.empty(0, dtype=torch.uint64, device=q.device),
            scale=call.scale,
            window_size_left=left,
            window_size_right=right,
        )
    except NotImplementedError as error:
        raise ValueError(
            f"the gradient of attention is torch's flash backward, which does not run on {q.device}"
        ) from error
    return dq, dk, dv[..., :head_dim_v], dsink


def readable(x: Tensor) -> Tensor:
    """x, or a copy if torch's flash backward cannot read it: by 16 bytes, along the head dim.

    NOTE: unlike the forward it is also called where there are no addresses, by a compiler's trace.
    """
    strides = [s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
    aligned = all(s * x.element_size() % ALIGN == 0 for s in (x.storage_offset(), *strides))
    return x if aligned and x.stride(-1) == 1 else packed(x)


def window(call: AttentionCall) -> tuple[int, int]:
    """The window as torch's flash backward takes it: in 32 bits, with -1 for an open side."""
    left, right = (-1 if x is None else min(x, MAX_LENGTH) for x in call.window_size)
    return left, right


def sink_gradient(call: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """The gradient of the sink, (heads,): minus the sink's probability times the row's sum of
    grad_out * out."""
    sink, ends = call.learnable_sink, call.cu_seqlens_q
    assert sink is not None
    delta = (
        (grad_out.float() * out.float()).sum(-1).transpose(-1, -2)
    )  # like lse, (.., heads, rows)
    if ends is not None:  # rows behind the last sequence hold anything
        delta = delta.where(torch.arange(out.shape[0], device=ends.device) < ends[-1], 0.0)
    share = torch.exp(sink.float()[:, None] - lse)
    rows = [d for d in range(lse.dim()) if d != lse.dim() - 2]
    return -torch.where(delta == 0, 0.0, share * delta).sum(rows).to(sink.dtype)
