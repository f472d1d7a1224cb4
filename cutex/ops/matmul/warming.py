"""Building kernels before they are needed, so that no call of a server waits for a compiler."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from itertools import compress
from pathlib import Path

import torch
from torch import Tensor

from cutex.arch import local_arch
from cutex.bench.progress import progress
from cutex.kernels.gemm.choose import cover, predictions, rows_class
from cutex.kernels.gemm.scaled.fp8 import promoted
from cutex.kernels.gemm.signature import GeneralConfig
from cutex.kernels.gemm.sm90.loading import FINE_ROWS
from cutex.ops import building
from cutex.ops.device import forget_plans, simulated_arch
from cutex.ops.matmul import choices
from cutex.ops.matmul.arrange import arrange
from cutex.ops.matmul.checks import FLOAT8, Call, check
from cutex.ops.matmul.choices import CallClass
from cutex.ops.matmul.plan import (
    BUILT,
    bits_of,
    call_class,
    config_for,
    fitted,
    forget,
    job,
    kernel_for,
    majors_of,
    placed,
    problem_of,
)
from cutex.ops.number import check_flag
from cutex.problem.protocol import size_class

MOST_KERNELS = 24

Rows = int | range
Shape = tuple[Rows, int, int]


def kernels_built() -> int:
    """The number of kernels of `cutex.matmul` that this process had to compile because they were
    not on disk, without those that `warm_up` and `tune` compile in other processes."""
    return BUILT.count


def warm_up(
    shapes: Iterable[Shape],
    dtype: torch.dtype = torch.bfloat16,
    *,
    bias: bool = False,
    activation: str | None = None,
    residual: bool = False,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = True,
    most: int = MOST_KERNELS,
) -> int:
    """Build the kernels of `cutex.matmul(x, w.mT, ...)` for all `shapes` in parallel, and load
    them.

    shapes: (M, N, K) each, for contiguous x (M, K) and w (N, K); M may be a range of token counts.
    bias, residual: (N,) and (M, N), both of `dtype`, or bfloat16 for fp8. activation,
        use_fast_accum: as in `cutex.matmul`.
    most: the number of kernels that may serve them all, chosen to cost the least by the model;
        calls in this process then use these.

    Returns the number of kernels. After it none of these calls compiles anything (`kernels_built`).
    Raises TypeError or ValueError for what `cutex.matmul` would refuse, and without a Hopper or
    Blackwell GPU.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {dtype!r:.60}")
    if not isinstance(shapes, Iterable) or isinstance(shapes, str | bytes | Tensor):
        raise TypeError(f"shapes must be an iterable of (M, N, K), got {type(shapes).__name__}")
    check_flag("bias", bias)
    check_flag("residual", residual)
    if type(most) is not int:
        raise TypeError(f"most must be a whole number above 0, got {type(most).__name__}")
    if most < 1:
        raise ValueError(f"most must be a whole number above 0, got {most}")
    arch = _arch()
    added = torch.bfloat16 if dtype in FLOAT8 else dtype
    classes: dict[CallClass, None] = {}
    for shape in shapes:
        for m, n, k in _classes(shape):
            x, w, row = _meta((m, k), dtype), _meta((n, k), dtype), _meta((n,), added)
            call = Call(x, w.mT, row if bias else None, activation=activation, out_dtype=out_dtype,
                        use_fast_accum=use_fast_accum)  # fmt: skip
            call.residual = _meta(call.shape, added) if residual else None
            check(call)
            arranged = arrange(call, _meta(call.shape, call.dtype), arch)
            layouts = arranged.a, arranged.b, arranged.out
            of = arranged.sizes, layouts, arranged.ops, arch, arranged.promoted
            classes[call_class(*of)] = None
    configs = list(dict.fromkeys(_few_for(list(classes), most).values()))
    building.build([job(config, arch) for config in configs])
    for config in configs:
        kernel_for(config, arch)
    return len(configs)


def build_ahead(
    operands: Iterable[tuple[Tensor, Tensor]],
    out_dtype: torch.dtype,
    use_fast_accum: bool = True,
) -> list[Path]:
    """Build in parallel the kernels of `cutex.matmul(a, b, out_dtype=...)` for each (a, b), whose
    data is not read (they may be on "meta"), and show the progress. Return their folders in the
    cache, without those that do not compile."""
    configs = list(dict.fromkeys(_config(a, b, out_dtype, use_fast_accum) for a, b in operands))
    with progress("kernels are built", len(configs)) as step:
        built = building.build([job(config, _arch()) for config in configs], ended=step)
    return [kernel_for(c, _arch()).object_path.parent for c in compress(configs, built)]


