"""`cutex.softmax`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutex.ops.row.operators import define
from cutex.ops.row.rows import (
    arch_of,
    as_rows,
    check_alike,
    check_rows,
    empty_rows,
    launch,
    tile_of,
)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x - max) / sum of exp(x - max), over `dim`, as torch.softmax.

    x: bfloat16, float16 or float32, of any shape and strides; computed in float32, each row read
    once. A dim that is not contiguous is copied first. Differentiable once. Raises TypeError or
    ValueError, with one sentence, for arguments that do not fit, for rows that no tile holds (of
    some million elements), and where there is no NVIDIA GPU from Ampere on.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
    """
    check_rows("x", x)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim={dim}: x has {x.dim()} dimensions")
    if dim not in (-1, x.dim() - 1):
        return softmax(x.movedim(dim, -1)).movedim(-1, dim)
    return torch.ops.cutex.softmax(x)


def _forward(x: Tensor) -> Tensor:
    from cutex.kernels.row.softmax import Softmax

    arch, y = arch_of(x.device, "cutex.softmax"), empty_rows(x)
    if x.numel():
        rows = as_rows(x), as_rows(y)
        launch(Softmax, tile_of(rows, (), arch), rows[0], arch, rows[1])
    return y


def _gradient(y: Tensor, dy: Tensor) -> Tensor:
    from cutex.kernels.row.softmax import SoftmaxBackward

    check_alike("dy", dy, "y", y)
    arch, dx = arch_of(y.device, "cutex.softmax"), empty_rows(y)
    if y.numel():
        rows = as_rows(y), as_rows(dy), as_rows(dx)
        launch(SoftmaxBackward, tile_of(rows, (), arch), *rows[:1], arch, *rows[1:])
    return dx


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, dy: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors
    return torch.ops.cutex.softmax_gradient(y, dy)


define(
    "softmax_gradient", "(Tensor y, Tensor dy) -> Tensor", _gradient, lambda y, dy: empty_rows(y)
)
define("softmax", "(Tensor x) -> Tensor", _forward, empty_rows, _setup, _backward)
