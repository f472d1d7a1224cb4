"""`cutex.matmul`: calls that need nothing from torch run directly, by a plan, all others through
torch.

A plan is found by the shapes and options of a call; dtypes, strides, devices, dispatch keys and
gradients of its tensors are compared by the guards of torch.compile, in one call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cutex.ops import autocast
from cutex.ops.device import SEVERAL_GPUS, arch_of, current, launcher, per_device
from cutex.ops.matmul import tuner
from cutex.ops.matmul.arrange import Arranged, arrange
from cutex.ops.matmul.checks import Call, check, check_memory
from cutex.ops.matmul.plan import config_for, kernel_for, user_functions
from cutex.ops.number import number
from cutex.ops.overlap import share_memory, span
from cutex.ops.plain import empty_of, guard, is_plain, nobody_watches, untraced

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

    a (.., M, K) and b (.., K, N): bfloat16, float16 or float32, both alike, or float8_e4m3fn /
    float8_e5m2; accumulated in fp32. float32 is read as tf32, whatever precision torch is set to;
    a first call warns where torch would not. Batch sizes broadcast. Any strides; a tensor that TMA
    cannot read (a base or stride that is no multiple of 16 bytes; on Hopper float32 and fp8 whose
    K is not contiguous) is copied first.
    bias: (N,) or (1, N), or (M, 1). residual: broadcasts to the result. Both of any float dtype.
    activation: "relu", "gelu", "gelu_tanh", "silu"; "gated_silu" or "gated_gelu", act(even columns)
        * odd columns, which leaves (.., M, N / 2); or a function of one DSL Float32, or of it and
        its row and column (@cute.jit if it branches). gelu of -inf is 0, its limit; torch has NaN.
    alpha, beta: numbers, not tensors. beta: the factor of out's previous values.
    out: the tensor to write, of any strides; it may be residual itself, but overlap no other input.
    out_dtype: bfloat16, float16 or float32; by default that of a, bfloat16 for fp8.
    scale_a, scale_b: float32, one number each, or one for each row of a and each column of b.
    amax: float32 of one element, raised to the largest magnitude of the result before rounding, to
        NaN if there is one. It may overlap no input, as a scale.

    Differentiable in a, b, bias and residual, forward and backward, to any order, except where out,
    a scale, amax or a function of the user's is given. torch.autocast casts a and b as those of
    torch.matmul, unless out is given. Raises TypeError or ValueError, with one sentence that names
    the argument, for arguments that do not fit, and where there is no Hopper or Blackwell GPU.
    """
    if _is_compiling():
        return _through_operator(
            Call(a, b, bias, residual, out, scale_a, scale_b, amax, activation, out_dtype,
                 alpha, beta)
        )  # fmt: skip
    if nobody_watches():
        result = planned(
            a, b, bias, residual, out, scale_a, scale_b, amax, activation, out_dtype, alpha, beta
        )
        if result is not None:
            if out is not None or amax is not None:
                _increment_version((result,) if amax is None else (result, amax))
            return result
    return _unplanned(
        Call(a, b, bias, residual, out, scale_a, scale_b, amax, activation, out_dtype, alpha, beta)
    )


def written(*tensors: Tensor | None) -> None:
    """Count a write to the tensors, so that autograd detects changes of saved tensors."""
    _increment_version([x for x in tensors if x is not None])


@untraced
def _unplanned(call: Call) -> Tensor:
    """Run a call without a plan: through the operator if torch has more to do than to run it."""
    if isinstance(call.a, Tensor) and autocast.is_on(call.a.device):
        with autocast.off(call.a.device):
            return _unplanned(_cast(call))
    check(call)
    given = call.tensors.values()
    for name in ("out", "amax"):
        x = getattr(call, name)
        if x is not None and x.is_neg():  # NOTE: torch itself writes such an output wrongly
            memory = x.resolve_neg()
            result = _unplanned(replace(call, **{name: memory}))
            x.copy_(memory)
            return x if name == "out" else result
    if (
        not nobody_watches()
        or not all(map(is_plain, given))
        or (_grad_enabled() and any(x.requires_grad for x in given))
    ):
        return _through_operator(call)
    result = planned(*call.arguments)  # autocast may have kept the call from its plan
    result = run(call) if result is None else result
    written(call.out, call.amax)
    return result