def tiles_of(a: Tensor, b: Tensor, out_dtype: torch.dtype, use_fast_accum: bool = True) -> str:
    """The tiles that `cutex.matmul(a, b, out_dtype=...)` takes, as text: the sizes of a tile and
    its stages, and the fields that differ from the defaults."""
    tiles = _config(a, b, out_dtype, use_fast_accum).tiles
    always = ("tile_m", "tile_n", "k_bytes", "num_stages")
    said = [f for f in fields(tiles) if f.name in always or getattr(tiles, f.name) != f.default]
    return " ".join(f"{f.name}={getattr(tiles, f.name)}" for f in said)


def _config(a: Tensor, b: Tensor, out_dtype: torch.dtype, use_fast_accum: bool) -> GeneralConfig:
    """The config that `cutex.matmul(a, b, out_dtype=...)` takes."""
    call = Call(a, b, out_dtype=out_dtype, use_fast_accum=use_fast_accum)
    check(call)
    arranged = arrange(call, _meta(call.shape, call.dtype), _arch())
    layouts = arranged.a, arranged.b, arranged.out
    return config_for(arranged.sizes, layouts, arranged.ops, _arch(), arranged.promoted)


def _few_for(classes: list[CallClass], most: int) -> dict[CallClass, GeneralConfig]:
    """A config for each of `classes`, at most `most` different ones, which calls then take."""
    sampled = list({_wider(calls): calls for calls in classes}.values())
    while True:
        few = cover([_times(calls) for calls in sampled], most)
        times = {calls: _times(calls, few) for calls in classes}
        if not (without := [calls for calls, of_class in times.items() if not of_class]):
            break
        sampled += without
    chosen = {}
    for calls, of_class in times.items():
        config = min(of_class, key=of_class.__getitem__)
        choices.prefer(calls, config.tiles)
        chosen[calls] = config
    forget()
    forget_plans()
    return chosen


def _wider(calls: CallClass) -> CallClass:
    """The class that `calls` would be in if there were only eight of large M from one power of two
    to the next: the candidates for all of it are those of its largest M."""
    m, n, k, batch = calls.sizes
    return replace(calls, sizes=(size_class(m) if m > FINE_ROWS else m, n, k, batch))


def _times(
    calls: CallClass, among: Iterable[GeneralConfig] | None = None
) -> dict[GeneralConfig, float]:
    """The predicted microseconds of the configs that can run `calls`, of all candidates or those
    given; if a config was chosen for them by timing, that one alone."""
    given = None if among is None else [c.tiles for c in among]
    if (known := choices.remembered(calls)) is not None:
        times = {known: 1.0}
    elif calls.promoted:
        times = promoted.predictions(calls.sizes, calls.target, given)
    else:
        times = predictions(
            problem_of(calls),
            calls.target,
            calls.sizes[3],
            majors_of(calls),
            bits_of(calls),
            configs=given,
        )
        times = {placed(tiles, calls): us for tiles, us in times.items()}
    fitting = ((fitted(tiles, calls), us) for tiles, us in times.items())
    return {c: us for c, us in fitting if c is not None and (among is None or c in among)}


def _arch() -> str:
    here = local_arch()
    name = simulated_arch() or (here.name if here is not None else None)
    if name is None:
        raise ValueError("warm_up needs a Hopper or Blackwell GPU, or `cutex.ops.simulated()`")
    return name


def _classes(shape: Shape) -> Iterator[tuple[int, int, int]]:
    """The smallest and the largest M of each class of `shape`, with its N and K; none of an empty
    result, for which nothing is launched."""
    if not (
        isinstance(shape, tuple | list)
        and len(shape) == 3
        and type(shape[0]) in (int, range)
        and all(type(x) is int for x in shape[1:])
    ):
        raise TypeError(f"shapes holds {shape!r}: (M, N, K) of whole numbers is due, M or a range")
    rows, n, k = shape
    if isinstance(rows, range):
        rows = rows if rows.step > 0 else rows[::-1]
    least = rows if isinstance(rows, int) else rows[0] if rows else 0
    if min(least, n, k) < 0:
        raise ValueError(f"shapes holds {shape!r}: sizes are at least 0")
    if n == 0 or rows == 0:
        return
    if isinstance(rows, int):
        yield rows, n, k
        return
    rest = rows[least == 0 :]
    while rest:
        count = bisect_right(rest, rows_class(rest[0]), key=rows_class)
        yield from ((m, n, k) for m in sorted({rest[0], rest[count - 1]}))
        rest = rest[count:]


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
