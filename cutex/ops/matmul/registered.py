"""`cutex.matmul` as torch sees it: registered operators with fakes, derivatives and FLOPs.

torch.ops.cutex.matmul and matmul_out serve torch.compile, autograd, torch.func, tensor subclasses,
modes and transforms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cutex.ops import autocast, differentiation
from cutex.ops.matmul.checks import FLOAT8, Call, check
from cutex.ops.matmul.eager import planned, run, written
from cutex.ops.plain import bare

_FUSED = (
    "Tensor? bias=None, Tensor? residual=None, Tensor? scale_a=None, Tensor? scale_b=None, "
    "str? activation=None"
)
_library = torch.library.Library("cutex", "DEF")
_FAST = "bool use_fast_accum=True"
_library.define(
    f"matmul(Tensor a, Tensor b, {_FUSED}, ScalarType? out_dtype=None, float alpha=1.0, {_FAST}) "
    "-> Tensor"
)
_NUMBERS = f"float alpha=1.0, float beta=0.0, {_FAST}"
_WRITTEN = f"Tensor(a!) out, Tensor a, Tensor b, {_FUSED}, {_NUMBERS}"
_library.define(f"matmul_out({_WRITTEN}) -> ()")
_library.define(f"matmul_amax(Tensor(b!) amax, {_WRITTEN}) -> ()")
_NAMES = ("a", "b", "bias", "residual", "scale_a", "scale_b", "activation")


def _call(*args: Any) -> Call:
    """The call from matmul's arguments; torch leaves out trailing defaults."""
    names = *_NAMES, "out_dtype", "alpha", "use_fast_accum"
    return Call(**dict(zip(names, args, strict=False)))


def _call_out(*args: Any) -> Call:
    """The call from matmul_out's arguments."""
    names = "out", *_NAMES, "alpha", "beta", "use_fast_accum"
    return Call(**dict(zip(names, args, strict=False)))


def _call_amax(amax: Tensor, *args: Any) -> Call:
    """The call from matmul_amax's arguments."""
    return replace(_call_out(*args), amax=amax)


@torch.no_grad()
def _launch(call: Call) -> Tensor:
    result = planned(*call.arguments)
    if result is not None:
        return result
    check(call)
    return run(call)


def _operator(*args: Any) -> Tensor:
    return _launch(_call(*map(bare, args)))


def _fake(*args: Any) -> Tensor:
    call = _call(*args)
    check(call)
    return call.a.new_empty(call.shape, dtype=call.dtype)


# ---- derivatives


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    call = _call(*inputs)
    if not (call.scale_a is call.scale_b is None):
        raise ValueError("scale_a and scale_b cannot be given where a gradient is wanted")
    ctx.save_for_backward(call.a, call.b, call.bias)
    ctx.save_for_forward(call.a, call.b, call.bias)
    ctx.activation, ctx.alpha, ctx.dtype = call.activation, call.alpha, output.dtype
    ctx.use_fast_accum = call.use_fast_accum
    ctx.residual = None if call.residual is None else (call.residual.shape, call.residual.dtype)
    ctx.count = len(inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients. The input of an activation is not saved but computed again, by one more
    GEMM."""
    a, b, bias = ctx.saved_tensors
    # NOTE: as many as the caller wrote out; those left to their defaults are missing
    needs_a, needs_b, needs_bias, needs_residual = (*ctx.needs_input_grad, False, False)[:4]
    grads: list[Tensor | None] = [None] * max(ctx.count, 4)
    if needs_residual:
        shape, dtype = ctx.residual
        grads[3] = grad.sum_to_size(shape).to(dtype)
    product = torch.ops.cutex.matmul
    if ctx.activation is not None:
        options = None, None, None, None, torch.float32, ctx.alpha, ctx.use_fast_accum
        before = product(a, b, bias, *options)
        grad = _activation_gradient(ctx.activation, grad.float(), before)
    if needs_bias:
        grads[2] = grad.float().sum_to_size(bias.shape).to(bias.dtype)
    if a.dtype in FLOAT8:
        # NOTE: without a scale, few gradients are within fp8's range; bfloat16 holds all its values
        a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
    grad = grad.to(a.dtype)
    if needs_a:
        full = product(grad, b.mT, None, None, None, None, None, None, ctx.alpha)
        grads[0] = full.sum_to_size(a.shape)
    if needs_b:
        full = product(a.mT, grad, None, None, None, None, None, None, ctx.alpha)
        grads[1] = full.sum_to_size(b.shape)
    return tuple(grads[: ctx.count])


def _forward_mode(
    ctx: Any,
    of_a: Tensor | None,
    of_b: Tensor | None,
    of_bias: Tensor | None = None,
    of_residual: Tensor | None = None,
    *_: None,
) -> Tensor:
    """The tangent of the result, given those of the inputs."""
    saved: list[Any] = [differentiation.primal(x) for x in ctx.saved_tensors]
    a, b, bias = saved

    def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        options = None, None, None, None, torch.float32, ctx.alpha, ctx.use_fast_accum
        return torch.ops.cutex.matmul(a, b, bias, *options)

    terms = [product(x, y) for x, y in ((of_a, b), (a, of_b)) if x is not None and y is not None]
    shape = (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    if of_bias is not None:
        terms.append(of_bias.float().expand(shape))
    result = sum(terms[1:], terms[0]) if terms else a.new_zeros(shape, dtype=torch.float32)
    if ctx.activation is not None:
        result = _activation_tangent(ctx.activation, result, product(a, b, bias))
    if of_residual is not None:
        result = result + of_residual.float()
    return result.to(ctx.dtype)


def _activation_tangent(name: str, tangent: Tensor, x: Tensor) -> Tensor:
    """The tangent of an activation's result, given that of its input x, both in float32."""
    if not name.startswith("gated_"):
        return _derivative(name, tangent, x)
    name = name.removeprefix("gated_")
    gate, gated = x[..., 0::2], x[..., 1::2]
    of_gate = _derivative(name, tangent[..., 0::2] * gated, gate)
    return of_gate + tangent[..., 1::2] * _ACTIVATIONS[name](gate)


def _activation_gradient(name: str, grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x, the activation's input, in float32; a gate takes two columns."""
    if not name.startswith("gated_"):
        return _derivative(name, grad, x)
    name = name.removeprefix("gated_")
    gate, gated = x[..., 0::2], x[..., 1::2]
    of_gate = _derivative(name, grad * gated, gate)
    return torch.stack((of_gate, grad * _ACTIVATIONS[name](gate)), -1).flatten(-2)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # the activations of gates
    "gelu": torch.ops.aten.gelu,
    "silu": torch.ops.aten.silu,
}


def _derivative(name: str, grad: Tensor, x: Tensor) -> Tensor:
    """grad times the derivative of an activation at x, itself differentiable."""
    if not torch.is_grad_enabled() and not differentiation.is_forward():
        return _KERNELS[name](grad, x)  # these lack some derivatives of their own
    if name == "relu":
        return torch.where(x <= 0, 0.0, grad)
    if name == "silu":
        s = torch.sigmoid(x)
        return grad * s * (1 + x * (1 - s))
    if name == "gelu":
        density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return grad * (0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * density)
    u = math.sqrt(2 / math.pi)
    t = torch.tanh(u * (x + 0.044715 * x**3))
    return grad * 0.5 * (1 + t + x * (1 - t * t) * u * (1 + 3 * 0.044715 * x * x))


_KERNELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda g, x: torch.ops.aten.threshold_backward(g, x, 0),
    "gelu": lambda g, x: torch.ops.aten.gelu_backward(g, x),
    "gelu_tanh": lambda g, x: torch.ops.aten.gelu_backward(g, x, approximate="tanh"),
    "silu": lambda g, x: torch.ops.aten.silu_backward(g, x),
}

