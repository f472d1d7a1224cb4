"""Predicted times of the launches of one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutex.sim.host.capture import HostFunction, HostTensor
from cutex.sim.ptx.program import Program
from cutex.sim.timing.gpus import gpu as gpu_named
from cutex.sim.timing.gpus import of_arch
from cutex.sim.timing.report import TimeReport, time_launch
from cutex.sim.timing.sampled import Sampled, sample
from cutex.sim.timing.timed import Whole
from cutex.sim.timing.trace import Traced, trace


def time_call(
    host: HostFunction,
    programs: dict[str, Program],
    arguments: list[Any],
    regions: Sequence[HostTensor],
    gpu: str = "",
    *,
    whole: Whole | None = None,
    limit: float = 0.0,
    log: bool = False,
    data: str = "normal",
) -> list[TimeReport]:
    """Return one report for each launch, on ``gpu`` (see `gpus.gpu`), by default that of the
    kernels' arch.

    The recorded clusters run for real, so the memory that they write is restored. ``whole`` states
    the work of the grid where only ``limit`` MMA FLOPs of each CTA are recorded.
    """
    target = next(iter(programs.values())).target
    board = gpu_named(gpu or of_arch(target))
    if board.arch != target:
        raise ValueError(f"gpu {gpu!r} is a GPU of {board.arch}, the kernel is for {target}")
    traced: Sequence[Traced | Sampled]
    if whole is None and not limit:
        traced = sample(host, programs, arguments, regions)
    else:
        traced = trace(host, programs, arguments, regions, limit)
    return [time_launch(t, board, whole, log=log, data=data) for t in traced]
