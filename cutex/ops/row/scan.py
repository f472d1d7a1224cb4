"""`cutex.scan`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutex.arch import kernels_of
from cutex.kernels.row import choose
from cutex.ops.row.launches import Calls, Launch, Run, runs
from cutex.ops.row.operators import define
from cutex.ops.row.rows import DTYPES, arch_of, check_rows, dtype_of, empty_rows, loads_of

OPS = {"sum": ("sum", 1), "max": ("max", 1), "min": ("max", -1)}

_is_compiling = torch.compiler.is_dynamo_compiling


def scan(
    x: Tensor,
    op: str = "sum",
    dim: int = -1,
    *,
    reverse: bool = False,
    exclusive: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The running sum, max or min of x along `dim`, like torch.cumsum: element i covers elements 0
    to i.

    x: bfloat16, float16 or float32, any shape and strides; summed in float32, read and written
        once, however long. If `dim` is not contiguous, x is copied first.
    reverse: element i covers elements i to the last one.
    exclusive: without element i itself; the first result is 0 for sum, -inf for max, inf for min.
    out_dtype: by default x's.

    Sums have a fixed order, so results are bitwise reproducible. A sum is differentiable once.
    Raises TypeError or ValueError, in one sentence that names the argument, for arguments that are
    not supported, and without an NVIDIA GPU from Ampere on.
    """
    plain = op.__class__ is str and reverse.__class__ is exclusive.__class__ is bool
    if plain and dim.__class__ is int and dim == -1 and not _is_compiling():
        found = _again((op, reverse, exclusive, out_dtype), x)
        if found is not None:
            return found
    check_rows("x", x)
    if op not in OPS:
        raise ValueError(f"op={op!r} is not one of {', '.join(OPS)}")
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"dim must be an int, got {type(dim).__name__}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim={dim}: x has {x.dim()} dimensions")
    for name, flag in (("reverse", reverse), ("exclusive", exclusive)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool, got {type(flag).__name__}")
    if out_dtype not in (None, *DTYPES):
        raise TypeError(f"out_dtype={out_dtype!r:.60} is not bfloat16, float16 or float32")
    if op != "sum" and torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(f"x wants a gradient, which a running {op} has not")
    options = op, reverse, exclusive, out_dtype or x.dtype
    if dim in (-1, x.dim() - 1):
        return SCAN(x, *options)
    return SCAN(x.movedim(dim, -1), *options).movedim(-1, dim)


def _again(options: tuple[Any, ...], x: Any) -> Tensor | None:
    """The result of a call that is like one before; None if there was none."""
    if not isinstance(x, Tensor):
        return None
    *most, out = options
    found: Tensor | None = _scanned.again((*most, x.dtype if out is None else out), x)
    return found


def _plan(options: tuple[Any, ...], x: Tensor) -> Run:
    from cutex.kernels.row.fold import Fold
    from cutex.kernels.row.scan import Scan, ScanConfig, words_of
    from cutex.kernels.row.scan_in_cluster import InClusterConfig, ScanInCluster

    op, reverse, exclusive, out = options
    arch = arch_of(x.device, "cutex.scan")
    if not x.numel():
        return lambda x: empty_rows(x, out)
    launch = Launch(x.device)
    rows = launch.rows(x=x)
    rows.append(launch.makes("y", x.shape, out, 2))
    unit, shifted = loads_of(rows, (), True)
    n, bits = rows[0].shape[1], 8 * max(y.element_size() for y in rows)
    for largest in (choose.LARGE_CLUSTER, choose.CLUSTER):
        given = len(rows[0]), n, bits, unit, shifted, kernels_of(arch), largest
        few = choose.scan_in_cluster(*given)
        if few is None:
            continue
        tile, ctas = few
        made = tile, Fold(*OPS[op]), dtype_of(rows[1]), False, reverse, exclusive, ctas
        kernel = ScanInCluster, InClusterConfig(*made), arch
        if runs(*kernel[:2], rows[0], arch):
            return launch.run(kernel, ("x", "y"), (ctas,), ("y",))
    tile = choose.scan(n, bits, unit, shifted)
    parts = -(-(n + tile.lead) // (tile.columns + tile.lead))
    names = ["x", "y"]
    if parts > 1:
        launch.makes("words", (words_of(rows[0].shape[0], parts),), torch.int64)
        names.append("words")
    config = ScanConfig(tile, Fold(*OPS[op]), dtype_of(rows[1]), parts > 1, reverse, exclusive)
    zeroed = ("words",) if parts > 1 else ()
    return launch.run((Scan, config, arch), names, (parts,), ("y",), zeroed)


_scanned = Calls(_plan)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.options = inputs
    ctx.dtype = x.dtype


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    op, reverse, exclusive, _ = ctx.options
    return SCAN(dy, op, not reverse, exclusive, ctx.dtype), None, None, None, None


SCAN = define(
    "scan",
    "(Tensor x, str op, bool reverse, bool exclusive, ScalarType dtype) -> Tensor",
    lambda x, *options: _scanned(options, x),
    lambda x, op, reverse, exclusive, dtype: empty_rows(x, dtype),
    _setup,
    _backward,
)
