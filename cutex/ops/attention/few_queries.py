"""Calls of flash_attn_func whose queries are few beside their keys: they are bound by memory, and
take the kernels of caches, which cut the keys of each head over the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from cutex.arch import kernels_of
from cutex.ops.attention import kvcache
from cutex.ops.attention.cache import check_in_place
from cutex.ops.attention.call import AttentionCall
from cutex.ops.attention.kvcache_call import KVCacheCall
from cutex.ops.attention.plan import arch_name, longest_q, mean_k, stepped, why_copied

MOST_ROWS = 64  # packed rows of a sequence, of one tile of those kernels
FEWEST_KEYS = 1024


def are_few(call: AttentionCall) -> bool:
    """Whether a checked call has few queries on many keys, and nothing that caches do not have."""
    heads_q, heads_kv = call.heads
    if longest_q(call) * (heads_q // heads_kv) > MOST_ROWS or mean_k(call) < FEWEST_KEYS:
        return False
    others = call.cu_seqlens_k, call.seqused_q, call.alibi_slopes, call.score_mod, call.mask_mod
    if any(x is not None for x in others) or any(x is not None and x < 0 for x in call.window):
        return False
    name = arch_name(call.q.device)
    if name is None or kernels_of(name) != "sm_90a":
        return False
    try:
        for side, x in (("k", call.k), ("v", call.v)):
            check_in_place(side, x)
    except ValueError:
        return False
    return True


def as_cache(call: AttentionCall) -> KVCacheCall:
    """The same call of flash_attn_with_kvcache."""
    left, right = call.window
    nothing = dict.fromkeys(KVCacheCall._fields)
    return KVCacheCall(**{
        **nothing,
        "q": call.q, "k_cache": call.k, "v_cache": call.v, "cu_seqlens_q": call.cu_seqlens_q,
        "cache_seqlens": call.seqused_k, "learnable_sink": call.learnable_sink,
        "max_seqlen_q": call.max_seqlen_q, "softmax_scale": call.softmax_scale,
        "causal": right == 0, "window_size": (left, right), "softcap": call.softcap,
        "num_splits": 0,
    })  # fmt: skip


class FewQueries:
    """The plan of such a call, with what `Plan` has for its callers."""

    functions: tuple[None, ...] = ()

    def __init__(self, call: AttentionCall, with_lse: bool) -> None:
        self.plan = kvcache.plan_of(as_cache(call), with_lse)
        self.with_lse = with_lse
        self.short: Callable[..., Any] | None = None  # as Plan's

    def is_current(self) -> bool:
        return True

    def __call__(
        self, call: AttentionCall, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Launch on the tensors of `call`; `given` is where to write O."""
        found = self.plan(*as_cache(call).tensors.values())
        if self.plan.as_given:
            self.short = self.plan.run
        out, lse = found if self.with_lse else (found, None)
        if given is None:
            return out, lse
        given.copy_(out)
        return given, lse

    def short_with(self, out: Tensor) -> Callable[..., Any] | None:
        """`short` allocating O with the strides of `out`; None if there is no `short`, or the
        kernel cannot write such an O directly."""
        if self.short is None or why_copied(out, False) or stepped(out, False) is not out:
            return None
        return self.plan.writing(out.stride())
