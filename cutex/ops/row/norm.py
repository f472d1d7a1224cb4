"""Norms of rows, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutex.arch import kernels_of
from cutex.ops.occupancy import clusters_at_once
from cutex.ops.row.launches import Calls, Launch, Run, bulk_groups, kernel_for, runs
from cutex.ops.row.operators import define, needs_nothing
from cutex.ops.row.rows import (
    VECTOR,
    arch_of,
    check_alike,
    check_rows,
    check_vector,
    dense_of,
    dtype_of,
    empty_rows,
    few_of,
    loads_of,
    sms_of,
    tile_of,
)

_is_compiling = torch.compiler.is_dynamo_compiling

if TYPE_CHECKING:
    from cutex.device.row.tile import RowTile
    from cutex.kernels.row.norm import Norm, NormConfig
    from cutex.kernels.row.norm_backward import NormBackward, NormBackwardConfig
    from cutex.kernels.row.norm_by_groups import GroupsConfig

GROUPS = 3  # CTAs of an SM that have room for rows on their way
MOST_GROUPS = 8
IN_REGISTERS = 8192  # elements of a gradient's rows in the registers of an SM; facts/rows.md
SMEM = 200 << 10  # bytes of an SM for rows on their way; an RTX GPU takes what it has
MOST_STAGES = 4
GPC = 16  # SMs of a part of a GPU, about
APART = 1 << 24  # elements of rows whose sums are taken apart, at one time


def norm(
    centred: bool, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    residual: Tensor | None, eps: float,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """The norm, with a residual also the sum; checks what it is given."""
    if not _is_compiling() and eps.__class__ is float:
        found = _forward.again((eps, centred, False), x, weight, bias, residual)
        if found is not None:
            return found
    check_norm(x, weight, bias, residual, eps)
    if needs_nothing(x, weight, bias, residual):
        return _forward((float(eps), centred, False), x, weight, bias, residual)
    y, summed, _, _ = NORM(x, weight, bias, residual, float(eps), centred)
    return y if residual is None else (y, summed)


def check_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float
) -> None:
    """Raise TypeError or ValueError, in one sentence, for what a norm does not take."""
    check_rows("x", x)
    if isinstance(eps, bool) or not isinstance(eps, float | int):
        raise TypeError(f"eps must be a number, got {type(eps).__name__}")
    for name, v in (("weight", weight), ("bias", bias)):
        if v is not None:
            check_vector(name, v, x)
    if residual is not None:
        check_alike("residual", residual, "x", x)


def name_of(x: Tensor | None) -> str:
    """The name of an optional tensor's dtype; "" if there is none."""
    return "" if x is None else dtype_of(x)


