"""Kernels compiled in parallel, into the cache on disk, by processes of their own.

The processes start on first use, import the compiler once, and stay. They import only cutex: the
caller's script is not run again in them, whatever it does at its top level. They see no GPU, so
that none of its memory is theirs.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import selectors
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from cutex.arch import ARCHS
from cutex.problem.stage import package

if TYPE_CHECKING:
    from cutex.kernels.gemm.signature import GeneralConfig

MOST = 16  # processes
MESSAGE = 400  # characters of an error
START = "from cutex.ops.building import work; work()"

Job = tuple["GeneralConfig", str]  # a config and its arch


@dataclass
class Builder:
    """The caller's side of one process: a job goes in, a line of JSON comes out, null or why the
    kernel did not compile; and one line before, when the compiler is imported."""

    process: subprocess.Popen[bytes]
    job: tuple[int, int] | None = None  # the batch and the number of what it compiles
    ready: bool = False
    unread: bytes = b""

    def give(self, batch: int, number: int, job: Job) -> None:
        """Have `job` compiled, once the process is ready."""
        assert self.process.stdin is not None
        self.job = batch, number
        self.process.stdin.write(pickle.dumps(job))
        self.process.stdin.flush()

    def fileno(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def lines(self) -> Iterator[str]:
        """The lines that the process has printed; EOFError if it has ended."""
        more = os.read(self.fileno(), 1 << 16)
        if not more:
            raise EOFError
        *whole, self.unread = (self.unread + more).split(b"\n")
        for line in whole:
            yield line.decode()


_builders: list[Builder] = []
_told: set[str] = set()  # the reasons that warnings have given
_batches = count(1)


class _Batch:
    """The jobs of one call of `build`."""

    def __init__(self, jobs: Sequence[Job], ended: Callable[[], object]) -> None:
        self.number = next(_batches)
        self.jobs, self.ended = jobs, ended
        self.done = [False] * len(jobs)
        self.waiting = deque(range(len(jobs)))
        self.left = len(jobs)

    def employ(self) -> None:
        """Give a job to each process that has none, in order."""
        for builder in start(self.left):
            if builder.job is None and self.waiting:
                number = self.waiting[0]
                try:
                    builder.give(self.number, number, self.jobs[number])
                except BrokenPipeError:  # it ended; the next call of `lines` says so
                    builder.job = None
                else:
                    self.waiting.popleft()

    def hear(self, builder: Builder, line: str) -> None:
        """Take in what the process says."""
        if not builder.ready:
            builder.ready = True
        else:
            self.end(builder, json.loads(line))

    def end(self, builder: Builder, failure: str | None) -> None:
        """Note how the process's job went; jobs of earlier batches are nobody's."""
        if builder.job is None:
            return
        (batch, number), builder.job = builder.job, None
        if batch != self.number:
            return
        self.done[number] = failure is None
        self.left -= 1
        self.ended()
        if failure is not None and failure not in _told:
            _told.add(failure)
            warnings.warn(f"a kernel was not built ahead: {failure}", stacklevel=4)


def build(
    jobs: Sequence[Job],
    seconds: float | None = None,
    ended: Callable[[], object] = lambda: None,
) -> list[bool]:
    """Compile `jobs` in order, and call `ended` after each. Return for each whether it is on disk,
    at the latest `seconds` after the processes are ready; a job that does not compile is not, and a
    warning says why, once for each reason."""
    batch = _Batch(jobs, ended)
    until = None
    with selectors.DefaultSelector() as said:
        while batch.left:
            batch.employ()
            for builder in _builders:
                if builder not in said.get_map():
                    said.register(builder, selectors.EVENT_READ, builder)
            if seconds is not None and until is None and all(b.ready for b in _builders):
                until = time.monotonic() + seconds
            wait = None if until is None else until - time.monotonic()
            if wait is not None and wait <= 0:
                break
            for key, _ in said.select(wait):
                builder = key.data
                try:
                    for line in builder.lines():
                        batch.hear(builder, line)
                except EOFError:
                    said.unregister(builder)
                    _builders.remove(builder)
                    batch.end(builder, f"the compiler ended with {builder.process.wait()}")
    return batch.done


def start(most: int = MOST) -> list[Builder]:
    """Start processes until there are `most`, or one for each core; they take seconds to be
    ready."""
    for builder in [b for b in _builders if b.job is None and b.process.poll() is not None]:
        _builders.remove(builder)
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(x for x in (root, os.environ.get("PYTHONPATH")) if x)
    while len(_builders) < min(most, MOST, os.cpu_count() or 1):
        process = subprocess.Popen(
            [sys.executable, "-c", START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        )
        _builders.append(Builder(process))
    return list(_builders)


@atexit.register
def stop() -> None:
    """End the processes."""
    for builder in _builders:
        builder.process.kill()
    for builder in _builders:
        builder.process.wait()
    _builders.clear()


def work() -> None:
    """Compile the jobs read from standard input until it closes; runs in a process of its own."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of others must not mix with the answers
    for arch in ARCHS:
        import_module(f"{package('gemm', arch)}.general")
    from cutex.ops.plan import kernel_for

    print("ready", file=out, flush=True)
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        failure = None
        try:
            kernel_for(*job)
        except Exception as error:
            first, *_ = str(error).splitlines() or [""]
            failure = f"{type(error).__name__}: {first}"[:MESSAGE]
        print(json.dumps(failure), file=out, flush=True)
