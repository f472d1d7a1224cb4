"""`cutex.matmul`: calls that need nothing from torch run directly, by a plan, all others through
torch.

A plan is found by the shapes and options of a call; dtypes, strides, devices, dispatch keys and
gradients of its tensors are compared by the guards of torch.compile, in one call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cutex.arch import ARCHS, PORTABLE
from cutex.ops import autocast
from cutex.ops.device import arch_of, current, launcher
from cutex.ops.matmul import tuner
from cutex.ops.matmul.arrange import Arranged, arrange
from cutex.ops.matmul.checks import Call, check, check_arch, check_memory
from cutex.ops.matmul.launch import launch_of
from cutex.ops.matmul.plan import config_for, kernel_for, user_functions
from cutex.ops.number import number
from cutex.ops.plain import is_plain, nobody_watches, untraced
from cutex.ops.plans import PlanCache
from cutex.ops.torchao_tensors import both, is_torchao
from cutex.ops.w4.packed import W4Weight
from cutex.ops.written import written

ON = ARCHS | PORTABLE  # archs that have kernels for it
Activation = str | Callable[..., Any] | None


def matmul(
    a: Tensor,
    b: Tensor | W4Weight,
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
    use_fast_accum: bool = True,
) -> Tensor:
    """activation(alpha * scale_a * scale_b * (a @ b) + beta * out + bias) + residual.

    a, b: (.., M, K) and (.., K, N), bfloat16, float16 or float32, the same for both, or
        float8_e4m3fn / float8_e5m2; sums are in fp32. float32 is read as tf32, whatever precision
        torch is set to; the first call warns where torch would not use tf32. Batch dimensions
        broadcast. Any strides. A tensor that TMA cannot read is copied first: one whose base or a
        stride is not a multiple of 16 bytes; on Hopper, float32 and fp8 whose K is not contiguous.
        On Hopper a 16-bit matrix a with M contiguous and K a multiple of 8 is read as it is,
        whatever its stride.
        b may be a result of `cutex.pack_w4` for a 4-bit weight (N, K): the product is then a @ b^T,
        with a bfloat16 or float16 a, and only bias, a named activation, residual and out_dtype are
        supported. Differentiable in a, bias and residual.
        a and b may be torchao's MXTensor or NVFP4Tensor, (M, K) and (K, N), or results of
        `cutex.quantize` for x (M, K) and for a weight (N, K): this is `cutex.scaled_mm`, with bias,
        a named activation, residual and out_dtype only.
    bias: (N,) or (1, N), or (M, 1). residual: broadcasts to the result. Both of any float dtype.
    activation: "relu", "gelu", "gelu_tanh" or "silu"; "gated_silu" or "gated_gelu",
        act(even columns) * odd columns, which leaves (.., M, N / 2); or a function of one DSL
        Float32, or of it and its row and column (@cute.jit if it branches). gelu(-inf) is 0, the
        limit, where torch returns NaN.
    alpha, beta: numbers, not tensors; beta is the factor of out's previous values.
    out: the tensor to write, of any strides. It may be residual itself, but must not overlap any
        other input.
    out_dtype: bfloat16, float16 or float32; by default a's, and bfloat16 for fp8.
    scale_a, scale_b: float32, one number each, or one per row of a and one per column of b.
    use_fast_accum: whether fp8 is summed by Hopper's tensor cores alone, which keep some 13 bits of
        a sum, as by torch._scaled_mm with it; if not, which is that function's default and
        `cutex.scaled_mm`'s, the sums of each 128 of K are added up in float32. Other dtypes, and
        Blackwell, add up in float32 in any case.
    amax: float32 with one element, raised to the largest magnitude of the result before rounding,
        or to NaN if the result has one. It must not overlap any input.

    Differentiable in a, b, bias and residual, in forward and reverse mode, to any order, unless
    out, a scale, amax or a user's function is given. torch.autocast casts a and b as for
    torch.matmul, unless out is given.

    Raises TypeError or ValueError, in one sentence that names the argument, for arguments that are
    not supported, and without a Hopper or Blackwell GPU.
    """
    if isinstance(b, W4Weight):
        others = out, scale_a, scale_b, amax, alpha, beta
        return _with_packed(a, b, bias, activation, residual, out_dtype, others)
    if _is_compiling():
        if _is_quantized(a) or _is_quantized(b):
            others = out, scale_a, scale_b, amax, alpha, beta
            return _of_quantized(a, b, bias, activation, residual, out_dtype, others)
        return _through_operator(
            Call(a, b, bias, residual, out, scale_a, scale_b, amax, activation, out_dtype,
                 alpha, beta, use_fast_accum)
        )  # fmt: skip
    if nobody_watches():
        result = planned(
            a, b, bias, residual, out, scale_a, scale_b, amax, activation, out_dtype, alpha, beta,
            use_fast_accum,
        )  # fmt: skip
        if result is not None:
            if out is not None or amax is not None:
                _increment_version((result,) if amax is None else (result, amax))
            return result
    if _is_quantized(a) or _is_quantized(b):
        others = out, scale_a, scale_b, amax, alpha, beta
        return _of_quantized(a, b, bias, activation, residual, out_dtype, others)
    return _unplanned(
        Call(a, b, bias, residual, out, scale_a, scale_b, amax, activation, out_dtype, alpha, beta,
             use_fast_accum)
    )  # fmt: skip


def _with_packed(
    a: Tensor,
    b: W4Weight,
    bias: Tensor | None,
    activation: Activation,
    residual: Tensor | None,
    out_dtype: torch.dtype | None,
    others: tuple[Any, ...],
) -> Tensor:
    """The product with a packed weight of 4 bits."""
    from cutex.ops.w4.product import w4_matmul

    _check_others(others, "a packed weight")
    if isinstance(a, Tensor) and autocast.is_on(a.device):
        (a,) = autocast.cast(a)
    return w4_matmul(a, b, bias, activation, residual, out_dtype)


def _is_quantized(x: Any) -> bool:
    """Whether x has its scale factors with it."""
    from cutex.ops.quantize import QuantizedTensor

    return isinstance(x, QuantizedTensor) or is_torchao(x)


def _of_quantized(
    a: Any,
    b: Any,
    bias: Tensor | None,
    activation: Any,
    residual: Tensor | None,
    out_dtype: torch.dtype | None,
    others: tuple[Any, ...],
) -> Tensor:
    """The product of quantized tensors: torchao's, or those of `cutex.quantize`."""
    from cutex.ops import block_scaled, fp8_blocks

    _check_others(others, "quantized tensors")
    for name, x in (("a", a), ("b", b)):
        if not _is_quantized(x):
            got = getattr(x, "dtype", type(x).__name__)
            raise TypeError(
                f"{name} is {got}, and the other one is quantized: takes both, or a weight packed "
                "by cutex.pack_w4"
            )
    dtype = torch.bfloat16 if out_dtype is None else out_dtype
    a, b = both(a, b)
    if a.format in block_scaled.FORMATS and b.format in block_scaled.FORMATS:
        return block_scaled.of_quantized(a, b, bias, residual, activation, dtype)[0]
    return fp8_blocks.of_quantized(a, b, bias, residual, activation, dtype)


