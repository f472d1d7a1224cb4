"""A grid divided among processes: each simulates some of its clusters, in memory that all share.

Nothing orders the clusters of a grid (PTX ISA 8.7), so they may be simulated separately, unless the
kernel communicates between them. Findings are reported by one process that simulates all clusters:
where a part finds anything, or two parts touch the same bytes and one of them writes there, the
launch is undone and simulated again, undivided. Numbers and reports are those of one process; only
the order of events within a cluster may differ.
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

from cutex.cores import cores
from cutex.orders import MOST_JOBS
from cutex.sim.hazards.global_marks import Touched
from cutex.sim.hazards.sparse_marks import LARGEST
from cutex.sim.host.capture import Launch
from cutex.sim.machine.memory import GlobalMemory
from cutex.sim.policy import Policy
from cutex.sim.ptx.program import Program

# Instructions by which clusters can communicate besides memory.
_TELLS = re.compile(r"clusterlaunchcontrol|griddepcontrol|tensormap|call\b")
_CLOCKS = re.compile(r"%(clock|globaltimer)")
# Warp-instructions of a program without its loops, for which a process of their own pays: it costs
# 0.1 to 0.25 s of CPU time, and they take 0.1 to 1.4 s (measured: GEMM, attention, rows).
_ENOUGH = 200_000


class Part(NamedTuple):
    """The result of a process that has simulated its clusters without finding anything."""

    executed: np.ndarray  # (instructions of the program,) warp-instructions
    touched: Touched
    rings: dict[str, tuple[int, int]]  # by name: slots, and phases of the one that went furthest


def why_not(
    program: Program, what: Launch, policy: Policy, memory: GlobalMemory, orders: bool
) -> str:
    """The reason why a launch is simulated by one process; "" if several may. ``orders``: whether
    the program has instructions by which clusters may order their accesses.
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
        return f"a tensor is larger than {LARGEST} bytes, so that not all its bytes have marks"
    if multiprocessing.current_process().daemon:
        return "the process may not start others"
    return ""


def paying(program: Program, what: Launch, clusters: int) -> int:
    """How many processes it pays to divide ``clusters`` clusters of a launch among: 1 for a small
    one, at most one for each core that this process may keep busy.
    """
    threads = what.block[0] * what.block[1] * what.block[2]
    work = clusters * what.cluster_size * -(-threads // 32) * len(program.code)
    return max(1, min(work // _ENOUGH, cores(), clusters, MOST_JOBS))


def shares(clusters: Sequence[int], jobs: int) -> list[list[int]]:
    """The clusters, in order, in at most ``jobs`` parts whose sizes differ by at most one."""
    jobs = min(jobs, len(clusters), MOST_JOBS)
    bounds = [len(clusters) * i // jobs for i in range(jobs + 1)]
    return [list(clusters[a:b]) for a, b in pairwise(bounds)]


def run_parts(
    memory: GlobalMemory, parts: Sequence[list[int]], run: Callable[[list[int]], Part | None]
) -> list[Part] | None:
    """Run each part in a process of its own, by ``run``, which returns None if it finds something.

    Returns None, with ``memory`` restored, unless all parts are independent of each other.
    """
    with _shared(memory) as keep, _processes(parts, run) as ends:
        answers: dict[Connection, Part] = {}
        while len(answers) < len(ends):
            for end in wait([e for e in ends if e not in answers]):
                assert isinstance(end, Connection)
                try:
                    part = end.recv()
                except EOFError:
                    part = None
                if part is None:
                    return None
                answers[end] = part
        found = [answers[end] for end in ends]
        for i, part in enumerate(found):
            if any(part.touched.clashes(other.touched) for other in found[:i]):
                return None
        keep({base for part in found for base in part.touched.written})
        return found


@contextmanager
def _shared(memory: GlobalMemory) -> Iterator[Callable[[set[int]], None]]:
    """A context in which ``memory`` is shared between processes. It yields a function that keeps
    the writes to the regions at the given addresses.
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
    """A context of forked processes, one per part, that end with it at the latest; yields the ends
    of pipes that deliver their results.
    """
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    try:
        part = run(clusters)
    except Exception:  # NOTE: one process runs it again, and reports the error
        part = None
    end.send(part)
