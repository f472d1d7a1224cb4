"""torch's own attention on our kernel: scaled_dot_product_attention and torch.nn.attention.varlen.

torch lets others implement the operators behind its flash backend
(torch.nn.attention.register_flash_attention_impl). Ours run what the kernel supports, and pass
everything else to the kernels registered before. So do their backwards, from O and LSE of either.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention as torch_attention

from cutex.ops.attention import own_backward
from cutex.ops.attention.backward import gradients
from cutex.ops.attention.cache import why_no_steps
from cutex.ops.attention.call import DTYPES, AttentionCall, kernel_dims
from cutex.ops.attention.kvcache import flash_attn_with_kvcache, known_token
from cutex.ops.attention.plan import runs_on
from cutex.ops.attention.planned import attend, plan_of
from cutex.ops.device import simulated_arch
from cutex.ops.overlap import overlaps_itself, share_memory
from cutex.ops.plans import PlanCache
from cutex.ops.workspace import allocated_apart

NAME = "cutex"
# of scaled_dot_product_attention: from its options and tensors to what the operator returns
PLANS = PlanCache()
_without_dropout: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor, Tensor]] = {}
FEW, MANY = 16, 8  # queries of a decoder, at most, and keys for each of them, at least
_FLASH = torch_attention.SDPBackend.FLASH_ATTENTION.value


def activate() -> None:
    """Make scaled_dot_product_attention and varlen_attn run supported calls on our kernel."""
    register = getattr(torch_attention, "register_flash_attention_impl", None)
    if register is None:
        raise ValueError(
            f"torch {torch.__version__} takes no attention of others: 2.11 or later is needed"
        )
    if not torch.cuda.is_available() and simulated_arch() is None:
        raise ValueError(
            "there is no GPU here: activate() needs a Hopper or Blackwell GPU, or the simulator, "
            'as in `with cutex.ops.simulated("sm_90a"): cutex.attention.activate()`'
        )
    register(NAME, register_fn=Overrides.install)
    with warnings.catch_warnings():  # torch warns of each operator that is overridden
        warnings.simplefilter("ignore", UserWarning)
        torch_attention.activate_flash_attention_impl(NAME)


def deactivate() -> None:
    """Restore torch's own kernels."""
    if torch_attention.current_flash_attention_impl() == NAME:
        torch_attention.restore_flash_attention_impl()


@dataclass
class Overrides:
    """The operators that are currently overridden, and their original kernels."""

    library: torch.library.Library
    originals: dict[tuple[str, str], Any] = field(default_factory=dict)
    order: list[int] | None = None  # SDPA's backends as they were ordered

    @classmethod
    def install(cls) -> Overrides:
        installed = cls(torch.library.Library("aten", "IMPL"))
        if torch.cuda.is_available():
            for name, function in {**_OPERATORS, **_BACKWARDS}.items():
                installed.replace(name, function, "CUDA")
            installed.prefer_flash()
        if simulated_arch() is not None:
            for name, function in {**_OPERATORS, **_CPU_OPERATORS}.items():
                installed.replace(name, function, "CPU")
        return installed

    def replace(self, name: str, function: Callable[..., Any], key: str) -> None:
        try:
            original = torch.library.get_kernel(f"aten::{name}", key)
        except RuntimeError:  # the CPU has no kernel for most of them
            original = None

        def ours(keys: Any, *args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if result is not None:
                return result
            if original is None:
                raise ValueError(f"aten::{name}: neither cutex nor torch has a kernel for this")
            return original.call_boxed(keys, *args, **kwargs)

        self.library.impl(name, ours, key, with_keyset=True, allow_override=True)

    def prefer_flash(self) -> None:
        """Put the flash backend first in SDPA's order.

        NOTE: torch puts cuDNN first on a Hopper GPU, and does so at its first choice.
        """
        q = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16, device="cuda")
        torch._fused_sdp_choice(q, q, q)
        self.order = list(torch._C._get_sdp_priority_order())
        others = [x for x in self.order if x != _FLASH]
        torch._C._set_sdp_priority_order([_FLASH, *others])

    def remove(self) -> None:
        if self.order is not None:
            torch._C._set_sdp_priority_order(self.order)
        self.library._destroy()