def _check_others(others: tuple[Any, ...], beside: str) -> None:
    """Raise ValueError for an argument that only a product of plain matrices takes."""
    names = "out", "scale_a", "scale_b", "amax", "alpha", "beta"
    for name, x, due in zip(names, others, (None,) * 4 + (1.0, 0.0), strict=True):
        if x is not due and not (isinstance(x, int | float) and x == due):
            raise ValueError(
                f"{name} is given: with {beside} matmul takes bias, activation, residual and "
                "out_dtype"
            )


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


PLANS = PlanCache(most_alike=8)
_known = PLANS.known
_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_dynamo_compiling
_increment_version = torch._C._increment_version


def distinct(call: Call) -> list[Tensor]:
    """The tensors that a guard compares; b is omitted if it is the same tensor as a."""
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
    use_fast_accum: bool = True,
) -> Tensor | None:
    """The result by a plan that takes these tensors, or None if there is none."""
    try:
        plans = _known.get(
            (a.shape, b.shape, activation, out_dtype, alpha, beta, a is b, bias is None,
             residual is None, out is None, scale_a is None, scale_b is None, amax is None,
             use_fast_accum)
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
    for known in plans:
        if known.takes(*given):
            break
    else:
        return None
    if not (known.always or known.still()):
        return None
    try:
        return known.launch(*given)
    except (ValueError, TypeError):
        return None  # a base that is not aligned, or memory that is shared: as the first time


def _remember(function: Callable[..., None], call: Call, arranged: Arranged) -> None:
    key = _key(call)
    launch = launch_of(function, call, arranged)
    PLANS.remember(key, distinct(call), launch, user_functions(arranged.ops))


def _key(call: Call) -> tuple[Any, ...]:
    """The key of the plans for `call`, as `planned` makes it."""
    a, b, bias, residual, out, scale_a, scale_b, amax, *options, fast = call.arguments
    rest = (bias, residual, out, scale_a, scale_b, amax)
    return (a.shape, b.shape, *options, a is b, *[x is None for x in rest], fast)


def launch_like(call: Call) -> Callable[..., Tensor] | None:
    """The launch of the plan that takes `call`, a function of its tensors; None without a plan."""
    plans = _known.get(_key(call), ())
    given = distinct(call)
    return next((known.launch for known in plans if known.takes(*given)), None)


def run(call: Call) -> Tensor:
    """Run a checked call on plain tensors, preparing its operands; keep its plan."""
    check_memory(call)
    return _run(call, remember=True)


def _run(call: Call, remember: bool) -> Tensor:
    out = call.out
    if out is None:
        out = call.a.new_empty(call.shape, dtype=call.dtype)
    arch = arch_of(call.a.device, archs=ON)
    check_arch(call, arch)
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
        config = config_for(arranged.sizes, layouts, arranged.ops, arch, arranged.promoted)
    compiled = kernel_for(config, arch)
    with current(call.a.device):
        function = launcher(compiled, arranged.tensors, config.tiles.workspace)
        function(*arranged.tensors)
    if remember and arranged.as_given:
        _remember(function, call, arranged)
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
    fast = call.use_fast_accum
    if call.out is None and call.amax is None:
        return torch.ops.cutex.matmul(call.a, call.b, *fused, call.out_dtype, alpha, fast)
    call = _cast(call) if autocast.is_on(call.a.device) else call
    out = call.a.new_empty(call.shape, dtype=call.dtype) if call.out is None else call.out
    if call.amax is None:
        torch.ops.cutex.matmul_out(out, call.a, call.b, *fused, alpha, beta, fast)
    else:
        torch.ops.cutex.matmul_amax(call.amax, out, call.a, call.b, *fused, alpha, beta, fast)
    return out