def _plan(
    options: tuple[float, bool, bool], x: Tensor, weight: Tensor | None, bias: Tensor | None,
    residual: Tensor | None,
) -> Run:  # fmt: skip
    """A forward pass; if it `saves`, with the results of the operator, else with those of the
    functions."""
    from cutex.kernels.row import choose, choose_norm
    from cutex.kernels.row.norm import NormConfig
    from cutex.kernels.row.norm_bulk import BulkConfig
    from cutex.kernels.row.norm_by_groups import GroupsConfig
    from cutex.kernels.row.norm_by_tickets import TicketsConfig
    from cutex.kernels.row.norm_resident import ResidentConfig

    eps, centred, saves = options
    arch = arch_of(x.device, "cutex.layer_norm" if centred else "cutex.rms_norm")
    if not x.numel():
        return partial(_nothing, options, residual is not None)
    launch = Launch(x.device)
    rows = launch.rows(x=x)
    vectors = launch.flat(weight=weight, bias=bias)
    rows += launch.rows(residual=residual)
    rows.append(launch.makes("y", x.shape, x.dtype, 2))
    if residual is not None:
        rows.append(launch.makes("summed", x.shape, x.dtype, 2))
    elif saves:
        launch.makes("summed", (0,), x.dtype)
    if saves:
        launch.makes("mean", x.shape[:-1] if centred else (0,), torch.float32, 1)
        launch.makes("rstd", x.shape[:-1], torch.float32, 1)
    wide = choose.WIDE if centred else choose.NORM_WIDE
    tile = tile_of(
        rows, vectors, arch, wide=wide, least=choose.LEAST_THREADS, in_warp=choose.IN_WARP
    )
    tile = few_of(rows, vectors, arch) or tile
    staged = None
    if residual is None and x.numel() >= choose.BULK_LEAST:
        if not centred:
            tile = choose.one_cta(tile) if tile.vectors < choose.WIDE else tile
        elif tile.width * x.element_size() == VECTOR:
            staged = choose_norm.by_smem(x.shape[-1], tile)
    config = NormConfig(
        staged or tile, centred, residual is not None, name_of(weight), name_of(bias),
        saves=saves, by_smem=staged is not None,
    )  # fmt: skip
    kind, config = kernel_of(config, rows[0], arch)
    constants: tuple[float | int, ...] = (eps,)
    order = ["x", "y", *config.optional]
    if isinstance(config, GroupsConfig):
        groups = groups_at_once(config, rows[0], arch)
        constants += (groups,)
        launch.keeps("words", config.words_of(groups))
        order.append("words")
    elif isinstance(config, BulkConfig | ResidentConfig):
        constants += (bulk_groups(kind, config, rows[0], arch),)
    if isinstance(config, TicketsConfig):
        launch.keeps("drawn", 2)
        order.append("drawn")
    if saves:
        returns: tuple[str, ...] = "y", "summed", "mean", "rstd"
    else:
        returns = ("y",) if residual is None else ("y", "summed")
    return launch.run((kind, config, arch), order, constants, returns)


def kernel_of(config: NormConfig, x: Tensor, arch: str) -> tuple[type[Norm], NormConfig]:
    """The kind of kernel for a norm of the rows of x (M, N), and its config."""
    from cutex.kernels.row import choose, choose_norm
    from cutex.kernels.row.norm import Norm
    from cutex.kernels.row.norm_bulk import BulkConfig, NormBulk
    from cutex.kernels.row.norm_by_element import ByElementConfig, NormByElement
    from cutex.kernels.row.norm_by_groups import NormByGroups
    from cutex.kernels.row.norm_by_tickets import NormByTickets, TicketsConfig
    from cutex.kernels.row.norm_dense import DenseConfig, NormDense
    from cutex.kernels.row.norm_resident import NormResident, ResidentConfig
    from cutex.kernels.row.norm_staged import NormStaged, is_staged

    (m, n), centred = x.shape, config.centred
    dense = config.is_plain and (x.stride(0) == n or m == 1)
    widest = config.tile.width * x.element_size() == VECTOR
    if dense and widest and (shared := _by_groups(config, x, arch)) is not None:
        return NormByGroups, shared
    if config.is_plain and widest:
        here = choose_norm.resident(m, n, config.tile, centred, kernels_of(arch), dense=dense)
        if here is not None:
            return NormResident, ResidentConfig(**{**vars(config), **here._asdict()})
    by_words = dense and widest
    for largest in (choose.LARGE_CLUSTER, choose.CLUSTER) if by_words else ():
        if by := choose_norm.bulk(m, n, config.tile, centred, kernels_of(arch), largest=largest):
            kind: type[NormBulk] = NormBulk
            made = BulkConfig
            own = by._asdict()
            if each := choose_norm.by_tickets(n * x.element_size(), by, centred):
                kind, made, own = NormByTickets, TicketsConfig, own | {"each": each}
            bulk = made(**{**vars(config), **own})
            if runs(kind, bulk, x, arch):
                return kind, bulk
    if dense and (found := choose_norm.dense(m, n, config.tile, centred)):
        tile, words, turns = found
        return NormDense, DenseConfig(**vars(replace(config, tile=tile)), words=words, turns=turns)
    if config.is_plain and (found := choose_norm.by_element(n, config.tile, centred)):
        tile, elements, turns = found
        given = vars(replace(config, tile=tile))
        return NormByElement, ByElementConfig(**given, elements=elements, turns=turns)
    few = config.may_be_few and m * n <= min(choose.FEW, choose_norm.FEW_ONCE[config.tile.ctas > 1])
    if not is_staged(config, x.element_size()):
        return Norm, replace(config, few=few)
    for largest in (choose.LARGE_CLUSTER, choose.CLUSTER) if few and config.tile.width == 8 else ():
        if (long := choose_norm.few_long(m, n, kernels_of(arch), largest)) is not None:
            latent = replace(config, tile=long, few=True)
            if runs(Norm, latent, x, arch):
                return Norm, latent
    return NormStaged, config


