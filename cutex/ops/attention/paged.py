"""flash_attn_varlen_func with k and v in pages: flash_attn_with_kvcache by its arguments."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cutex.ops.attention.kvcache import flash_attn_with_kvcache

TABLES = ("page_table", "block_table")
TAKEN = (*TABLES, "num_splits", "pack_gqa", "q_descale", "k_descale", "v_descale")


def is_asked_for(others: dict[str, Any]) -> bool:
    """Whether `others`, the arguments that flash_attn_varlen_func does not name, have pages."""
    return any(others.get(name) is not None for name in TABLES)


def taken_out(others: dict[str, Any]) -> dict[str, Any]:
    """Those of `others` that pages have a use for, taken out of them; none without pages."""
    if not is_asked_for(others):
        return {}
    return {name: others.pop(name) for name in TAKEN if name in others}


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    functions: dict[str, Any],
    others: dict[str, Any],
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """The function of this name for k and v (pages, page size, heads_kv, head dim)."""
    for name, x in {"seqused_q": seqused_q, **functions}.items():
        if x is not None:
            raise ValueError(f"{name} cannot be given with a page_table")
    if seqused_k is None:
        if cu_seqlens_k is None:
            raise ValueError(
                "seqused_k must be given with a page_table: pages may be in part unused"
            )
        seqused_k = cu_seqlens_k.diff()  # flash-attn 2 has the lengths of pages so
    given = {name: x for name, x in others.items() if x is not None}
    return flash_attn_with_kvcache(
        q, k, v, cache_seqlens=seqused_k, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        **options, **given,
    )  # fmt: skip
