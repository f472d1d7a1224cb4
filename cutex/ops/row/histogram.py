"""`cutex.histogram`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cutex.arch import kernels_of
from cutex.kernels.row import choose
from cutex.ops.number import number
from cutex.ops.row.launches import Calls, Launch, Run, runs
from cutex.ops.row.operators import define
from cutex.ops.row.rows import COLUMNS, PIECE, arch_of, as_rows, check, loads_of, sms_of

CTAS = 4  # of an SM
THREADS = 256  # of each CTA of a cluster that counts few elements
IN_CLUSTER = 4096  # bins that a cluster counts where elements are few
MOST = 1 << 24  # bins, whose numbers float32 holds

_is_compiling = torch.compiler.is_dynamo_compiling


def histogram(x: Tensor, bins: int, *, low: float, high: float) -> Tensor:
    """The number of elements of x in each of `bins` bins of equal width from low to high.

    x: bfloat16, float16 or float32, any shape and strides. An element belongs to bin
        floor((x - low) * (bins / (high - low))), computed in float32; high itself belongs to the
        last bin. Elements outside, and NaNs, belong to none.

    Returns int64 (bins,), deterministic. Not differentiable. Raises TypeError or ValueError, in one
    sentence that names the argument, for arguments that are not supported, and without an NVIDIA
    GPU from Ampere on.
    """
    plain = bins.__class__ is int and low.__class__ is high.__class__ is float
    if plain and isinstance(x, Tensor) and not _is_compiling():
        found: Tensor | None = _counted.again((bins, low, high), x)
        if found is not None:
            return found
    check("x", x)
    if isinstance(bins, bool) or not isinstance(bins, int):
        raise TypeError(f"bins must be an int, got {type(bins).__name__}")
    if not 1 <= bins <= MOST:
        raise ValueError(f"bins={bins} must be from 1 to {MOST}")
    given = number("low", low), number("high", high)
    if not all(map(math.isfinite, given)) or not given[0] < given[1]:
        raise ValueError(f"low={low}, high={high}: must be finite, the first the smaller")
    if x.numel() <= COLUMNS:
        return HISTOGRAM(x.detach(), bins, *given)
    pieces = x.detach().reshape(-1).split(PIECE)
    return torch.stack([HISTOGRAM(piece, bins, *given) for piece in pieces]).sum(0)


def _plan(options: tuple[int, float, float], x: Tensor) -> Run:
    from cutex.kernels.row.histogram import Histogram, HistogramConfig

    bins, low, high = options
    arch = arch_of(x.device, "cutex.histogram")
    if not x.numel():
        return lambda x: torch.zeros(bins, dtype=torch.int64, device=x.device)
    launch = Launch(x.device)
    row = launch.passes("x", x, lambda x: as_rows(x.reshape(1, -1)))
    launch.makes("counts", (bins,), torch.int64)
    tile = choose.walk(8 * x.element_size(), *loads_of([row], (), True))
    numbers: tuple[float | int, ...] = low, high, bins / (high - low)
    for largest in (choose.LARGE_CLUSTER, choose.CLUSTER):
        given = x.numel(), tile, THREADS, kernels_of(arch), largest, choose.HISTOGRAM_CLUSTER
        cluster = choose.one_cluster(*given)
        if cluster is None or bins > IN_CLUSTER:
            break
        kernel = Histogram, HistogramConfig(cluster, bins), arch
        if runs(Histogram, kernel[1], row, arch):
            return launch.run(kernel, ("x", "counts"), (*numbers, cluster.ctas), ("counts",))
    parts = -(-(row.shape[1] + tile.lead) // (tile.columns + tile.lead))
    ctas = min(parts, CTAS * sms_of(x.device, arch))
    kernel = Histogram, HistogramConfig(tile, bins), arch
    return launch.run(kernel, ("x", "counts"), (*numbers, ctas), ("counts",), ("counts",))


_counted = Calls(_plan)


def _fake(x: Tensor, bins: int, *_: Any) -> Tensor:
    return torch.empty(bins, dtype=torch.int64, device=x.device)


HISTOGRAM = define(
    "histogram",
    "(Tensor x, int bins, float low, float high) -> Tensor",
    lambda x, *options: _counted(options, x),
    _fake,
)
