"""`cutex.reduce`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutex.arch import kernels_of
from cutex.kernels.row import choose
from cutex.ops.row.launches import Calls, Launch, Run
from cutex.ops.row.operators import define
from cutex.ops.row.rows import COLUMNS, PIECE, arch_of, check, dtype_of, few_of, loads_of, sms_of

# what each is of: a kind of fold, and the sign of the elements that it is the largest of
OPS = {"sum": ("sum", 1), "mean": ("sum", 1), "max": ("max", 1), "min": ("max", -1),
       "argmax": ("argmax", 1), "argmin": ("argmax", -1)}  # fmt: skip
CTAS = 8  # of an SM, that a reduction of few results is spread over
FEW_THREADS = 256  # of each CTA of a cluster that reduces few elements
LEAST = 4096  # elements of x that a CTA should have at least
MOST = 2**31 - 1

_is_compiling = torch.compiler.is_dynamo_compiling


def reduce(
    x: Tensor,
    op: str = "sum",
    dim: int | Sequence[int] | None = None,
    *,
    keepdim: bool = False,
    deterministic: bool = True,
) -> Tensor:
    """The sum, mean, max, min, argmax or argmin of x over `dim`, by default over all of x.

    x: bfloat16, float16 or float32, any shape and strides; summed in float32.
    dim: one dimension, several (not for argmax and argmin), or None. A NaN is both the largest and
        the smallest element; among equal elements argmax returns the first.
    deterministic: few results are shared by many CTAs. By default each CTA stores its part, and the
        parts are combined in a fixed order, by the last CTA to finish or by a second kernel, so
        that results are bitwise reproducible. With False, a sum's parts are added atomically, in
        any order; they may overflow where all of them together do not, and those below 2^-126
        count as 0.

    Returns x's dtype, rounded once, or int64 for argmax and argmin. Differentiable once; the
    gradient of a max or min is shared by equal elements, as in torch.amax. Raises TypeError or
    ValueError, in one sentence that names the argument, for arguments that are not supported, and
    without an NVIDIA GPU from Ampere on.
    """
    if (dim is None or dim.__class__ is int) and not _is_compiling():
        found = _again(x, op, dim, keepdim, deterministic)
        if found is not None:
            return found
    check("x", x)
    if not isinstance(op, str) or op not in OPS:
        raise ValueError(f"op={op!r} is not one of {', '.join(OPS)}")
    for name, flag in (("keepdim", keepdim), ("deterministic", deterministic)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool, got {type(flag).__name__}")
    dims = _dims(x, op, dim)
    if op not in ("sum", "mean") and any(x.shape[d] == 0 for d in dims):
        raise ValueError(f"x has shape {tuple(x.shape)}: of no elements there is no {op}")
    return REDUCE(x, op, dims, keepdim, deterministic, dim is None)


def _again(x: Any, op: Any, dim: int | None, keepdim: Any, deterministic: Any) -> Tensor | None:
    """The result of a call that is like one before; None if there was none."""
    if not (keepdim.__class__ is deterministic.__class__ is bool and isinstance(x, Tensor)):
        return None
    rank = x.dim()
    if dim is not None and not -rank <= dim < rank:
        return None
    dims = (*range(rank),) if dim is None else (dim % rank,)
    return _calls.again((op, dims, keepdim, deterministic, dim is None), x)


def _dims(x: Tensor, op: str, dim: Any) -> list[int]:
    """The dimensions, from 0 on and in order."""
    if dim is None:
        return [*range(x.dim())]
    given = [dim] if isinstance(dim, int) else dim
    if not isinstance(given, Sequence) or any(
        isinstance(d, bool) or not isinstance(d, int) for d in given
    ):
        raise TypeError(f"dim must be an int, several or None, got {dim!r}")
    for d in given:
        if not -x.dim() <= d < x.dim():
            raise ValueError(f"dim={d}: x has {x.dim()} dimensions")
    found = sorted({d % x.dim() for d in given})
    if len(found) < len(given) or not found:
        raise ValueError(f"dim={dim!r}: takes different dimensions, at least one")
    if len(found) > 1 and op.startswith("arg"):
        raise ValueError(f"dim={dim!r}: {op} takes one dimension, or None")
    return found


# ---- x as (A, R, B)


class Spaces(NamedTuple):
    """A tensor as (outer, reduced, inner), contiguous in the last one."""

    x: Tensor
    kept: tuple[int, ...]  # the sizes that are left, in the order in which they lie in memory
    order: list[int]  # the place of each among those of x that are kept


def _spaces(x: Tensor, dims: Sequence[int], flat: bool) -> Spaces:
    """x with its neighbouring reduced dimensions as one; a view where there is one."""
    if flat:
        return Spaces(_contiguous(x.reshape(1, -1, 1)), (), [])
    # NOTE: in the order of memory a permuted tensor is as good as a contiguous one
    places = sorted(range(x.dim()), key=lambda d: (-x.stride(d), d))
    if not _alone(places, dims):
        places = [*range(x.dim())]
    lying = x.permute(places)
    at = [i for i, d in enumerate(places) if d in dims]
    sizes = lying.shape[: at[0]].numel(), lying.shape[at[0] : at[-1] + 1].numel()
    shape = (*sizes, lying.shape[at[-1] + 1 :].numel())
    kept = [d for d in places if d not in dims]
    ranks = sorted(kept)
    order = [kept.index(d) for d in ranks]
    return Spaces(_contiguous(lying.reshape(shape)), tuple(x.shape[d] for d in kept), order)


def _contiguous(x: Tensor) -> Tensor:
    """x (A, R, B) with a stride of 1 in its last size above 1, and in those after."""
    outer, reduced, inner = x.shape
    if (inner > 1 and x.stride(2) != 1) or (inner == 1 < reduced and x.stride(1) != 1):
        x = x.contiguous()
    strides = x.stride()
    if inner == 1:
        strides = (strides[0], 1, 1) if outer > 1 else (reduced, 1, 1)
    return x.as_strided(x.shape, strides)


def _alone(places: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether the reduced dimensions are neighbours, in any order."""
    at = sorted(places.index(d) for d in dims)
    return at == [*range(at[0], at[0] + len(at))]


