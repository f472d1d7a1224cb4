"""Attention of one token of each sequence to a cache, as an operator of torch.

torch.ops.cutex.flash_attn_token is a node of a compiled model's graph, whose static cache it reads
where it is; it has no gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cutex.ops.attention.cache import why_no_steps
from cutex.ops.attention.kvcache import flash_attn_with_kvcache
from cutex.ops.attention.plan import packed

_library = torch.library.Library("cutex", "FRAGMENT")
_library.define(
    "flash_attn_token(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? begins, Tensor ends, "
    "float? softmax_scale=None, float softcap=0.0, Tensor? learnable_sink=None) -> Tensor"
)
flash_attn_token = torch.ops.cutex.flash_attn_token


def _operator(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    begins: Tensor | None,
    ends: Tensor,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
) -> Tensor:
    """O (batch, 1, heads, DV) for q (batch, 1, heads, D) and caches (batch, room, heads_kv, D or
    DV), of which each sequence has the rows from begins, or 0, to ends, (batch,) int32."""
    k, v = (x if why_no_steps(x) is None else packed(x) for x in (k_cache, v_cache))
    out = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=ends, cache_leftpad=begins, softmax_scale=softmax_scale,
        softcap=softcap, learnable_sink=learnable_sink,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


@torch.library.register_fake("cutex::flash_attn_token")
def _fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: object) -> Tensor:
    return q.new_empty((*q.shape[:-1], v_cache.shape[-1]))


for _key in ("CUDA", "CPU"):
    _library.impl("flash_attn_token", _operator, _key)
