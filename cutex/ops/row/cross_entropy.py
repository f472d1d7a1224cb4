"""`cutex.cross_entropy`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutex.arch import kernels_of
from cutex.kernels.row import choose
from cutex.ops.number import number
from cutex.ops.plain import check_strided
from cutex.ops.row.launches import Calls, Launch, Run, runs
from cutex.ops.row.operators import define, needs_nothing
from cutex.ops.row.rows import (
    arch_of,
    check_rows,
    dense_of,
    dtype_of,
    empty_rows,
    few_of,
    loads_of,
    part_of,
    sms_of,
    tile_of,
    walk_of,
)

if TYPE_CHECKING:
    from cutex.device.row.tile import RowTile

_is_compiling = torch.compiler.is_dynamo_compiling
REDUCTIONS = ("mean", "sum", "none")
FEW = 2  # losses for each thread of a CTA of rows, which the last one adds up
MANY = 8192  # losses, which several CTAs add up
WALKERS = 1.5  # rows for each SM, from which on a CTA walks along a long one: facts/rows.md
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
    """The cross-entropy of logits and class indices, like torch.nn.functional.cross_entropy, plus
    `z_loss` times the squared logarithm of the sum of exponentials.

    x: (M, N), bfloat16, float16 or float32; computed in float32, each row read once.
    target: (M,), int32 or int64, in [0, N), or ignore_index: such rows have loss 0 and do not count
        in the mean. Any other index gives NaN.
    reduction: "mean", "sum" or "none".

    Returns float32: the loss, or with "none" that of each row (M,). Differentiable once in x.
    Raises TypeError or ValueError, in one sentence that names the argument, for arguments that are
    not supported, and without an NVIDIA GPU from Ampere on.
    """
    options = (ignore_index, label_smoothing, z_loss, reduction, False)
    if not _is_compiling() and ignore_index.__class__ is int:
        found = _forward.again(options, x, target)
        if found is not None:
            return found
    check_rows("x", x)
    if x.dim() != 2:
        raise ValueError(f"x must have rows of logits (M, N), got {x.dim()} dimensions")
    if not x.shape[1]:
        raise ValueError("x has no columns: there must be at least one class")
    check_target(target, x)
    check_options(ignore_index, label_smoothing, reduction)
    given = number("label_smoothing", label_smoothing), number("z_loss", z_loss)
    if needs_nothing(x, target):
        return _forward((ignore_index, *given, reduction, False), x, target)
    return CROSS_ENTROPY(x, target, ignore_index, *given, reduction)[0]


def check_target(target: Any, x: Tensor) -> None:
    """Raise unless there is a class number for each row of x."""
    if not isinstance(target, Tensor) or target.dtype not in (torch.int32, torch.int64):
        got = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise TypeError(f"target must be a tensor of int32 or int64, got {got}")
    check_strided("target", target)
    if target.shape != x.shape[:1] or target.device != x.device:
        raise ValueError(
            f"target must have shape {tuple(x.shape[:1])} on {x.device}, got "
            f"{tuple(target.shape)} on {target.device}"
        )


def check_options(ignore_index: Any, label_smoothing: float, reduction: str) -> None:
    """Raise unless the options are those of a cross-entropy."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is not one of {', '.join(REDUCTIONS)}")
    if not 0 <= number("label_smoothing", label_smoothing) <= 1:
        raise ValueError(f"label_smoothing={label_smoothing} must be from 0 to 1")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int, got {type(ignore_index).__name__}")
    if not INT32[0] <= ignore_index <= INT32[1]:
        raise ValueError(f"ignore_index={ignore_index} must be a 32-bit integer")