def _groups(x: Tensor, dims: Sequence[int]) -> list[list[int]]:
    """The reduced dimensions as groups of neighbours, the last first: each is one reduction."""
    places = sorted(range(x.dim()), key=lambda d: (-x.stride(d), d))
    if _alone(places, dims) or _alone([*range(x.dim())], dims):
        return [[*dims]]
    groups: list[list[int]] = []
    for d in dims:
        if groups and groups[-1][-1] == d - 1:
            groups[-1].append(d)
        else:
            groups.append([d])
    return groups[::-1]


# ---- the operator


def _run(
    x: Tensor, op: str, dims: list[int], keepdim: bool, deterministic: bool, flat: bool
) -> Tensor:
    return _calls((op, (*dims,), keepdim, deterministic, flat), x)


def _plan_call(options: tuple[Any, ...], x: Tensor) -> Run:
    """The plan of a call: one reduction, or one after the other of groups of neighbours."""
    op, dims, keepdim, deterministic, flat = options
    shape = tuple(1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims)
    out = torch.int64 if op.startswith("arg") else x.dtype
    if not dims:  # a scalar
        return (lambda x: x.new_zeros((), dtype=out)) if op.startswith("arg") else Tensor.clone
    if not x.numel():
        nothing = torch.nan if op == "mean" else 0
        return lambda x: x.new_full(shape, nothing, dtype=out)
    count = 1
    for d in dims:
        count *= x.shape[d]
    flat = flat and (op.startswith("arg") or x.is_contiguous())
    scale = 1.0 / count if op == "mean" else 1.0
    if flat and count > COLUMNS:
        return partial(_in_pieces, (op, out, scale, deterministic, shape))
    *before, last = [list(dims)] if flat else _groups(x, dims)
    first = [(op, (*group,), torch.float32, 1.0, deterministic, False, None) for group in before]
    final = op, (*last,), out, scale, deterministic, flat, shape
    if not first:
        return _plan(final, x)

    def run(x: Tensor) -> Tensor:
        for options in first:
            x = _reduced(options, x)
        return _reduced(final, x)

    return run


