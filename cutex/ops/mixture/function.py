"""`cutex.moe` and its checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutex.ops.grouped.checks import MOST_GROUPS, check_tensor
from cutex.ops.mixture.fp8 import check_weights, moe_fp8
from cutex.ops.mixture.registered import MOE
from cutex.ops.plain import check_strided
from cutex.ops.quantize import QuantizedTensor

UNIT = 8  # elements of 16 bytes
MOST_EXPERTS = 32  # of a token


def moe(
    x: Tensor,
    router_weights: Tensor,
    expert_ids: Tensor,
    w_up: Tensor | QuantizedTensor,
    w_down: Tensor | QuantizedTensor,
) -> Tensor:
    """A mixture of experts: for each token t, the sum over its experts e = expert_ids[t, j] of
    router_weights[t, j] * (silu(g[:, 0::2]) * g[:, 1::2]) @ w_down[e], where g = x[t] @ w_up[e].

    x: (T, D), bfloat16 or float16.
    w_up, w_down: (E, D, 2 F), whose even columns are gates, and (E, F, D); dtype of x, any strides.
        D and F are multiples of 8. Or results of `cutex.quantize` for both transposed, (E, 2 F, D)
        and (E, D, F), as "fp8_128x128", with D and F multiples of 128: on Hopper, x and the gated
        product are then quantized as "fp8_1x128". Not differentiable.
    router_weights: (T, J), any float dtype, used in float32.
    expert_ids: (T, J), int32 or int64; ids outside of [0, E) contribute nothing. J is at most 32, E
        at most 1024.

    Deterministic: a token's terms are added in the order of j, in float32. Nothing waits for the
    host. Differentiable once in x, router_weights, w_up and w_down. Like SonicMoE, the forward pass
    keeps x, g in 16 bits, and the routing for the backward pass: T * D + 2 * T * J * F elements and
    12 * T * J bytes. If no gradient is wanted, g is not rounded.

    Returns (T, D). Raises TypeError or ValueError, in one sentence that names the argument, for
    arguments that are not supported, and without a Hopper or Blackwell GPU.

    Source: Guo et al., SonicMoE (arXiv 2512.14080).
    """
    if isinstance(w_up, QuantizedTensor) or isinstance(w_down, QuantizedTensor):
        check_weights(w_up, w_down)
        check(x, router_weights, expert_ids, *(_as_plain(x, w) for w in (w_up, w_down)))
        if torch.is_grad_enabled() and (x.requires_grad or router_weights.requires_grad):
            raise ValueError("x or router_weights requires a gradient: fp8 weights have none")
        return moe_fp8(x, router_weights, expert_ids, w_up, w_down)
    check(x, router_weights, expert_ids, w_up, w_down)
    given = (x, router_weights, w_up, w_down)
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    operator = torch.ops.cutex.moe if keep else MOE  # which takes a shorter way where it may
    out, *_ = operator(x, router_weights, expert_ids, w_up, w_down, keep)
    return out


def _as_plain(x: Any, w: QuantizedTensor) -> Any:
    """A stand-in for a quantized weight that has its shape transposed, and x's dtype and device if
    w is there."""
    if not isinstance(x, Tensor) or w.data.device != x.device:
        return w.data
    e, n, k = w.data.shape
    return x.new_empty(1).expand(e, k, n)


def check(x: Any, router_weights: Any, expert_ids: Any, w_up: Any, w_down: Any) -> None:
    """Raise TypeError or ValueError, in one sentence, unless the arguments fit."""
    check_tensor("x", x)
    check_tensor("w_up", w_up, x)
    check_tensor("w_down", w_down, x)
    for name, t, dim in (("x", x, 2), ("w_up", w_up, 3), ("w_down", w_down, 3)):
        if t.dim() != dim:
            raise ValueError(f"{name} must have {dim} dimensions, got {tuple(t.shape)}")
    for name, t in (("router_weights", router_weights), ("expert_ids", expert_ids)):
        check_strided(name, t)
        if t.device != x.device:
            raise ValueError(f"{name} is on {t.device}, not on {x.device} as x")
        if t.dim() != 2 or t.shape[0] != x.shape[0]:
            raise ValueError(f"{name} must be (T, J) with T={x.shape[0]}, got {tuple(t.shape)}")
    if not router_weights.is_floating_point():
        raise TypeError(f"router_weights must be of floats, got {router_weights.dtype}")
    if expert_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"expert_ids must be int32 or int64, got {expert_ids.dtype}")
    if router_weights.shape != expert_ids.shape:
        shapes = tuple(router_weights.shape), tuple(expert_ids.shape)
        raise ValueError(f"router_weights and expert_ids must be alike, got {shapes}")
    experts, d, f2 = w_up.shape
    if d != x.shape[1]:
        raise ValueError(f"w_up must be (E, D, 2 F) with D={x.shape[1]}, got {tuple(w_up.shape)}")
    if w_down.shape != (experts, f2 // 2, d) or f2 % 2:
        want = (experts, f2 // 2, d)
        raise ValueError(f"w_down must be (E, F, D) = {want}, got {tuple(w_down.shape)}")
    if d % UNIT or f2 // 2 % UNIT or not d or not f2:
        raise ValueError(f"D and F must be multiples of {UNIT}, got {d} and {f2 // 2}")
    if not 1 <= experts <= MOST_GROUPS:
        raise ValueError(f"w_up has {experts} experts, there may be 1 to {MOST_GROUPS}")
    if not 1 <= expert_ids.shape[1] <= MOST_EXPERTS:
        raise ValueError(f"expert_ids has J={expert_ids.shape[1]}, a token has 1 to {MOST_EXPERTS}")
