"""`attn_implementation="cutex"` for transformers' models.

It computes what "sdpa" computes or, where that lacks softcap and sinks, "eager": masks are those
that transformers makes for a model, never guessed from its name. What our kernel cannot express
runs on torch. One thing follows transformers' flash attention instead: sequences packed into a row
are kept apart with a cache, too (`_packed`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from cutex.ops import autocast
from cutex.ops.attention.backward import why_no_gradient
from cutex.ops.attention.cache import why_no_steps
from cutex.ops.attention.call import DTYPES, AttentionCall, kernel_dims
from cutex.ops.attention.eager import flash_attn_func, flash_attn_varlen_func
from cutex.ops.attention.kvcache import flash_attn_with_kvcache, known_token
from cutex.ops.attention.registered_token import flash_attn_token
from cutex.ops.attention.transformers_masks import FEW, RUN, Layout, Mask, mask_of, packed_by
from cutex.ops.plain import is_plain, nobody_watches

NAME = "cutex"
SPARSE = ("indices", "block_indices")  # keys chosen by the model; "sdpa" gets a mask of them
WHOLE = (None, None)  # the window of a query that sees all keys
FOR_TORCH = ("position_bias", "cache")  # arguments that sdpa_attention_forward knows


def register() -> None:
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask_of)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The output (batch, rows, heads, D) for query, key and value (batch, heads, rows, D).

    Which keys a query sees is what `attention_mask` says, made by `mask_of` or any that sdpa takes;
    without one `is_causal` counts as in sdpa. Padded queries are 0 where our kernel runs. Raises
    ValueError for keys that a model selects sparsely.
    """
    for name in SPARSE:
        if more.get(name) is not None:
            raise ValueError(
                f"{name}: attn_implementation {NAME!r} has no sparse attention; use 'sdpa'"
            )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options = options_of(scaling, softcap, s_aux)
    layout = None
    if not dropout and all(more.get(name) is None for name in FOR_TORCH):
        if (found := token_of_static(query, key, value, attention_mask, options)) is not None:
            return found, None
        layout = _layout(query, key, attention_mask, causal, more)
    if layout is not None:
        if (found := _decoded_again(query, key, value, layout, options)) is not None:
            return found, None
        if takes(query, key, value, options):
            return _attend(query, key, value, layout, options), None
    if not softcap and s_aux is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
            is_causal=is_causal, **{name: more.get(name) for name in FOR_TORCH},
        )  # fmt: skip
    if dropout:
        raise ValueError(
            f"dropout={dropout}: attn_implementation {NAME!r} has none with softcap or sinks"
        )
    return _by_definition(query, key, value, attention_mask, causal, options), None


def options_of(
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Our functions' options from transformers' arguments."""
    return {"softmax_scale": scaling, "softcap": softcap or 0.0, "learnable_sink": s_aux}


def _layout(
    query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, more: dict[str, Any]
) -> Layout | None:
    """Which rows see which keys, in our kernel's terms; None if it cannot express them."""
    batch, (rows, keys) = query.shape[0], (x.shape[2] for x in (query, key))
    if isinstance(mask, Mask):
        layout = mask.expressed
        if layout is None or mask.shape[0] != batch or mask.shape[2:] != (rows, keys):
            return None
    elif mask is not None:
        return None
    elif not causal or rows == 1:
        layout = Layout((None, None), keys)
    elif keys < rows:
        return None  # sdpa aligns it top left
    else:
        layout = Layout((None, 0), rows)  # the other keys are a static cache's, not yet written
    if layout.cu_seqlens_q is not None or layout.keys != rows or rows == 1:
        return layout
    known = mask.packed if isinstance(mask, Mask) else {}  # one for all layers
    key_of = tuple(more.get(x) for x in ("cu_seq_lens_q", "cu_seq_lens_k", "position_ids"))
    if (found := known.get(tuple(map(id, key_of)))) is None:
        found = _packed(layout, batch, *key_of)
        known[tuple(map(id, key_of))] = found, key_of  # which keeps the ids from others
        return found
    return found[0]


def _packed(
    layout: Layout, batch: int, cu_q: Tensor | None, cu_k: Tensor | None, positions: Tensor | None
) -> Layout:
    """`layout` for the sequences that a user packed into a row, found as transformers' flash
    attention does: by cu_seq_lens or, with one row of positions, where these are lowest.

    NOTE: flash attention does so with a cache and with a mask of ones, too, where sdpa lets
    sequences see each other. Without either, sdpa's mask decides, which requires positions to rise
    by 1.
    """
    if cu_q is not None and cu_k is not None:
        ends = [x.to(torch.int32) for x in (cu_q, cu_k)]
        longest = int(ends[0].diff().max()), int(ends[1].diff().max())
        return layout._replace(cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], longest=longest)
    if positions is None or layout.window[1] != 0 or batch != 1:
        return layout
    if positions.shape != (1, layout.keys) or bool((positions.diff() == 1).all()):
        return layout
    begins = positions == positions.min()
    begins[:, 0] = True  # the rest of a sequence that began in a chunk before this one
    return layout._replace(**packed_by(begins))


