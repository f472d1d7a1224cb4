"""Softmax of scaled and masked rows as an operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutex.ops.row.launches import Calls, Launch, Run
from cutex.ops.row.operators import define
from cutex.ops.row.rows import arch_of, check_alike, dtype_of, empty_rows, tile_of

VECTOR = 16  # bytes
RANK = 3  # sizes of a mask's rows, as the kernel takes them


def kept(mask: Tensor) -> Tensor:
    """A mask as it is passed: a boolean one as bytes."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def _as_rows_of(mask: Tensor, shape: torch.Size) -> Tensor:
    """The mask, broadcast to x's `shape`, as (outer, middle, inner, N) of any strides: a view, or a
    copy where there is none."""
    wide = mask.expand(shape)
    merged: list[tuple[int, int]] = []  # sizes and strides, the innermost last
    for size, stride in zip(wide.shape[:-1], wide.stride()[:-1], strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = merged[-1][0] * size, stride
        else:
            merged.append((size, stride))
    if len(merged) > RANK:
        return wide.contiguous().view(1, 1, -1, shape[-1])
    merged = [(1, 0)] * (RANK - len(merged)) + merged
    sizes, strides = zip(*merged, (shape[-1], wide.stride(-1)), strict=True)
    return wide.as_strided(sizes, strides)


def _plan(options: tuple[float, bool], x: Tensor, mask: Tensor | None) -> Run:
    from cutex.kernels.row.softmax_masked import SoftmaxMasked, SoftmaxMaskedConfig

    scale, causal = options
    arch = arch_of(x.device, "cutex.softmax")
    if not x.numel():
        return lambda x, *_: empty_rows(x)
    launch = Launch(x.device)
    rows = launch.rows(x=x)
    order, name, vectors = ["x"], "", False
    if mask is not None:
        shape = x.shape
        passed = launch.passes("mask", mask, lambda mask: _as_rows_of(mask, shape))
        name = dtype_of(mask)
    rows.append(launch.makes("y", x.shape, x.dtype, 2))
    tile = tile_of(rows, (), arch)
    if mask is not None:
        vectors = tile.aligned and _by_vectors(passed, tile.width)
    order += ["y", "mask"] if name else ["y"]
    config = SoftmaxMaskedConfig(tile, name, vectors, causal)
    queries = x.shape[-2] if x.dim() > 1 else 1
    return launch.run((SoftmaxMasked, config, arch), order, (scale, queries), ("y",))


def _by_vectors(mask: Tensor, width: int) -> bool:
    """Whether each row of the mask begins with, and has, whole vectors of so many elements."""
    unit = min(width * mask.element_size(), VECTOR)
    places = mask.data_ptr() | mask.shape[-1] * mask.element_size()
    for size, stride in zip(mask.shape[:-1], mask.stride()[:-1], strict=True):
        places |= stride * mask.element_size() if size > 1 else 0
    return mask.stride(-1) == 1 and places % unit == 0


def _plan_gradient(options: tuple[float], y: Tensor, dy: Tensor) -> Run:
    from cutex.kernels.row.softmax_masked import SoftmaxScaledBackward

    check_alike("dy", dy, "y", y)
    arch = arch_of(y.device, "cutex.softmax")
    if not y.numel():
        return lambda y, dy: empty_rows(y)
    launch = Launch(y.device)
    rows = [*launch.rows(y=y, dy=dy), launch.makes("dx", y.shape, y.dtype, 2)]
    kernel = SoftmaxScaledBackward, tile_of(rows, (), arch), arch
    return launch.run(kernel, ("y", "dy", "dx"), options, ("dx",))


_forward, _gradient = Calls(_plan), Calls(_plan_gradient)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, mask, ctx.scale, _ = inputs
    ctx.mask = None if mask is None else (mask.shape, mask.dtype)
    ctx.save_for_backward(output)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (y,) = ctx.saved_tensors
    of_x, of_mask = ctx.needs_input_grad[:2]
    if not of_mask:
        return GRADIENT(y, dy, ctx.scale), None, None, None
    ds = GRADIENT(y, dy, 1.0)  # of the scores, which the mask is added to
    shape, dtype = ctx.mask
    return ds * ctx.scale if of_x else None, ds.float().sum_to_size(shape).to(dtype), None, None


GRADIENT = define(
    "softmax_scaled_gradient",
    "(Tensor y, Tensor dy, float scale) -> Tensor",
    lambda y, dy, scale: _gradient((scale,), y, dy),
    lambda y, dy, scale: empty_rows(y),
)
MASKED = define(
    "softmax_masked",
    "(Tensor x, Tensor? mask, float scale, bool causal) -> Tensor",
    lambda x, mask, scale, causal: _forward((scale, causal), x, mask),
    lambda x, mask, scale, causal: empty_rows(x),
    _setup,
    _backward,
)
