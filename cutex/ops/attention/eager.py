"""`cutex.flash_attn_func` and `flash_attn_varlen_func`: each call looks up a plan for its options
and shapes that takes its tensors, and launches it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from cutex.ops import autocast
from cutex.ops.attention import differentiable, paged
from cutex.ops.attention.call import AttentionCall, Window, check, pair_of
from cutex.ops.attention.flash_arguments import NEUTRAL, is_default, named, taken
from cutex.ops.attention.planned import PLANS, attend
from cutex.ops.number import number
from cutex.ops.plain import is_plain, is_watched_unseen, nobody_watches, untraced
from cutex.ops.plans import CachedPlan

Mod = Callable[..., Any] | None


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *by_place: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
    score_mod: Mod = None,
    mask_mod: Mod = None,
    deterministic: bool = False,
    alibi_slopes: Tensor | None = None,
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(mask(softmax_scale * q @ k.T)) @ v, like FlashAttention's function of this name.

    q: (batch, seqlen_q, heads, head dim), bfloat16 or float16; sums are in fp32.
    k, v: (batch, seqlen_k, heads_kv, head dim), dtype of q; v's head dim may differ. heads is a
        multiple of heads_kv. Head dims are multiples of 8 up to 256, computed as the next larger of
        64, 96, 128, 192 and 256 (or 192 with 128 for v).
        Any strides. A tensor that TMA cannot read is copied first: one whose head dim is not
        contiguous, or whose base or another stride is not a multiple of 16 bytes.
    by_place: positional arguments, either the following ones in this order, from softmax_scale to
        return_lse; or flash-attn 2's (dropout_p, softmax_scale, causal, ...), told apart by their
        types: a first number of 0, a second that is None or a float, or a third that is a bool.
    softmax_scale: 1 / sqrt(head dim) by default.
    causal: query i sees keys j <= i + seqlen_k - seqlen_q; the last query sees all keys.
    window_size: (left, right), the number of keys that a query sees on either side of key
        i + seqlen_k - seqlen_q. None is unbounded, and so is -1 beside another number. Other
        negative numbers shift the bound across the diagonal: (None, -3) ends three keys before it.
        causal closes the right side.
    softcap: replaces scores s by softcap * tanh(s / softcap); 0 turns it off.
    learnable_sink: (heads,), one additional score per row, whose value is zero.
    score_mod: a function of (score, batch, head, query, key), as DSL numbers, that returns the new
        score. mask_mod: a function of (batch, head, query, key) that returns whether the query sees
        the key. Decorate them with @cute.jit if they branch. Values they close over are constants.
    alibi_slopes: (heads,) or (batch, heads), float32. Each score is lowered by its slope times the
        distance of the key from the diagonal. Slopes get no gradient.
    others: arguments that only FlashAttention's functions have (dropout_p, num_splits, ...), each
        with the value that changes nothing.
    return_lse: return (out, lse); lse (batch, heads, seqlen_q) float32 is the natural logarithm of
        the sum of exponentials of a row's scores, including the sink.
    deterministic: make gradients bitwise reproducible, as torch.use_deterministic_algorithms does.
        out always is.

    Returns out (batch, seqlen_q, heads, head dim of v), contiguous. Rows that see no key are 0,
    with an lse of -inf or of their sink. out and lse are differentiable once in q, k, v and
    learnable_sink, except with score_mod or mask_mod; with softcap on Hopper only.

    Raises TypeError or ValueError, in one sentence that names the argument, for arguments that are
    not supported, and without a Hopper or Blackwell GPU.
    """
    if window_size.__class__ is not tuple:
        window_size = pair_of(window_size)
    if by_place or others:
        by_name = {
            "softmax_scale": softmax_scale, "causal": causal, "window_size": window_size,
            "softcap": softcap, "learnable_sink": learnable_sink, "return_lse": return_lse,
            "score_mod": score_mod, "mask_mod": mask_mod, "deterministic": deterministic,
            "alibi_slopes": alibi_slopes,
        }  # fmt: skip
        return _translated(flash_attn_func, (q, k, v), by_place, by_name, others)
    if alibi_slopes is not None:
        alibi_slopes = _of_batch(alibi_slopes, q, None)
    key: tuple[Any, ...] | None = None
    if not _is_compiling():
        try:
            has_vectors = learnable_sink is not None or alibi_slopes is not None
            options = (
                softmax_scale, causal, window_size, softcap, return_lse, score_mod, mask_mod,
                deterministic, has_vectors and (learnable_sink is None, alibi_slopes is None),
            )  # fmt: skip
            known = None if has_vectors else _latest.get(options)
            # NOTE: most calls end here, and each step of Python costs 0.1 us
            if (
                known is not None
                and known.takes(q, k, v)
                and not is_watched_unseen()
                and (known.always or known.still())
            ):
                return known.launch(q, k, v)
            if nobody_watches():
                given = (q, k, v)
                if has_vectors:
                    given += tuple(x for x in (learnable_sink, alibi_slopes) if x is not None)
                known = _find(options, given)
                if known is not None:
                    return known.launch(*given)
                key = _key(options, given)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            key = None  # not a tensor, or a base that is not aligned: the checks raise for it
    return _unknown(
        AttentionCall(q, k, v, softmax_scale=softmax_scale, causal=causal,
                      window_size=window_size, softcap=softcap, learnable_sink=learnable_sink,
                      score_mod=score_mod, mask_mod=mask_mod, deterministic=deterministic,
                      alibi_slopes=alibi_slopes),
        return_lse,
        key,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *by_place: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    score_mod: Mod = None,
    mask_mod: Mod = None,
    deterministic: bool = False,
    alibi_slopes: Tensor | None = None,
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash_attn_func for sequences of different lengths, like FlashAttention's function of this
    name.

    cu_seqlens_q: (batch + 1,) int32, the first row of each sequence in q (total_q, heads, head
        dim), and the end of the last one. Without it q is (batch, seqlen_q, heads, head dim).
        cu_seqlens_k: the same for k and v.
    max_seqlen_q: the longest sequence of q; rows beyond it are not computed. By default the number
        of rows of q, which is slower for many sequences. max_seqlen_k: optional; without it the
        kernel is chosen for the mean length.
    seqused_q, seqused_k: (batch,) int32, the number of valid rows of each sequence.
    page_table (or block_table): (batch, pages of the longest sequence) int32; k and v are then
        pages, as in flash_attn_with_kvcache, with their lengths in seqused_k; num_splits as there.

    Returns out (total_q, heads, head dim of v) and lse (heads, total_q), or the shapes of
    flash_attn_func if q is not packed. Rows that belong to no sequence are left unwritten. Other
    arguments and errors are those of flash_attn_func. The values of int32 tensors are checked only
    on the CPU: on a GPU the check would have to wait for it. With seqused, or with cu_seqlens on
    one side only, gradients have the same limits as with softcap.
    """
    if window_size.__class__ is not tuple:
        window_size = pair_of(window_size)
    if not by_place and paged.is_asked_for(others) and others.keys() <= set(paged.TAKEN):
        return paged.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, seqused_q, seqused_k,
            {"score_mod": score_mod, "mask_mod": mask_mod, "alibi_slopes": alibi_slopes}, others,
            softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
            learnable_sink=learnable_sink, return_lse=return_lse,
        )  # fmt: skip
    if by_place or others:
        by_name = {
            "softmax_scale": softmax_scale, "causal": causal, "window_size": window_size,
            "softcap": softcap, "learnable_sink": learnable_sink, "return_lse": return_lse,
            "seqused_q": seqused_q, "seqused_k": seqused_k, "score_mod": score_mod,
            "mask_mod": mask_mod, "deterministic": deterministic, "alibi_slopes": alibi_slopes,
        }  # fmt: skip
        operands = q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return _translated(flash_attn_varlen_func, operands, by_place, by_name, others)
    if alibi_slopes is not None:
        alibi_slopes = _of_batch(alibi_slopes, q, cu_seqlens_q)
    key: tuple[Any, ...] | None = None
    if not _is_compiling() and nobody_watches():
        try:
            rest = (
                cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, learnable_sink, alibi_slopes
            )  # fmt: skip
            options = (
                softmax_scale, causal, window_size, softcap, return_lse, score_mod, mask_mod,
                max_seqlen_q, max_seqlen_k, deterministic, *[x is None for x in rest],
            )  # fmt: skip
            given = (q, k, v, *[x for x in rest if x is not None])
            known = _find(options, given)
            if known is not None:
                return known.launch(*given)
            key = _key(options, given)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            key = None
    return _unknown(
        AttentionCall(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
            softmax_scale, causal, window_size, softcap, learnable_sink, score_mod, mask_mod,
            deterministic, alibi_slopes,
        ),
        return_lse,
        key,
    )  # fmt: skip


def _translated(
    function: Callable[..., Any],
    operands: tuple[Any, ...],
    by_place: tuple[Any, ...],
    by_name: dict[str, Any],
    others: dict[str, Any],
) -> Any:
    """`function` with the arguments after the operands: `by_place`, in our order or flash-attn
    2's; `by_name`; and `others`, which only FlashAttention's functions have."""
    given = {name: x for name, x in by_name.items() if not is_default(x)}
    options = named(function.__name__, by_place, given)
    others = {**{name: options.pop(name) for name in NEUTRAL if name in options}, **others}
    pages = paged.taken_out(others) if function is flash_attn_varlen_func else {}
    return function(*operands, **{**options, **taken(function.__name__, others, options), **pages})


def _of_batch(slopes: Any, q: Any, cu_seqlens_q: Any) -> Any:
    """ALiBi slopes (batch, heads) from (heads,); anything but a tensor is left to `check`."""
    rows = q if cu_seqlens_q is None else cu_seqlens_q
    if not (isinstance(slopes, Tensor) and isinstance(rows, Tensor) and slopes.dim() == 1):
        return slopes
    if rows.dim() == 0 or slopes.layout is not torch.strided:
        return slopes
    return slopes.expand(len(rows) - (cu_seqlens_q is not None), -1)


# ---- plans


_known, _latest = PLANS.known, PLANS.latest  # by options and sizes; by options
_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_dynamo_compiling


@untraced
def _find(options: tuple[Any, ...], given: tuple[Tensor, ...]) -> CachedPlan | None:
    """The plan for these options that takes the tensors `given` as they are: that of the latest
    call with them, as when a model's layers are alike, or another."""
    known = _latest.get(options)
    if known is not None and known.takes(*given) and (known.always or known.still()):
        return known
    for known in _known.get(_key(options, given), ()):
        if known.takes(*given) and (known.always or known.still()):
            _latest[options] = known
            return known
    return None


@untraced
def _key(options: tuple[Any, ...], given: tuple[Tensor, ...]) -> tuple[Any, ...]:
    return given[0].numel(), given[1].numel(), *options


@untraced
def _unknown(
    call: AttentionCall, return_lse: bool, key: tuple[Any, ...] | None
) -> Tensor | tuple[Tensor, Tensor]:
    """Run a call that has no plan: through the operator if torch has more to do than to run it."""
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse must be a bool, got {type(return_lse).__name__}")
    if _is_compiling():
        return _through_operator(call, return_lse)
    operands = call.q, call.k, call.v
    if all(isinstance(x, Tensor) for x in operands) and autocast.is_on(call.q.device):
        arguments = {f.name: getattr(call, f.name) for f in fields(call)}
        arguments.update(zip("qkv", autocast.cast(*operands), strict=True))
        with autocast.off(call.q.device):
            return flash_attn_varlen_func(**arguments, return_lse=return_lse)
    check(call)
    wants_gradient = _grad_enabled() and any(x.requires_grad for x in call.tensors)
    has_functions = call.score_mod is not None or call.mask_mod is not None
    if (
        not nobody_watches()
        or not all(is_plain(x) for x in call.tensors)
        or (wants_gradient and has_functions)
    ):
        return _through_operator(call, return_lse)
    if wants_gradient:
        return differentiable.attend(call, return_lse, key)
    out, lse = attend(call, return_lse, key=key)
    return out if lse is None else (out, lse)


def _through_operator(call: AttentionCall, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """Run the call as one node of a graph."""
    for name in ("score_mod", "mask_mod"):
        if getattr(call, name) is not None:
            raise ValueError(
                f"{name} cannot be given under torch.compile, torch.func or a dispatch mode, nor "
                "where a gradient is wanted"
            )
    scale = call.softmax_scale
    out, lse = torch.ops.cutex.flash_attn(
        call.q, call.k, call.v, call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q,
        call.max_seqlen_k, call.seqused_q, call.seqused_k,
        scale if scale is None else number("softmax_scale", scale), call.causal,
        *call.window_size, number("softcap", call.softcap), call.learnable_sink,
        call.deterministic, call.alibi_slopes,
    )  # fmt: skip
    return (out, lse) if return_lse else out
