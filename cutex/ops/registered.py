"""`cutex.matmul` as torch sees it: registered operators with fakes and gradients.

torch.ops.cutex.matmul and matmul_out serve torch.compile and autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cutex.ops.checks import Call, check
from cutex.ops.eager import matmul

_FUSED = (
    "Tensor? bias=None, Tensor? residual=None, Tensor? scale_a=None, Tensor? scale_b=None, "
    "str? activation=None"
)
_library = torch.library.Library("cutex", "DEF")
_library.define(
    f"matmul(Tensor a, Tensor b, {_FUSED}, ScalarType? out_dtype=None, float alpha=1.0) -> Tensor"
)
_library.define(
    f"matmul_out(Tensor(a!) out, Tensor a, Tensor b, {_FUSED}, float alpha=1.0, float beta=0.0)"
    " -> ()"
)


def _named(args: tuple[Any, ...], kwargs: dict[str, Any], *rest: str) -> dict[str, Any]:
    """The arguments that torch passes to an operator, by name; those left out are missing."""
    names = ("a", "b", "bias", "residual", "scale_a", "scale_b", "activation", *rest)
    return {**dict(zip(names, args, strict=False)), **kwargs}


@torch.no_grad()
def _operator(*args: Any, **kwargs: Any) -> Tensor:
    return matmul(**_named(args, kwargs, "out_dtype", "alpha"))


@torch.no_grad()
def _operator_out(out: Tensor, *args: Any, **kwargs: Any) -> None:
    matmul(out=out, **_named(args, kwargs, "alpha", "beta"))


def _fake(*args: Any, **kwargs: Any) -> Tensor:
    call = Call(**_named(args, kwargs, "out_dtype", "alpha"))
    check(call)
    return call.a.new_empty(call.shape, dtype=call.dtype)


def _fake_out(out: Tensor, *args: Any, **kwargs: Any) -> None:
    check(Call(out=out, **_named(args, kwargs, "alpha", "beta")))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, bias, residual, scale_a, scale_b, activation, _, alpha = inputs
    if any(x is not None for x in (scale_a, scale_b)):
        raise ValueError("scale_a and scale_b cannot be given where a gradient is wanted")
    ctx.save_for_backward(a, b, bias)
    ctx.activation, ctx.alpha = activation, alpha
    ctx.residual = None if residual is None else (residual.shape, residual.dtype)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients. The input of an activation is computed again, by one more GEMM, not kept."""
    a, b, bias = ctx.saved_tensors
    # NOTE: as many as the caller wrote out; those left to their defaults are missing
    wanted = (*ctx.needs_input_grad, False, False)
    needs_a, needs_b, needs_bias, needs_residual = wanted[:4]
    grads: list[Tensor | None] = [None] * max(len(ctx.needs_input_grad), 4)
    if needs_residual:
        shape, dtype = ctx.residual
        grads[3] = grad.sum_to_size(shape).to(dtype)
    product = torch.ops.cutex.matmul
    if ctx.activation is not None:
        before = product(a, b, bias, None, None, None, None, torch.float32, ctx.alpha)
        grad = _activation_gradient(ctx.activation, grad.float(), before)
    if needs_bias:
        grads[2] = grad.float().sum_to_size(bias.shape).to(bias.dtype)
    grad = grad.to(a.dtype)
    if needs_a:
        full = product(grad, b.mT, None, None, None, None, None, None, ctx.alpha)
        grads[0] = full.sum_to_size(a.shape)
    if needs_b:
        full = product(a.mT, grad, None, None, None, None, None, None, ctx.alpha)
        grads[1] = full.sum_to_size(b.shape)
    return tuple(grads[: len(ctx.needs_input_grad)])


def _activation_gradient(name: str, grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x, the activation's input, both in float32; a gate takes two columns."""
    if not name.startswith("gated_"):
        return _ACTIVATION_GRADIENTS[name](grad, x)
    name = name.removeprefix("gated_")
    gate, gated = x[..., 0::2], x[..., 1::2]
    of_gate = _ACTIVATION_GRADIENTS[name](grad * gated, gate)
    return torch.stack((of_gate, grad * _ACTIVATIONS[name](gate)), -1).flatten(-2)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # of gates
    "gelu": torch.ops.aten.gelu,
    "silu": torch.ops.aten.silu,
}
_ACTIVATION_GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda g, x: torch.ops.aten.threshold_backward(g, x, 0),
    "gelu": lambda g, x: torch.ops.aten.gelu_backward(g, x),
    "gelu_tanh": lambda g, x: torch.ops.aten.gelu_backward(g, x, approximate="tanh"),
    "silu": lambda g, x: torch.ops.aten.silu_backward(g, x),
}

for _key in ("CUDA", "CPU"):
    _library.impl("matmul", _operator, _key)
    _library.impl("matmul_out", _operator_out, _key)
torch.library.register_fake("cutex::matmul", _fake)
torch.library.register_fake("cutex::matmul_out", _fake_out)
torch.library.register_autograd("cutex::matmul", _backward, setup_context=_setup)
