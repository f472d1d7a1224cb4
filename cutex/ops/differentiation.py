"""Derivatives of an operator in Python, for autograd, forward differentiation and torch.func.

torch.library.register_autograd supports reverse mode only: under torch.func.grad it raises, and it
silently drops the tangents of forward mode. The kernel here, on the operator's Autograd key,
differentiates one level; the level below, another transform or the device, gets the operator again
from the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

_transforms_active = torch._C._are_functorch_transforms_active
_below_autograd = torch._C._AutoDispatchBelowAutograd


def is_wanted(tensors: Iterable[Tensor | None]) -> bool:
    """Whether a gradient or a tangent of a result computed from `tensors` is wanted."""
    given = [x for x in tensors if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return True
    return is_forward() and any(tangent(x) is not None for x in given)


def check_unwanted(function: str, **given: Any) -> None:
    """Raise ValueError, in one sentence, if a gradient is wanted of a tensor among `given`, of
    which `function` has none."""
    if torch.compiler.is_dynamo_compiling():
        return
    for name, x in given.items():
        if isinstance(x, Tensor) and is_wanted([x]):
            raise ValueError(f"{name} requires a gradient, and {function} has none")


def is_forward() -> bool:
    """Whether forward differentiation is on."""
    return forward_ad._current_level >= 0


def primal(x: Tensor | None) -> Tensor | None:
    """x without its tangent."""
    return x if x is None else forward_ad.unpack_dual(x, level=0).primal


def tangent(x: Tensor) -> Tensor | None:
    return forward_ad.unpack_dual(x, level=0).tangent


def register(
    library: torch.library.Library,
    name: str,
    setup: Callable[..., None],
    backward: Callable[..., Any],
    forward_mode: Callable[..., Any] | None = None,
) -> None:
    """Register the derivatives of an operator: `setup(ctx, inputs, output)`, `backward(ctx,
    *gradients)` and `forward_mode(ctx, *tangents)`, with the meaning of torch.autograd.Function's
    methods."""
    operator = getattr(getattr(torch.ops, library.ns), name).default

    def forward(*args: Any) -> Any:
        # NOTE: a Function turns both modes off, although outer levels may be in them
        with _below_autograd(), torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return operator(*args)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        if forward_mode is None:
            raise NotImplementedError(f"cutex::{name} has no forward differentiation (jvp)")
        with forward_ad._set_fwd_grad_enabled(True):
            return forward_mode(ctx, *tangents)

    methods = {"forward": forward, "setup_context": setup, "backward": backward, "jvp": jvp}
    static = {key: staticmethod(method) for key, method in methods.items()}
    function: Any = type(name, (_SingleLevelFunction,), static)

    def differentiate(*args: Any) -> Any:
        if not is_wanted(x for x in args if isinstance(x, Tensor)):
            with _below_autograd():
                return operator(*args)
        with enable_single_level_autograd_function():
            return function.apply(*args)

    library.impl(name, differentiate, "Autograd")
