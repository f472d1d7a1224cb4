"""Products of 16-bit activations with a packed weight: cutex::w4_mm, with its gradient of x."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from cutex.arch import ARCHS
from cutex.arch import arch as arch_named
from cutex.ops.device import allocating, arch_of, current, launcher, other_board, per_device
from cutex.ops.matmul.arrange import fused, operand, result
from cutex.ops.matmul.checks import Call, by_row, check
from cutex.ops.plans import PlanCache
from cutex.ops.row.operators import define, needs_nothing
from cutex.ops.w4.packed import W4Weight
from cutex.problem.matmul import ACTIVATIONS
from cutex.problem.w4.layout import W4Format

PACKAGE = {arch: f"cutex.kernels.gemm.w4.{arch.rstrip('a').replace('_', '')}" for arch in ARCHS}


def w4_matmul(
    x: Any,
    w: W4Weight,
    bias: Tensor | None,
    activation: Any,
    residual: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """activation(x @ w^T + bias) + residual, x (.., M, K), w a packed weight (N, K)."""
    compiling = torch.compiler.is_dynamo_compiling()
    absent = bias is None, residual is None
    options = w.n, w.k, w.format, w.dtype, w.layout_version, *absent, activation, out_dtype
    passed = [t for t in (w.packed, w.factor, bias, residual) if t is not None]
    if not compiling and (known := PLANS.find(options, x, *passed)) is not None:
        return known.launch(x, *passed)
    if not isinstance(x, Tensor):
        raise TypeError(f"a must be a torch.Tensor, got {type(x).__name__}")
    if not compiling:  # where sizes may be symbols
        w.check_types("b")
    if x.dtype != w.dtype:
        raise TypeError(f"a is {x.dtype}, but b is packed for {w.dtype}")
    if x.dim() < 1 or x.shape[-1] != w.k:
        what = f"b is a packed weight (N, K) = {(w.n, w.k)}"
        raise ValueError(f"{what}, and takes a (.., {w.k}), got {tuple(x.shape)}")
    if x.device != w.packed.device:
        raise ValueError(f"b is on {w.packed.device}, but a is on {x.device}")
    if x.dim() == 1:
        return w4_matmul(x[None], w, bias, activation, residual, out_dtype)[0]
    if activation is not None and not isinstance(activation, str):
        raise ValueError("activation is a function: with a packed weight it must be a name")
    call = _call(x, w.n, bias, residual, activation, out_dtype)
    check(call)
    if bias is not None and by_row(bias, call) and x.dim() != 2:
        what = f"with rows of {x.dim()} dimensions it must be ({w.n},)"
        raise ValueError(f"bias has shape {tuple(bias.shape)}: {what}")
    of = w.format
    given = [x.reshape(-1, w.k), w.packed, w.factor, w.n, of.kind, of.group, of.zeros, bias]
    flat = None
    if residual is not None:
        flat = residual.expand(call.shape).reshape(-1, call.shape[-1])
    kept = [t for t in (x, bias, residual) if t is not None]
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in kept)
    if call.gate or (activation is not None and recorded):
        # NOTE: gates take neighbouring columns, which are rows of the MMA; and what an activation
        # is of is what its gradient needs
        wide_dtype = call.dtype if recorded else torch.float32
        wide = W4_MM(*given, None, None, wide_dtype, w.layout_version)
        y = ACTIVATIONS[activation](wide)
        y = y if flat is None else y + flat
        return y.to(call.dtype).view(call.shape)
    y = W4_MM(*given, flat, activation, call.dtype, w.layout_version).view(call.shape)
    if not compiling and needs_nothing(x, *passed):
        _remember(options, [x, *passed], y, [given[0], *given[1:3], bias, flat])
    return y


PLANS = PlanCache()


def _remember(options: Any, given: list[Tensor], y: Tensor, passed: list[Tensor | None]) -> None:
    """Keep a plan for such calls, whose result is like y and whose operator took `passed`: x, the
    weight, its factors, bias and residual."""
    n, k, of, _, version, *_, activation, _ = options
    tensors = [t for t in passed if t is not None]
    fixed = (
        n,
        of.kind,
        of.group,
        of.zeros,
        activation,
        y.dtype,
        passed[2] is None,
        passed[3] is None,
        version,
    )
    function = _KNOWN.get(_key(fixed, tensors))
    same = all(_layout(s) == _layout(t) for s, t in zip(given[1:], tensors[1:], strict=True))
    if function is None or not same or given[0].data_ptr() != tensors[0].data_ptr():
        return
    run, shape = allocating(function, y.view(-1, n), 2), y.shape

    def flattened(x: Tensor, *rest: Tensor) -> Tensor:
        return run(x.view(-1, k), *rest).view(shape)

    launch = run if given[0].dim() == 2 else flattened
    PLANS.remember(PLANS.key_of(options, *given), given, launch)


def _call(
    x: Tensor, n: int, bias: Any, residual: Any, activation: Any, out_dtype: Any, factor: Any = None
) -> Call:
    """The call in terms of `cutex.matmul`, for its checks, its shape and its epilogue."""
    like = torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape[-1], n)
    return Call(x, like, bias, residual, scale_b=factor, activation=activation, out_dtype=out_dtype)


# ---- the operator


def _run(
    x: Tensor,
    packed: Tensor,
    factor: Tensor | None,
    n: int,
    kind: str,
    group: int,
    zeros: bool,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype,
    layout_version: int = 0,
) -> Tensor:
    given = [x, packed, *(t for t in (factor, bias, residual) if t is not None)]
    absent = factor is None, bias is None
    options = (n, kind, group, zeros, activation, out_dtype, *absent, layout_version)
    key = _key(options, given)
    out = torch.empty((x.shape[0], n), dtype=out_dtype, device=x.device)
    if (known := _KNOWN.get(key)) is not None:
        with current(x.device):
            known(*given[:2], out, *given[2:])
        return out
    of = W4Format(kind, group, zeros)
    W4Weight(packed, factor, n, x.shape[1], of, x.dtype, kind, layout_version).check("b")
    arch = arch_of(x.device)
    if not out.numel():
        return out
    call = _call(x, n, bias, residual, activation, out_dtype, factor)
    first, layout, _ = operand(x, -1, True)
    to, out_layout, _ = result(out)
    ops, passed = fused(call, out, residual, arch)
    tensors = [first, packed, to, *(t for _, t in passed)]
    sizes = (x.shape[0], n, x.shape[1])
    config = _config(sizes, of, layout.dtype, out_layout, ops, arch)
    with current(x.device):
        function = launcher(_compiled(config, arch), tensors, config.tiles.workspace)
        function(*tensors)
    passed_on = [first, packed, *tensors[3:]]
    if len(passed_on) == len(given) and all(s is t for s, t in zip(passed_on, given, strict=True)):
        _KNOWN[key] = function
    return out


# the launches of calls whose tensors are passed as they are given, by layouts and options
_KNOWN: dict[Any, Any] = per_device({})


def _key(options: Hashable, tensors: list[Tensor]) -> Hashable:
    """What the launch of a call depends on."""
    return options, *map(_layout, tensors)


def _layout(x: Tensor) -> tuple[Any, ...]:
    """What a launch depends on beside a tensor's values."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() % 16, x.device


