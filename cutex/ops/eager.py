"""`cutex.matmul` as it is called: it looks up a plan by dtypes, shapes and strides, and runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cutex.ops import tuner
from cutex.ops.arrange import Arranged, arrange
from cutex.ops.checks import Call, check
from cutex.ops.device import SEVERAL_GPUS, arch_of, current, launcher, per_device
from cutex.ops.plan import config_for, kernel_for, user_functions

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
        if SEVERAL_GPUS:
            key += (a.get_device(),)
        plan = _plans.get(key)
    except (AttributeError, TypeError, RuntimeError):
        key = plan = None  # not a tensor, or not a plain one: `check` names it
    if plan is not None and plan.functions and not plan.is_current():
        plan = None
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


# ---- plans


class _Plan:
    """A call whose operands are passed as they are: its launch, and the result to allocate.

    What the key leaves open, the launcher checks: devices, and that bases are aligned.
    """

    def __init__(self, function: Callable[..., None], call: Call, arranged: Arranged) -> None:
        self.function = function
        self.shape = call.shape
        self.strides = torch.empty(call.shape, device="meta").stride()
        self.dtype = call.dtype
        self.same_dtype = call.dtype == call.a.dtype
        # NOTE: with several GPUs the current one must be that of the tensors
        self.plain = not (arranged.names or arranged.tall or SEVERAL_GPUS)
        self.device = call.a.device
        self.tall = arranged.tall
        self.names = arranged.names  # of the arguments beside a, b and out
        given = dict(zip(self.names, arranged.tensors[3:], strict=True))
        self.copies_out = "c" in given and given["c"].data_ptr() != arranged.tensors[2].data_ptr()
        self.functions = user_functions(arranged.ops)
        self.numbers = {"alpha": float(call.alpha), "beta": float(call.beta)}

    def is_current(self) -> bool:
        """Whether the user's functions in it still compute what they did."""
        return all(f.is_current() for f in self.functions)

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
        if SEVERAL_GPUS and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                self.function(a, b, out, *passed)
        else:
            self.function(a, b, out, *passed)


_plans: dict[tuple[Any, ...], _Plan] = per_device({})
_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling


def _run(call: Call, key: tuple[Any, ...] | None) -> Tensor:
    """Run a checked call with whatever its operands need; remembers its plan under `key`."""
    out = call.out
    if out is None:
        out = call.a.new_empty(call.shape, dtype=call.dtype)
    arch = arch_of(call.a.device)
    if out.numel() == 0:
        return out
    if out.dim() > 3 and not _viewable(out):
        packed = out.contiguous()
        _run(replace(call, out=packed), None)
        return out.copy_(packed)
    arranged = arrange(call, out, arch)
    layouts = arranged.a, arranged.b, arranged.out
    if tuner.active():
        config = tuner.tuned_config(arranged, arch)
    else:
        config = config_for(arranged.sizes, layouts, arranged.ops, arch)
    compiled = kernel_for(config, arch)
    with current(call.a.device):
        function = launcher(compiled, arranged.tensors)
        function(*arranged.tensors)
    if key is not None and arranged.as_given:
        if len(_plans) >= 4096:
            _plans.clear()
        _plans[key] = _Plan(function, call, arranged)
    return out


def _viewable(x: Tensor) -> bool:
    try:
        x.view(-1, *x.shape[-2:])
    except RuntimeError:
        return False
    return True


def _through_operator(call: Call) -> Tensor:
    """Run `call` as one node of a graph."""
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
