"""Calls of attention on plain tensors, each by the plan of the first call like it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from cutex.ops.attention.call import AttentionCall, check
from cutex.ops.attention.few_queries import FewQueries, are_few
from cutex.ops.attention.plan import ALIGN, Plan, check_device, longest_q
from cutex.ops.device import current, per_device
from cutex.ops.plans import PlanCache

PLANS = PlanCache()  # of the functions that users call
_plans: dict[tuple[Any, ...] | None, Plan | FewQueries] = per_device(
    {}
)  # by everything that a plan depends on


def forget() -> None:
    """Drop all plans."""
    PLANS.forget()
    _plans.clear()


def attend(
    call: AttentionCall,
    with_lse: bool,
    out: Tensor | None = None,
    key: tuple[Any, ...] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """O and LSE of plain tensors, O in `out` if given; with a `key`, later calls like it find a
    plan."""
    whole: tuple[Any, ...] | None = _whole(call, with_lse, out)
    try:
        plan = _plans.get(whole)
    except TypeError:  # a function without a hash, as of a dataclass, is not looked up
        plan = whole = None
    if plan is not None and plan.is_current():
        if call.lengths and call.q.is_cpu:
            check(call)
        with contextlib.suppress(TypeError, ValueError):  # not of the plan's alignment
            result = plan(call, out)
            _remember(key, call, plan)  # one tensor may be given twice this time
            return result
    check(call)
    return run(call, with_lse, whole, out, key)


def plan_of(
    call: AttentionCall, with_lse: bool, out: Tensor | None = None
) -> Plan | FewQueries | None:
    """The plan of a call that `attend` has run."""
    return _plans.get(_whole(call, with_lse, out))


def run(
    call: AttentionCall,
    with_lse: bool,
    whole: tuple[Any, ...] | None = None,
    out: Tensor | None = None,
    key: tuple[Any, ...] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run a checked call on plain tensors; keep its plan under `whole`, and under `key` for the
    functions that users call."""
    check_device(call.q.device)
    if 0 in (*call.out_shape, call.k.shape[-3], call.batch, longest_q(call)):
        return _nothing_to_see(call, with_lse, out)
    with current(call.q.device):
        plan = FewQueries(call, with_lse) if are_few(call) else Plan(call, with_lse)
        result = plan(call, out)
    if whole is not None:
        if len(_plans) >= 4096:
            forget()
        _plans[whole] = plan
    _remember(key, call, plan)
    return result


def _remember(key: tuple[Any, ...] | None, call: AttentionCall, plan: Plan | FewQueries) -> None:
    """Keep a plan for calls like this one, if it has a key and takes tensors as they are given."""
    if key is not None and plan.short is not None:
        functions = [f for f in plan.functions if f is not None]
        PLANS.remember(key, call.tensors, plan.short, functions)


def _whole(call: AttentionCall, with_lse: bool, out: Tensor | None) -> tuple[Any, ...]:
    """Everything that a plan depends on."""
    tensors = (call.q, call.k, call.v, out, call.learnable_sink, call.alibi_slopes,
               call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q, call.seqused_k)  # fmt: skip
    return (
        *map(_described, tensors), *(x.data_ptr() % ALIGN == 0 for x in (call.q, call.k, call.v)),
        call.q.device, call.max_seqlen_q, call.softmax_scale,
        call.causal, tuple(call.window_size), call.softcap, with_lse, call.score_mod,
        call.mask_mod,
    )  # fmt: skip


def _described(x: Tensor | None) -> tuple[Any, ...] | None:
    return None if x is None else (x.__class__, x.dtype, x.shape, x.stride())


def _nothing_to_see(
    call: AttentionCall, with_lse: bool, out: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """O and LSE of rows that see no key; for no rows nothing is written."""
    out = call.q.new_empty(call.out_shape) if out is None else out
    lse = call.q.new_empty(call.lse_shape, dtype=torch.float32) if with_lse else None
    mine = _rows_of_sequences(call)
    out.masked_fill_(mine[..., None, None], 0.0)
    if lse is not None:
        nothing, sink = torch.full_like(lse, -torch.inf), call.learnable_sink
        if sink is not None:
            nothing.copy_(sink[:, None].expand(lse.shape))
        lse.copy_(torch.where(mine[..., None, :], nothing, lse))
    return out, lse


def _rows_of_sequences(call: AttentionCall) -> Tensor:
    """Which rows of q are computed, those that belong to a sequence: (batch, seqlen_q) or, of
    packed sequences, (total_q)."""
    rows = torch.arange(call.q.shape[-3], dtype=torch.int32, device=call.q.device)
    begins = call.cu_seqlens_q
    if begins is None:
        longest = longest_q(call) if call.seqused_q is None else call.seqused_q[:, None]
        return (rows < longest).expand(call.q.shape[:-2])
    if call.batch == 0:
        return rows < 0
    ends = begins[1:].contiguous()
    sequence = torch.searchsorted(ends, rows, right=True).clamp(max=call.batch - 1)
    lengths = begins.diff() if call.seqused_q is None else call.seqused_q
    place = rows - begins[sequence]
    return (place >= 0) & (place < lengths[sequence]) & (place < longest_q(call))
