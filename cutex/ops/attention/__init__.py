"""Attention forward as PyTorch functions, under FlashAttention's names. Importing this registers
the operators."""

from __future__ import annotations

from cutex.ops.attention import registered, registered_cache
from cutex.ops.attention.eager import flash_attn_func, flash_attn_varlen_func
from cutex.ops.attention.kvcache import flash_attn_with_kvcache
from cutex.ops.attention.mla import flash_mla_with_kvcache, get_mla_metadata
from cutex.ops.attention.packed_operands import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
    "registered",
    "registered_cache",
]