def takes(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    """Whether our kernel computes this call, and its gradients where they are wanted."""
    scale, heads, heads_kv = options["softmax_scale"], query.shape[1], key.shape[1]
    if not (scale is None or (isinstance(scale, (int, float)) and scale > 0)):
        return False
    dtype = query.dtype
    alike = dtype in DTYPES and key.dtype is dtype and value.dtype is dtype
    if not alike and not autocast.is_on(query.device):
        return False
    if kernel_dims(query.shape[-1], value.shape[-1]) is None or heads_kv == 0 or heads % heads_kv:
        return False
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))):
        return True
    return why_no_gradient(AttentionCall(query, key, value, **options)) is None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, options: dict[str, Any]
) -> Tensor:
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if layout.keys != k.shape[1]:
        k, v = k[:, : layout.keys], v[:, : layout.keys]
    options = {**options, **layout.options}
    if (found := decoded(q, k, v, layout, options)) is not None:
        return found
    if layout.cu_seqlens_q is None:
        return _tensor(flash_attn_func(q, k, v, **options))
    if layout.rows_q is None:
        rows = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    else:
        rows = [q[layout.rows_q], k[layout.rows_k], v[layout.rows_k]]
    ends = layout.cu_seqlens_q, layout.cu_seqlens_k, *(layout.longest or ())
    out = _tensor(flash_attn_varlen_func(*rows, *ends, **options))
    if layout.rows_q is None:
        return out.view(*q.shape[:3], v.shape[-1])
    padded = out.new_zeros(*q.shape[:3], v.shape[-1])
    return padded.masked_scatter(layout.rows_q[..., None, None], out)


def token_of_static(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> Tensor | None:
    """The output for one token per sequence and a static cache, through an operator if a compiler
    is tracing; None where `mask` does not say which rows of the cache it sees, `takes` says no, or
    a gradient is wanted."""
    run = getattr(mask, RUN, None)
    if run is None or mask is None or (mask.shape[0], *mask.shape[2:]) != (
        query.shape[0], query.shape[2], key.shape[2]
    ):  # fmt: skip
        return None
    if query.shape[2] != 1:
        return None
    layout = Layout(WHOLE, key.shape[2], run=run)
    if (found := _decoded_again(query, key, value, layout, options)) is not None:
        return found
    if not takes(query, key, value, options):
        return None
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if not torch.compiler.is_compiling():
        return decoded(q, k, v, layout, {**options, **layout.options})
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return None
    if autocast.is_on(q.device):
        return None
    return flash_attn_token(q, k, v, *run, *options.values())


def _decoded_again(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, options: dict[str, Any]
) -> Tensor | None:
    """The result of `decoded` if it was called before with tensors like these, so that a plan's
    guard covers everything that `takes` and `decoded` check; otherwise None."""
    if query.shape[2] > FEW or (layout.cu_seqlens_q is not None and layout.run is None):
        return None
    window = layout.window
    if torch.compiler.is_compiling() or (window != WHOLE and any((x or 0) < 0 for x in window)):
        return None
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if layout.keys != k.shape[1]:
        k, v = k[:, : layout.keys], v[:, : layout.keys]
    begins, ends = layout.run or (None, None)
    return known_token(q, k, v, ends, begins, **options, **layout.options)


def decoded(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, options: dict[str, Any]
) -> Tensor | None:
    """The output for few queries over a cache, whose keys are split over the GPU and read in place;
    None if a gradient is wanted, or TMA cannot step through them.

    q (batch, rows, heads, D), k and v (batch, layout.keys, heads_kv, D).
    """
    if q.shape[1] > FEW or (layout.cu_seqlens_q is not None and layout.run is None):
        return None
    if layout.window != WHOLE and any(x is not None and x < 0 for x in layout.window):
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return None
    plain = nobody_watches() and not torch.compiler.is_compiling() and all(map(is_plain, (q, k, v)))
    if not plain or autocast.is_on(q.device) or 0 in k.shape:
        return None
    if why_no_steps(k) is not None or why_no_steps(v) is not None:
        return None
    begins, ends = layout.run or (None, None)
    return _tensor(
        flash_attn_with_kvcache(q, k, v, cache_seqlens=ends, cache_leftpad=begins, **options)
    )


def _tensor(out: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    assert isinstance(out, Tensor)
    return out


def _by_definition(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool,
    options: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Attention with softcap and sinks in torch operations, for masks that our kernel cannot
    express, and for gradients that torch's flash backward lacks."""
    heads, rows = query.shape[1:3]
    wide = torch.promote_types(query.dtype, torch.float32)
    k, v = (x.repeat_interleave(heads // x.shape[1], 1).to(wide) for x in (key, value))
    scale, softcap, sink = options["softmax_scale"], options["softcap"], options["learnable_sink"]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query.to(wide) @ k.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        allowed = mask if mask.dtype == torch.bool else None
        scores = scores + mask if allowed is None else scores.masked_fill(~allowed, -torch.inf)
    elif causal and rows > 1:
        seen = torch.ones(rows, k.shape[2], dtype=torch.bool, device=k.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    if sink is not None:
        column = sink.to(wide).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    weights = torch.softmax(scores, -1)
    out = (weights if sink is None else weights[..., :-1]) @ v
    return out.to(query.dtype).transpose(1, 2).contiguous()
