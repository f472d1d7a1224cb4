"""cutex.matmul: the general GEMM as a PyTorch operator.

Eager calls look up a plan by dtypes, shapes and strides and launch it; the registered operators
torch.ops.cutex.matmul and matmul_out serve torch.compile and autograd. The first call with a new
combination of dtypes, layouts and options compiles (seconds, once; kept on disk), so call once
before a CUDA graph captures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cutex.arch import ARCHS
from cutex.ops.plan import Arranged, Call, arrange, check, config_for, kernel_for

Activation = str | Callable[..., Any] | None


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: Activation = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    amax: Tensor | None = None,
) -> Tensor:
    """activation(alpha * scale_a * scale_b * (a @ b) + beta * out + bias) + residual.

    a (.., M, K) and b (.., K, N): bfloat16, float16 or float32 (read as tf32), both alike, or
    float8_e4m3fn / float8_e5m2; accumulated in fp32. Batch sizes broadcast. Any strides; what TMA
    cannot step through (a base or stride that is no multiple of 16 bytes; on Hopper float32 and fp8
    whose K is not contiguous) is copied first.
    bias: (N,) or (1, N), or (M, 1). residual: broadcasts to the result. Both of any float dtype.
    activation: "relu", "gelu", "gelu_tanh", "silu"; "gated_silu" or "gated_gelu", act(even columns)
        * odd columns, which leaves (.., M, N / 2); or a function of one DSL Float32, or of it and
        its row and column (@cute.jit if it branches).
    out: where to write; of any strides. beta: factor of what it held before.
    out_dtype: bfloat16, float16 or float32; by default that of a, bfloat16 for fp8.
    scale_a, scale_b: float32, one number each, or one for each row of a and each column of b.
    amax: float32 of one element, raised to the largest magnitude of the result before rounding.

    Differentiable in a, b, bias and residual, except where out, a scale, amax or a function of the
    user's is given. Raises TypeError or ValueError, in one sentence that names the argument, for
    what does not fit, and where there is no Hopper or Blackwell GPU.
    """
    if _is_compiling():
        return _through_operator(
            Call(a, b, bias, residual, out, scale_a, scale_b, amax, activation, out_dtype,
                 alpha, beta)
        )  # fmt: skip
    key: tuple[Any, ...] | None
    try:
        key = (
            a.__class__, a.dtype, a.shape, a.stride(), b.__class__, b.dtype, b.shape, b.stride(),
            out_dtype, activation, alpha, beta,
        )  # fmt: skip
        if out is not None:
            key += ("out", out.__class__, out.dtype, out.shape, out.stride())
        if bias is not None:
            key += ("bias", bias.__class__, bias.dtype, bias.shape, bias.stride())
        if not (residual is scale_a is scale_b is amax is None):
            key += tuple(
                x if x is None else (x.__class__, x.dtype, x.shape, x.stride())
                for x in (residual, scale_a, scale_b, amax)
            )
        if _several_gpus:
            key += (a.get_device(),)
        plan = _plans.get(key)
    except (AttributeError, TypeError, RuntimeError):
        key = plan = None  # not a tensor, or not a plain one: the checks will say
    if plan is not None and not (_grad_enabled() and _wants_gradient(a, b, bias, residual)):
        if out is not None:
            result = out
        elif plan.same_dtype:
            result = a.new_empty_strided(plan.shape, plan.strides)  # half of new_empty's time
        else:
            result = a.new_empty_strided(plan.shape, plan.strides, dtype=plan.dtype)
        try:
            if plan.plain:
                plan.function(a, b, result)
            else:
                plan(a, b, result, bias, residual, scale_a, scale_b, amax)
            return result
        except (ValueError, TypeError):
            pass  # a base that is not aligned, which is not in the key: as the first time
    call = Call(
        a, b, bias, residual, out, scale_a, scale_b, amax, activation, out_dtype, alpha, beta
    )
    check(call)
    if _grad_enabled() and any(x.requires_grad for x in call.tensors.values()):
        return _through_operator(call)
    return _run(call, key)


def _wants_gradient(a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None) -> bool:
    return (
        a.requires_grad
        or b.requires_grad
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
    )


# ---- eager


class _Plan:
    """A call whose operands are passed as they are: launch, and what to allocate.

    Whatever the key does not say, the launcher checks: devices, and that bases are aligned.
    """

    def __init__(self, function: Callable[..., None], call: Call, arranged: Arranged) -> None:
        self.function = function
        self.shape = call.shape
        self.strides = torch.empty(call.shape, device="meta").stride()
        self.dtype = call.dtype
        self.same_dtype = call.dtype == call.a.dtype
        # NOTE: with several GPUs the current one must be that of the tensors
        self.plain = not (arranged.names or arranged.tall or _several_gpus)
        self.device = call.a.device
        self.tall = arranged.tall
        self.names = arranged.names  # of the arguments beside a, b and out
        given = dict(zip(self.names, arranged.tensors[3:], strict=True))
        self.copies_out = "c" in given and given["c"].data_ptr() != arranged.tensors[2].data_ptr()
        self.numbers = {"alpha": float(call.alpha), "beta": float(call.beta)}

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        scale_a: Tensor | None,
        scale_b: Tensor | None,
        amax: Tensor | None,
    ) -> None:
        if self.tall:
            a, out = a.view(-1, a.shape[-1]), out.view(-1, out.shape[-1])
            residual = residual if residual is None else residual.view(-1, residual.shape[-1])
        passed: Any = ()
        if self.names == ("bias",):
            passed = (bias,)
        elif self.names:
            given = {
                "bias": bias, "residual": residual, "amax": amax,
                "c": out.clone() if self.copies_out else out,
                "scale_a": scale_a, "scale_b": scale_b, **self.numbers,
            }  # fmt: skip
            passed = [given[name] for name in self.names]
        if _several_gpus and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                self.function(a, b, out, *passed)
        else:
            self.function(a, b, out, *passed)


_plans: dict[tuple, _Plan] = {}
_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
_several_gpus = torch.cuda.is_available() and torch.cuda.device_count() > 1
_simulator: dict[str, Any] = {}  # while tensors of the CPU run in the simulator: arch, order, seed


def _run(call: Call, key: tuple | None) -> Tensor:
    """The call, checked, with whatever its operands need; remembers its plan under `key`."""
    out = call.out
    if out is None:
        out = call.a.new_empty(call.shape, dtype=call.dtype)
    arch = _arch(call.a.device)
    if out.numel() == 0:
        return out
    if out.dim() > 3 and not _viewable(out):
        packed = out.contiguous()
        _run(replace(call, out=packed), None)
        return out.copy_(packed)
    arranged = arrange(call, out, arch)
    lies = arranged.a, arranged.b, arranged.out
    compiled = kernel_for(config_for(arranged.sizes, lies, arranged.pieces, arch), arch)
    with _device(call.a.device):
        function = _launcher(compiled, arranged)
        function(*arranged.tensors)
    if key is not None and arranged.as_given:
        if len(_plans) >= 4096:
            _plans.clear()
        _plans[key] = _Plan(function, call, arranged)
    return out


def _launcher(compiled: Any, arranged: Arranged) -> Callable[..., None]:
    if not _simulator:
        return compiled.function(*arranged.tensors)
    from cutex.sim import simulate

    orders = {k: v for k, v in _simulator.items() if k != "arch"}

    def launch(*tensors: Any) -> None:
        simulate(compiled, *tensors, **orders)

    return launch


def _viewable(x: Tensor) -> bool:
    try:
        x.view(-1, *x.shape[-2:])
    except RuntimeError:
        return False
    return True


def _device(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _arch(device: torch.device) -> str:
    """The arch of what runs on `device`; ValueError, in one sentence, if nothing does."""
    if device.type == "cpu" and _simulator:
        return _simulator["arch"]
    if device.type != "cuda":
        raise ValueError(
            f"a is on {device}: cutex.matmul runs on a Hopper or Blackwell GPU; move its tensors "
            "there, or run them in the simulator with `with cutex.ops.simulated():`"
        )
    capability = torch.cuda.get_device_capability(device)
    arch = next((x for x in ARCHS.values() if x.capability == capability), None)
    if arch is None:
        raise ValueError(
            f"a is on {device}, a GPU of compute capability {capability[0]}.{capability[1]}: "
            "cutex.matmul has kernels for 9.0 (Hopper) and 10.0 (Blackwell); use torch.matmul there"
        )
    return arch.name


@contextmanager
def simulated(arch: str = "sm_90a", **orders: Any) -> Iterator[None]:
    """Within, tensors on the CPU run in the simulator (see cutex.sim.simulate for `orders`)."""
    if arch not in ARCHS:
        known = " and ".join(ARCHS)
        raise ValueError(f"arch {arch!r}: cutex.matmul has kernels for {known} only")
    _plans.clear()
    _simulator.update(arch=arch, **orders)
    try:
        yield
    finally:
        _simulator.clear()
        _plans.clear()


# ---- the registered operators

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


def _through_operator(call: Call) -> Tensor:
    """As one node of a graph."""
    if call.activation is not None and not isinstance(call.activation, str):
        raise ValueError("activation is a function: under torch.compile and autograd it must be a "
                         "name, or be applied by torch to the result")  # fmt: skip
    if call.amax is not None:
        raise ValueError("amax cannot be given under torch.compile and autograd")
    fused = (call.bias, call.residual, call.scale_a, call.scale_b, call.activation)
    if call.out is None:
        return torch.ops.cutex.matmul(call.a, call.b, *fused, call.out_dtype, float(call.alpha))
    if not torch.compiler.is_compiling():
        raise ValueError("out cannot be given where a gradient is wanted")
    torch.ops.cutex.matmul_out(
        call.out, call.a, call.b, *fused, float(call.alpha), float(call.beta)
    )
    return call.out


def _named(args: tuple, kwargs: dict[str, Any], *rest: str) -> dict[str, Any]:
    """What torch passes to an operator, all but what the caller left out, by name."""
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


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    a, b, bias, residual, scale_a, scale_b, activation, _, alpha = inputs
    if any(x is not None for x in (scale_a, scale_b)):
        raise ValueError("scale_a and scale_b cannot be given where a gradient is wanted")
    ctx.save_for_backward(a, b, bias)
    ctx.activation, ctx.alpha = activation, alpha
    ctx.residual = None if residual is None else (residual.shape, residual.dtype)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    """What an activation had as input is computed again, by one more GEMM, rather than kept."""
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
    """Of x, the activation's input, both in float32; a gate's takes both of its columns."""
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