def _plan(options: tuple[Any, ...], x: Tensor, target: Tensor) -> Run:
    """The plan of a loss; if it `saves`, with the results of the operator."""
    from cutex.kernels.row.cross_entropy import RESIDENT
    from cutex.kernels.row.cross_entropy_in_turns import CrossEntropyInTurns

    ignored, smoothing, z_loss, reduction, saves = options
    arch = arch_of(x.device, "cutex.cross_entropy")
    if not x.shape[0]:

        def of_no_rows(x: Tensor, target: Tensor) -> Any:
            loss, lse, count = _fake(x, target, *options[:4])
            loss.fill_(torch.nan if reduction == "mean" else 0.0)
            return (loss, lse, count.zero_()) if saves else loss

        return of_no_rows
    launch = Launch(x.device)
    rows = launch.rows(x=x)
    launch.flat(target=target)
    launch.makes("lse", x.shape[:1], torch.float32)
    launch.makes("losses", x.shape[:1], torch.float32)
    for name in ("loss", "count"):
        launch.makes(name, (), torch.float32, 1)
    kind, config = _kernel_of(rows[0], arch, smoothing != 0, dtype_of(target), reduction)
    totals = _totals(launch, config.adds) if config.reduced else ()
    order = ["x", "target", "lse", "losses", *totals]
    numbers: list[float | int] = [float(smoothing), float(z_loss), ignored]
    if issubclass(kind, CrossEntropyInTurns):
        launch.keeps("drawn", 1)
        order.append("drawn")
        at_once = sms_of(x.device, arch) * (RESIDENT // config.tile.num_threads)
        numbers.insert(0, min(len(x), at_once))
    returns = ["loss" if totals else "losses", *(("lse", "count") if saves else ())]
    return launch.run((kind, config, arch), order, numbers, returns)


def _kernel_of(
    x: Tensor, arch: str, smoothed: bool, target: str, reduction: str
) -> tuple[Any, Any]:
    """The kernel's class and config for rows x (M, N)."""
    from cutex.kernels.row.cross_entropy import CrossEntropy, CrossEntropyConfig
    from cutex.kernels.row.cross_entropy_dense import CrossEntropyDense, DenseLossesConfig
    from cutex.kernels.row.cross_entropy_in_turns import CrossEntropyInTurns

    (m, n), loads = x.shape, loads_of([x], (), True)
    if reduction != "none" and (found := _in_cluster(x, arch, smoothed, target, reduction)):
        return found
    tile = choose.cross_entropy(n, 8 * x.element_size(), kernels_of(arch), *loads)
    few = few_of([x], (), arch)
    if not tile.aligned and few is not None and few.ctas == 1:
        tile = few
    # CTAs that meet wait for each other; one alone does not, where each SM has several rows
    alone = tile.ctas == 1 or m >= WALKERS * sms_of(x.device, arch)
    dense = choose.dense_losses(m, n, dense_of([x]), tile.aligned) if alone else None
    walks = alone and dense is None and tile.ctas > 1
    turns = _in_turns(x, arch, loads) if walks else None
    if walks:
        tile = turns or walk_of([x], sms_of(x.device, arch))
    elif dense is not None:
        tile = dense.tile
    given = tile, smoothed, target, reduction, walks, _who_adds(m, tile.num_threads)
    if dense is not None:
        return CrossEntropyDense, DenseLossesConfig(*given, *dense[1:])
    kind = CrossEntropy if turns is None else CrossEntropyInTurns
    return kind, CrossEntropyConfig(*given)


def _in_turns(x: Tensor, arch: str, loads: tuple[int, bool]) -> RowTile | None:
    """The tile of CTAs that stay and walk along the rows of x (M, N); None where others do."""
    (m, n), bits = x.shape, 8 * x.element_size()
    return choose.walk_in_turns(n, bits, *loads, m / sms_of(x.device, arch))


def _in_cluster(
    x: Tensor, arch: str, smoothed: bool, target: str, reduction: str
) -> tuple[Any, Any] | None:
    """The kernel's class and config for a sum of few losses of rows x, all of one cluster; None for
    others."""
    from cutex.kernels.row.cross_entropy import CLUSTER
    from cutex.kernels.row.cross_entropy_in_cluster import LossInCluster, LossInClusterConfig

    unit, _ = loads_of([x], (), False)
    for largest in (choose.LARGE_CLUSTER, choose.CLUSTER):
        m, n = x.shape
        chosen = choose.losses_in_cluster(m, n, unit, kernels_of(arch), largest)
        if chosen is None:
            return None
        tile, ctas = chosen
        config = LossInClusterConfig(tile, smoothed, target, reduction, False, CLUSTER, ctas)
        if runs(LossInCluster, config, x, arch):
            return LossInCluster, config
    return None


def _who_adds(rows: int, threads: int) -> str:
    """Which kernel adds up the losses of this many rows, in CTAs with this many threads."""
    from cutex.kernels.row.cross_entropy import LAST, ONE, SHARED

    if rows <= FEW * threads:
        return LAST
    return SHARED if rows > MANY else ONE


def _totals(launch: Launch, adds: str) -> tuple[str, ...]:
    """The names of the additional operands that a sum of losses takes."""
    from cutex.kernels.row.cross_entropy import LAST, SHARED, TOTAL_PARTS

    if adds == SHARED:
        launch.makes("parts", (2, TOTAL_PARTS), torch.float32)
        return "loss", "count", "parts"
    if adds == LAST:
        launch.keeps("counter", 1)
        return "loss", "count", "counter"
    return "loss", "count"


def _fake(
    x: Tensor, target: Tensor, ignored: int, smoothing: float, z_loss: float, reduction: str
) -> tuple[Tensor, Tensor, Tensor]:
    def made(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    rows = x.shape[0]
    return made(rows) if reduction == "none" else made(), made(rows), made()


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, target, *ctx.options = inputs
    _, lse, count = output
    ctx.mark_non_differentiable(lse, count)
    ctx.set_materialize_grads(False)  # of these, zeros as large as they are
    ctx.save_for_backward(x, target, lse, count)


def _backward(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dloss is None:  # what comes behind gave the loss no gradient
        return (None,) * 6
    x, target, lse, count = ctx.saved_tensors
    dx = GRADIENT(x, target, lse, dloss, count, *ctx.options)
    return dx, None, None, None, None, None


def _plan_gradient(
    options: tuple[Any, ...], x: Tensor, target: Tensor, lse: Tensor, dloss: Tensor, count: Tensor
) -> Run:
    from cutex.kernels.row.cross_entropy import CrossEntropyBackward, CrossEntropyConfig

    ignored, smoothing, z_loss, reduction, in_place = options
    arch = arch_of(x.device, "cutex.cross_entropy")
    if not x.numel():
        return lambda x, *_: x if in_place else empty_rows(x)
    launch = Launch(x.device)
    rows = launch.rows(x=x)
    launch.flat(target=target, lse=lse)
    launch.passes("dloss", dloss, lambda dloss: dloss.expand(lse.shape))
    launch.flat(count=count)
    if not in_place:
        rows.append(launch.makes("dx", x.shape, x.dtype))
    tile = part_of(rows)
    if x.shape[1] <= tile.columns:  # several rows to a CTA
        tile = tile_of(rows, (), arch)
    config = CrossEntropyConfig(tile, target=dtype_of(target), reduction=reduction)
    kernel = CrossEntropyBackward, config, arch
    counted = ("count",) if reduction == "mean" else ()
    return launch.run(
        kernel,
        ("x", "x" if in_place else "dx", "target", "lse", "dloss", *counted),
        (float(smoothing), float(z_loss), ignored),
        () if in_place else ("dx",),
    )


_forward, _gradient = Calls(_plan), Calls(_plan_gradient)


def run(x: Tensor, target: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, the logarithm of each row's sum of exponentials, and the count, of checked ones."""
    found: tuple[Tensor, Tensor, Tensor] = _forward((*options, True), x, target)
    return found


def gradient_in_place(options: tuple[Any, ...], x: Tensor, *given: Tensor) -> None:
    """Write the gradient of a loss to its logits x; given: target, lse, dloss and count."""
    _gradient((*options, True), x, *given)


_OPTIONS = "int ignored, float smoothing, float z_loss, str reduction"
GRADIENT = define(
    "cross_entropy_gradient",
    f"(Tensor x, Tensor target, Tensor lse, Tensor dloss, Tensor count, {_OPTIONS}) -> Tensor",
    lambda *args: _gradient((*args[5:], False), *args[:5]),
    lambda x, *_: empty_rows(x),
)
CROSS_ENTROPY = define(
    "cross_entropy",
    f"(Tensor x, Tensor target, {_OPTIONS}) -> (Tensor loss, Tensor lse, Tensor count)",
    run,
    _fake,
    _setup,
    _backward,
)
