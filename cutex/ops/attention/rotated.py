"""Rotary position embedding of the queries and the new keys of a call with a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from cutex.ops.row.rope import rope


def rotated(
    q: Tensor,
    k: Tensor | None,
    tables: tuple[Tensor, Tensor],
    interleaved: bool,
    lengths: Tensor | None,
    aligned: bool,
) -> tuple[Tensor, Tensor]:
    """q and k, each row turned by its position: new key i of a sequence is at `lengths` + i, and so
    is query i if queries are `aligned` with keys, by a causal mask or a window; else they are at
    `lengths`, as in FlashAttention."""
    if k is None or lengths is None:
        raise ValueError("rotary_cos and rotary_sin need k and v, and cache_seqlens: their places")
    if q.dim() != 4 or k.dim() != 4 or lengths.dim() != 1 or lengths.shape[0] != q.shape[0]:
        raise ValueError("rotary_cos: q and k must have one batch, of as many cache_seqlens")

    def places(x: Tensor, follow: bool) -> Tensor:
        steps = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
        return lengths[:, None] + (steps if follow else torch.zeros_like(steps))

    q = rope(q, *tables, interleaved=interleaved, positions=places(q, aligned))
    return q, rope(k, *tables, interleaved=interleaved, positions=places(k, True))
