"""`cutex.flash_attn_func` and `flash_attn_varlen_func` as they are called: each looks up a plan by
dtypes, shapes, strides and options, and runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from cutex.ops import autocast
from cutex.ops.attention.call import AttentionCall, Window, check
from cutex.ops.attention.plan import Plan, check_device, longest_q
from cutex.ops.device import SEVERAL_GPUS, current, per_device
from cutex.ops.plain import are_plain, is_plain, nobody_watches

Mod = Callable[..., Any] | None


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
    *,
    score_mod: Mod = None,
    mask_mod: Mod = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(mask(softmax_scale * q @ k.T)) @ v, as FlashAttention's function of this name.

    q (batch, seqlen_q, heads, head dim), k (batch, seqlen_k, heads_kv, head dim), v (batch,
    seqlen_k, heads_kv, head dim of v): bfloat16 or float16, all alike, accumulated in fp32; heads a
    multiple of heads_kv; head dims 64, 96, 128, 192, 256, or 192 with 128 of v. Any strides; what
    TMA cannot step through (a head dim that is not contiguous; a base or another stride that is no
    multiple of 16 bytes) is copied first.
    softmax_scale: 1 / sqrt(head dim) by default.
    causal: query i sees keys j <= i + seqlen_k - seqlen_q, so that the last query sees all.
    window_size: (left, right), how many keys on either side of that last one a query sees; None is
        all of them. causal closes the right side.
    softcap: scores s become softcap * tanh(s / softcap); 0 is none.
    learnable_sink: (heads,), one more score for each row, whose value is zero.
    score_mod: a function of (score, batch, head, query, key), DSL numbers, that returns the score;
        mask_mod: one of (batch, head, query, key) that returns whether the key is seen. @cute.jit
        if they branch. What they read besides is compiled in.
    return_lse: return (out, lse), lse (batch, heads, seqlen_q) float32, the natural logarithm of
        the sum of the exponentials of a row's scores, the sink's included.

    Returns out (batch, seqlen_q, heads, head dim of v), contiguous. A row that sees no key is 0 and
    has an lse of -inf, or of its sink. Differentiable in q, k, v and learnable_sink by torch's own
    flash backward, except with softcap, score_mod or mask_mod; lse is not differentiable. Raises
    TypeError or ValueError, in one sentence that names the argument, for what does not fit, and
    where there is no Hopper GPU.
    """
    if _is_compiling():
        return _through_operator(
            AttentionCall(q, k, v, softmax_scale=softmax_scale, causal=causal,
                          window_size=window_size, softcap=softcap, learnable_sink=learnable_sink,
                          score_mod=score_mod, mask_mod=mask_mod), return_lse
        )  # fmt: skip
    key: tuple[Any, ...] | None
    try:
        # what the key does not say, the dtypes of k and v, the launcher finds out
        key = (
            q.__class__, k.__class__, v.__class__, q.dtype, q.shape, q.stride(), k.shape,
            k.stride(), v.shape, v.stride(), softmax_scale, causal, window_size, softcap,
            return_lse,
        )  # fmt: skip
        if not (learnable_sink is score_mod is mask_mod is None):
            key += (_described(learnable_sink), score_mod, mask_mod)
        if SEVERAL_GPUS:
            key += (q.get_device(),)
        plan = _plans.get(key)
        if (
            plan is not None
            and (
                are_plain(q, k, v) if learnable_sink is None else are_plain(q, k, v, learnable_sink)
            )
            and not (_grad_enabled() and _wants_gradient(q, k, v, learnable_sink))
            and (not plan.has_functions or plan.is_current())
        ):
            if plan.short is not None:
                return plan.short(q, k, v)
            out, lse = plan(q, k, v, [], learnable_sink)
            return out if lse is None else (out, lse)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        key = None  # not a tensor, or not of the plan's alignment: the checks will say
    return _without_plan(
        AttentionCall(q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
                      softcap=softcap, learnable_sink=learnable_sink, score_mod=score_mod,
                      mask_mod=mask_mod),
        return_lse,
        key,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    score_mod: Mod = None,
    mask_mod: Mod = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash_attn_func for sequences of different lengths, as FlashAttention's of this name.

    cu_seqlens_q: (batch + 1,) int32, where each sequence begins in q, which is then (total_q,
        heads, head dim), and the last one ends; without it q is (batch, seqlen_q, heads, head dim).
        cu_seqlens_k: the same of k and v.
    max_seqlen_q: no sequence of q is longer; rows beyond it are not computed. By default the rows
        of q, which costs time where sequences are many. max_seqlen_k: not needed.
    seqused_q, seqused_k: (batch,) int32, how many rows of each sequence count.

    Returns out (total_q, heads, head dim of v) and lse (heads, total_q), or as flash_attn_func
    where q is not packed. Rows that belong to no sequence are left unwritten. Other arguments and
    errors are those of flash_attn_func. What the int32 tensors hold is checked on the CPU only: on
    a GPU that would have to wait for it. No gradient where seqused is given.
    """
    arguments = (
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
        softmax_scale, causal, window_size, softcap, learnable_sink, score_mod, mask_mod,
    )  # fmt: skip
    if _is_compiling():
        return _through_operator(AttentionCall(*arguments), return_lse)
    key: tuple[Any, ...] | None
    try:
        # what the key does not say, dtypes of all but q, the launcher finds out
        lengths = [x for x in (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k) if x is not None]
        key = (
            q.__class__, k.__class__, v.__class__, q.dtype, q.shape, q.stride(), k.shape,
            k.stride(), v.shape, v.stride(), softmax_scale, causal, window_size, softcap,
            return_lse, max_seqlen_q, cu_seqlens_q is None, cu_seqlens_k is None,
            seqused_q is None, seqused_k is None, *[x.shape for x in lengths],
        )  # fmt: skip
        if not (learnable_sink is score_mod is mask_mod is None):
            key += (_described(learnable_sink), score_mod, mask_mod)
        if SEVERAL_GPUS:
            key += (q.get_device(),)
        plan = _plans.get(key)
        if (
            plan is not None
            and not (_grad_enabled() and _wants_gradient(q, k, v, learnable_sink))
            and are_plain(q, k, v, *lengths)
            and (learnable_sink is None or are_plain(learnable_sink))
            and (not plan.has_functions or plan.is_current())
        ):
            if q.is_cpu:
                check(AttentionCall(*arguments))
            out, lse = plan(q, k, v, lengths, learnable_sink)
            return out if lse is None else (out, lse)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        key = None
    return _without_plan(AttentionCall(*arguments), return_lse, key)


def _described(x: Tensor | None) -> tuple[Any, ...] | None:
    return None if x is None else (x.__class__, x.dtype, x.shape, x.stride())


def _wants_gradient(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> bool:
    return (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (sink is not None and sink.requires_grad)
    )


# ---- plans

_plans: dict[tuple[Any, ...], Plan] = per_device({})
_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling


def _without_plan(
    call: AttentionCall, return_lse: bool, key: tuple[Any, ...] | None
) -> Tensor | tuple[Tensor, Tensor]:
    """A call without a plan: through the operator where torch has more to do than to run it."""
    operands = call.q, call.k, call.v
    if all(isinstance(x, Tensor) for x in operands) and autocast.is_on(call.q.device):
        arguments = {f.name: getattr(call, f.name) for f in fields(call)}
        arguments.update(zip("qkv", autocast.cast(*operands), strict=True))
        with autocast.off(call.q.device):
            return flash_attn_varlen_func(**arguments, return_lse=return_lse)
    check(call)
    tensors = (*operands, *call.lengths.values(), call.learnable_sink)
    if (
        not nobody_watches()
        or not all(x is None or is_plain(x) for x in tensors)
        or (_grad_enabled() and _wants_gradient(call.q, call.k, call.v, call.learnable_sink))
    ):
        return _through_operator(call, return_lse)
    out, lse = run(call, return_lse, key)
    return out if lse is None else (out, lse)


def attend(
    call: AttentionCall, with_lse: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """O and LSE of plain tensors, O in `out` if that is given; for other fronts than these two."""
    tensors = (call.q, call.k, call.v, out, call.learnable_sink, call.cu_seqlens_q,
               call.cu_seqlens_k, call.seqused_q, call.seqused_k)  # fmt: skip
    key = (
        *map(_described, tensors), call.q.device, call.max_seqlen_q, call.softmax_scale,
        call.causal, call.window_size, call.softcap, with_lse,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is not None:
        try:
            lengths = list(call.lengths.values())
            return plan(call.q, call.k, call.v, lengths, call.learnable_sink, out)
        except (TypeError, ValueError):
            pass  # not of the plan's alignment
    check(call)
    return run(call, with_lse, key, out)


def run(
    call: AttentionCall,
    with_lse: bool,
    key: tuple[Any, ...] | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The call, checked, on plain tensors; remembers its plan under `key`."""
    check_device(call.q.device)
    if 0 in (*call.out_shape, call.k.shape[-3], call.batch, longest_q(call)):
        return _nothing_to_see(call, with_lse, out)
    lengths = list(call.lengths.values())
    with current(call.q.device):
        plan = Plan(call, with_lse)
        result = plan(call.q, call.k, call.v, lengths, call.learnable_sink, out)
    if key is not None:
        if len(_plans) >= 4096:
            _plans.clear()
        _plans[key] = plan
    return result


def _nothing_to_see(
    call: AttentionCall, with_lse: bool, out: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Of rows that see no key; of no rows nothing is written."""
    rows = longest_q(call) > 0
    out = call.q.new_empty(call.out_shape) if out is None else out
    lse = call.q.new_empty(call.lse_shape, dtype=torch.float32) if with_lse else None
    if rows:
        out.zero_()
    if rows and lse is not None:
        lse.fill_(-torch.inf)
        if call.learnable_sink is not None:
            lse.copy_(call.learnable_sink[:, None].expand(lse.shape))
    return out, lse


def _through_operator(call: AttentionCall, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """As one node of a graph."""
    for name in ("score_mod", "mask_mod"):
        if getattr(call, name) is not None:
            raise ValueError(
                f"{name} cannot be given under torch.compile, torch.func or a dispatch mode, nor "
                "where a gradient is wanted"
            )
    out, lse = torch.ops.cutex.flash_attn(
        call.q, call.k, call.v, call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q,
        call.max_seqlen_k, call.seqused_q, call.seqused_k, call.softmax_scale, call.causal,
        *call.window_size, float(call.softcap), call.learnable_sink,
    )  # fmt: skip
    return (out, lse) if return_lse else out
