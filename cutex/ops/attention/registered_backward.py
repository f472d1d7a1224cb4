"""The gradient of attention as torch sees it: torch.ops.cutex.flash_attn_backward, with a fake, so
that a compiled graph may contain it. It has no derivative of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cutex.ops import differentiation
from cutex.ops.attention.backward import (
    Gradients,
    gradients,
    gradients_with_sink,
    sink_gradient,
)
from cutex.ops.attention.call import AttentionCall
from cutex.ops.plain import bare, is_plain, nobody_watches

_library = torch.library.Library("cutex", "FRAGMENT")
_library.define(
    "flash_attn_backward(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, Tensor q, "
    "Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? max_seqlen_q, "
    "SymInt? max_seqlen_k, Tensor? seqused_q, Tensor? seqused_k, float? softmax_scale, "
    "bool causal, SymInt? window_left, SymInt? window_right, float softcap, "
    "Tensor? learnable_sink, bool deterministic, Tensor? alibi_slopes=None) "
    "-> (Tensor dq, Tensor dk, Tensor dv)"
)
RESULTS = 4  # arguments before those of the call
TENSORS = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
           "seqused_q", "seqused_k")  # fmt: skip


def call(
    of: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None
) -> Gradients:
    """The gradients of q, k and v, as one node of a graph."""
    scale = of.softmax_scale
    dq, dk, dv = torch.ops.cutex.flash_attn_backward(
        grad_out, grad_lse, out, lse, of.q, of.k, of.v, of.cu_seqlens_q, of.cu_seqlens_k,
        of.max_seqlen_q, of.max_seqlen_k, of.seqused_q, of.seqused_k, scale, of.causal,
        *of.window_size, of.softcap, of.learnable_sink, of.deterministic, of.alibi_slopes,
    )  # fmt: skip
    return dq, dk, dv


def of_inputs(
    of: AttentionCall,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    with_sink: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and, if wanted, the sink, from those of out and lse that there are;
    a node of a graph where torch records one."""
    if grad_out is None:  # only LSE has one
        grad_out = torch.zeros_like(out)
    given = (*of.tensors, grad_out, out, lse, *(() if grad_lse is None else (grad_lse,)))
    if nobody_watches() and not torch.is_grad_enabled() and all(map(is_plain, given)):
        if with_sink:
            return gradients_with_sink(of, grad_out, out, lse, grad_lse)
        dq, dk, dv = gradients(of, grad_out, out, lse, grad_lse)
    else:
        dq, dk, dv = call(of, grad_out, out, lse, grad_lse)
    dsink = sink_gradient(of, grad_out, out, lse, grad_lse) if with_sink else None
    return dq, dk, dv, dsink


@torch.no_grad()
def _operator(*args: Any) -> Gradients:
    grad_out, grad_lse, out, lse, *rest = map(bare, args)
    tensors, options = rest[: len(TENSORS)], rest[len(TENSORS) :]
    scale, causal, left, right, softcap, sink, deterministic, slopes, *_ = (*options, None)
    of = AttentionCall(
        **dict(zip(TENSORS, tensors, strict=True)), softmax_scale=scale, causal=causal,
        window_size=(left, right), softcap=softcap, learnable_sink=sink,
        deterministic=deterministic, alibi_slopes=slopes,
    )  # fmt: skip
    # NOTE: a graph holds what the fake says: contiguous tensors that share no memory
    dq, dk, dv = (x.contiguous() for x in gradients(of, grad_out, out, lse, grad_lse))
    return dq, dk, dv


def _fake(*args: Any) -> Gradients:
    q, k, v = args[RESULTS : RESULTS + 3]
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
    """Save nothing."""


def _no_second(ctx: Any, *grads: Tensor | None) -> Any:
    raise ValueError("attention has no second derivative: its gradient is not differentiable")


def _mapped(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
    """Run the calls of a vmap one by one."""
    results = [
        torch.ops.cutex.flash_attn_backward(
            *(x if d is None else x.select(d, i) for x, d in zip(args, in_dims, strict=True))
        )
        for i in range(info.batch_size)
    ]
    return tuple(map(torch.stack, zip(*results, strict=True))), (0, 0, 0)


def _flops(
    grad_out: Any, grad_lse: Any, out: Any, lse: Any, q: Any, k: Any, v: Any, *rest: Any, **_: Any
) -> int:
    """The FLOPs of its five products, with pairs counted as those of the forward are."""
    pairs = pairs_of(q, k, *rest[:2])
    return 2 * pairs * q.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])


def pairs_of(q: Tensor, k: Tensor, cu_q: Tensor | None = None, cu_k: Tensor | None = None) -> int:
    """The pairs of a query and a key of one sequence, seen or not, of one head."""
    pairs = q.shape[-3] * k.shape[-3]
    if cu_q is None and cu_k is None:
        return pairs * q.shape[0]
    if cu_q is None or cu_k is None:
        return pairs
    if is_plain(cu_q):
        return int((cu_q.diff().long() * cu_k.diff()).sum())
    return pairs // max(cu_q.shape[0] - 1, 1)  # the lengths are unknown: taken to be equal


for _key in ("CUDA", "CPU"):
    _library.impl("flash_attn_backward", _operator, _key)
torch.library.register_fake("cutex::flash_attn_backward", _fake)
differentiation.register(_library, "flash_attn_backward", _setup, _no_second)
torch.library.register_vmap("cutex::flash_attn_backward", _mapped, lib=_library)
register_flop_formula(torch.ops.cutex.flash_attn_backward, get_raw=True)(_flops)