@lru_cache(maxsize=4096)
def _config(
    mnk: tuple[int, int, int], of: W4Format, dtype: str, out: Any, ops: Any, arch: str
) -> Any:
    """The kernel's signature for such calls."""
    from cutex.kernels.gemm.w4.signature import W4Signature

    choose = import_module(f"{PACKAGE[arch]}.choose")
    for tiles in choose.configs_for(mnk, of, other_board(arch), dtype):
        for epi_n in (tiles.epi_n, 16):
            signature = W4Signature(replace(tiles, epi_n=epi_n), dtype, out, ops)
            if signature.general.why_not(None, arch_named(arch)) is None:
                return signature
    raise ValueError(f"M={mnk[0]}, N={mnk[1]}, K={mnk[2]}: no config takes these sizes")


@lru_cache(maxsize=4096)
def _compiled(config: Any, arch: str) -> Any:
    from cutex.compile import compile
    from cutex.kernels.gemm.w4.sm90.decode_config import W4DecodeConfig

    if isinstance(config.tiles, W4DecodeConfig):
        from cutex.kernels.gemm.w4.sm90.decode import W4Decode

        return compile(W4Decode(config), config.dtype, arch)
    if getattr(config.tiles, "digits", 0):
        from cutex.kernels.gemm.w4.sm90.one_row import W4OneRow

        return compile(W4OneRow(config), config.dtype, arch)
    kernel = import_module(f"{PACKAGE[arch]}.kernel")
    return compile(kernel.W4Gemm(config), config.dtype, arch)


def _fake(
    x: Tensor,
    packed: Tensor,
    factor: Tensor | None,
    n: int,
    kind: str,
    group: int,
    zeros: bool,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype,
    layout_version: int = 0,
) -> Tensor:
    return x.new_empty((x.shape[0], n), dtype=out_dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, packed, factor, n, kind, group, zeros, bias, residual, activation, *_ = inputs
    if activation is not None:
        raise ValueError("cutex::w4_mm has no gradient of an activation: call cutex.matmul")
    ctx.save_for_backward(packed, factor)
    ctx.weight = n, x.shape[1], W4Format(kind, group, zeros), x.dtype, kind, inputs[-1]
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)
    ctx.residual = None if residual is None else residual.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    packed, factor = ctx.saved_tensors
    of_x = of_bias = of_residual = None
    if ctx.needs_input_grad[0]:
        w = W4Weight(packed, factor, *ctx.weight)
        empty = (None,) * 5
        of_x = torch.ops.cutex.matmul(grad.to(w.dtype), w.dequantize(), *empty, None, 1.0)
    if ctx.bias is not None and ctx.needs_input_grad[7]:
        shape, kind = ctx.bias
        rows = shape[0] == grad.shape[0] and len(shape) == 2 and shape[1] == 1
        of_bias = grad.sum(1 if rows else 0, dtype=torch.float32).to(kind).view(shape)
    if ctx.residual is not None and ctx.needs_input_grad[8]:
        of_residual = grad.to(ctx.residual)
    return (of_x, *(None,) * 6, of_bias, of_residual, None, None, None)


W4_MM = define(
    "w4_mm",
    "(Tensor x, Tensor packed, Tensor? factor, int n, str kind, int group, bool zeros, "
    "Tensor? bias, Tensor? residual, str? activation, ScalarType out_dtype, int layout_version=0) "
    "-> Tensor",  # NOTE: what was exported before has none
    _run,
    _fake,
    _setup,
    _backward,
)
