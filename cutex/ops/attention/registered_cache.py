"""What operators of attention to caches do in a running graph: the functions of their names."""

from __future__ import annotations

from typing import Any

from torch import Tensor, float32

from cutex.ops.attention.cache_operators import OPTIONS, library
from cutex.ops.attention.kvcache import flash_attn_with_kvcache
from cutex.ops.attention.mla import flash_mla_with_kvcache


def _run(q: Tensor, k_cache: Tensor, v_cache: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return _attended((q, k_cache, v_cache), options)


def _run_appending(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    return _attended((q, k_cache, v_cache, k, v), options)


def _attended(tensors: tuple[Tensor, ...], options: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    given = dict(zip(OPTIONS, options, strict=True))
    length, window = given.pop("length"), (given.pop("window_left"), given.pop("window_right"))
    if length is not None:
        given["cache_seqlens"] = length
    found = flash_attn_with_kvcache(*tensors, window_size=window, **given)
    if given["return_lse"]:
        out, lse = found
        return out, lse
    assert isinstance(found, Tensor)
    return found, found.new_empty(0, dtype=float32)


def _run_latent(
    q: Tensor, k_cache: Tensor, table: Tensor | None, lengths: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    dim, splits, scale, causal, indices, counts = rest
    return flash_mla_with_kvcache(
        q, k_cache, table, lengths, dim, None, splits, scale, causal, indices=indices,
        topk_length=counts,
    )  # fmt: skip


for _name, _function in (
    ("flash_attn_with_kvcache", _run),
    ("flash_attn_appending_kvcache", _run_appending),
    ("flash_mla_with_kvcache", _run_latent),
):
    for _key in ("CUDA", "CPU"):
        library.impl(_name, _function, _key)