def _in_pieces(options: tuple[Any, ...], x: Tensor) -> Tensor:
    """The reduction of all of x, of more elements than one launch counts: of pieces, and of their
    results."""
    op, out, scale, deterministic, shape = options
    pieces = x.reshape(-1).split(PIECE)

    def whole(x: Tensor, out: torch.dtype, scale: float, shape: tuple[int, ...]) -> Tensor:
        found: Tensor = _reduced((op, (0,), out, scale, deterministic, True, shape), x)
        return found

    if not op.startswith("arg"):
        parts = [whole(piece, torch.float32, 1.0, ()) for piece in pieces]
        return whole(torch.stack(parts), out, scale, shape)
    places = torch.cat([whole(piece, out, 1.0, (1,)) for piece in pieces])
    extremes = [piece.gather(0, at) for piece, at in zip(pieces, places.split(1), strict=True)]
    which = whole(torch.cat(extremes), out, 1.0, (1,))
    return (places.gather(0, which) + which * PIECE).view(shape)


_calls = Calls(_plan_call)


def _plan(options: tuple[Any, ...], x: Tensor) -> Run:
    """The plan of one reduction over neighbouring dimensions; `shape`: of the result, by default
    x's with sizes of 1."""
    op, dims, out, scale, deterministic, flat, shape = options
    from cutex.kernels.row.reduce import WORDS

    arch = arch_of(x.device, "cutex.reduce")
    spaces, kept, order = _spaces(x, dims, flat)
    outer, reduced, inner = spaces.shape
    if max(reduced, inner, outer * inner) > MOST:
        raise ValueError(f"x has shape {tuple(x.shape)}: at most {MOST} elements of a dimension")
    if shape is None:
        shape = tuple(1 if d in dims else n for d, n in enumerate(x.shape))
    launch = Launch(x.device)
    if inner == 1:
        view = launch.passes("x", x, lambda x: _spaces(x, dims, flat).x[:, :, 0])
    else:
        view = launch.passes("x", x, lambda x: _spaces(x, dims, flat).x)
    sms = sms_of(x.device, arch)
    kind, config, splits, atomics = _config(op, view, out, arch, sms, deterministic)
    outs = outer * inner
    in_place = order == sorted(order)  # results lie as x's dimensions stand
    made = torch.float32 if atomics else out
    launch.makes("out", shape if in_place else kept, made, 1)
    names = ["x", "out"]
    shared = getattr(config, "shared", "")
    if shared == WORDS:
        launch.keeps("words", 2 * outs * splits * config.fold.words)
        names.append("words")
    elif splits > 1 and not atomics:
        launch.makes("parts", (config.fold.words, outs, splits), torch.float32)
        names.append("parts")
        if inner == 1:
            launch.keeps("counts", -(-outer // config.tile.rows))
            names.append("counts")
    zeroed = ("out",) if atomics else ()
    run = launch.run((kind, config, arch), names, (splits, scale), ("out",), zeroed)
    if in_place and made == out:
        return run
    if in_place:
        return lambda x: run(x).to(out)
    return lambda x: run(x).to(out).permute(order).reshape(shape)


def _config(
    op: str, x: Tensor, out: torch.dtype, arch: str, sms: int, deterministic: bool
) -> tuple[Any, Any, int, bool]:
    """The kernel's class and config, the CTAs that share a result, and whether by atomics."""
    from cutex.kernels.row.fold import Fold
    from cutex.kernels.row.reduce import ATOMICS, PARTS, WORDS, Reduce, ReduceConfig
    from cutex.kernels.row.reduce_columns import ReduceColumns, ReduceColumnsConfig

    fold, name = (
        Fold(*OPS[op]),
        {torch.int64: "int64"}.get(out) or dtype_of(torch.empty(0, dtype=out)),
    )
    most = max(1, x.numel() // LEAST)

    def shared(splits: int) -> str:
        if splits == 1:
            return ""
        return PARTS if deterministic or fold.kind != "sum" else ATOMICS

    if x.dim() == 2:
        unit, shifted = loads_of([x], (), True)
        bits = 8 * x.element_size()
        tile = choose.walk(bits, unit, shifted)
        if x.shape[1] <= tile.columns:
            tile = choose.tile(
                x.shape[1], bits, kernels_of(arch), unit, shifted, wide=2 * choose.MOST
            )
        parts = -(-(x.shape[1] + tile.lead) // (tile.columns + tile.lead))
        wanted = -(-CTAS * sms // x.shape[0])
        splits = max(1, min(parts, wanted, most))
        splits = -(-parts // -(-parts // splits))  # each begins within the row
        few = None if tile.aligned else few_of([x], (), arch)
        if few is None and splits > 1 and x.numel() <= choose.FEW:
            # CTAs that meet in smem, not in global memory
            few = choose.one_cluster(x.shape[1], tile, FEW_THREADS, kernels_of(arch))
        if few is not None:
            return Reduce, ReduceConfig(few, fold, name), 1, False
        how = shared(splits)
        if how == PARTS and x.numel() <= choose.FEW:
            how = WORDS
        return (
            Reduce,
            ReduceConfig(tile, fold, _sum_name(how == ATOMICS, name), how),
            splits,
            how == ATOMICS,
        )
    width, _ = loads_of([x[0], x[:, 0]], (), False)
    vectors = -(-x.shape[2] // width)
    lanes = min(32, 1 << (vectors - 1).bit_length())
    config = ReduceColumnsConfig(fold, name, "", lanes, width)
    tiles = x.shape[0] * -(-vectors // lanes)
    splits = max(1, min(-(-x.shape[1] // (4 * config.rows)), -(-CTAS * sms // tiles), most))
    if splits > 1 and x.numel() <= choose.FEW and (at_most := few_lanes(x.shape[1])):
        config = ReduceColumnsConfig(fold, name, "", min(lanes, at_most), width)
        return ReduceColumns, config, 1, False
    how = shared(splits)
    config = ReduceColumnsConfig(fold, _sum_name(how == ATOMICS, name), how, lanes, width)
    return ReduceColumns, config, splits, how == ATOMICS


def few_lanes(rows: int) -> int:
    """The lanes of a CTA that takes all of so many rows of few columns, at one time; 0 for more."""
    from cutex.kernels.row.reduce_columns import AHEAD, THREADS

    return next((lanes for lanes in (8, 4) if rows <= AHEAD * THREADS // lanes), 0)


def _sum_name(atomics: bool, name: str) -> str:
    return "fp32" if atomics else name


_reduced = Calls(_plan)


def _fake(
    x: Tensor, op: str, dims: list[int], keepdim: bool, deterministic: bool, flat: bool
) -> Tensor:
    shape = [1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims]
    out = torch.int64 if op.startswith("arg") else x.dtype
    return torch.empty(shape, dtype=out, device=x.device)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.op, ctx.dims, ctx.keepdim, *_ = inputs
    ctx.shape = x.shape
    if ctx.op.startswith("arg"):
        ctx.mark_non_differentiable(output)
    elif ctx.op in ("max", "min"):
        ctx.save_for_backward(x, output)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    def wide(y: Tensor) -> Tensor:
        """y with its reduced dimensions, of size 1."""
        return y.reshape([1 if d in ctx.dims else n for d, n in enumerate(ctx.shape)])

    if ctx.op in ("max", "min"):
        x, y = ctx.saved_tensors
        equal = (x == wide(y)) | (x.isnan() & wide(y).isnan())
        # NOTE: of more than 65504 equal elements the number is none of float16
        share = wide(dy).float() / equal.sum(ctx.dims, keepdim=True)
        return (equal * share.to(x.dtype), *[None] * 5)
    count = 1
    for d in ctx.dims:
        count *= ctx.shape[d]
    given = wide((dy.float() / count).to(dy.dtype)) if ctx.op == "mean" and count else wide(dy)
    return (given.expand(ctx.shape), *[None] * 5)


REDUCE = define(
    "reduce",
    "(Tensor x, str op, int[] dims, bool keepdim, bool deterministic, bool flat) -> Tensor",
    _run,
    _fake,
    _setup,
    _backward,
)
