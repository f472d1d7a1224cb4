"""Kernels built before they are needed: no call of a server then waits for a compiler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

import torch
from torch import Tensor

from cutex.arch import local_arch
from cutex.kernels.gemm.signature import GeneralConfig
from cutex.ops import building
from cutex.ops.arrange import arrange
from cutex.ops.checks import Call, check
from cutex.ops.device import simulated_arch
from cutex.ops.plan import BUILT, config_for, kernel_for, rows_class

Rows = int | range
Shape = tuple[Rows, int, int]


def kernels_built() -> int:
    """How many kernels of `cutex.matmul` this process has had to compile, not finding them on disk,
    where those are not counted that `warm_up` and `tune` compile in processes of their own."""
    return BUILT.count


def warm_up(
    shapes: Iterable[Shape],
    dtype: torch.dtype = torch.bfloat16,
    *,
    bias: bool = False,
    activation: str | None = None,
    residual: bool = False,
    out_dtype: torch.dtype | None = None,
) -> int:
    """Build, in parallel, and load the kernels of `cutex.matmul(x, w.mT, ...)` for all `shapes`.

    shapes: (M, N, K) each, x (M, K) and w (N, K) contiguous; M may be a range of token counts. bias
    (N,), residual (M, N) and `activation` as `cutex.matmul` takes them. Returns how many kernels
    these calls take; after it none of them compiles (`kernels_built`). Raises TypeError or
    ValueError for what `cutex.matmul` would not take, and where there is no Hopper or Blackwell
    GPU.
    """
    arch = _arch()
    configs: dict[GeneralConfig, None] = {}
    for shape in shapes:
        for m, n, k in _classes(shape):
            x, w, row = _meta((m, k), dtype), _meta((n, k), dtype), _meta((n,), dtype)
            call = Call(x, w.mT, row if bias else None, activation=activation, out_dtype=out_dtype)
            call.residual = _meta(call.shape, dtype) if residual else None
            check(call)
            arranged = arrange(call, _meta(call.shape, call.dtype), arch)
            layouts = arranged.a, arranged.b, arranged.out
            configs[config_for(arranged.sizes, layouts, arranged.ops, arch)] = None
    building.build([(config, arch) for config in configs])
    for config in configs:
        kernel_for(config, arch)
    return len(configs)


def _arch() -> str:
    here = local_arch()
    name = simulated_arch() or (here.name if here is not None else None)
    if name is None:
        raise ValueError("warm_up needs a Hopper or Blackwell GPU, or `cutex.ops.simulated()`")
    return name


def _classes(shape: Shape) -> Iterator[tuple[int, int, int]]:
    """The least and the largest M of each class of `shape`, and its N and K."""
    rows, n, k = shape
    if isinstance(rows, int):
        yield rows, n, k
        return
    for _, members in groupby(sorted(rows), rows_class):
        of_class = list(members)
        yield from ((m, n, k) for m in {of_class[0], of_class[-1]})


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
