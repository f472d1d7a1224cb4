"""`cutex.linear_cross_entropy`: the last linear layer and its cross-entropy, in chunks of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cutex.arch import kernels_of
from cutex.kernels.row import choose_losses
from cutex.ops.device import arch_of
from cutex.ops.matmul.eager import matmul
from cutex.ops.number import number
from cutex.ops.plain import is_plain
from cutex.ops.row.cross_entropy import check_options, check_target, gradient_in_place
from cutex.ops.row.cross_entropy import run as run_plain
from cutex.ops.row.launches import Calls, Launch, Run, bulk_groups
from cutex.ops.row.operators import define
from cutex.ops.row.rows import arch_of as rows_arch_of
from cutex.ops.row.rows import check, dtype_of, loads_of, part_of, tile_of

if TYPE_CHECKING:
    from cutex.kernels.row.cross_entropy_in_place_bulk import InPlaceTicketsConfig

LOGITS = 512 << 20  # bytes of a chunk's logits
ROWS = 128  # of which a chunk is a multiple: those of a tile of the product
LEAST_ROWS = 1024  # of which a product keeps a GPU busy
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


class Loss(NamedTuple):
    """What a loss is of: the options of `cutex.cross_entropy`."""

    ignored: int
    smoothing: float
    z_loss: float
    reduction: str


def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk_rows: int | None = None,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:
    """cutex.cross_entropy(x @ w.T, target), without ever holding all logits in memory.

    x, w: (M, K) and (N, K), like torch.nn.Linear's weight; bfloat16, float16 or float32 (read as
        tf32), the same for both, any strides.
    target, ignore_index, label_smoothing, z_loss, reduction: as in `cutex.cross_entropy`. Logits
        are rounded to x's dtype, as a linear layer's are.
    chunk_rows: the rows whose logits exist at one time. By default as many as take 512 MiB, at
        least 1024; or all, if all logits take no more memory than the sums over chunks would.
    accum_dtype: of the sums over chunks that become w's gradient: float32, the default, which takes
        N * K float32 values beside the gradient; or w's dtype, in which they are rounded once per
        chunk.

    Returns float32: the loss, or with "none" that of each row (M,). Differentiable once in x and w.
    For "mean" and "sum" the gradients, where wanted, are computed together with the loss, each
    chunk's in place of its logits; for "none" in the backward pass, from recomputed logits. Raises
    TypeError or ValueError, in one sentence that names the argument, for arguments that are not
    supported, and without a Hopper or Blackwell GPU.

    Source: Hsu et al., Liger Kernel, 2024.
    """
    for name, v in (("x", x), ("w", w)):
        check(name, v, x)
        if v.dim() != 2:
            raise ValueError(f"{name} must be a matrix, got {v.dim()} dimensions")
    if w.dtype != x.dtype:
        raise TypeError(f"w is {w.dtype}, but x is {x.dtype}: they must be alike")
    if w.shape[1] != x.shape[1]:
        raise ValueError(f"w has K={w.shape[1]}, but x has K={x.shape[1]}")
    if not w.shape[0]:
        raise ValueError("w has no rows: there must be at least one class")
    check_target(target, x)
    check_options(ignore_index, label_smoothing, reduction)
    if not (chunk_rows is None or type(chunk_rows) is int):
        raise TypeError(f"chunk_rows must be an int or None, got {type(chunk_rows).__name__}")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows={chunk_rows} must be at least 1")
    if accum_dtype not in (None, torch.float32, w.dtype):
        raise ValueError(f"accum_dtype={accum_dtype!r:.60} is not float32 or {w.dtype}, that of w")
    options = (
        ignore_index, number("label_smoothing", label_smoothing), number("z_loss", z_loss),
        reduction, chunk_rows or 0, accum_dtype in (None, torch.float32),
    )  # fmt: skip
    wanted = [torch.is_grad_enabled() and v.requires_grad for v in (x, w)]
    now = reduction != "none"
    return LINEAR(x, w, target, *options, wanted[0] and now, wanted[1] and now)[0]


def chunks(x: Tensor, w: Tensor, most: int, sums: bool = False) -> Iterator[slice]:
    """The rows of each chunk: at most `most`; 0: by the bytes of their logits, and of the float32
    `sums` that several chunks need."""
    rows = x.shape[0]
    if not most:
        most = max(LEAST_ROWS, LOGITS // max(1, w.shape[0] * x.element_size()) // ROWS * ROWS)
        count = -(-rows // most)  # of one size, but for the last
        most = -(-rows // (ROWS * max(1, count))) * ROWS
        if sums and rows * x.element_size() <= most * x.element_size() + 4 * w.shape[1]:
            most = rows
    for start in range(0, rows, max(1, most)):
        yield slice(start, min(start + most, rows))


# ---- in the forward pass


def _run(x: Tensor, w: Tensor, target: Tensor, *options: Any) -> tuple[Tensor, ...]:
    *given, chunk, wide, wants_x, wants_w = options
    of = Loss(*given)
    arch_of(x.device, "cutex.linear_cross_entropy", "x", "torch")
    loss, lse, dx, dw = _fake(x, w, target, *options)
    if not x.shape[0]:
        nothing = torch.nan if of.reduction == "mean" else 0.0
        return loss.fill_(nothing), lse, dx, dw.zero_()
    if not (wants_x or wants_w):
        return _losses(of, chunk, x, w, target)
    losses = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    count = (target != of.ignored).sum(dtype=torch.float32)[None]
    parts = [*chunks(x, w, chunk, wide and wants_w)]
    sums = Sums(dw, len(parts), wide) if wants_w else None
    logits = x.new_empty(parts[0].stop, w.shape[0])
    for i, part in enumerate(parts):
        z = matmul(x[part], w.mT, out=logits[: part.stop - part.start])
        _in_place(of, z, target[part], losses[part], count)
        if wants_x:
            matmul(z, w, out=dx[part])
        if sums is not None:
            sums.add(z, x[part], i)
    total = losses.sum()
    return total / count[0] if of.reduction == "mean" else total, lse, dx, dw


class Sums:
    """The gradient of w: sums of chunks, if `wide` in float32 and rounded with the last one."""

    def __init__(self, dw: Tensor, chunks: int, wide: bool) -> None:
        self.dw, self.last = dw, chunks - 1
        self.sums = dw
        if self.last and wide and dw.dtype != torch.float32:
            self.sums = torch.empty(dw.shape, dtype=torch.float32, device=dw.device)

    def add(self, z: Tensor, x: Tensor, chunk: int) -> None:
        """Add the product of a chunk's gradient of logits, z (m, N), and its x (m, K)."""
        if chunk == self.last and self.sums is not self.dw:
            matmul(z.mT, x, residual=self.sums, out=self.dw)
        else:
            matmul(z.mT, x, out=self.sums, beta=float(chunk > 0))


