"""`attn_implementation="cutex_flash_3"` of transformers' models: our functions in the place of
FlashAttention-3's.

transformers has a path of its own for flash attention, which it takes by the implementation's name:
padding is left out by a mask of tokens, packed sequences are found by their positions, and
continuous batching (`generate_batch`) reads and writes pages through `flash_attn_with_kvcache`. Its
functions are loaded by name, so ours are put where it looks for them. What is ours alone: one token
of a cache longer than what is valid in it, or with padding, is computed where its keys are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, modeling_flash_attention_utils
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import causal_mask_function, flash_attention_mask

from cutex.ops.attention import in_transformers
from cutex.ops.attention.eager import flash_attn_func, flash_attn_varlen_func
from cutex.ops.attention.kvcache import flash_attn_with_kvcache
from cutex.ops.attention.transformers_masks import Layout, pattern_of, run_of

NAME = "cutex_flash_3"  # transformers pages the caches of names with "flash" and then 2 or 3
PAGED = f"paged|{NAME}"  # what continuous batching of older versions, as 5.17, makes of it
FUNCTIONS = flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache


def register() -> None:
    """Make the name known, unless this transformers loads its functions in another way."""
    load = getattr(modeling_flash_attention_utils, "_lazy_imports", None)
    if load is None:
        return
    if not getattr(load, "knows_cutex", False):
        modeling_flash_attention_utils._lazy_imports = _with_ours(load)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask_of)
    with suppress(ImportError):
        from transformers.integrations.flash_paged import paged_attention_forward

        AttentionInterface.register(PAGED, paged_attention_forward)


def _with_ours(load: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' loader of flash attention's functions, which knows ours, too."""

    def loaded(implementation: str | None, *args: Any, **more: Any) -> Any:
        if implementation not in (NAME, PAGED):
            return load(implementation, *args, **more)
        of = modeling_flash_attention_utils
        return *FUNCTIONS, of._pad_input, of._unpad_input

    loaded.knows_cutex = True  # type: ignore[attr-defined]
    return loaded


def mask_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **more: Any,
) -> Tensor | None:
    """transformers' mask of tokens for flash attention, also where a static cache is longer than
    what is valid in it and the user gave none. Raises ValueError, in one sentence, for a mask that
    flash attention does not know: transformers itself drops most of them."""
    valid = int(q_offset) + q_length - kv_offset
    if pattern_of(mask_function, valid) is None:
        raise ValueError(
            f"attn_implementation {NAME!r} has causal masks, sliding windows and padding, but not "
            f"{getattr(mask_function, '__qualname__', mask_function)}; use 'cutex' or 'sdpa'"
        )
    if attention_mask is None and valid < kv_length:
        attention_mask = torch.ones(batch_size, valid, dtype=torch.bool, device=device)
    return flash_attention_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **more
    )


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None, **given: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The output (batch, rows, heads, D) for query, key and value (batch, heads, rows, D), as
    transformers' flash_attention_forward has it. `attention_mask` (batch, tokens) is True where one
    counts."""
    paged = any(given.get(name) is not None for name in ("cache", "cu_seq_lens_q"))
    one = query.shape[2] == 1 and not given.get("dropout")
    if one and not paged and not torch.compiler.is_compiling():
        layout = _of_token(attention_mask, key.shape[2], given.get("sliding_window"))
        options = in_transformers.options_of(**given)
        if layout is not None and in_transformers.takes(query, key, value, options):
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            k, v = k[:, : layout.keys], v[:, : layout.keys]
            options.update(layout.options)
            if (found := in_transformers.decoded(q, k, v, layout, options)) is not None:
                return found, None
    return flash_attention_forward(module, query, key, value, attention_mask, **given)


_latest: list[Any] = [None, None]  # the mask that all layers of a step have, and what was found


def _of_token(mask: Tensor | None, keys: int, sliding_window: int | None) -> Layout | None:
    """Which keys the last token sees; None if padding is in between or after. It waits for the GPU
    once for each mask."""
    left = None if sliding_window is None or sliding_window > keys else sliding_window - 1
    if mask is None:
        return Layout((left, None), keys)
    if _latest[0] is not mask:
        rows = mask.bool()
        found = run_of(rows)
        counts = found is not None and bool(rows[:, -1].all())
        _latest[:] = mask, (found if counts else None)
    return None if _latest[1] is None else Layout((left, None), mask.shape[1], run=_latest[1])
