"""`cutex.cross_entropy`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutex.ops.row.operators import define
from cutex.ops.row.rows import arch_of, as_rows, check_rows, empty_rows, launch, part_of, tile_of

REDUCTIONS = ("mean", "sum", "none")
INT32 = -(2**31), 2**31 - 1


def cross_entropy(
    x: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """The cross-entropy of logits and class numbers, as torch.nn.functional.cross_entropy, plus
    `z_loss` times the squared logarithm of the sum of exponentials.

    x (M, N): bfloat16, float16 or float32; computed in float32, each row read once. target (M,):
    int32 or int64, each in [0, N) or ignore_index, whose rows are 0 and no part of the mean; any
        other gives NaN.
    reduction: "mean", "sum" or "none". Differentiable once in x. Raises TypeError or ValueError,
    with one sentence that names the argument, for arguments that do not fit, and where there is no
    NVIDIA GPU from Ampere on.

    Returns float32: the loss, or for "none" that of each row (M,).
    """
    check_rows("x", x)
    if x.dim() != 2:
        raise ValueError(f"x must have rows of logits (M, N), got {x.dim()} dimensions")
    if not isinstance(target, Tensor) or target.dtype not in (torch.int32, torch.int64):
        got = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise TypeError(f"target must be a tensor of int32 or int64, got {got}")
    if target.shape != x.shape[:1] or target.device != x.device:
        raise ValueError(
            f"target must have shape {tuple(x.shape[:1])} on {x.device}, got "
            f"{tuple(target.shape)} on {target.device}"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is not one of {', '.join(REDUCTIONS)}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing} must be from 0 to 1")
    if not INT32[0] <= ignore_index <= INT32[1]:
        raise ValueError(f"ignore_index={ignore_index} must be a 32-bit integer")
    loss, _ = torch.ops.cutex.cross_entropy(
        x, target, ignore_index, float(label_smoothing), float(z_loss)
    )
    if reduction == "none":
        return loss
    total = loss.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def _forward(
    x: Tensor, target: Tensor, ignored: int, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    from cutex.kernels.row.cross_entropy import CrossEntropy, CrossEntropyConfig

    arch = arch_of(x.device, "cutex.cross_entropy")
    loss, lse = _fake(x, target, ignored, smoothing, z_loss)
    if x.numel():
        rows = as_rows(x)
        config = CrossEntropyConfig(tile_of([rows], (), arch), smoothing != 0)
        labels = _labels(target)
        launch(CrossEntropy, config, rows, arch, labels, lse, loss, smoothing, z_loss, ignored)
    return loss, lse


def _labels(target: Tensor) -> Tensor:
    """target in int32; a number that it does not hold stays one that no class has."""
    narrow = target if target.dtype == torch.int32 else target.clamp(*INT32).to(torch.int32)
    return narrow.contiguous()


def _fake(
    x: Tensor, target: Tensor, ignored: int, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    def of_rows() -> Tensor:
        return torch.empty(x.shape[0], dtype=torch.float32, device=x.device)

    return of_rows(), of_rows()


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, target, *ctx.options = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, target, output[1])


def _backward(ctx: Any, dloss: Tensor, _: Any) -> tuple[Any, ...]:
    dx = torch.ops.cutex.cross_entropy_gradient(*ctx.saved_tensors, dloss, *ctx.options)
    return dx, None, None, None, None


def _gradient(
    x: Tensor, target: Tensor, lse: Tensor, dloss: Tensor, ignored: int, smoothing: float,
    z_loss: float,
) -> Tensor:  # fmt: skip
    from cutex.kernels.row.cross_entropy import CrossEntropyBackward, CrossEntropyConfig

    arch, dx = arch_of(x.device, "cutex.cross_entropy"), empty_rows(x)
    if x.numel():
        rows = as_rows(x), as_rows(dx)
        config, labels = CrossEntropyConfig(part_of(rows)), _labels(target)
        launch(
            CrossEntropyBackward, config, rows[0], arch, rows[1], labels, lse, dloss.contiguous(),
            smoothing, z_loss, ignored,
        )  # fmt: skip
    return dx


_OPTIONS = "int ignored, float smoothing, float z_loss"
define(
    "cross_entropy_gradient",
    f"(Tensor x, Tensor target, Tensor lse, Tensor dloss, {_OPTIONS}) -> Tensor",
    _gradient,
    lambda x, *_: empty_rows(x),
)
define(
    "cross_entropy",
    f"(Tensor x, Tensor target, {_OPTIONS}) -> (Tensor loss, Tensor lse)",
    _forward,
    _fake,
    _setup,
    _backward,
)