def _losses(of: Loss, chunk: int, x: Tensor, w: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """The loss alone; of "none" with the logarithms of sums of exponentials, for its gradient."""
    parts = [*chunks(x, w, chunk)]
    logits = x.new_empty(parts[0].stop, w.shape[0])
    found = []
    for part in parts:
        z = matmul(x[part], w.mT, out=logits[: part.stop - part.start])
        found.append(run_plain(z, target[part], *of[:3], "none")[:2])
    losses, lse = (torch.cat(each) for each in zip(*found, strict=True))
    nothing = x.new_empty(0), w.new_empty(0)
    if of.reduction == "none":
        return losses, lse, *nothing
    total = losses.sum()
    if of.reduction == "mean":
        total = total / (target != of.ignored).sum()
    return total, lse.new_empty(0), *nothing


def _in_place(of: Loss, z: Tensor, target: Tensor, losses: Tensor, count: Tensor) -> None:
    given = (z, target, losses) + ((count,) if of.reduction == "mean" else ())
    _gradients_in_place(of, *given)


def _plan_in_place(of: Loss, z: Tensor, target: Tensor, *given: Tensor) -> Run:
    from cutex.kernels.row.cross_entropy import CrossEntropyConfig
    from cutex.kernels.row.cross_entropy_in_place import CrossEntropyInPlace
    from cutex.kernels.row.cross_entropy_in_place_bulk import InPlaceByTickets

    arch = rows_arch_of(z.device, "cutex.linear_cross_entropy")
    launch = Launch(z.device)
    rows = launch.rows(x=z)
    names = ("losses", "count")[: len(given)]
    launch.flat(target=target, **dict(zip(names, given, strict=True)))
    scalars = of.smoothing, of.z_loss, of.ignored
    by = _by_tickets(of, rows[0], dtype_of(target), arch)
    if by is not None:
        launch.keeps("drawn", 2)
        groups = bulk_groups(InPlaceByTickets, by, rows[0], arch)
        order = "x", "target", *names, "drawn"
        return launch.run((InPlaceByTickets, by, arch), order, (*scalars, groups))
    config = CrossEntropyConfig(
        tile_of(rows, (), arch), of.smoothing != 0, dtype_of(target), of.reduction
    )
    kernel = CrossEntropyInPlace, config, arch
    return launch.run(kernel, ("x", "target", *names), scalars)


def _by_tickets(of: Loss, z: Tensor, target: str, arch: str) -> InPlaceTicketsConfig | None:
    """The config of CTAs that draw the rows that they take; None for other kernels."""
    from cutex.kernels.row.cross_entropy_in_place_bulk import InPlaceTicketsConfig

    (m, n), (unit, _) = z.shape, loads_of([z], (), False)
    by = choose_losses.in_place(m, n, unit, kernels_of(arch)) if z.is_contiguous() else None
    if by is None:
        return None
    return InPlaceTicketsConfig(*by, of.smoothing != 0, target, of.reduction)


_gradients_in_place = Calls(_plan_in_place)


def _fake(
    x: Tensor, w: Tensor, target: Tensor, ignored: int, smoothing: float, z_loss: float,
    reduction: str, chunk: int, wide: bool, wants_x: bool, wants_w: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    def made(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    def like(v: Tensor, wanted: bool) -> Tensor:
        return torch.empty(v.shape if wanted else (0,), dtype=v.dtype, device=v.device)

    each = reduction == "none"
    rows = x.shape[0]
    of_rows = made(rows) if each else made(0)
    return made(rows) if each else made(), of_rows, like(x, wants_x), like(w, wants_w)


# ---- in the backward pass


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, w, target, *ctx.options = inputs
    _, lse, dx, dw = output
    ctx.mark_non_differentiable(lse, dx, dw)
    ctx.set_materialize_grads(False)  # of these, zeros as large as they are
    ctx.save_for_backward(x, w, target, lse, dx, dw)


def _backward(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dloss is None:  # what comes behind gave the loss no gradient
        return (None,) * 11
    x, w, target, lse, dx, dw = ctx.saved_tensors
    *of, chunk, wide, wants_x, wants_w = ctx.options
    if of[3] == "none":
        wants = ctx.needs_input_grad[:2]
        dx, dw = AGAIN(x, w, target, lse, dloss, *of, chunk, wide, *wants)
        return (dx if wants[0] else None, dw if wants[1] else None, *[None] * 9)
    if all(map(is_plain, (dx, dw, dloss))) and not _keeps_graph():
        # nothing else will read them
        scaled = [
            _times(g, dloss) for g in (dx, dw)
        ]  # NOTE: grads may take what no other refers to
    else:
        scaled = SCALED(x, w, dx, dw, dloss)
    return (scaled[0] if wants_x else None, scaled[1] if wants_w else None, *[None] * 9)


def _times(g: Tensor, dloss: Tensor) -> Tensor:
    """g multiplied in place by a number that is on the device, mostly 1."""
    g = g.detach()
    if g.numel():
        _scaled((), g, dloss.reshape(1))
    return g


def _plan_scale(_: Any, g: Tensor, factor: Tensor) -> Run:
    from cutex.kernels.row.scale import Scale

    launch = Launch(g.device)
    rows = launch.rows(x=g)
    launch.flat(factor=factor)
    tile = part_of(rows)
    if g.shape[1] <= tile.columns:  # several rows to a CTA
        tile = tile_of(rows, (), rows_arch_of(g.device, "cutex.linear_cross_entropy"))
    kernel = Scale, tile, rows_arch_of(g.device, "cutex.linear_cross_entropy")
    return launch.run(kernel, ("x", "factor"))


_scaled = Calls(_plan_scale)


def _again(
    x: Tensor, w: Tensor, target: Tensor, lse: Tensor, dloss: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    """The gradients of losses of rows, from logits computed again."""
    *given, chunk, wide, wants_x, wants_w = options
    of = Loss(*given)
    _, _, dx, dw = _fake(x, w, target, *options)
    if not x.shape[0]:
        return dx, dw.zero_()
    parts = [*chunks(x, w, chunk, wide and wants_w)]
    sums = Sums(dw, len(parts), wide) if wants_w else None
    logits = x.new_empty(parts[0].stop, w.shape[0])
    count = lse.new_empty(())
    for i, part in enumerate(parts):
        z = matmul(x[part], w.mT, out=logits[: part.stop - part.start])
        gradient_in_place(of, z, target[part], lse[part], dloss[part], count)
        if wants_x:
            matmul(z, w, out=dx[part])
        if sums is not None:
            sums.add(z, x[part], i)
    return dx, dw


_OPTIONS = (
    "int ignored, float smoothing, float z_loss, str reduction, int chunk, bool wide, "
    "bool wants_x, bool wants_w"
)
SCALED = define(
    "linear_cross_entropy_scaled",
    "(Tensor x, Tensor w, Tensor dx, Tensor dw, Tensor dloss) -> (Tensor, Tensor)",
    lambda x, w, dx, dw, dloss: (dx * dloss, dw * dloss),
    lambda x, w, dx, dw, dloss: (torch.empty_like(dx), torch.empty_like(dw)),
)
AGAIN = define(
    "linear_cross_entropy_gradient",
    f"(Tensor x, Tensor w, Tensor target, Tensor lse, Tensor dloss, {_OPTIONS}) "
    "-> (Tensor, Tensor)",
    _again,
    lambda x, w, target, lse, dloss, *options: _fake(x, w, target, *options)[2:],
)
LINEAR = define(
    "linear_cross_entropy",
    f"(Tensor x, Tensor w, Tensor target, {_OPTIONS}) "
    "-> (Tensor loss, Tensor lse, Tensor dx, Tensor dw)",
    _run,
    _fake,
    _setup,
    _backward,
)
