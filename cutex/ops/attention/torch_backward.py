"""Gradients of attention by torch's own flash backward, from our O and LSE.

torch.ops.aten._flash_attention_backward supports what FlashAttention-2 supports: one head dim, a
band, no softcap, no seqused, no gradient of LSE. If v has another head dim, it is padded with zeros
to q's. The gradient of LSE takes two more attentions: with P the probabilities, a row's LSE changes
by scale * P K with its q, and by scale * P^T q with the keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from cutex.ops.attention.call import MAX_LENGTH, AttentionCall
from cutex.ops.attention.plan import ALIGN, packed


def why_not(call: AttentionCall) -> str | None:
    """The reason why torch's flash backward does not support the call, or None."""
    if call.softcap:
        return f"softcap={call.softcap}, which torch's flash backward does not know"
    if call.alibi_slopes is not None:
        return "alibi_slopes, which torch's flash backward does not take"
    if any(x is not None and x < 0 for x in call.sides):
        return (
            f"window_size={tuple(call.window_size)}, a band off the diagonal, which torch's flash "
            "backward does not know"
        )
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
    call: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    q, k, v = map(readable, (call.q, call.k, call.v))
    call = replace(call, q=q, k=k, v=v)
    # NOTE: a row without keys has exp(-inf - lse), which is 0 with +inf and NaN with -inf
    lse = torch.where(lse == -torch.inf, torch.inf, lse)
    dq, dk, dv = _of_out(call, grad_out, out, lse)
    if grad_lse is None:
        return dq, dk, dv
    change = grad_lse.transpose(-1, -2)[..., None].float()  # (.., rows, heads, 1)
    change = torch.where(lse.transpose(-1, -2)[..., None] == torch.inf, 0.0, change)
    mean_k = _mean_keys(call)
    # NOTE: in 16 bits; divided by its largest, a gradient does not leave fp16's range
    largest = change.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    changed_q = (q.float() * (change / largest)).to(q.dtype)
    keys = replace(call, v=k)
    _, _, of_keys = _of_out(keys, changed_q, torch.zeros_like(q), lse)
    dq = (dq.float() + change * (call.scale * mean_k)).to(dq.dtype)
    return dq, (dk.float() + of_keys.float() * (call.scale * largest)).to(dk.dtype), dv


def _mean_keys(call: AttentionCall) -> Tensor:
    """P K, in float32: O of a call whose values are its keys. A sink has its share of P."""
    out, _ = torch.ops.cutex.flash_attn(
        call.q, call.k, call.k, call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q,
        call.max_seqlen_k, None, None, call.softmax_scale, call.causal, *call.window_size, 0.0,
        call.learnable_sink,
    )  # fmt: skip
    return out.float()


def _of_out(
    call: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = call.q, call.k, call.v
    head_dim, head_dim_v = call.head_dims
    if head_dim_v != head_dim:
        v, out, grad_out = (pad(x, (0, head_dim - head_dim_v)) for x in (v, out, grad_out))
    left, right = window(call)
    longest = [
        x.shape[-3] if most is None else most
        for x, most in ((q, call.max_seqlen_q), (k, call.max_seqlen_k))
    ]
    nothing = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of a dropout of 0
    try:
        with deterministic(call.deterministic):
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
    return dq, dk, dv[..., :head_dim_v]


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """A context in which torch's flash backward takes its deterministic form, if it is `wanted`."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(before or wanted, warn_only=only_warns)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)


def readable(x: Tensor) -> Tensor:
    """x, or a copy if torch's flash backward cannot read it: by 16 bytes, along the head dim.

    NOTE: unlike the forward it is also called where there are no addresses, by a compiler's trace.
    """
    strides = [s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
    aligned = all(s * x.element_size() % ALIGN == 0 for s in (x.storage_offset(), *strides))
    return x if aligned and x.stride(-1) == 1 else packed(x)


def window(call: AttentionCall) -> tuple[int, int]:
    """The window as torch's flash backward takes it: in 32 bits, with -1 for an open side."""
    left, right = (-1 if x is None else min(x, MAX_LENGTH) for x in call.sides)
    return left, right
