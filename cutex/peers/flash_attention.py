"""FlashAttention-4 (flash-attn-4)."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

from cutex.peers.attention_sizes import AttentionSizes, by_autograd


def version() -> str:
    return f"flash-attn-4 {metadata.version('flash-attn-4')}"


def forward(problem: AttentionSizes) -> tuple[Callable[..., Any], str]:
    from flash_attn.cute.interface import _flash_attn_fwd

    left, right = problem.bounds
    more = {"causal": problem.causal, "softcap": problem.softcap or None}
    more |= {"window_size_left": left, "window_size_right": right}

    def launch(q: Any, k: Any, v: Any, *rest: Any) -> object:
        *lengths, out, lse = rest
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        longest = (problem.seqlen_q, problem.seqlen_k) if lengths else ()
        given = dict(zip(names, (*lengths, *longest), strict=False))
        return _flash_attn_fwd(q, k, v, out=out, lse=lse, **given, **more)[:2]

    return launch, version()


def varlen() -> tuple[Callable[..., Any], str]:
    """Its flash_attn_varlen_func, of caches and pages too, and the version."""
    from flash_attn.cute import flash_attn_varlen_func

    return flash_attn_varlen_func, version()


def backward(problem: AttentionSizes) -> tuple[Callable[..., Any], str]:
    from flash_attn.cute import flash_attn_func

    if problem.varlen:
        raise ValueError("varlen: compared with dense sequences only")
    more = {"causal": problem.causal, "window_size": problem.bounds, "softcap": problem.softcap}
    return by_autograd(lambda q, k, v: flash_attn_func(q, k, v, **more)), version()
