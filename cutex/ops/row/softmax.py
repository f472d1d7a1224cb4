"""`cutex.softmax`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutex.ops.row.launches import Calls, Launch, Run
from cutex.ops.row.operators import define
from cutex.ops.row.rows import arch_of, check_alike, check_rows, empty_rows, tile_of

_is_compiling = torch.compiler.is_dynamo_compiling


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x - max) / sum of exp(x - max), over `dim`, as torch.softmax.

    x: bfloat16, float16 or float32, of any shape and strides; computed in float32, each row read
    once. A dim that is not contiguous is copied first. Differentiable once. Raises TypeError or
    ValueError, with one sentence, for arguments that do not fit, for rows that no tile holds (of
    some million elements), and where there is no NVIDIA GPU from Ampere on.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
    """
    if not _is_compiling() and dim.__class__ is int and dim == -1:
        found = _forward.again((), x)
        if found is not None:
            return found
    check_rows("x", x)
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"dim must be an int, got {type(dim).__name__}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim={dim}: x has {x.dim()} dimensions")
    if dim not in (-1, x.dim() - 1):
        return softmax(x.movedim(dim, -1)).movedim(-1, dim)
    return SOFTMAX(x)


def _plan(_: Any, x: Tensor) -> Run:
    from cutex.kernels.row.softmax import Softmax

    arch = arch_of(x.device, "cutex.softmax")
    if not x.numel():
        return empty_rows
    launch = Launch(x.device)
    rows = [*launch.rows(x=x), launch.makes("y", x.shape, x.dtype, 2)]
    kernel = Softmax, tile_of(rows, (), arch), arch
    return launch.run(kernel, ("x", "y"), returns=("y",))


def _plan_gradient(_: Any, y: Tensor, dy: Tensor) -> Run:
    from cutex.kernels.row.softmax import SoftmaxBackward

    check_alike("dy", dy, "y", y)
    arch = arch_of(y.device, "cutex.softmax")
    if not y.numel():
        return lambda y, dy: empty_rows(y)
    launch = Launch(y.device)
    rows = [*launch.rows(y=y, dy=dy), launch.makes("dx", y.shape, y.dtype, 2)]
    kernel = SoftmaxBackward, tile_of(rows, (), arch), arch
    return launch.run(kernel, ("y", "dy", "dx"), returns=("dx",))


_forward, _gradient = Calls(_plan), Calls(_plan_gradient)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, dy: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors
    return GRADIENT(y, dy)


GRADIENT = define(
    "softmax_gradient", "(Tensor y, Tensor dy) -> Tensor", lambda y, dy: _gradient((), y, dy),
    lambda y, dy: empty_rows(y),
)  # fmt: skip
SOFTMAX = define(
    "softmax", "(Tensor x) -> Tensor", lambda x: _forward((), x), empty_rows, _setup, _backward
)
