"""`cutex.rms_norm` and `cutex.layer_norm`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cutex.dtypes import of_torch
from cutex.ops.row.operators import define
from cutex.ops.row.rows import (
    arch_of,
    as_rows,
    check_alike,
    check_rows,
    check_vector,
    empty_rows,
    launch,
    tile_of,
)

GROUPS = 2  # CTAs of an SM, that share the rows of a gradient


def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """x / sqrt(mean of x^2 + eps) * weight over the last dimension; with a residual, of x +
    residual, and that sum is returned, too.

    x (.., N): bfloat16, float16 or float32, of any strides; computed in float32, each row read
    once. weight (N,): any of these dtypes. residual: as x. Differentiable once in all of them.
    Raises TypeError or ValueError, with one sentence that names the argument, for arguments that do
    not fit, and where there is no NVIDIA GPU from Ampere on.

    Returns y, as x, or (y, x + residual). Source: Zhang and Sennrich, Root mean square layer
    normalization, 2019.
    """
    return _norm(False, x, weight, None, residual, eps)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, as
    torch.nn.functional.layer_norm; with a residual, of x + residual, and that sum is returned, too.

    x, weight, residual and errors as of `cutex.rms_norm`; bias (N,) as weight. The variance is
    that of differences from the mean, so that rows far from 0 lose nothing.
    """
    return _norm(True, x, weight, bias, residual, eps)


def _norm(
    centred: bool, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    residual: Tensor | None, eps: float,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    check_rows("x", x)
    if isinstance(eps, bool) or not isinstance(eps, float | int):
        raise TypeError(f"eps must be a number, got {type(eps).__name__}")
    for name, v in (("weight", weight), ("bias", bias)):
        if v is not None:
            check_vector(name, v, x)
    if residual is not None:
        check_alike("residual", residual, "x", x)
    y, summed, _, _ = torch.ops.cutex.norm(x, weight, bias, residual, float(eps), centred)
    return y if residual is None else (y, summed)


def _given(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: x for name, x in tensors.items() if x is not None}


def _name(x: Tensor | None) -> str:
    found = None if x is None else of_torch(x.dtype)
    return "" if found is None else found.name


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    eps: float, centred: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    from cutex.kernels.row.norm import Norm, NormConfig

    arch = arch_of(x.device, "cutex.layer_norm" if centred else "cutex.rms_norm")
    y, summed, mean, rstd = _fake(x, weight, bias, residual, eps, centred)
    if not x.numel():
        return y, summed, mean.zero_(), rstd.fill_(eps**-0.5 if eps > 0 else torch.inf)
    rows = {"x": as_rows(x), "y": as_rows(y)}
    if residual is not None:
        rows |= {"residual": as_rows(residual), "summed": as_rows(summed)}
    vectors = {n: v.contiguous() for n, v in _given(weight=weight, bias=bias).items()}
    tile = tile_of([*rows.values()], [*vectors.values()], arch)
    config = NormConfig(tile, centred, residual is not None, _name(weight), _name(bias), saves=True)
    given = rows | vectors | {"mean": mean.view(-1), "rstd": rstd.view(-1)}
    optional = (given[name] for name in config.optional)
    launch(Norm, config, rows["x"], arch, rows["y"], *optional, eps)
    return y, summed, mean, rstd


def _fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    eps: float, centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    def of_rows(wanted: bool) -> Tensor:
        shape = x.shape[:-1] if wanted else (0,)
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    summed = x.new_empty(0) if residual is None else empty_rows(x)
    return empty_rows(x), summed, of_rows(centred), of_rows(True)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, residual, _, centred = inputs
    _, summed, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x if residual is None else summed, weight, bias, mean, rstd)
    ctx.has_residual, ctx.centred = residual is not None, centred


def _backward(ctx: Any, dy: Tensor, dsummed: Tensor, *_: Any) -> tuple[Any, ...]:
    x, weight, bias, mean, rstd = ctx.saved_tensors
    given = dsummed if ctx.has_residual else None
    dx, dweight, dbias = torch.ops.cutex.norm_gradient(
        x, dy, weight, bias, mean, rstd, given, ctx.centred
    )
    return (
        dx, dweight if weight is not None else None, dbias if bias is not None else None,
        dx if ctx.has_residual else None, None, None,
    )  # fmt: skip


def _gradient(
    x: Tensor, dy: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor,
    dsummed: Tensor | None, centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from cutex.kernels.row.norm_backward import NormBackward, NormBackwardConfig

    check_alike("dy", dy, "x", x)
    arch = arch_of(x.device, "cutex.layer_norm" if centred else "cutex.rms_norm")
    dx, dweight, dbias = _fake_gradient(x, dy, weight, bias, mean, rstd, dsummed, centred)
    if not x.numel():
        return dx, dweight.zero_(), dbias.zero_()
    rows = {"x": as_rows(x), "dy": as_rows(dy), "dx": as_rows(dx)}
    if dsummed is not None:
        rows["dsummed"] = as_rows(dsummed)
    vectors = {"weight": weight.contiguous()} if weight is not None else {}
    # NOTE: the columns of a thread are those of all its rows, so rows may not shift
    tile = tile_of([*rows.values()], [*vectors.values()], arch, shifts=False)
    config = NormBackwardConfig(tile, centred, _name(weight), _name(bias), dsummed is not None)
    groups = min(
        -(-rows["x"].shape[0] // tile.rows), _ctas(x.device, arch) // tile.ctas
    ) * tile.rows  # fmt: skip
    given = rows | vectors | {"mean": mean.view(-1), "dweight": dweight, "dbias": dbias}
    for name in config.sums:
        given[f"{name}_parts"] = x.new_empty(groups, x.shape[-1], dtype=torch.float32)
    optional = (given[name] for name in config.optional)
    launch(
        NormBackward, config, rows["x"], arch, rows["dy"], rows["dx"], rstd.view(-1), *optional,
        groups,
    )  # fmt: skip
    return dx, dweight, dbias


@lru_cache
def _ctas(device: torch.device, arch_name: str) -> int:
    """The CTAs that share the rows of a gradient: as many as fill the GPU."""
    from cutex.arch import arch

    if device.type != "cuda":
        return GROUPS * arch(arch_name).num_sms
    return GROUPS * torch.cuda.get_device_properties(device).multi_processor_count


def _fake_gradient(
    x: Tensor, dy: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor,
    dsummed: Tensor | None, centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    def like(v: Tensor | None) -> Tensor:
        return x.new_empty(0) if v is None else torch.empty(v.shape, dtype=v.dtype, device=x.device)

    return empty_rows(x), like(weight), like(bias)


define(
    "norm_gradient",
    "(Tensor x, Tensor dy, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, "
    "Tensor? dsummed, bool centred) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    _gradient,
    _fake_gradient,
)
define(
    "norm",
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, float eps, bool centred) "
    "-> (Tensor y, Tensor summed, Tensor mean, Tensor rstd)",
    _forward,
    _fake,
    _setup,
    _backward,
)