# ---- the operators: each returns None for a call that the kernel does not support


def _takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return (
        q.dtype in DTYPES
        and q.shape[-1] == v.shape[-1]  # as torch's outputs are shaped like q
        and kernel_dims(q.shape[-1], v.shape[-1]) is not None
        and k.shape[-2] > 0
        and q.shape[-2] % k.shape[-2] == 0
        and runs_on(q.device)
    )


def _flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
) -> Any:
    """Returns (output, logsumexp, rng_state, unused, debug_mask) for q (batch, rows, heads, D) or
    packed."""
    if (
        dropout_p != 0
        or return_debug_mask
        or alibi_slopes is not None
        or block_table is not None
        or num_splits not in (None, 1)
        or (scale is not None and scale <= 0)
        or not _takes(query, key, value)
    ):
        return None
    bounds = (None if x is None or x < 0 else x for x in (window_size_left, window_size_right))
    left, right = bounds
    call = AttentionCall(
        query, key, value, cum_seq_q, cum_seq_k, max_q if cum_seq_q is not None else None, None,
        None, seqused_k, scale, is_causal, (left, right),
    )  # fmt: skip
    wanted = out
    if out is not None and overlaps_itself(out):
        shape, strides = tuple(out.shape), out.stride()
        raise ValueError(f"out of shape {shape} has strides {strides}: its elements overlap")
    if out is None or any(share_memory(out, x) for x in (query, key, value)):
        out = torch.empty_like(query)
    out, lse = attend(call, with_lse=True, out=out)
    if wanted is not None and wanted is not out:
        out = wanted.copy_(out)
    assert lse is not None
    if cum_seq_q is not None or seqused_k is not None or query.shape[1] > key.shape[-3]:
        # NOTE: torch's backward takes +inf for a row that sees no key
        lse.masked_fill_(lse == -torch.inf, torch.inf)
    return out, lse, *_no_dropout(query)


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rng_state, unused and debug_mask of a call without dropout, of arbitrary values as in
    torch; the same tensors each time if no backward keeps them."""
    if torch.is_grad_enabled():
        return _made_without_dropout(q)
    kept = _without_dropout.get((q.device, q.dtype))
    if kept is None:
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            return _made_without_dropout(q)  # whose memory is the graph's
        kept = allocated_apart(lambda: _made_without_dropout(q), q.device)
        _without_dropout[q.device, q.dtype] = kept
    return kept


def _made_without_dropout(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        q.new_empty(2, dtype=torch.uint64),
        q.new_empty((), dtype=torch.uint64),
        q.new_empty(0),
    )


def _flash_attention_forward_no_dropout_inplace(out: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Returns logsumexp; the output is written to `out`."""
    found = _flash_attention_forward(*args, **kwargs, out=out)
    return None if found is None else found[1]


def _scaled_dot_product_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """Run _flash_attention_forward for q (batch, heads, rows, D), with the further values that
    torch's autograd saves."""
    rows, keys = query.shape[2], key.shape[2]
    options = dropout_p, is_causal, return_debug_mask, scale
    if rows <= FEW and rows * MANY <= keys and not (dropout_p or return_debug_mask):
        few = _of_a_cache(query, key, value, is_causal, scale)
        if few is not None:
            return few[0].transpose(1, 2), few[1], None, None, rows, keys, *_no_dropout(query)
    elif (found := PLANS.launched(options, query, key, value)) is not None:
        return found
    out = torch.empty_like(query)
    q, k, v, o = (x.transpose(1, 2) for x in (query, key, value, out))
    found = _flash_attention_forward(
        q, k, v, None, None, rows, keys, dropout_p, is_causal, return_debug_mask,
        scale=scale, out=o,
    )  # fmt: skip
    if found is None:
        return None
    _remember(options, query, key, value, o)
    return out, found[1], None, None, rows, keys, *found[2:]