def _by_groups(config: NormConfig, x: Tensor, arch: str) -> GroupsConfig | None:
    """How groups of CTAs share the rows of x (M, N), if they do: all of them are resident."""
    from cutex.kernels.row import choose_groups
    from cutex.kernels.row.norm_by_groups import GroupsConfig, NormByGroups

    (m, n), tile, of = x.shape, config.tile, kernels_of(arch)
    given = m, n, tile.width, tile.aligned, config.centred, sms_of(x.device, arch), of
    found = choose_groups.by_groups(*given)
    if found is None:
        return None
    made = GroupsConfig(**{**vars(config), **found._asdict()})
    compiled = kernel_for(NormByGroups, made, dtype_of(x), arch)
    at_once = clusters_at_once(compiled, made.num_threads, 1, x.device)
    ctas = made.sharers * groups_at_once(made, x, arch)
    return made if at_once is None or at_once >= ctas else None


def groups_at_once(config: GroupsConfig, x: Tensor, arch: str) -> int:
    """The groups of CTAs that share the rows of x (M, N)."""
    from cutex.kernels.row import choose_groups

    m, n = x.shape
    ctas = config.resident * sms_of(x.device, arch)
    return choose_groups.count_of(m, n, config.tile.width, ctas, config.sharers)


def _nothing(
    options: tuple[float, bool, bool], has_residual: bool, x: Tensor, *rest: Tensor
) -> Any:
    """The results for no elements."""
    eps, centred, saves = options
    y, summed, mean, rstd = _fake(x, None, None, x if has_residual else None, eps, centred)
    if saves:
        return y, summed, mean.zero_(), rstd.fill_(eps**-0.5 if eps > 0 else torch.inf)
    return (y, summed) if has_residual else y


def _fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    eps: float, centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    def of_rows(wanted: bool) -> Tensor:
        shape = x.shape[:-1] if wanted else (0,)
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    summed = x.new_empty(0) if residual is None else empty_rows(x)
    return empty_rows(x), summed, of_rows(centred), of_rows(True)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, residual, _, centred = inputs
    _, summed, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)  # of these, zeros as large as they are
    ctx.save_for_backward(x if residual is None else summed, weight, bias, mean, rstd)
    ctx.has_residual, ctx.centred = residual is not None, centred


def _backward(ctx: Any, dy: Tensor | None, dsummed: Tensor | None, *_: Any) -> tuple[Any, ...]:
    x, weight, bias, mean, rstd = ctx.saved_tensors
    given = dsummed if ctx.has_residual else None
    dy = torch.zeros_like(x) if dy is None else dy  # where only the sum of x and residual is used
    dx, dweight, dbias = NORM_GRADIENT(x, dy, weight, bias, mean, rstd, given, ctx.centred)
    return (
        dx, dweight if weight is not None else None, dbias if bias is not None else None,
        dx if ctx.has_residual else None, None, None,
    )  # fmt: skip


