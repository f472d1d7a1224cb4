"""`cutex.flash_attn_func` as torch sees it: a registered operator with a fake, gradients and FLOPs.

torch.ops.cutex.flash_attn serves torch.compile, autograd, tensor subclasses, modes and transforms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cutex.ops import autocast, differentiation
from cutex.ops.attention import registered_backward
from cutex.ops.attention.backward import check_gradient
from cutex.ops.attention.call import AttentionCall, check
from cutex.ops.attention.planned import attend
from cutex.ops.attention.registered_backward import TENSORS
from cutex.ops.plain import bare

_library = torch.library.Library("cutex", "FRAGMENT")
_library.define(
    "flash_attn(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, float? softmax_scale=None, "
    "bool causal=False, SymInt? window_left=None, SymInt? window_right=None, float softcap=0.0, "
    "Tensor? learnable_sink=None, bool deterministic=False, Tensor? alibi_slopes=None) "
    "-> (Tensor out, Tensor lse)"
)


SINK, SLOPES = 14, 16  # the places of these tensors among the operator's arguments


def _call(*args: Any) -> AttentionCall:
    """The call from the operator's arguments; torch leaves out trailing defaults."""
    tensors, options = (
        args[: len(TENSORS)],
        args[len(TENSORS) :],
    )
    defaults = (None, False, None, None, 0.0, None, False, None)
    scale, causal, left, right, softcap, sink, deterministic, slopes = (
        options + defaults[len(options) :]
    )
    return AttentionCall(
        **dict(zip(TENSORS, tensors, strict=False)), softmax_scale=scale, causal=causal,
        window_size=(left, right), softcap=softcap, learnable_sink=sink,
        deterministic=deterministic, alibi_slopes=slopes,
    )  # fmt: skip


@torch.no_grad()
def _operator(*args: Any) -> tuple[Tensor, Tensor]:
    out, lse = attend(_call(*map(bare, args)), with_lse=True)
    assert lse is not None
    return out, lse


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    call = _call(*args)
    check(call)
    lse = call.q.new_empty(call.lse_shape, dtype=torch.float32)
    return call.q.new_empty(call.out_shape), lse


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    call = _call(*inputs)
    check_gradient(call)
    ctx.set_materialize_grads(False)
    lengths = call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q, call.seqused_k
    vectors = call.learnable_sink, call.alibi_slopes
    ctx.save_for_backward(call.q, call.k, call.v, *lengths, *vectors, *output)
    ctx.longest = call.max_seqlen_q, call.max_seqlen_k
    ctx.options = call.softmax_scale, call.causal, call.window_size, call.softcap
    ctx.deterministic = call.deterministic
    ctx.count = len(inputs)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, cu_q, cu_k, used_q, used_k, sink, slopes, out, lse = ctx.saved_tensors
    scale, causal, window, softcap = ctx.options
    longest_q, longest_k = ctx.longest
    call = AttentionCall(
        q, k, v, cu_q, cu_k, longest_q, longest_k, used_q, used_k, scale, causal, window, softcap,
        sink, deterministic=ctx.deterministic, alibi_slopes=slopes,
    )  # fmt: skip
    with_sink = sink is not None and ctx.needs_input_grad[SINK]
    dq, dk, dv, dsink = registered_backward.of_inputs(call, grad_out, grad_lse, out, lse, with_sink)
    grads = (dq, dk, dv, *(None,) * (SINK - 3), dsink, None, None)
    return grads[: ctx.count]


def _mapped(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
    """Run the calls of a vmap as one of a larger batch; for packed sequences and sinks, one by
    one."""
    n = info.batch_size
    if any(x is not None for x in (*args[3:9], *in_dims[9:], *args[SLOPES:])):
        results = [
            torch.ops.cutex.flash_attn(
                *(x if d is None else x.select(d, i) for x, d in zip(args, in_dims, strict=True))
            )
            for i in range(n)
        ]
        return tuple(map(torch.stack, zip(*results, strict=True))), (0, 0)
    dims = zip(args[:3], in_dims[:3], strict=True)
    each = [x.expand(n, *x.shape) if d is None else x.movedim(d, 0) for x, d in dims]
    out, lse = torch.ops.cutex.flash_attn(*(x.flatten(0, 1) for x in each), *args[3:])
    sizes = n, each[0].shape[1]
    return (out.unflatten(0, sizes), lse.unflatten(0, sizes)), (0, 0)


def _flops(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None = None, cu_k: Tensor | None = None,
    *rest: Any, **more: Any,
) -> int:  # fmt: skip
    """The FLOPs as torch counts attention: every pair of a query and a key of one sequence, seen or
    not."""
    pairs = registered_backward.pairs_of(q, k, cu_q, cu_k)
    return 2 * pairs * q.shape[-2] * (q.shape[-1] + v.shape[-1])


for _key in ("CUDA", "CPU"):
    _library.impl("flash_attn", _operator, _key)
torch.library.register_fake("cutex::flash_attn", _fake)
differentiation.register(_library, "flash_attn", _setup, _backward)
torch.library.register_vmap("cutex::flash_attn", _mapped, lib=_library)
autocast.register(_library, "flash_attn", count=3)
register_flop_formula(torch.ops.cutex.flash_attn, get_raw=True)(_flops)
