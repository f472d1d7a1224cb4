"""The public entry: simulate a compiled kernel, or any @cute.jit function, on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from cutex.arch import arch as arch_named
from cutex.orders import MOST_JOBS, ORDERS
from cutex.sim.errors import Hazards, SimError
from cutex.sim.host.capture import HostTensor
from cutex.sim.host.loaded import captured
from cutex.sim.simulation import SimReport, Simulation


def simulate(
    compiled: Any,
    *tensors: Any,
    order: str = "fifo",
    seed: int = 0,
    arch: str = "sm_100a",
    memory: Sequence[Any] = (),
    raise_findings: bool = True,
    max_instructions: int | None = None,
    time: bool = False,
    gpu: str = "",
    jobs: int | None = 1,
    checks: bool = True,
    clusters: int | None = None,
    resources: bool = False,
) -> SimReport:
    """Run a kernel on the CPU: its real host code and PTX, every warp, barrier, TMA copy and MMA.

    compiled: a `cutex.compile.Compiled`; or a result of ``cute.compile`` with TVM-FFI and KeepPTX
        on; or a ``@cute.jit`` function (or an object with a jitted ``__call__``), which is compiled
        for ``arch`` first.
    tensors: CPU torch tensors or numpy arrays of any shape and strides, written in place; also int,
        float, None.
    order: "fifo" (deterministic; copies and MMAs complete as late as the program allows), "eager"
        (they complete at once), "starved" (one warp runs last), "peer-late" (so do all CTAs of a
        cluster but one), "elected" (elect.sync returns another lane) or "random"; ``seed`` picks
        the warp, the CTA, the lane, the order.
    time: predict how long each launch takes on ``gpu`` (as "b200,clock=1.6"; by default the one of
        the arch), in ``times`` of the report; docs/time.md says how, and how far off it may be.
    memory: further CPU tensors, which the kernel reaches by addresses that it reads from others, as
        grouped GEMMs do.
    max_instructions: of all warps of one launch, after which it is ended as Endless; None for no
        limit.

    jobs: processes that simulate a grid of independent clusters together, on as many cores; None:
        as many as pay, at most one a core.
    clusters: simulate no more than so many of the grid, evenly from its first to its last. The
        report lists these launches (``sampled``), and the elements ``written``: only these may be
        compared. A kernel whose clusters may wait for each other through global memory runs whole;
        a call that launches another kernel behind a sampled one is refused.
    resources: say what each kernel takes of an SM, its bank conflicts, and its transactions with
        memory, in ``kernels`` of the report.
    checks: look for races, which takes a fifth to two fifths of a run; without, it finds wrong
        numbers, deadlocks, bad addresses and misused barriers only.

    Returns a SimReport. Raises Deadlock, Endless, BadAddress, BarrierMisuse, BadOperand,
    UnknownInstruction, each with a report; Hazards after a run with findings (unless
    ``raise_findings`` is False: then they are in the report); NoCompiler where a C compiler is
    needed and there is none; TypeError or ValueError when the host code refuses the arguments.
    """
    if order not in ORDERS:
        raise ValueError(f"order {order!r}: takes one of {', '.join(ORDERS)}")
    for name, number in (("seed", seed), ("jobs", jobs), ("clusters", clusters),
                         ("max_instructions", max_instructions)):  # fmt: skip
        if number is not None and not isinstance(number, int):
            raise TypeError(f"{name} must be an int, got {number!r}")
    if jobs is not None and not 1 <= jobs <= MOST_JOBS:
        raise ValueError(f"jobs {jobs}: takes 1 to {MOST_JOBS}")
    if not 0 <= seed < 1 << 31:
        raise ValueError(f"seed {seed}: takes a number from 0 to {(1 << 31) - 1}")
    if max_instructions is not None and max_instructions < 1:
        raise ValueError(f"max_instructions {max_instructions}: takes a number from 1")
    if not isinstance(gpu, str):
        raise TypeError(f"gpu must be a str, got {gpu!r}")
    if gpu and not time:
        raise ValueError(f"gpu {gpu!r} goes with time=True")
    if clusters is not None and (clusters < 1 or not checks):
        raise ValueError(f"clusters {clusters}: takes a number from 1, and checks")
    arch_named(arch)
    started = perf_counter()
    host, programs, arguments, reached = captured(compiled, tensors, arch)
    if not isinstance(memory, Sequence):
        raise TypeError(f"memory takes a list of CPU tensors, got {type(memory).__name__}")
    for i, more in enumerate(memory):
        tensor = HostTensor.of(more, f"memory {i}")
        if tensor is None:
            raise TypeError(f"memory takes CPU tensors, got {type(more).__name__}")
        reached.append(tensor)
    limit = max_instructions
    run = Simulation(
        programs, reached, order=order, seed=seed, limit=limit, jobs=jobs, checks=checks,
        clusters=clusters, cubin=(host.cubin or b"") if resources else None,
    )  # fmt: skip
    if time:
        from cutex.sim.timing.call import time_call

        try:
            times = time_call(host, programs, arguments, reached, gpu)
        except SimError:
            host(arguments, run.launch)  # NOTE: it ends there too, with names and calls
            raise
    host(arguments, run.launch)
    report = run.report
    report.times = times if time else []
    report.seconds = perf_counter() - started
    if report.findings and raise_findings:
        raise Hazards(report.findings)
    return report