def _cast(call: Call) -> Call:
    """The call as autocast casts it; a call with `out` is left unchanged."""
    if call.out is not None or not isinstance(call.b, Tensor):
        return call
    a, b = autocast.cast(call.a, call.b)
    return replace(call, a=a, b=b)


# ---- plans


class _Plan:
    """A call whose operands are passed unchanged: its launch, and the result to allocate.

    The launcher checks what neither the key nor `takes` covers: that bases are aligned.
    """

    def __init__(self, function: Callable[..., None], call: Call, arranged: Arranged) -> None:
        self.function = function
        self.takes = guard(distinct(call))
        self.wants_gradient = any(x.requires_grad for x in call.tensors.values())
        self.shape = call.shape
        self.strides = torch.empty(call.shape, device="meta").stride()
        self.dtype = call.dtype
        # NOTE: with several GPUs the current one must be that of the tensors
        self.plain = not (arranged.names or arranged.tall or SEVERAL_GPUS)
        self.device = call.a.device
        self.empty = empty_of(call.a.device, SEVERAL_GPUS)
        self.tall = arranged.tall
        self.names = arranged.names  # names of the arguments beside a, b and out
        given = dict(zip(self.names, arranged.tensors[3:], strict=True))
        self.copies_out = "c" in given and given["c"].data_ptr() != arranged.tensors[2].data_ptr()
        self.functions = user_functions(arranged.ops)
        # the distances from the base of a to that of out between which they may overlap; same of b
        self.distances: tuple[int, ...] = ()
        if call.out is not None:
            of_out = span(call.out)
            self.distances = (-of_out, span(call.a), -of_out, span(call.b))

    def is_current(self) -> bool:
        """Whether the user's functions in it still compute the same."""
        return all(f.is_current() for f in self.functions)

    def overlaps(self, out: Tensor, a: Tensor, b: Tensor, *rest: Tensor | None) -> bool:
        """Whether out shares memory with another of the tensors."""
        start = out.data_ptr()
        low_a, high_a, low_b, high_b = self.distances
        if low_a < start - a.data_ptr() < high_a and share_memory(out, a):
            return True
        if low_b < start - b.data_ptr() < high_b and share_memory(out, b):
            return True
        return any(x is not None and share_memory(out, x) for x in rest)

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
        alpha: float,
        beta: float,
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
                "scale_a": scale_a, "scale_b": scale_b, "alpha": float(alpha), "beta": float(beta),
            }  # fmt: skip
            passed = [given[name] for name in self.names]
        if SEVERAL_GPUS and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                self.function(a, b, out, *passed)
        else:
            self.function(a, b, out, *passed)


_plans: dict[tuple[Any, ...], tuple[_Plan, ...]] = per_device({})
_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_dynamo_compiling
_increment_version = torch._C._increment_version


def distinct(call: Call) -> list[Tensor]:
    """The tensors that a guard compares; b is left out if it is the same tensor as a."""
    given = list(call.tensors.values())
    return given[:1] + given[2:] if call.a is call.b else given


@untraced
def planned(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    amax: Tensor | None,
    activation: Activation,
    out_dtype: torch.dtype | None,
    alpha: float,
    beta: float,
) -> Tensor | None:
    """The result by a plan that takes these tensors, or None if there is none."""
    try:
        plans = _plans.get(
            (a.shape, b.shape, activation, out_dtype, alpha, beta, a is b, bias is None,
             residual is None, out is None, scale_a is None, scale_b is None, amax is None)
        )  # fmt: skip
    except (AttributeError, TypeError, RuntimeError):  # `check` names an argument that is no tensor
        return None
    if plans is None:
        return None
    given: Sequence[Tensor] = (a,) if a is b else (a, b)
    if not (bias is residual is scale_a is scale_b is amax is None):
        rest = (bias, residual, out, scale_a, scale_b, amax)
        given = (*given, *[x for x in rest if x is not None])
    elif out is not None:
        given = (a, out) if a is b else (a, b, out)
    for plan in plans:
        if plan.takes(*given):
            break
    else:
        return None
    if (plan.wants_gradient and _grad_enabled()) or (plan.functions and not plan.is_current()):
        return None
    if out is not None and (
        plan.overlaps(out, a, b)
        if plan.plain
        else plan.overlaps(out, a, b, bias, residual, scale_a, scale_b, amax)
    ):
        return None
    if amax is not None:
        for x in (a, b, bias, residual, scale_a, scale_b):
            if x is not None and share_memory(amax, x):
                return None
    result = plan.empty(plan.shape, plan.strides, plan.dtype) if out is None else out
    try:
        if plan.plain:
            plan.function(a, b, result)
        else:
            plan(a, b, result, bias, residual, scale_a, scale_b, amax, alpha, beta)
    except (ValueError, TypeError):
        return None  # a base that is not aligned: as the first time
    return result


