"""flash-attn 2's functions whose operands are one tensor, read where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from cutex.ops.attention.eager import flash_attn_func, flash_attn_varlen_func
from cutex.ops.attention.flash_arguments import named

_dense: Callable[..., Any] = flash_attn_func
_ragged: Callable[..., Any] = flash_attn_varlen_func


def flash_attn_qkvpacked_func(qkv: Tensor, *options: Any, **more: Any) -> Any:
    """flash_attn_func for qkv (batch, seqlen, 3, heads, head dim).

    Further arguments in flash-attn 2's order (dropout_p, softmax_scale, causal, window_size,
    softcap, ..), or by the names of flash_attn_func.
    """
    return _dense(*_parts("qkv", qkv, 5, 3), **_named(options, more))


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **more: Any) -> Any:
    """flash_attn_func for kv (batch, seqlen, 2, heads, head dim); other arguments as those of
    flash_attn_qkvpacked_func."""
    return _dense(q, *_parts("kv", kv, 5, 2), **_named(options, more))


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | None = None, *options: Any, **more: Any
) -> Any:
    """flash_attn_varlen_func for qkv (total, 3, heads, head dim); other arguments as those of
    flash_attn_qkvpacked_func."""
    ends = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return _ragged(*_parts("qkv", qkv, 4, 3), *ends, **_named(options, more))


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *options: Any,
    **more: Any,
) -> Any:
    """flash_attn_varlen_func for kv (total, 2, heads, head dim); other arguments as those of
    flash_attn_qkvpacked_func."""
    ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return _ragged(q, *_parts("kv", kv, 4, 2), *ends, **_named(options, more))


def _named(options: tuple[Any, ...], more: dict[str, Any]) -> dict[str, Any]:
    """The arguments after the operands by their names."""
    return named("flash_attn_func", options, more, flash2=True)


def _parts(name: str, x: Any, rank: int, count: int) -> tuple[Tensor, ...]:
    """The operands in x. Raises TypeError or ValueError where it does not hold `count` of them."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dim() != rank or x.shape[-3] != count:
        modes = "total" if rank == 4 else "batch, seqlen"
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, it must be ({modes}, {count}, heads, head dim)"
        )
    return x.unbind(-3)
