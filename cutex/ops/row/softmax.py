"""`cutex.softmax`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutex.arch import kernels_of
from cutex.kernels.row import choose
from cutex.ops.number import number
from cutex.ops.row.launches import Calls, Launch, Run, bulk_groups, runs
from cutex.ops.row.operators import define
from cutex.ops.row.rows import (
    arch_of,
    check,
    check_alike,
    check_rows,
    dense_of,
    empty_rows,
    few_of,
    loads_of,
)
from cutex.ops.row.softmax_masked import MASKED, kept

_is_compiling = torch.compiler.is_dynamo_compiling


def softmax(
    x: Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """exp(x - max) / sum of exp(x - max) over `dim`, like torch.softmax; of x * scale + mask, if
    given.

    x: bfloat16, float16 or float32, any shape and strides; computed in float32, each row read once.
        If `dim` is not contiguous, x is copied first.
    mask: broadcasts to x. Boolean: True for elements that count; or bfloat16, float16 or float32,
        which is added. Requires the last dim.
    causal: over the last two dimensions (S, N), row s has columns up to N - S + s, like attention's
        causal mask; masked elements are not read. Requires the last dim.

    With a mask or causal, a row with nothing left is 0, as in attention; otherwise it is NaN, as in
    torch. Differentiable once, in x and in a mask that is added. Raises TypeError or ValueError, in
    one sentence, for arguments that are not supported, for rows too long for any tile (more than a
    million or so elements), and without an NVIDIA GPU from Ampere on.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
    """
    plain = mask is None and scale.__class__ is float and scale == 1.0 and causal is False
    if plain and not _is_compiling() and dim.__class__ is int and dim == -1:
        found = _forward.again((), x)
        if found is not None:
            return found
    check_rows("x", x)
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"dim must be an int, got {type(dim).__name__}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim={dim}: x has {x.dim()} dimensions")
    last = dim in (-1, x.dim() - 1)
    if plain:
        return SOFTMAX(x) if last else SOFTMAX(x.movedim(dim, -1)).movedim(-1, dim)
    _check_mask(x, mask, causal, last)
    scale = number("scale", scale)
    if mask is not None:
        mask = kept(mask)
    if last:
        return MASKED(x, mask, scale, causal)
    if mask is not None:
        mask = mask.expand(x.shape).movedim(dim, -1)
    return MASKED(x.movedim(dim, -1), mask, scale, causal).movedim(-1, dim)


def _check_mask(x: Tensor, mask: Any, causal: Any, last: bool) -> None:
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be a bool, got {type(causal).__name__}")
    if causal and (x.dim() < 2 or not last):
        raise ValueError("causal=True takes x of at least 2 dimensions, and its last dim")
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        check("mask", mask, x)
    if mask.device != x.device:
        raise ValueError(f"mask is on {mask.device}, not on {x.device} as x")
    try:
        fits = torch.broadcast_shapes(mask.shape, x.shape) == x.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, which does not broadcast to {tuple(x.shape)}"
        )


def _plan(_: Any, x: Tensor) -> Run:
    from cutex.kernels.row.softmax import Softmax
    from cutex.kernels.row.softmax_bulk import RowsBulkConfig, SoftmaxBulk
    from cutex.kernels.row.softmax_by_tickets import RowsTicketsConfig, SoftmaxByTickets
    from cutex.kernels.row.softmax_dense import DenseRowsConfig, SoftmaxDense

    arch = arch_of(x.device, "cutex.softmax")
    if not x.numel():
        return empty_rows
    launch = Launch(x.device)
    rows = [*launch.rows(x=x), launch.makes("y", x.shape, x.dtype, 2)]
    m, n = rows[0].shape
    given = m, n, 8 * x.element_size(), kernels_of(arch), *loads_of(rows, (), True)
    tile = few_of(rows, (), arch) or choose.softmax(*given)
    if not runs(Softmax, tile, rows[0], arch):
        tile = choose.softmax(*given, largest=choose.CLUSTER)
    dense = choose.dense_softmax(m, n, dense_of(rows), tile.aligned)
    widest = 0 if tile.aligned else dense_of(rows)
    if dense is not None:
        several = DenseRowsConfig(*dense)
        return launch.run((SoftmaxDense, several, arch), ("x", "y"), (), ("y",))
    for largest in (choose.LARGE_CLUSTER, choose.CLUSTER) if widest else ():
        by = choose.bulk_rows(m, n, widest, kernels_of(arch), largest=largest)
        if by is None:
            break
        draws = choose.rows_by_tickets(by)
        kind: type[SoftmaxBulk] = SoftmaxByTickets if draws else SoftmaxBulk
        config = (RowsTicketsConfig if draws else RowsBulkConfig)(*by)
        if runs(kind, config, rows[0], arch):
            if draws:
                launch.keeps("drawn", 2)
            groups = bulk_groups(kind, config, rows[0], arch)
            order = ("x", "y", "drawn")[: 2 + draws]
            return launch.run((kind, config, arch), order, (groups,), ("y",))
    kernel = Softmax, tile, arch
    return launch.run(kernel, ("x", "y"), returns=("y",))


def _plan_gradient(_: Any, y: Tensor, dy: Tensor) -> Run:
    from cutex.kernels.row.softmax import SoftmaxBackward

    check_alike("dy", dy, "y", y)
    arch = arch_of(y.device, "cutex.softmax")
    if not y.numel():
        return lambda y, dy: empty_rows(y)
    launch = Launch(y.device)
    rows = [*launch.rows(y=y, dy=dy), launch.makes("dx", y.shape, y.dtype, 2)]
    x = rows[0]
    tile = choose.softmax_gradient(
        x.shape[1], 8 * x.element_size(), kernels_of(arch), *loads_of(rows, (), True)
    )
    kernel = SoftmaxBackward, tile, arch
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
