"""Tuning on the user's machine: the choice of tiles for one call, by timing, stored on disk.

    cutex.tune(x, w.mT, bias=b)      # this call, with the arguments of cutex.matmul
    with cutex.tuning():             # every call inside, the first time
        model(batch)

What the call takes untuned and the model's first candidates are compiled in parallel and timed on
copies of the call's own operands with a cold L2; those that are slow in a first look are left out.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutex.arch import arch
from cutex.bench import timing
from cutex.errors import NoCache
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.ops import building
from cutex.ops.device import forget_plans, launcher
from cutex.ops.matmul import choices
from cutex.ops.matmul.plan import (
    call_class,
    candidates,
    config_for,
    fitted,
    forget,
    job,
    kernel_for,
    unplaced,
)
from cutex.ops.number import number

if TYPE_CHECKING:
    from cutex.kernels.gemm.config import GemmConfig
    from cutex.kernels.gemm.signature import GeneralConfig
    from cutex.ops.matmul.arrange import Arranged
    from cutex.ops.matmul.choices import CallClass

SECONDS = 3.0  # the limit of one call's tuning
CANDIDATES = 16
OF_A_TILE = 2  # configs that differ in all but the tile, before others of other tiles are taken
LOOKED_THROUGH = 96  # of the ranking, for other tiles
HOPES = 1 / 4  # share of them that may be configs unlike what was measured
COPIES = 64  # of a call's operands, at most
COMPILING = 0.6  # the share of the time after which the wait for compilations ends
LOOK = timing.Sampling(rounds=3, warm_up_seconds=0.02, sample_us=400.0, eager_calls=1)
FINAL = timing.Sampling(rounds=9, warm_up_seconds=0.02, sample_us=1500.0, eager_calls=1)
BEHIND = 1.1  # configs slower than this multiple of the first look's best are left out

# a function that times variants by name on copies of operands, in microseconds
Timer = Callable[[Mapping[str, Any], Sequence[tuple[Any, ...]], timing.Sampling], dict[str, float]]


@dataclass(eq=False)
class Limit:
    """The seconds that an open context gives to a call."""

    seconds: float


_limits: list[Limit] = []  # of the open contexts of all threads, the latest last
_found: ContextVar[list[GeneralConfig] | None] = ContextVar("found", default=None)


@contextmanager
def tuning(seconds: float = SECONDS) -> Iterator[None]:
    """A context in which the first call of `cutex.matmul` of each kind is tuned, in at most
    `seconds`; the first one in a process takes some seconds more, until the compiler is imported in
    another process. It counts for all threads, as those of a backward pass are torch's."""
    limit = Limit(number("seconds", seconds))
    if not limit.seconds > 0:
        raise ValueError(f"seconds is {seconds}: tuning takes a number above 0")
    forget_plans()  # calls that were made before are looked at again
    if torch.cuda.is_available():
        building.start()
    _limits.append(limit)
    try:
        yield
    finally:
        _limits.remove(limit)


@contextmanager
def configs_tuned() -> Iterator[list[GeneralConfig]]:
    """A context with the configs to which calls within it, in this thread, are tuned."""
    found: list[GeneralConfig] = []
    token = _found.set(found)
    try:
        yield found
    finally:
        _found.reset(token)


def limit_of_call() -> float | None:
    """The seconds that tuning a call may take; None if calls are not to be tuned."""
    latest = _limits[-1:]  # at once, as other threads leave their contexts
    return latest[0].seconds if latest else None


def tuned_config(arranged: Arranged, arch_name: str, seconds: float) -> GeneralConfig:
    """The config for a call inside `tuning`."""
    config = choose_by_time(arranged, arch_name, seconds)
    found = _found.get()
    if found is not None:
        found.append(config)
    return config


def choose_by_time(
    arranged: Arranged, arch_name: str, seconds: float, timer: Timer | None = None
) -> GeneralConfig:
    """The fastest config for an arranged call, stored before or timed now; or the one it uses
    untuned, if nothing is compiled in time, or while a CUDA graph is captured, which timing would
    break."""
    on_gpu = arranged.tensors[0].is_cuda
    if timer is None and (not on_gpu or torch.cuda.is_current_stream_capturing()):
        layouts = arranged.a, arranged.b, arranged.out
        return config_for(arranged.sizes, layouts, arranged.ops, arch_name, arranged.promoted)
    with building.alone():  # what others compile or time meanwhile would disturb the times
        return _timed(arranged, arch_name, seconds, timer or time_on_gpu)


def _timed(arranged: Arranged, arch_name: str, seconds: float, timer: Timer) -> GeneralConfig:
    """`choose_by_time`, where calls can be timed."""
    layouts = arranged.a, arranged.b, arranged.out
    calls = call_class(arranged.sizes, layouts, arranged.ops, arch_name, arranged.promoted)
    untuned = config_for(arranged.sizes, layouts, arranged.ops, arch_name, arranged.promoted)
    if (known := choices.remembered(calls)) is not None:
        if fitted(known, calls) != untuned:
            forget()  # another process has tuned such calls since this one first made them
        return config_for(arranged.sizes, layouts, arranged.ops, arch_name, arranged.promoted)
    proposed = worth_timing(calls, untuned)
    built = building.build([job(c, arch_name) for c in proposed], COMPILING * seconds)
    until = time.monotonic() + (1 - COMPILING) * seconds
    ready = [c for c, ok in zip(proposed, built, strict=True) if ok]
    if len(ready) < min(2, len(proposed)):
        m, n, k, _ = arranged.sizes
        few = f"{len(ready)} of {len(proposed)} kernels were built in time"
        warnings.warn(f"{m}x{n}x{k} is not tuned: {few}", stacklevel=2)
    if len(ready) < 2:
        return ready[0] if ready else proposed[0]
    us = compete(ready, arranged, arch_name, until, timer)
    best = min(us, key=us.__getitem__)
    try:
        choices.remember(calls, best.tiles, {str(c.tiles): round(t, 3) for c, t in us.items()})
    except NoCache as error:
        warnings.warn(f"what was tuned is kept in this process only: {error}", stacklevel=2)
        choices.prefer(calls, best.tiles)
    forget()
    return best


