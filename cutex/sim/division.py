"""A grid divided among processes: each simulates some of its clusters, in memory that they share.

Nothing orders the clusters of a grid (PTX ISA 8.7), so they may as well be simulated apart, but for
kernels in which they tell each other something. What is found is told by one process that simulates
all of them: so where a part finds anything, or two parts touch the same bytes and one of them
writes there, the launch is undone and simulated again, undivided. Numbers and reports are those of
one process; only the order of events within a cluster may be another one.
"""

from __future__ import annotations

import mmap
import multiprocessing
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import NamedTuple

import numpy as np

from cutex.orders import MOST_JOBS
from cutex.sim.hazards.global_races import LARGEST, Touched
from cutex.sim.host.capture import Launch
from cutex.sim.machine.memory import GlobalMemory
from cutex.sim.policy import Policy
from cutex.sim.ptx.parse import Program

# What clusters can tell each other by, besides memory: who comes first.
_TELLS = re.compile(r"clusterlaunchcontrol|griddepcontrol|tensormap|call\b")
_CLOCKS = re.compile(r"%(clock|globaltimer)")


class Part(NamedTuple):
    """What a process says of the clusters that it has simulated, where it has found nothing."""

    executed: np.ndarray  # (instructions of the program,) warp-instructions
    touched: Touched


def why_not(
    program: Program, what: Launch, policy: Policy, memory: GlobalMemory, orders: bool
) -> str:
    """Why a launch is simulated by one process; "" if several may. ``orders``: the program has
    instructions by which clusters may order what they do.
    """
    if what.num_ctas == what.cluster_size:
        return "the grid has one cluster"
    if not policy.divides:
        return "one seed decides the order of all its clusters"
    if orders:
        return "its clusters may wait for each other through global memory"
    if any(_TELLS.match(ins.op) or _CLOCKS.search(ins.text) for ins in program.code):
        return "what its clusters do may depend on which comes first"
    if any(len(region.data) > LARGEST for region in memory.regions):
        return f"a tensor is larger than {LARGEST} bytes, so that its accesses are not watched"
    if multiprocessing.current_process().daemon:
        return "the process may not start others"
    return ""


def shares(clusters: Sequence[int], jobs: int) -> list[list[int]]:
    """The clusters in order, in at most ``jobs`` parts that differ by one at most."""
    jobs = min(jobs, len(clusters), MOST_JOBS)
    bounds = [len(clusters) * i // jobs for i in range(jobs + 1)]
    return [list(clusters[a:b]) for a, b in pairwise(bounds)]


def run_parts(
    memory: GlobalMemory, parts: Sequence[list[int]], run: Callable[[list[int]], Part | None]
) -> list[Part] | None:
    """Each part in a process of its own, which ``run`` simulates; it gives None where something was
    found. None, and ``memory`` as it was, unless all of them can be told apart from nothing else.
    """
    with _shared(memory) as keep, _processes(parts, run) as ends:
        told: dict[Connection, Part] = {}
        while len(told) < len(ends):
            for end in wait([e for e in ends if e not in told]):
                assert isinstance(end, Connection)
                try:
                    part = end.recv()
                except EOFError:
                    part = None
                if part is None:
                    return None
                told[end] = part
        found = [told[end] for end in ends]
        for i, part in enumerate(found):
            if any(part.touched.clashes(other.touched) for other in found[:i]):
                return None
        keep({base for part in found for base in part.touched.written})
        return found


@contextmanager
def _shared(memory: GlobalMemory) -> Iterator[Callable[[set[int]], None]]:
    """Within, ``memory`` is one that processes share; what is called keeps what they wrote to the
    regions at these addresses.
    """
    originals = [region.data for region in memory.regions]
    for region, original in zip(memory.regions, originals, strict=True):
        region.data = np.frombuffer(mmap.mmap(-1, len(original)), np.uint8)
        region.data[...] = original

    def keep(written: set[int]) -> None:
        for region, original in zip(memory.regions, originals, strict=True):
            if region.base in written:
                original[...] = region.data

    try:
        yield keep
    finally:
        for region, original in zip(memory.regions, originals, strict=True):
            region.data = original


@contextmanager
def _processes(
    parts: Sequence[list[int]], run: Callable[[list[int]], Part | None]
) -> Iterator[list[Connection]]:
    """Copies of this process, which end with the context if not before, and tell by these."""
    context = multiprocessing.get_context("fork")
    ends: list[Connection] = []
    processes: list[ForkProcess] = []
    try:
        for part in parts:
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_tell, args=(there, part, run), daemon=True)
            process.start()
            there.close()
            ends.append(here)
            processes.append(process)
        yield ends
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _tell(end: Connection, clusters: list[int], run: Callable[[list[int]], Part | None]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits ends this one
    try:
        part = run(clusters)
    except Exception:  # NOTE: one process does it again, and tells
        part = None
    end.send(part)
