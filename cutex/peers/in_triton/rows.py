"""Softmax and norms of rows in Triton: a program holds a row in registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

MOST = 65536  # columns that the registers of a program hold


@triton.jit
def softmax_of_row(x, y, columns, ldx, ldy, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    values = tl.load(x + row * ldx + at, mask=at < columns, other=float("-inf")).to(tl.float32)
    values = tl.exp2((values - tl.max(values, 0)) * 1.4426950408889634)
    values = values / tl.sum(values, 0)
    tl.store(y + row * ldy + at, values.to(y.dtype.element_ty), mask=at < columns)


@triton.jit
def norm_of_row(
    x, weight, bias, y, columns, eps, ldx, ldy,
    CENTRED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * ldx + at, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        values = tl.where(inside, values - tl.sum(values, 0) / columns, 0.0)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / columns + eps)
    values = values * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        values = values + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * ldy + at, values.to(y.dtype.element_ty), mask=inside)


def softmax(problem: Any) -> Callable[..., Any]:
    """A launch of x (M, N) and y."""
    how = _launch(problem.columns)

    def launch(x: torch.Tensor, y: torch.Tensor) -> None:
        softmax_of_row[(x.shape[0],)](x, y, x.shape[1], x.stride(0), y.stride(0), **how)

    return launch


def norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, eps: float = 1e-6,
    centred: bool = False, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The RMS norm of the rows of x (M, N), or with `centred` their layer norm."""
    y = torch.empty_like(x) if out is None else out
    norm_of_row[(x.shape[0],)](
        x, weight, weight if bias is None else bias, y, x.shape[1], eps, x.stride(0), y.stride(0),
        CENTRED=centred, BIAS=bias is not None, **_launch(x.shape[1]),
    )  # fmt: skip
    return y


def rms_norm(problem: Any) -> Callable[..., Any]:
    """A launch of x (M, N), weight (N) and y."""
    _launch(problem.columns)

    def launch(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
        norm(x, weight, out=y)

    return launch


def _launch(columns: int) -> dict[str, int]:
    if columns > MOST:
        raise ValueError(f"columns={columns}: this Triton kernel holds {MOST} of a row")
    block = triton.next_power_of_2(columns)
    return {"BLOCK": block, "num_warps": min(32, max(4, block // 1024))}
