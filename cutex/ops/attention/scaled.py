"""Queries and scales of a call whose caches hold e4m3."""

from __future__ import annotations

import torch
from torch import Tensor


def prepared(
    q: Tensor,
    k_cache: Tensor,
    cu_seqlens_q: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q in 16 bits, which hold every e4m3, and the scales of K, times that of q, and of V; 1 where
    they are not given."""
    if k_cache.dtype != torch.float8_e4m3fn:
        raise ValueError("q_descale is given, but k_cache is not float8_e4m3fn")
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    shape = batch, k_cache.shape[-2]
    for name, x in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
        if x is not None and (x.dtype != torch.float32 or tuple(x.shape) != shape):
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, it must be float32 {shape}")
    if q.dtype == k_cache.dtype:
        q = q.to(torch.bfloat16)
    elif q_descale is not None:
        raise ValueError(f"q_descale is given, but q has dtype {q.dtype}")
    if k_descale is None:
        k_descale = q_descale
    elif q_descale is not None:
        k_descale = k_descale * q_descale
    if k_descale is None or v_descale is None:
        ones = torch.ones(shape, dtype=torch.float32, device=q.device)
        k_descale = ones if k_descale is None else k_descale
        v_descale = ones if v_descale is None else v_descale
    return q, k_descale, v_descale
