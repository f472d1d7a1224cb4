"""Norms whose results are quantized in the same pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import cutex.ops.quantize as quantization  # a module that imports this package
from cutex.arch import kernels_of
from cutex.kernels.row import choose
from cutex.ops.row.launches import Calls, Launch, Run
from cutex.ops.row.norm import check_norm, name_of, norm
from cutex.ops.row.operators import define
from cutex.ops.row.rows import VECTOR, arch_of, empty_rows, loads_of
from cutex.problem.scaled import layouts
from cutex.problem.scaled.formats import FORMATS, SWIZZLE_FACTORS, Format

ROW = "fp8_row"  # of one factor a row, which "fp8" stands for
NAMES = ("fp8", ROW, *(name for name, f in FORMATS.items() if f.block[0] == 1 and f.block[1]))
Given = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]  # x, weight, bias, residual
FACTORS = {"e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn, "fp32": torch.float32}


def norm_quantized(
    centred: bool, given: Given, eps: float, format: Any, tensor_scale: Tensor | None
) -> Any:
    """The norm of x, weight, bias and residual as a QuantizedTensor; with a residual, the sum,
    too."""
    check_norm(*given, eps)
    name = _checked(given, format, tensor_scale)
    of = FORMATS[name]
    if of.tensor_scale and tensor_scale is None:
        q, summed = _in_two(centred, given, eps, name, None)
    else:
        data, scale, summed = QUANTIZED_NORM(*given, tensor_scale, float(eps), centred, name)
        q = quantization.QuantizedTensor(data, scale, name, of.swizzled, tensor_scale)
    return q if given[-1] is None else (q, summed)


def _checked(given: Given, format: Any, tensor_scale: Any) -> str:
    """The name of the format; raises, in one sentence, for what does not fit."""
    x = given[0]
    if format not in NAMES:
        raise ValueError(f"quantize={format!r} is not one of {', '.join(NAMES)}")
    name = ROW if format == "fp8" else str(format)
    if x.dim() < 2:
        raise ValueError(f"x must have at least 2 dimensions to be quantized, got {x.dim()}")
    if FORMATS[name].element == "e2m1" and x.shape[-1] % 2:
        raise ValueError(f"N={x.shape[-1]}: two elements of {name} share a byte, it is even")
    if torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in given):
        raise ValueError(f"quantize={format!r}: a tensor wants a gradient, which this has not")
    if tensor_scale is None:
        return name
    if not FORMATS[name].tensor_scale:
        raise ValueError(f"tensor_scale is given, but {name} has none")
    if not isinstance(tensor_scale, Tensor) or tensor_scale.dtype != torch.float32:
        got = tensor_scale.dtype if isinstance(tensor_scale, Tensor) else type(tensor_scale)
        raise TypeError(f"tensor_scale must be a float32 tensor of 1 element, got {got}")
    if tensor_scale.numel() != 1 or tensor_scale.device != x.device:
        raise ValueError(
            f"tensor_scale must have 1 element on {x.device}, got {tensor_scale.numel()} on "
            f"{tensor_scale.device}"
        )
    return name


def _in_two(
    centred: bool, given: Given, eps: float, name: str, tensor_scale: Tensor | None
) -> tuple[quantization.QuantizedTensor, Tensor]:
    """The same by a norm, and a quantization of it; and the sum, or nothing."""
    found = norm(centred, *given, eps)
    y, *summed = found if isinstance(found, tuple) else (found,)
    q = _by_rows(y) if name == ROW else quantization.quantize(y, name, tensor_scale=tensor_scale)
    return q, *(summed or [y.new_empty(0)])


def _by_rows(y: Tensor) -> quantization.QuantizedTensor:
    """y (.., K) with a factor for each row, by torch's own operations."""
    from cutex.problem.scaled import quantization as reference

    if not y.numel():
        data = torch.empty(y.shape, dtype=torch.float8_e4m3fn, device=y.device)
        scale = torch.full(
            (y.shape[:-1].numel(), 1), 1e-12 / 448, dtype=torch.float32, device=y.device
        )
        return quantization.QuantizedTensor(data, scale, ROW, False)
    found = reference.quantize(y.reshape(-1, y.shape[-1]), FORMATS[ROW])
    return quantization.QuantizedTensor(found.data.view(y.shape), found.scale, ROW, False)


# ---- the operator


