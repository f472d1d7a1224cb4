"""flash_mla_with_kvcache with `indices`: attention of each token to its own chosen rows of a cache
of latent keys, as DeepSeek-V3.2's.

A token is a sequence of its own: its list of rows is a page table of pages of one row.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cutex.compile import Workspace
from cutex.kernels.attention.decode.config import WORDS
from cutex.kernels.attention.decode.splits import Splits
from cutex.kernels.attention.mla.sparse.config import CONFIGS, SparseMlaConfig
from cutex.ops.attention.cache import check_tensors
from cutex.ops.attention.cache_plan import CacheOperator, Plan, preparations
from cutex.ops.attention.call import DTYPES
from cutex.ops.attention.mla_call import MlaCall, check_numbers, check_operands
from cutex.ops.attention.plan import resources
from cutex.ops.device import current
from cutex.ops.plain import is_plain, untraced

if TYPE_CHECKING:
    from cutex.compile import Compiled

OPERATOR = CacheOperator("flash_mla_with_kvcache with indices", CONFIGS)
PLANS = OPERATOR.plans


@untraced
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
    call = MlaCall(q, k_cache, topk_length, indices, head_dim_v, num_splits, softmax_scale, causal)
    check(call)
    OPERATOR.check_device(q.device)
    OPERATOR.check_no_gradient(call)
    batch, tokens, heads, _ = q.shape
    if 0 in q.shape or 0 in k_cache.shape or indices.shape[2] == 0:
        lse = torch.full(call.lse_shape, torch.inf, device=q.device)
        return q.new_zeros(call.out_shape), lse
    with current(q.device):
        of_tokens = by_token(call)
        key = head_dim_v, num_splits, softmax_scale
        given = tuple(of_tokens.tensors.values())
        found = PLANS.launched(key, *given)
        if found is None:
            found = OPERATOR.run(plan_of(of_tokens), of_tokens.tensors, key)
    out, lse = found
    return out.view(call.out_shape), lse.view(batch, tokens, heads).transpose(1, 2)


def by_token(call: MlaCall) -> MlaCall:
    """The call in which each token is a sequence, and each row of the cache a page."""
    batch, tokens, heads, d = call.q.shape
    q, indices = call.q.reshape(batch * tokens, 1, heads, d), call.block_table
    assert indices is not None
    topk = indices.shape[2]
    lengths = call.cache_seqlens
    if lengths is None:
        lengths = torch.full((batch * tokens,), topk, dtype=torch.int32, device=q.device)
    elif tokens > 1:
        lengths = lengths.repeat_interleave(tokens, output_size=batch * tokens)
    rows = call.k_cache.view(-1, 1, 1, d)
    table = indices.reshape(batch * tokens, topk)
    return call._replace(q=q, k_cache=rows, cache_seqlens=lengths, block_table=table)


def plan_of(call: MlaCall) -> Plan:
    """The plan of a call `by_token`."""
    arch = OPERATOR.arch_of(call.q.device)
    sms, _ = resources(call.q.device, arch)
    c = SparseMlaConfig(num_sms=sms).fitted(call.rows, call.q.shape[0])
    compiled = kernel_for(c, DTYPES[call.q.dtype], arch)
    units = call.q.shape[0] * -(-call.rows // c.tile_m)
    slots = Splits.slots(c.ctas, units, int(call.num_splits))
    words = WORDS * units if c.combined else 0
    needs = Workspace(words + slots * c.tile_m * (c.head_dim_v + 1), 0 if c.combined else units)
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
    if q.device.type == "cpu" and all(map(is_plain, call.tensors.values())) and indices.numel():
        rows, most = cache.shape[0] * cache.shape[1], int(indices.max())
        if most >= rows:
            raise ValueError(f"indices has row {most}, k_cache has rows 0 to {rows - 1}")


def are_rows(cache: Tensor) -> bool:
    """Whether the pages of a cache are one list of rows."""
    return cache.shape[0] <= 1 or cache.stride(0) == cache.shape[1] * cache.stride(1)
