"""Grouped products as torch sees them: registered operators with fakes, derivatives and FLOPs.

    grouped_rows    rows of each group times its matrix
    grouped_sums    sums over the rows of each group

Each is the other's gradient. Gradients of rows that belong to no group are zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cutex.ops.grouped import launch
from cutex.ops.grouped.checks import check_apart
from cutex.ops.plain import bare
from cutex.ops.row.operators import define, library
from cutex.ops.written import written

EIGHT = 8  # rows of ones whose product with a gradient is that of a bias


def run_rows(
    x: Tensor, w: Tensor, edges: Tensor, bias: Tensor | None, activation: str | None,
    padded: bool, zeros: bool, ragged: bool = False,
) -> Tensor:  # fmt: skip
    """Launch the product of rows, and with `zeros` that of the zeros beside them; ragged: as of
    launch.rows."""
    out = _fake_rows(x, w, edges, bias, activation, padded, zeros)
    if out.numel() == 0:
        launch.arch_for(x)
        return out
    flat = out.flatten(0, -2)
    launch.rows(x.flatten(0, -2), w, edges, flat, (bias, activation, padded), ragged=ragged)
    if zeros:
        launch.zeros(flat, edges, padded)
    return out


def _fake_rows(
    x: Tensor, w: Tensor, edges: Tensor, bias: Tensor | None, activation: str | None,
    padded: bool, zeros: bool, ragged: bool = False,
) -> Tensor:  # fmt: skip
    n = w.shape[2]
    if activation is not None and activation.startswith("gated_"):
        n = n // 2
    return launch.empty((*x.shape[:-1], n), x)


def _setup_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, edges, bias, activation, padded, _, ragged = inputs
    if activation is not None:
        raise ValueError("cutex::grouped_rows has no gradient of an activation: call grouped_mm")
    ctx.save_for_backward(x, w, edges, bias)
    ctx.padded, ctx.ragged = padded, ragged


def _rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w, edges, bias = ctx.saved_tensors
    of_x = of_w = of_bias = None
    product, sums, padded = torch.ops.cutex.grouped_rows, torch.ops.cutex.grouped_sums, ctx.padded
    needs_x, needs_w, _, needs_bias = ctx.needs_input_grad[:4]
    if needs_x:
        of_x = product(grad, w.mT, edges, None, None, padded, True, ctx.ragged)
    flat, rows = grad.flatten(0, -2), x.flatten(0, -2)
    if needs_w:
        if w.stride(-2) == 1:  # as memory has it
            of_w = sums(flat.mT, rows, edges, padded).mT
        else:
            of_w = sums(rows.mT, flat, edges, padded)
    if needs_bias:
        ones = flat.new_ones((flat.shape[0], EIGHT))
        of_bias = sums(ones.mT, flat, edges, padded)[:, 0].to(bias.dtype)
    return of_x, of_w, None, of_bias, None, None, None, None


def run_sums(x: Tensor, w: Tensor, edges: Tensor, padded: bool) -> Tensor:
    out = _fake_sums(x, w, edges, padded)
    if out.numel() == 0 or x.shape[1] == 0:
        launch.arch_for(x)
        return out.zero_()
    launch.sums(x, w, edges, out, padded)
    return out


def _fake_sums(x: Tensor, w: Tensor, edges: Tensor, padded: bool) -> Tensor:
    return launch.empty((edges.shape[0], x.shape[0], w.shape[1]), x)


def _setup_sums(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *saved, ctx.padded = inputs
    ctx.save_for_backward(*saved)


def _sums_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w, edges = ctx.saved_tensors
    product = torch.ops.cutex.grouped_rows
    of_x = of_w = None
    if ctx.needs_input_grad[0]:
        of_x = product(
            _padded(w, grad, ctx.padded), grad.mT, edges, None, None, ctx.padded, True, False
        )
        of_x = of_x.flatten(0, -2).mT
    if ctx.needs_input_grad[1]:
        of_w = product(
            _padded(x.mT, grad, ctx.padded), grad, edges, None, None, ctx.padded, True, False
        )
        of_w = of_w.flatten(0, -2)
    return of_x, of_w, None, None


def _padded(x: Tensor, of_groups: Tensor, padded: bool) -> Tensor:
    """x (T, N), as (E, M, N) if its rows are padded to equal parts."""
    return x.reshape(of_groups.shape[0], -1, x.shape[-1]) if padded else x


define(
    "grouped_rows",
    "(Tensor x, Tensor w, Tensor edges, Tensor? bias, str? activation, bool padded, bool zeros, "
    "bool ragged) -> Tensor",
    run_rows,
    _fake_rows,
    _setup_rows,
    _rows_backward,
)
define(
    "grouped_sums",
    "(Tensor x, Tensor w, Tensor edges, bool padded) -> Tensor",
    run_sums,
    _fake_sums,
    _setup_sums,
    _sums_backward,
)


def _run_gathered(
    x: Tensor, w: Tensor, edges: Tensor, index: Tensor | None, bias: Tensor | None,
    activation: str | None, row_scale: Tensor | None, ragged: bool,
) -> Tensor:  # fmt: skip
    out = _fake_gathered(x, w, edges, index, bias, activation, row_scale, ragged)
    options = bias, activation, False
    if out.numel() == 0:
        launch.arch_for(x)
    elif index is None:
        launch.rows(x, w, edges, out, options, row_scale, ragged)
    else:
        launch.gathered(x, index, w, edges, out, options, row_scale, ragged)
    return out


def _fake_gathered(
    x: Tensor, w: Tensor, edges: Tensor, index: Tensor | None, bias: Tensor | None,
    activation: str | None, row_scale: Tensor | None, ragged: bool,
) -> Tensor:  # fmt: skip
    like = x if index is None else x.new_empty((index.shape[0], 0))
    return _fake_rows(like, w, edges, bias, activation, False, False)


GATHERED = define(
    "grouped_gathered",
    "(Tensor x, Tensor w, Tensor edges, Tensor? index, Tensor? bias, str? activation, "
    "Tensor? row_scale, bool ragged) -> Tensor",
    _run_gathered,
    _fake_gathered,
)


def _run_scattered(
    out: Tensor, out_index: Tensor, x: Tensor, w: Tensor, edges: Tensor, bias: Tensor | None,
    activation: str | None, row_scale: Tensor | None, add: bool,
) -> None:  # fmt: skip
    x, w, edges, out, out_index = (bare(t) for t in (x, w, edges, out, out_index))
    check_apart(out, (x, w, edges, out_index, bias, row_scale))
    if x.shape[0] and out.numel():
        launch.scattered(x, w, edges, out, out_index, (bias, activation, add), row_scale)
    else:
        launch.arch_for(x)


def _fake_scattered(*_: Any) -> None:
    """Nothing: out is there."""


def _count_write(*args: Any) -> None:
    with torch._C._AutoDispatchBelowADInplaceOrView():
        torch.ops.cutex.grouped_scattered(*args)
    written(args[0])


library.define(
    "grouped_scattered(Tensor(a!) out, Tensor out_index, Tensor x, Tensor w, Tensor edges, "
    "Tensor? bias, str? activation, Tensor? row_scale, bool add) -> ()"
)
for _key in ("CUDA", "CPU"):
    library.impl("grouped_scattered", torch.no_grad()(_run_scattered), _key)
library.impl("grouped_scattered", _count_write, "ADInplaceOrView")
torch.library.register_fake("cutex::grouped_scattered")(_fake_scattered)


def _rows_flops(x: Any, w: Any, *_: Any, **__: Any) -> int:
    """The FLOPs if all rows belong to a group: the shapes know no more."""
    return 2 * torch.Size(x).numel() * w[2]


def _sums_flops(x: Any, w: Any, *_: Any, **__: Any) -> int:
    return 2 * x[0] * w[0] * w[1]


register_flop_formula(torch.ops.cutex.grouped_rows)(_rows_flops)
register_flop_formula(torch.ops.cutex.grouped_sums)(_sums_flops)


def grouped_rows(
    x: Tensor, w: Tensor, edges: Tensor, bias: Tensor | None, activation: str | None,
    padded: bool, ragged: bool = False,
) -> Tensor:  # fmt: skip
    """The rows of each group of x times its matrix."""
    return torch.ops.cutex.grouped_rows(x, w, edges, bias, activation, padded, False, ragged)


def grouped_sums(x: Tensor, w: Tensor, edges: Tensor) -> Tensor:
    """The columns of each group of x times its rows of w."""
    return torch.ops.cutex.grouped_sums(x, w, edges, False)
