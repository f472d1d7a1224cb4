"""Kernels compiled in parallel, into the cache on disk, by processes of their own.

The processes start on first use, import the compiler once, and stay (cutex/compile/worker.py). They
import only cutex: the caller's script is not run again in them, whatever it does at its top level.
They see no GPU, so that none of its memory is theirs. Kernels with a function of the user's, which
other processes do not have, are compiled here, one after the other.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from cutex.arch import ARCHS
from cutex.compile import worker
from cutex.ops.plan import kernel_for, user_functions
from cutex.problem.stage import package

if TYPE_CHECKING:
    from cutex.kernels.gemm.signature import GeneralConfig

MOST = 16  # processes
MODULES = tuple(f"{package('gemm', arch)}.general" for arch in ARCHS)
START = f"from cutex.compile.worker import work; work{MODULES}"

Job = tuple["GeneralConfig", str]  # a config and its arch


@dataclass
class Builder:
    """The caller's side of one process: a job goes in, a line of JSON comes out, null or why the
    kernel did not compile; and one line before, when the compiler is imported."""

    process: subprocess.Popen[bytes]
    job: tuple[int, int] | None = None  # the batch and the number of what it compiles
    ready: bool = False
    unread: bytes = b""

    def give(self, batch: int, number: int, message: bytes) -> None:
        """Have the job of `message` compiled, once the process is ready."""
        assert self.process.stdin is not None
        self.job = batch, number
        self.process.stdin.write(message)
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
        self.messages = {i: m for i, job in enumerate(jobs) if (m := message_of(job)) is not None}
        self.ours = [i for i in range(len(jobs)) if i not in self.messages]  # no message
        self.waiting = deque(self.messages)
        self.left = len(self.messages)  # that the processes have to compile

    def employ(self) -> None:
        """Give a job to each process that has none, in order."""
        for builder in start(self.left):
            if builder.job is None and self.waiting:
                number = self.waiting[0]
                try:
                    builder.give(self.number, number, self.messages[number])
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
        if batch == self.number:
            self.left -= 1
            self.note(number, failure)

    def note(self, number: int, failure: str | None) -> None:
        """Note how a job of this batch went."""
        self.done[number] = failure is None
        self.ended()
        if failure is not None and failure not in _told:
            _told.add(failure)
            warnings.warn(f"a kernel was not built ahead: {failure}", stacklevel=4)

    def compile_ours(self, until: float | None) -> None:
        """Compile here what the processes cannot, until a time of the monotonic clock."""
        for number in self.ours:
            if until is not None and time.monotonic() >= until:
                return
            config, arch = self.jobs[number]
            try:
                kernel_for(config, arch)
            except Exception as error:
                self.note(number, worker.failure_of(error))
            else:
                self.note(number, None)


def message_of(job: Job) -> bytes | None:
    """What has a process compile `job`; None if it has to be compiled here."""
    config, arch = job
    if config.ops and user_functions(config.ops):
        return None
    module = f"{package('gemm', arch)}.general"
    return worker.message_of(worker.Job(module, "General", config, config.a.dtype, arch))


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
    if seconds is not None and until is None:
        until = time.monotonic() + seconds
    batch.compile_ours(until)
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
