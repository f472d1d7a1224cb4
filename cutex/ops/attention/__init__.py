"""Attention forward as PyTorch functions, under FlashAttention's names. Importing this registers
the operator."""

from __future__ import annotations

from cutex.ops.attention import registered
from cutex.ops.attention.eager import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "registered"]
