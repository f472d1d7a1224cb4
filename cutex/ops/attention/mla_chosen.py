"""flash_mla_with_kvcache with `indices`: attention of each token to its own chosen rows of a cache
of latent keys, as DeepSeek-V3.2's.

A token is a sequence of its own: its list of rows is a page table of pages of one row. Each call
looks up a plan for its options that takes its tensors, and launches it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutex.kernels.attention.mla.config import HEAD_DIM_V
from cutex.kernels.attention.mla.sparse.config import CONFIGS, SparseMlaConfig
from cutex.ops.attention.cache import check_tensors
from cutex.ops.attention.cache_plan import CacheOperator, Plan, of_parts, preparations
from cutex.ops.attention.call import DTYPES
from cutex.ops.attention.mla_call import MlaCall, check_numbers, check_operands
from cutex.ops.attention.plan import resources
from cutex.ops.device import current
from cutex.ops.plain import is_plain, untraced
from cutex.ops.plans import PlanCache

if TYPE_CHECKING:
    from cutex.compile import Compiled

OPERATOR = CacheOperator("flash_mla_with_kvcache with indices", CONFIGS)
PLANS = OPERATOR.plans


def attend_to_chosen(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    head_dim_v: int,
    num_splits: int,
    softmax_scale: float | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """O (batch, tokens, heads, 512) and LSE (batch, heads, tokens) of the rows of `k_cache` that
    `indices` (batch, tokens, topk) lists for each token."""
    numbers = head_dim_v, num_splits, softmax_scale, causal
    key = *numbers, topk_length is None
    given = (q, k_cache, indices) if topk_length is None else (q, k_cache, indices, topk_length)
    found = PLANS.launched(key, *given)
    if found is None:
        found = attend(MlaCall(q, k_cache, topk_length, indices, *numbers), given, key)
    return found


@untraced
def attend(call: MlaCall, given: tuple[Tensor, ...], key: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Run a call that has no plan, and keep one if later calls can have it."""
    check(call)
    OPERATOR.check_device(call.q.device)
    OPERATOR.check_no_gradient(call)
    assert call.block_table is not None, "it was checked"
    if 0 in call.q.shape or 0 in call.k_cache.shape or call.block_table.shape[2] == 0:
        lse = torch.full(call.lse_shape, torch.inf, dtype=torch.float32, device=call.q.device)
        return call.q.new_zeros(call.out_shape), lse
    tensors = by_token(*given)
    with current(call.q.device):
        plan = plan_of(of_tokens(call, tensors))
        launch = launch_by_token(plan)
        result = launch(*given)
    if plan.as_given:
        PLANS.remember(PlanCache.key_of(key, *given), given, launch)
    return result


@untraced
def by_token(
    q: Tensor, k_cache: Tensor, indices: Tensor, topk_length: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The tensors q, k_cache, lengths if any, and page table of the call in which each token is a
    sequence and each row of the cache a page."""
    batch, tokens, heads, d = q.shape
    count = batch * tokens
    table = indices.reshape(count, -1)
    if tokens > 1:
        q = q.reshape(count, 1, heads, d)
    if topk_length is None:
        return q, k_cache, table
    if tokens > 1:
        topk_length = topk_length.repeat_interleave(tokens, output_size=count)
    return q, k_cache, topk_length, table


def of_tokens(call: MlaCall, tensors: tuple[Tensor, ...]) -> MlaCall:
    """`call` with its tensors `by_token`."""
    q, k_cache, *lengths, table = tensors
    of_each = lengths[0] if lengths else None
    return call._replace(q=q, k_cache=k_cache, cache_seqlens=of_each, block_table=table)


def launch_by_token(plan: Plan) -> Callable[..., tuple[Tensor, Tensor]]:
    """A function of a call's tensors that launches `plan`, which was made for them `by_token`."""

    @untraced
    def launch(*given: Tensor) -> tuple[Tensor, Tensor]:
        batch, tokens, heads, _ = given[0].shape
        run = plan.run if plan.as_given and plan.run is not None else plan
        if tokens == 1:
            q, k_cache, table, *lengths = given
            return run(q, k_cache, *lengths, table.squeeze(1))
        out, lse = run(*by_token(*given))
        out = out.view(batch, tokens, heads, HEAD_DIM_V)
        return out, lse.view(batch, tokens, heads).transpose(1, 2)

    return launch


def plan_of(call: MlaCall) -> Plan:
    """The plan of a call `of_tokens`."""
    arch = OPERATOR.arch_of(call.q.device)
    sms, _ = resources(call.q.device, arch)
    c = SparseMlaConfig(num_sms=sms, lengths=call.cache_seqlens is not None)
    c = c.fitted(call.rows, call.q.shape[0], int(call.num_splits), call.room)
    units = call.q.shape[0] * -(-call.rows // c.tile_m)
    needs = of_parts(c, units, int(call.num_splits), 0 if c.combined else units * c.flags_of_unit)
    compiled = kernel_for(c, DTYPES[call.q.dtype], arch)
    numbers = call.scale, int(call.num_splits)
    return Plan(call, compiled, 2, True, numbers, needs, preparations(call.tensors))


@lru_cache(maxsize=1024)
def kernel_for(config: SparseMlaConfig, dtype: str, arch: str) -> Compiled:
    from cutex.compile import compile
    from cutex.kernels.attention.mla.sparse.sm90 import SparseMla

    return compile(SparseMla(config), dtype, arch)


def check(call: MlaCall) -> None:
    """Raise TypeError or ValueError, in one sentence that names the argument, for a call that is
    not supported."""
    q, cache, lengths, indices = call.q, call.k_cache, call.cache_seqlens, call.block_table
    given = [("q", q), ("k_cache", cache), ("indices", indices)]
    check_tensors(given if lengths is None else [*given, ("topk_length", lengths)])
    assert indices is not None
    check_operands(call)
    check_numbers(call)
    if call.causal:
        raise ValueError("causal=True: indices say which keys a token sees")
    if not are_rows(cache):
        raise ValueError(
            f"k_cache has strides {tuple(cache.stride())}: for indices its pages must follow one "
            "another"
        )
    for name, x, shape in (
        ("indices", indices, (*q.shape[:2], "topk")), ("topk_length", lengths, q.shape[:1])
    ):  # fmt: skip
        if x is None:
            continue
        if x.dtype != torch.int32:
            raise TypeError(f"{name} has dtype {x.dtype}, which is not int32")
        if x.dim() != len(shape) or tuple(x.shape[:2]) != tuple(shape[:2]):
            sizes = ", ".join(map(str, shape))
            raise ValueError(f"{name} has shape {tuple(x.shape)}, it must be ({sizes})")
    if lengths is not None and q.device.type == "cpu" and all(map(is_plain, (q, lengths))):
        topk = indices.shape[2]
        if not ((lengths >= 0) & (lengths <= topk)).all():
            raise ValueError(f"topk_length must be from 0 to {topk}, got {lengths.tolist()}")


def are_rows(cache: Tensor) -> bool:
    """Whether the pages of a cache are one list of rows."""
    return cache.shape[0] <= 1 or cache.stride(0) == cache.shape[1] * cache.stride(1)