def _plan_gradient(
    options: tuple[bool], x: Tensor, dy: Tensor, weight: Tensor | None, bias: Tensor | None,
    mean: Tensor | None, rstd: Tensor, dsummed: Tensor | None,
) -> Run:  # fmt: skip
    from cutex.kernels.row.norm_backward_bulk import BackwardBulkConfig

    (centred,) = options
    check_alike("dy", dy, "x", x)
    arch = arch_of(x.device, "cutex.layer_norm" if centred else "cutex.rms_norm")
    if not x.numel():
        shapes = [v.shape if v is not None else (0,) for v in (weight, bias)]
        dtypes = [x.dtype if v is None else v.dtype for v in (weight, bias)]
        return lambda x, *_: (
            empty_rows(x),
            *(
                torch.zeros(s, dtype=d, device=x.device)
                for s, d in zip(shapes, dtypes, strict=True)
            ),
        )
    launch = Launch(x.device)
    rows = launch.rows(x=x, dy=dy)
    vectors = launch.flat(weight=weight)
    launch.flat(bias=bias, mean=mean, rstd=rstd)
    rows += [*launch.rows(dsummed=dsummed), launch.makes("dx", x.shape, x.dtype, 2)]
    kind, config = _gradient_kernel(centred, rows, vectors, bias, arch, dsummed is not None)
    tile = config.tile
    if config.alone:
        order, groups = ("x", "dy", "dx", "rstd", *config.optional), len(rows[0])
        run = launch.run((kind, config, arch), order, (groups,), ("dx",))
        return partial(_with_sums_apart, run, weight is not None, bias is not None, centred)
    if isinstance(config, BackwardBulkConfig):
        clusters = bulk_groups(kind, config, rows[0], arch)
    else:
        most = most_clusters(tile, sms_of(x.device, arch))
        if tile.ctas > 1:
            compiled = kernel_for(kind, config, dtype_of(x), arch)
            at_once = clusters_at_once(compiled, tile.num_threads, tile.ctas, x.device)
            most = min(most, at_once or most)
        clusters = min(-(-rows[0].shape[0] // tile.rows), most)
    for name, v in (("dweight", weight), ("dbias", bias)):
        launch.makes(name, (0,) if v is None else v.shape, x.dtype if v is None else v.dtype)
        if v is not None:
            launch.makes(f"{name}_parts", (clusters, x.shape[-1]), torch.float32)
    order = "x", "dy", "dx", "rstd", *config.optional
    returns = "dx", "dweight", "dbias"
    return launch.run((kind, config, arch), order, (clusters * tile.rows,), returns)


def _gradient_kernel(
    centred: bool, rows: list[Tensor], vectors: list[Tensor], bias: Tensor | None, arch: str,
    summed: bool,
) -> tuple[Callable[[Any], NormBackward], NormBackwardConfig]:  # fmt: skip
    """The kind of kernel for the gradient of a norm of rows, of x, dy and others, and its
    config."""
    from cutex.kernels.row import choose, choose_gradient
    from cutex.kernels.row.norm_backward import NormBackward, NormBackwardConfig
    from cutex.kernels.row.norm_backward_bulk import BackwardBulkConfig, NormBackwardBulk

    x, weight = rows[0], vectors[0] if vectors else None
    m, n = x.shape
    names = centred, name_of(weight), name_of(bias)
    least = choose.BULK_LEAST
    try:
        # NOTE: the columns of a thread are those of all its rows, so rows may not shift
        tile = choose_gradient.with_sums(n, tile_of(rows, vectors, arch, shifts=False), centred)
    except choose.TooLong:
        tile, least = None, 0
    if widest := dense_of(rows):
        sums = (weight is not None) + (bias is not None)
        each = 0 if weight is None else weight.element_size()
        given = m, n, widest, sums, each, kernels_of(arch), least
        aligned = loads_of(rows, vectors, shifts=False)[0] == widest
        for largest in (choose.LARGE_CLUSTER, choose.CLUSTER):
            by = choose_gradient.bulk_gradient(*given, aligned=aligned, largest=largest)
            if by is None:
                break
            own = by._asdict()
            bulk = BackwardBulkConfig(own.pop("tile"), *names, summed, **own)
            if runs(NormBackwardBulk, bulk, x, arch):
                return NormBackwardBulk, bulk
    if tile is None:  # in one pass nobody holds the sums of so many columns
        tile = tile_of(rows, vectors, arch)
        return NormBackward, NormBackwardConfig(tile, *names, summed, alone=True)
    return NormBackward, NormBackwardConfig(tile, *names, summed, stages_of(tile, x))


def _with_sums_apart(
    run: Run, has_weight: bool, has_bias: bool, centred: bool, x: Tensor, dy: Tensor, *rest: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of rows that are so long that `run` gives dx alone: those of weight and bias by
    torch's operations, some rows at a time."""
    weight, bias = (
        rest[i] if has else None for i, has in ((0, has_weight), (has_weight, has_bias))
    )
    *means, rstd = rest[has_weight + has_bias :][: 1 + centred]
    n, dx = x.shape[-1], run(x, dy, *rest)
    sums = [
        torch.zeros(n, dtype=torch.float32, device=x.device) if v is not None else None
        for v in (weight, bias)
    ]
    flat = (*(v.reshape(-1, n) for v in (x, dy)), *(v.reshape(-1, 1) for v in (rstd, *means)))
    for part in zip(*(v.split(max(1, APART // n)) for v in flat), strict=True):
        px, pdy, prstd, *pmean = (v.float() for v in part)
        if sums[0] is not None:
            sums[0] += (pdy * ((px - pmean[0] if centred else px) * prstd)).sum(0)
        if sums[1] is not None:
            sums[1] += pdy.sum(0)
    given = [
        x.new_empty(0) if v is None or total is None else total.to(v.dtype)
        for v, total in zip((weight, bias), sums, strict=True)
    ]
    return dx, given[0], given[1]


def stages_of(tile: RowTile, x: Tensor) -> int:
    """The slots for rows of x and dy on their way, of the smem of a CTA among GROUPS of an SM."""
    slot = 2 * tile.num_threads * tile.vectors * tile.width * x.element_size()
    return min(MOST_STAGES, SMEM // GROUPS // slot)


def groups_of(tile: RowTile) -> int:
    """The CTAs of an SM that share the rows of a gradient: as many as its registers hold, which are
    some 8192 elements; three of a cluster of 4 or 8, which waits for its slowest."""
    fitting = max(1, round(IN_REGISTERS / (tile.num_threads * tile.vectors * tile.width)))
    return max(fitting, GROUPS) if tile.ctas >= 4 else min(fitting, MOST_GROUPS)


def most_clusters(tile: RowTile, sms: int) -> int:
    """How many clusters of a tile share the rows of a gradient, where so many run at one time.

    A cluster lies in a GPC of about 16 SMs.
    """
    each = groups_of(tile)
    if tile.ctas <= 2:
        return each * sms // tile.ctas
    return each * (sms // GPC) * (GPC // tile.ctas)


def _fake_gradient(
    x: Tensor, dy: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor,
    dsummed: Tensor | None, centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    def like(v: Tensor | None) -> Tensor:
        return x.new_empty(0) if v is None else torch.empty(v.shape, dtype=v.dtype, device=x.device)

    return empty_rows(x), like(weight), like(bias)


_forward, _gradient = Calls(_plan), Calls(_plan_gradient)


def _run(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    eps: float, centred: bool,
) -> Any:  # fmt: skip
    return _forward((eps, centred, True), x, weight, bias, residual)


def _run_gradient(
    x: Tensor, dy: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor,
    dsummed: Tensor | None, centred: bool,
) -> Any:  # fmt: skip
    mean_given = mean if centred else None
    return _gradient((centred,), x, dy, weight, bias, mean_given, rstd, dsummed)


NORM_GRADIENT = define(
    "norm_gradient",
    "(Tensor x, Tensor dy, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, "
    "Tensor? dsummed, bool centred) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    _run_gradient,
    _fake_gradient,
)
NORM = define(
    "norm",
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, float eps, bool centred) "
    "-> (Tensor y, Tensor summed, Tensor mean, Tensor rstd)",
    _run,
    _fake,
    _setup,
    _backward,
)
