"""flash_attn_func and flash_attn_varlen_func, called with the arguments of an attention case."""

from __future__ import annotations

import torch

import cutex
from cutex.problem.attention.case import AttentionCase, Inputs

SMALL = AttentionCase(
    batch=2, seqlen_q=24, seqlen_k=40, heads_q=4, heads_kv=2, head_dim=64, head_dim_v=64
)
PACKED = AttentionCase(
    batch=2, lengths_q=(5, 9), lengths_k=(7, 3), heads_q=2, heads_kv=1, head_dim=64, head_dim_v=64
)


def call(case: AttentionCase, inputs: Inputs, **more) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE by the public function for the case."""
    more = {
        "softmax_scale": case.scale,
        "causal": case.causal,
        "window_size": case.window,
        "softcap": case.softcap,
        "learnable_sink": inputs.sink,
        "return_lse": True,
        **more,
    }
    if not case.varlen:
        return cutex.flash_attn_func(*inputs[:3], **more)
    longest = (max(x) if x else None for x in (case.lengths_q, case.lengths_k))
    used = {"seqused_q": inputs.seqused_q, "seqused_k": inputs.seqused_k}
    return cutex.flash_attn_varlen_func(*inputs[:5], *longest, **used, **more)