def _remember(plan: _Plan, call: Call) -> None:
    if len(_plans) >= 4096:
        _plans.clear()
    a, b, bias, residual, out, scale_a, scale_b, amax, *options = call.arguments
    rest = (bias, residual, out, scale_a, scale_b, amax)
    key = (a.shape, b.shape, *options, a is b, *[x is None for x in rest])
    with suppress(TypeError):  # a function without a hash, as of a dataclass, is not looked up
        _plans[key] = (plan, *_plans.get(key, ())[:7])


def run(call: Call) -> Tensor:
    """Run a checked call on plain tensors, preparing its operands; keep its plan."""
    check_memory(call)
    return _run(call, remember=len(set(map(id, distinct(call)))) == len(distinct(call)))


def _run(call: Call, remember: bool) -> Tensor:
    out = call.out
    if out is None:
        out = call.a.new_empty(call.shape, dtype=call.dtype)
    arch = arch_of(call.a.device)
    if out.numel() == 0:
        return out
    if out.dim() > 3 and not _viewable(out):
        packed = out.contiguous()
        _run(replace(call, out=packed), remember=False)
        return out.copy_(packed)
    if call.a.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32":
        _warn_of_tf32()
    arranged = arrange(call, out, arch)
    layouts = arranged.a, arranged.b, arranged.out
    seconds = tuner.limit_of_call()
    if seconds is not None:
        config = tuner.tuned_config(arranged, arch, seconds)
    else:
        config = config_for(arranged.sizes, layouts, arranged.ops, arch)
    compiled = kernel_for(config, arch)
    with current(call.a.device):
        function = launcher(compiled, arranged.tensors, config.tiles.workspace)
        function(*arranged.tensors)
    if remember and arranged.as_given:
        _remember(_Plan(function, call, arranged), call)
    return out


@cache
def _warn_of_tf32() -> None:
    warnings.warn(
        "cutex.matmul reads float32 as tf32, 10 bits of mantissa, where torch is set to full "
        'precision; torch.set_float32_matmul_precision("high") says that this is meant',
        stacklevel=1,
    )


def _viewable(x: Tensor) -> bool:
    try:
        x.view(-1, *x.shape[-2:])
    except RuntimeError:
        return False
    return True


def _through_operator(call: Call) -> Tensor:
    """Run `call` as one node of a graph."""
    if call.activation is not None and not isinstance(call.activation, str):
        raise ValueError(
            "activation is a function: under torch.compile, torch.func or a mode, and where a "
            "gradient is wanted, it must be a name, or be applied by torch to the result"
        )
    alpha, beta = number("alpha", call.alpha), number("beta", call.beta)
    fused = (call.bias, call.residual, call.scale_a, call.scale_b, call.activation)
    if call.out is None and call.amax is None:
        return torch.ops.cutex.matmul(call.a, call.b, *fused, call.out_dtype, alpha)
    call = _cast(call) if autocast.is_on(call.a.device) else call
    out = call.a.new_empty(call.shape, dtype=call.dtype) if call.out is None else call.out
    if call.amax is None:
        torch.ops.cutex.matmul_out(out, call.a, call.b, *fused, alpha, beta)
    else:
        torch.ops.cutex.matmul_amax(call.amax, out, call.a, call.b, *fused, alpha, beta)
    return out