def _plan(
    options: tuple[float, bool, str], x: Tensor, weight: Tensor | None, bias: Tensor | None,
    residual: Tensor | None, tensor_scale: Tensor | None,
) -> Run:  # fmt: skip
    from cutex.kernels.quantize.config import NATIVE
    from cutex.kernels.row.norm import NormConfig
    from cutex.kernels.row.norm_quantized import NormQuantized, NormQuantizedConfig

    eps, centred, name = options
    arch, of = arch_of(x.device, "cutex.layer_norm" if centred else "cutex.rms_norm"), FORMATS[name]
    launch = Launch(x.device)
    rows = launch.rows(x=x)
    vectors = launch.flat(weight=weight, bias=bias)
    rows += launch.rows(residual=residual)
    launch.flat(tensor_scale=tensor_scale)
    unit, _ = loads_of(rows, vectors, shifts=False)
    if not x.numel() or unit < VECTOR // x.element_size():
        return _by_two(options, x, weight, bias, residual, tensor_scale)
    m, n = rows[0].shape
    launch.makes("data", (*x.shape[:-1], n * of.dtype.bits // 8), torch.uint8, 2)
    kind = torch.float32 if of.scale == "fp32" else torch.uint8
    launch.makes("factors", _factors_shape(of, m, n), kind)
    if residual is not None:
        launch.makes("summed", x.shape, x.dtype, 2)
    whole = of.block[1] * SWIZZLE_FACTORS if of.swizzled else 1  # columns that have factors
    least = max(8, of.block[1] // unit)
    tile = choose.tile(
        -(-n // whole) * whole, 8 * x.element_size(), kernels_of(arch), unit, least=least
    )
    norm = NormConfig(tile, centred, residual is not None, name_of(weight), name_of(bias))
    config = NormQuantizedConfig(norm, name, arch in NATIVE[of.element])
    own = ("tensor_scale",) if of.tensor_scale else ()
    order = ("x", "data", "factors", *own, *norm.optional)
    returns = ("data", "factors") if residual is None else ("data", "factors", "summed")
    run = launch.run((NormQuantized, config, arch), order, (eps,), returns)

    def finished(*given: Tensor) -> tuple[Tensor, ...]:
        data, factors, *summed = run(*given)
        more = summed or [data.new_empty(0, dtype=x.dtype)]
        return data.view(of.dtype.torch), _as_given(of, factors, m, n), *more

    return finished


def _by_two(options: tuple[float, bool, str], *tensors: Tensor | None) -> Run:
    """The plan of rows that are no whole vectors."""
    eps, centred, name = options
    there = [v is not None for v in tensors]

    def run(*given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left = iter(given)
        *operands, tensor_scale = [next(left) if is_there else None for is_there in there]
        q, summed = _in_two(centred, tuple(operands), eps, name, tensor_scale)  # type: ignore[arg-type]
        return q.data, q.scale, summed

    return run


def _factors_shape(of: Format, m: int, n: int) -> tuple[int, ...]:
    """The shape of the factors in memory."""
    if of.swizzled:
        return (of.stored_factors(m, n),)
    if not of.block[1]:
        return (m,)
    return of.factors(m, n)[1], -(-m // layouts.PITCH) * layouts.PITCH


def _as_given(of: Format, factors: Tensor, m: int, n: int) -> Tensor:
    """The factors as `cutex.quantize` returns them."""
    if of.swizzled:
        return factors.view(FACTORS[of.scale]).view(layouts.swizzled_shape(*of.factors(m, n)))
    return factors[:, :m].mT if of.block[1] else factors.view(m, 1)


_quantized = Calls(_plan)


def _run(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    tensor_scale: Tensor | None, eps: float, centred: bool, format: str,
) -> Any:  # fmt: skip
    return _quantized((eps, centred, format), x, weight, bias, residual, tensor_scale)


def _fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    tensor_scale: Tensor | None, eps: float, centred: bool, format: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    of, n = FORMATS[format], x.shape[-1]
    m = x.numel() // n if n else 0
    bytes_ = (*x.shape[:-1], n * of.dtype.bits // 8)
    data = torch.empty(bytes_, dtype=torch.uint8, device=x.device).view(of.dtype.torch)
    kind = torch.float32 if of.scale == "fp32" else torch.uint8
    factors = torch.empty(_factors_shape(of, m, n), dtype=kind, device=x.device)
    summed = x.new_empty(0) if residual is None else empty_rows(x)
    return data, _as_given(of, factors, m, n), summed


QUANTIZED_NORM = define(
    "norm_quantized",
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? tensor_scale, "
    "float eps, bool centred, str format) -> (Tensor data, Tensor scale, Tensor summed)",
    _run,
    _fake,
)