def _of_a_cache(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor] | None:
    """O (batch, rows, heads, D) and LSE of few queries over many keys, which are split over the
    GPU; None if O would have other strides than q, or TMA cannot step through the keys."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if not q.is_contiguous():
        return None
    options: dict[str, Any] = {"softmax_scale": scale, "causal": causal, "return_lse": True}
    rest: dict[str, Any] = {"window_size": (-1, -1), "softcap": 0.0, "learnable_sink": None}
    found: Any = known_token(q, k, v, None, None, **options, **rest)
    if found is not None:
        return found
    if (scale is not None and scale <= 0) or not _takes(q, k, v) or 0 in (*q.shape, *k.shape):
        return None
    if why_no_steps(k) is not None or why_no_steps(v) is not None:
        return None
    found = flash_attn_with_kvcache(q, k, v, **options, **rest)
    return found


def _remember(options: Any, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
    """Keep the plan of a call that was run, with O (batch, rows, heads, D) like `out`, if it takes
    tensors as they are given."""
    _, causal, _, scale = options
    rows, keys = query.shape[2], key.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    plan = plan_of(AttentionCall(q, k, v, softmax_scale=scale, causal=causal), True, out)
    run = None if plan is None else plan.short_with(out)
    # NOTE: as many keys as queries, or more: each row sees one, so that LSE is finite
    if run is None or (causal and rows > keys):
        return

    def launch(query: Tensor, key: Tensor, value: Tensor) -> Any:
        o, lse = run(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        return o.transpose(1, 2), lse, None, None, rows, keys, *_no_dropout(query)

    given = query, key, value
    PLANS.remember(PlanCache.key_of(options, *given), given, launch, below_autograd=True)


def _scaled_dot_product_flash_attention_for_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """Returns (output, logsumexp), from the simulator; torch aligns causal masks on the CPU top
    left."""
    if attn_mask is not None or (is_causal and query.shape[2] != key.shape[2]):
        return None
    found = _scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, scale=scale
    )
    return None if found is None else found[:2]


def _flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Any:
    """Returns the gradients of query, key and value, (batch, rows, heads, D) or packed."""
    if dropout_p != 0 or (scale is not None and scale <= 0) or not _takes(query, key, value):
        return None
    left, right = (None if x is None or x < 0 else x for x in (window_size_left, window_size_right))
    packed = cum_seq_q is not None
    call = AttentionCall(
        query, key, value, cum_seq_q, cum_seq_k, max_q if packed else None,
        max_k if packed else None, softmax_scale=scale, causal=is_causal, window_size=(left, right),
    )  # fmt: skip
    if own_backward.why_not(call) is not None or logsumexp.shape != call.lse_shape:
        return None
    return gradients(call, grad_out, out, logsumexp, None)


def _scaled_dot_product_flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Any:
    """The same for q (batch, heads, rows, D)."""
    do, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    found = _flash_attention_backward(
        do, q, k, v, o, logsumexp, None, None, max_q, max_k, dropout_p, is_causal, philox_seed,
        philox_offset, scale=scale,
    )  # fmt: skip
    return None if found is None else tuple(x.transpose(1, 2) for x in found)


_BACKWARDS: dict[str, Callable[..., Any]] = {
    "_flash_attention_backward": _flash_attention_backward,
    "_scaled_dot_product_flash_attention_backward": _scaled_dot_product_flash_attention_backward,
}
_OPERATORS: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": _flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_attention_forward_no_dropout_inplace,
    "_scaled_dot_product_flash_attention": _scaled_dot_product_flash_attention,
}
_CPU_OPERATORS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _scaled_dot_product_flash_attention_for_cpu,
}
