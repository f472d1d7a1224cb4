"""Attention to caches as torch.compile sees it: operators with fakes, one node of a graph each.

torch.ops.cutex.flash_attn_with_kvcache and flash_mla_with_kvcache read their caches;
flash_attn_appending_kvcache also writes new keys and values to them, which its schema says. What
they do in a running graph is in registered_cache.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutex.ops.attention import kvcache_call
from cutex.ops.attention.call import Window
from cutex.ops.attention.flash_arguments import one_of
from cutex.ops.attention.kvcache_call import FP8, KVCacheCall, other_sink
from cutex.ops.attention.mla_call import MlaCall, check_numbers, refuse_sparse
from cutex.ops.number import check_flag, number

library = torch.library.Library("cutex", "FRAGMENT")
# the arguments after q, the caches, and what is appended, with their types
OPTIONS = {
    "cache_seqlens": "Tensor?", "length": "SymInt?", "page_table": "Tensor?",
    "cache_batch_idx": "Tensor?", "cache_leftpad": "Tensor?", "cu_seqlens_q": "Tensor?",
    "cu_seqlens_k_new": "Tensor?", "max_seqlen_q": "SymInt?", "softmax_scale": "float?",
    "causal": "bool", "window_left": "SymInt?", "window_right": "SymInt?", "softcap": "float",
    "learnable_sink": "Tensor?", "num_splits": "SymInt", "return_lse": "bool",
    "q_descale": "Tensor?", "k_descale": "Tensor?", "v_descale": "Tensor?",
    "rotary_cos": "Tensor?", "rotary_sin": "Tensor?", "rotary_interleaved": "bool",
    "rotary_seqlens": "Tensor?",
}  # fmt: skip
_TYPED = ", ".join(f"{kind} {name}" for name, kind in OPTIONS.items())
library.define(
    f"flash_attn_with_kvcache(Tensor q, Tensor k_cache, Tensor v_cache, {_TYPED}) "
    "-> (Tensor out, Tensor lse)"
)
library.define(
    "flash_attn_appending_kvcache(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, "
    f"Tensor v, {_TYPED}) -> (Tensor out, Tensor lse)"
)
library.define(
    "flash_mla_with_kvcache(Tensor q, Tensor k_cache, Tensor? block_table, Tensor? cache_seqlens, "
    "SymInt head_dim_v, SymInt num_splits, float? softmax_scale, bool causal, Tensor? indices, "
    "Tensor? topk_length) -> (Tensor out, Tensor lse)"
)


# ---- as nodes of a graph that is traced


def attend(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    window: Window,
    others: dict[str, Any],
    **given: Any,
) -> Any:
    """What flash_attn_with_kvcache returns for q, its caches, k, v, and other arguments by their
    names, as one node of the graph that is being traced."""
    q, k_cache, v_cache, k, v = tensors
    given["page_table"] = one_of(
        "page_table", given["page_table"], "block_table", given.pop("block_table")
    )
    given["learnable_sink"] = other_sink(others, given["learnable_sink"])
    for name in ("causal", "return_lse", "rotary_interleaved"):
        check_flag(name, given[name])
    scale, ends = given["softmax_scale"], given["cache_seqlens"]
    given["softmax_scale"] = scale if scale is None else number("softmax_scale", scale)
    given["softcap"] = number("softcap", given["softcap"])
    if isinstance(ends, bool):
        raise TypeError("cache_seqlens must be a torch.Tensor or an int, got bool")
    given["length"] = None if ends is None or isinstance(ends, Tensor) else ends
    given["cache_seqlens"] = ends if isinstance(ends, Tensor) else None
    given["window_left"], given["window_right"] = window
    options = [given[name] for name in OPTIONS]
    _check_no_gradient("flash_attn_with_kvcache", (*tensors, *options))
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together, or neither")
    if k is None:
        out, lse = torch.ops.cutex.flash_attn_with_kvcache(q, k_cache, v_cache, *options)
    else:
        out, lse = torch.ops.cutex.flash_attn_appending_kvcache(q, k_cache, v_cache, k, v, *options)
    return (out, lse) if given["return_lse"] else out


def attend_to_latent(
    q: Tensor,
    k_cache: Tensor,
    table: Tensor | None,
    lengths: Tensor | None,
    numbers: tuple[int, int, float | None, bool],
    others: dict[str, Any],
    is_fp8: bool,
) -> tuple[Tensor, Tensor]:
    """The same for flash_mla_with_kvcache; `numbers`: head_dim_v, num_splits, softmax_scale and
    causal."""
    refuse_sparse(others, is_fp8)
    dim, splits, scale, causal = numbers
    check_flag("causal", causal)
    scale = scale if scale is None else number("softmax_scale", scale)
    indices, counts = others.get("indices"), others.get("topk_length")
    if indices is None and counts is not None:
        raise ValueError("topk_length is given without indices")
    if indices is not None:
        table = lengths = None
    _check_no_gradient("flash_mla_with_kvcache", (q, k_cache))
    found: tuple[Tensor, Tensor] = torch.ops.cutex.flash_mla_with_kvcache(
        q, k_cache, table, lengths, dim, splits, scale, causal, indices, counts
    )
    return found


def _check_no_gradient(function: str, given: tuple[Any, ...]) -> None:
    wanted = any(isinstance(x, Tensor) and x.requires_grad for x in given)
    if wanted and torch.is_grad_enabled():
        raise ValueError(f"{function} has no gradient: call it under torch.no_grad()")


# ---- what a graph knows of the results


def _fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return _shaped(q, k_cache, v_cache, None, None, options)


def _fake_appending(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    return _shaped(q, k_cache, v_cache, k, v, options)


def _shaped(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    options: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:
    """O and LSE without contents. Raises TypeError or ValueError for what shapes, dtypes and
    numbers say is not supported; a running graph knows where memory lies, and what it holds."""
    given = dict(zip(OPTIONS, options, strict=True))
    table, entries = given["page_table"], given["cache_batch_idx"]
    if table is not None and entries is not None:
        table, entries = table.new_empty(entries.shape[0], table.shape[1]), None
    ends = given["cache_seqlens"]
    q = q.to(torch.bfloat16) if q.dtype == FP8 else q
    call = KVCacheCall(
        q, k_cache, v_cache, given["cu_seqlens_q"], ends, table, entries, given["cache_leftpad"],
        given["cu_seqlens_k_new"], given["learnable_sink"], given["k_descale"], given["v_descale"],
        k, v, given["max_seqlen_q"], given["softmax_scale"], given["causal"],
        (given["window_left"], given["window_right"]), given["softcap"], given["num_splits"],
    )  # fmt: skip
    if ends is None and given["length"] is not None:
        call = call._replace(cache_seqlens=q.new_empty(call.batch, dtype=torch.int32))
    kvcache_call.check_shapes(call)
    lse_shape = call.lse_shape if given["return_lse"] else (0,)
    return q.new_empty(call.out_shape), q.new_empty(lse_shape, dtype=torch.float32)


def _fake_latent(
    q: Tensor, k_cache: Tensor, table: Tensor | None, lengths: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    dim, splits, scale, causal, *_ = rest
    call = MlaCall(q, k_cache, lengths, table, dim, splits, scale, causal)
    check_numbers(call)
    if q.dim() != 4:
        raise ValueError(f"q has {q.dim()} dimensions, it must have 4: (batch, tokens, heads, 576)")
    return q.new_empty(call.out_shape), q.new_empty(call.lse_shape, dtype=torch.float32)


for _name, _function in (
    ("flash_attn_with_kvcache", _fake),
    ("flash_attn_appending_kvcache", _fake_appending),
    ("flash_mla_with_kvcache", _fake_latent),
):
    torch.library.register_fake(f"cutex::{_name}", _function, lib=library)