# ---- torch.func.vmap


def _mapped(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    """Run the calls of a vmap as one with one more batch dimension; where that is not possible, one
    by one."""
    call, dims = _call(*args), _call(*in_dims)
    if not (dims.bias is dims.scale_a is dims.scale_b is None):
        results = [
            torch.ops.cutex.matmul(
                *(x if d is None else x.select(d, i) for x, d in zip(args, in_dims, strict=True))
            )
            for i in range(info.batch_size)
        ]
        return torch.stack(results), 0
    mapped = [name for name in ("a", "b", "residual") if getattr(dims, name) is not None]
    rank = max(getattr(call, name).dim() - (name in mapped) for name in ("a", "b"))
    for name in mapped:
        x = getattr(call, name).movedim(getattr(dims, name), 0)
        missing = (1,) * (rank + 1 - x.dim())
        setattr(call, name, x.reshape(x.shape[0], *missing, *x.shape[1:]))
    if mapped == ["residual"]:
        missing = (1,) * (rank - call.a.dim())
        call.a = call.a.expand(info.batch_size, *missing, *call.a.shape)
    fused = (call.bias, call.residual, call.scale_a, call.scale_b, call.activation)
    numbers = call.alpha, call.use_fast_accum
    result = torch.ops.cutex.matmul(call.a, call.b, *fused, call.out_dtype, *numbers)
    return result, 0


# ---- writing to out and amax


def _register_written(name: str, call_of: Callable[..., Call]) -> None:
    """Register an operator that writes to its arguments; `call_of` makes a Call of them."""
    operator = getattr(torch.ops.cutex, name).default

    def launch(*args: Any) -> None:
        _launch(call_of(*map(bare, args)))

    def fake(*args: Any) -> None:
        check(call_of(*args))

    def refuse_gradients(*args: Any) -> None:
        call = call_of(*args)
        if differentiation.is_wanted(call.tensors.values()):
            given = "out" if call.amax is None else "amax"
            raise ValueError(f"{given} cannot be given where a gradient is wanted")
        with torch._C._AutoDispatchBelowAutograd():
            operator(*args)

    def count_writes(*args: Any) -> None:
        call = call_of(*args)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            operator(*args)
        written(call.out, call.amax)

    for key in ("CUDA", "CPU"):
        _library.impl(name, launch, key)
    _library.impl(name, refuse_gradients, "Autograd")
    _library.impl(name, count_writes, "ADInplaceOrView")
    torch.library.register_fake(f"cutex::{name}", fake)


# ---- torch's tables


def _flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """The FLOPs as torch counts products, from shapes."""
    batch = math.prod(torch.broadcast_shapes(a[:-2], b[:-2]))
    return 2 * batch * a[-2] * a[-1] * b[-1]


for _key in ("CUDA", "CPU"):
    _library.impl("matmul", _operator, _key)
torch.library.register_fake("cutex::matmul", _fake)
differentiation.register(_library, "matmul", _setup, _backward, _forward_mode)
torch.library.register_vmap("cutex::matmul", _mapped, lib=_library)
autocast.register(_library, "matmul", count=2)
_register_written("matmul_out", _call_out)
_register_written("matmul_amax", _call_amax)
register_flop_formula(torch.ops.cutex.matmul)(_flops)
register_flop_formula(torch.ops.cutex.matmul_out)(lambda out, *args, **_: _flops(*args))
register_flop_formula(torch.ops.cutex.matmul_amax)(lambda amax, out, *args, **_: _flops(*args))