def worth_timing(calls: CallClass, untuned: GeneralConfig) -> list[GeneralConfig]:
    """The configs that tuning compares: the untuned choice, the same not placed by GPC, the top of
    the model's ranking, and those that may be faster where the model is unsure; few of each tile,
    since what the model does not know of one slows all its variants
    (docs/facts/gemm.md#tuned-tiles)."""
    ranking = of_many_tiles(islice(candidates(calls), LOOKED_THROUGH))[:CANDIDATES]
    hopes = of_many_tiles(islice(candidates(calls, hopeful=True), LOOKED_THROUGH))[:CANDIDATES]
    unlike = int(CANDIDATES * HOPES)
    first = [untuned, *unplaced(untuned, calls), *ranking[: CANDIDATES - unlike]]
    more = [c for c in hopes if c not in first][:unlike]
    return list(dict.fromkeys((*first, *more, *ranking)))[:CANDIDATES]


def of_many_tiles(ranking: Iterable[GeneralConfig]) -> list[GeneralConfig]:
    """`ranking` with what is alike behind: first OF_A_TILE of each tile, boxes not told apart."""
    of_tile: Counter[tuple[Any, ...]] = Counter()
    first: list[GeneralConfig] = []
    rest: list[GeneralConfig] = []
    met: set[GemmConfig] = set()
    for config in ranking:
        tile, variant = tile_and_variant(config)
        unlike = variant not in met and of_tile[tile] < OF_A_TILE
        (first if unlike else rest).append(config)
        of_tile[tile] += unlike
        met.add(variant)
    return first + rest


def tile_and_variant(config: GeneralConfig) -> tuple[tuple[Any, ...], GemmConfig]:
    """The rows and columns of C in a tile of `config`, with the CTAs that its K is divided among;
    and its tiles without what does not change how they are computed."""
    c = config.tiles
    if not isinstance(c, Sm90Config):
        return (c.tile_m, c.tile_n), c
    sides = (c.tile_n, c.tile_m) if c.swap_ab else (c.tile_m, c.tile_n)
    return (*sides, c.split_k, c.k_shares > 1, c.stream_k), replace(c, box_rows=0)


def compete(
    configs: Sequence[GeneralConfig],
    arranged: Arranged,
    arch_name: str,
    until: float,
    timer: Timer,
) -> dict[GeneralConfig, float]:
    """The microseconds of the finalists, or of the first round if there is no time for a second."""
    copies = operand_copies(arranged, arch(arch_name).l2_bytes)
    launches: dict[str, Any] = {}
    for i, config in enumerate(configs):
        compiled = kernel_for(config, arch_name)
        launches[str(i)] = launcher(compiled, list(copies[0]), config.tiles.workspace)
    us = timer(launches, copies, LOOK)
    limit = BEHIND * min(us.values())
    finalists = {name: launch for name, launch in launches.items() if us[name] <= limit}
    if len(finalists) > 1 and time.monotonic() < until:
        us = timer(finalists, copies, FINAL)
    return {configs[int(name)]: t for name, t in us.items()}


def operand_copies(arranged: Arranged, l2_bytes: int) -> list[tuple[Any, ...]]:
    """Copies of a call's arguments, enough to exceed L2. The first is the call's own, except for
    what is written (out and amax), which a tuned call must write only once."""
    tensors = [x for x in arranged.tensors[:3] if isinstance(x, Tensor)]
    bytes_of_one = sum(x.numel() * x.element_size() for x in tensors)
    least = timing.ROTATE_L2 * l2_bytes // COPIES + 1
    count = timing.copies_to_rotate(max(bytes_of_one, least), l2_bytes, "cold")
    a, b, out, *passed = arranged.tensors
    copies = []
    for i in range(count):
        ours = copied(out)
        rest = [
            ours if x is out else copied(x) if name == "amax" else x
            for name, x in zip(arranged.names, passed, strict=True)
        ]
        copies.append((copied(a) if i else a, copied(b) if i else b, ours, *rest))
    return copies


def copied(x: Tensor) -> Tensor:
    """A copy with the strides of `x`, of elements at one address as of one."""
    y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    once = tuple(slice(1 if stride == 0 else None) for stride in x.stride())
    y[once].copy_(x[once])
    return y


def time_on_gpu(
    launches: Mapping[str, Any], copies: Sequence[tuple[Any, ...]], sampling: timing.Sampling
) -> dict[str, float]:
    measured = timing.time_variants(launches, copies, "cold", sampling=sampling)
    return {name: t.median_us for name, t in measured.timings.items()}
