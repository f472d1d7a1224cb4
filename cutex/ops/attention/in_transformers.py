"""`attn_implementation="cutex"` of transformers' models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from cutex.ops.attention.eager import flash_attn_func, flash_attn_varlen_func

NAME = "cutex"


def register() -> None:
    AttentionInterface.register(NAME, attention)
    # a mask is then None, or (batch, keys), True where a key is no padding, as in flash attention
    AttentionMaskInterface.register(NAME, flash_attention_mask)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The output (batch, rows, heads, D) for query, key and value (batch, heads, rows, D).

    Padding is left out, and sequences that are packed into one row of the batch are kept apart.
    Raises ValueError for dropout, and for masks of more than padding.
    """
    if dropout:
        raise ValueError(f"dropout={dropout}: attn_implementation {NAME!r} has none")
    if attention_mask is not None and attention_mask.dim() != 2:
        shape = tuple(attention_mask.shape)
        raise ValueError(f"attention_mask has shape {shape}, {NAME!r} takes (batch, keys)")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "causal": causal,
        "softcap": softcap or 0.0,
        "learnable_sink": s_aux,
    }
    if sliding_window is not None:  # keys that are seen, the query's own among them
        options["window_size"] = (sliding_window - 1, sliding_window - 1)
    if attention_mask is not None:
        return _without_padding(q, k, v, attention_mask.bool(), options), None
    ends = [more.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    if None in ends and _is_packed(more.get("position_ids"), q, k):
        starts = (more["position_ids"].flatten() == 0).nonzero().flatten()
        ends = [torch.cat((starts, starts.new_tensor([q.shape[1]])))] * 2
    if None not in ends:
        lengths = [x.to(torch.int32) for x in ends if x is not None]
        longest = [int(x.diff().max()) for x in lengths]
        rows = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        out = flash_attn_varlen_func(*rows, *lengths, *longest, **options)
        assert isinstance(out, Tensor)
        return out.view(*q.shape[:3], v.shape[-1]), None
    out = flash_attn_func(q, k, v, **options)
    assert isinstance(out, Tensor)
    return out, None


def _is_packed(position_ids: Tensor | None, q: Tensor, k: Tensor) -> bool:
    """Whether one row of a batch holds several sequences, each counting from 0."""
    if position_ids is None or q.shape[0] != 1 or q.shape[1] == 1 or q.shape[1] != k.shape[1]:
        return False
    return int((position_ids == 0).sum()) > 1


def _without_padding(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: dict[str, Any]
) -> Tensor:
    """Attention over the rows that `mask` (batch, keys) keeps; the queries are the last rows. Other
    rows are 0."""
    masks = mask[:, -q.shape[1] :], mask
    lengths = [m.sum(-1, dtype=torch.int32) for m in masks]
    ends = [torch.nn.functional.pad(n.cumsum(0, dtype=torch.int32), (1, 0)) for n in lengths]
    longest = [int(n.max()) for n in lengths]
    kept = q[masks[0]], k[:, : mask.shape[1]][mask], v[:, : mask.shape[1]][mask]
    out = flash_attn_varlen_func(*kept, *ends, *longest, **options)
    assert isinstance(out, Tensor)
    padded = out.new_zeros(*q.shape[:3], v.shape[-1])
    return padded.masked_scatter(masks[0][..., None, None], out)
