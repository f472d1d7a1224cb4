"""Kernels compiled in parallel by processes of their own, into the cache on disk.

The processes start on first use and stay. They import cutex alone: the caller's script is not run
again in them, whatever it does at its top level.
"""

from __future__ import annotations

import atexit
import os
import pickle
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from cutex.kernels.gemm.signature import GeneralConfig

MOST = 16  # processes
START = "from cutex.ops.building import work; work()"

Job = tuple["GeneralConfig", str]  # and the arch


@dataclass
class _Builder:
    """One process, and the job that it works on."""

    process: subprocess.Popen[bytes]
    job: int | None = None
    batch: int = 0  # of jobs: what an earlier call gave up on is not of this one

    @property
    def answers(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def give(self, batch: int, number: int, job: Job) -> None:
        assert self.process.stdin is not None
        self.batch, self.job = batch, number
        pickle.dump(job, self.process.stdin)
        self.process.stdin.flush()


_builders: list[_Builder] = []
_batches = 0


def build(jobs: Sequence[Job], until: float | None = None) -> list[bool]:
    """Compile `jobs`, the first first; which of them are on disk, or when `until` (of
    time.monotonic) has passed, which are by then. One that does not compile is not."""
    global _batches
    _batches += 1
    done = [False] * len(jobs)
    left = deque(range(len(jobs)))
    start(len(jobs))
    with selectors.DefaultSelector() as ready:
        for builder in _builders:
            ready.register(builder.answers, selectors.EVENT_READ, builder)
            if builder.job is None and left:
                _give(builder, left.popleft(), jobs)
        while left or any(b.job is not None and b.batch == _batches for b in _builders):
            wait = None if until is None else until - time.monotonic()
            if wait is not None and wait <= 0:
                break
            for event, _ in ready.select(wait):
                builder = event.data
                answer = builder.answers.readline()
                if builder.batch == _batches and builder.job is not None:
                    done[builder.job] = answer == b"built\n"
                builder.job = None
                if not answer:  # it ended
                    ready.unregister(builder.answers)
                    _builders.remove(builder)
                elif left:
                    _give(builder, left.popleft(), jobs)
            if not _builders:
                break
    return done


def _give(builder: _Builder, number: int, jobs: Sequence[Job]) -> None:
    builder.give(_batches, number, jobs[number])


def start(count: int = MOST) -> None:
    """Have `count` processes, or as many as there are cores; they take seconds to be ready."""
    count = min(count, MOST, os.cpu_count() or 1)
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(x for x in (root, os.environ.get("PYTHONPATH")) if x)
    while len(_builders) < count:
        process = subprocess.Popen(
            [sys.executable, "-c", START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        )
        _builders.append(_Builder(process))


@atexit.register
def stop() -> None:
    """End the processes."""
    for builder in _builders:
        builder.process.kill()
        builder.process.wait()
    _builders.clear()


def work() -> None:
    """Compile what comes in, until nothing more does; runs in a process of its own."""
    from cutex.ops.plan import kernel_for

    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what is printed on the way is no answer
    while True:
        try:
            config, arch = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            kernel_for(config, arch)
        except Exception:
            answers.write(b"failed\n")
        else:
            answers.write(b"built\n")
