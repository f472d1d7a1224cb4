"""Rows by an index, and sums of rows by an index: each is the other's gradient.

Torch's `index_select` has a gradient that adds rows atomically, each sum rounded to their dtype; of
rows of ones a bfloat16 sum ends at 256. These sums are in float32, in an order that is always the
same (docs/facts/grouped.md#grouped-gather-gradient).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutex.ops.grouped.launch import empty
from cutex.ops.grouped.summed import summed
from cutex.ops.row.operators import define


def gathered_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index], of x (T, K) and index (R,)."""
    return torch.ops.cutex.grouped_gathered_rows(x, index)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, index)


def _fake_gather(x: Tensor, index: Tensor) -> Tensor:
    return x.new_empty((index.shape[0], *x.shape[1:]))


def _setup_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, index = inputs
    ctx.save_for_backward(index)
    ctx.count = x.shape[0]


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (index,) = ctx.saved_tensors
    return torch.ops.cutex.grouped_summed_rows(grad, index, ctx.count), None


def _sum(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """out (count, K), out[i] the sum of the rows whose index is i."""
    out = _fake_sum(rows, index, count)
    if not rows.numel() or not count:
        return out.zero_()
    summed(rows, index, out)
    return out


def _fake_sum(rows: Tensor, index: Tensor, count: int) -> Tensor:
    return empty((count, *rows.shape[1:]), rows)


def _setup_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return gathered_rows(grad, ctx.saved_tensors[0]), None, None


define(
    "grouped_gathered_rows",
    "(Tensor x, Tensor index) -> Tensor",
    _gather,
    _fake_gather,
    _setup_gather,
    _gather_backward,
)
define(
    "grouped_summed_rows",
    "(Tensor rows, Tensor index, int count) -> Tensor",
    _sum,
    _fake_sum,
    _setup_sum,
    _sum_backward,
)
