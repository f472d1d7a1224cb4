"""Predicted times: of one recorded launch, and of the launches of one call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from cutex.sim.host.capture import HostFunction, HostTensor
from cutex.sim.ptx.program import Program
from cutex.sim.timing.chain import BINDS, chain
from cutex.sim.timing.gpus import Gpu, of_arch
from cutex.sim.timing.gpus import gpu as gpu_named
from cutex.sim.timing.lengths import Lengths
from cutex.sim.timing.power import clock_ghz
from cutex.sim.timing.predict import launch_cycles, predict
from cutex.sim.timing.report import Role, TimeReport
from cutex.sim.timing.sampled import Sampled, sample
from cutex.sim.timing.timed import Whole
from cutex.sim.timing.trace import Traced, trace


def time_launch(
    traced: Traced | Lengths | Sampled,
    gpu: Gpu,
    whole: Whole | None = None,
    *,
    log: bool = False,
    data: str = "normal",
) -> TimeReport:
    """The time of one recorded launch."""
    timed = predict(traced, gpu, whole)
    ghz = clock_ghz(timed, gpu, data)
    timed = predict(traced, gpu.at(ghz), whole, log=log)
    parts: dict[str, float] = {}
    launch = launch_cycles(traced, gpu.at(ghz))
    busiest = timed.busy[timed.binds] * (1 - launch / timed.cycles)
    if nothing_binds := busiest < BINDS:
        drawn = timed if log else predict(traced, gpu.at(ghz), whole, log=True)
        parts = {"launch": launch, **chain(drawn.intervals)}
    record = traced.record
    roles = []
    for name in dict.fromkeys(record.roles.values()):
        warps = [w for w, r in record.roles.items() if r == name]
        count = len(warps) * max(1, timed.side_by_side)
        waited = timed.waited.get(name, {})
        roles.append(
            Role(
                name, len(warps) / (record.ctas or 1), timed.worked.get(name, 0.0) / count,
                {k: v / count for k, v in waited.items()},
            )
        )  # fmt: skip
    return TimeReport(
        kernel=traced.name,
        gpu=gpu.name,
        cycles=timed.cycles,
        clock_ghz=ghz,
        band=math.hypot(gpu.band, timed.sampling_error),
        clock_band=gpu.clock_band,
        flops=timed.flops,
        binds="nothing" if nothing_binds else timed.binds,
        busy=timed.busy,
        roles=roles,
        timed=timed,
        intervals=timed.intervals,
        chain=parts,
        stack=traced.stack,
    )


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
