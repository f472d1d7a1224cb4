"""Kernels compiled in parallel, into the cache on disk, by processes of their own.

The processes start on first use, import the compiler once, and stay (cutex/compile/worker.py). They
import only cutex, from where this process would: the caller's script is not run again in them,
whatever it does at its top level. They see no GPU, so that none of its memory is theirs. One batch
of kernels is compiled at a time, whichever thread asks. Kernels with a function of the user's,
which other processes do not have, are compiled here, one after the other.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, NamedTuple

from cutex.cache import VARIABLE, cache_dir
from cutex.compile import worker
from cutex.cores import cores

MOST = 16  # processes
PATH = "import sys; sys.path[:] = sys.argv[1:]\n"
START = "from cutex.compile.worker import work; work(*MODULES)"
STARTING = 300.0  # seconds after which a process that is not ready is given up
LOOK = 10.0  # seconds between looks at processes that say nothing

_modules: list[str] = []


def preload(*modules: str) -> None:
    """Have every process import these modules before it is ready."""
    _modules.extend(name for name in modules if name not in _modules)


class Job(NamedTuple):
    """A kernel to compile."""

    there: worker.Job | None  # by another process; None where only this one can
    here: Callable[[], object]  # in this process


@dataclass(eq=False)
class Builder:
    """The caller's side of one worker process: it takes a job and answers one line of JSON, null or
    why the kernel did not compile; and one line earlier, once the compiler is imported."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]  # what it prints elsewhere
    environment: dict[str, str]
    started: float = field(default_factory=time.monotonic)
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
            yield line.decode(errors="replace")

    def end(self) -> str:
        """End the process, if it has not ended; return how it did, with its last line."""
        self.process.kill()
        code = self.process.wait()
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - (1 << 12)))
        *_, last = self.errors.read().decode(errors="replace").splitlines() or [""]
        return f"the compiler ended with {code}{last and ': '}{last}"[: worker.MESSAGE]


_builders: list[Builder] = []
_alone = threading.RLock()  # held while a batch has the processes
_told: set[str] = set()  # the reasons that warnings have given
_batches = count(1)


class _Batch:
    """The jobs of one call of `build`."""

    def __init__(self, jobs: Sequence[Job], ended: Callable[[], object]) -> None:
        self.number = next(_batches)
        self.jobs, self.ended = jobs, ended
        self.done = [False] * len(jobs)
        self.messages = {
            i: worker.message_of(job.there) for i, job in enumerate(jobs) if job.there is not None
        }
        self.ours = [i for i in range(len(jobs)) if i not in self.messages]  # no message
        self.waiting = deque(self.messages)
        self.left = len(self.messages)  # that the processes have to compile

    def employ(self) -> None:
        """Give a job to each process that has none, in order."""
        for builder in _filled(self.left):
            if builder.job is None and self.waiting:
                number = self.waiting[0]
                try:
                    builder.give(self.number, number, self.messages[number])
                except BrokenPipeError:  # it ended; the next call of `lines` says so
                    builder.job = None
                else:
                    self.waiting.popleft()

    def hear(self, builder: Builder, line: str) -> None:
        """Process a worker's line. Before it is ready, other modules may print."""
        if not builder.ready:
            builder.ready = line == worker.READY
        else:
            self.end(builder, json.loads(line))

    def end(self, builder: Builder, failure: str | None) -> None:
        """Record the result of the worker's job; results of earlier batches are dropped."""
        if builder.job is None:
            return
        (batch, number), builder.job = builder.job, None
        if batch == self.number:
            self.left -= 1
            self.note(number, failure)

    def note(self, number: int, failure: str | None) -> None:
        """Record the result of a job of this batch."""
        self.done[number] = failure is None
        self.ended()
        if failure is not None and failure not in _told:
            _told.add(failure)
            warnings.warn(f"a kernel was not built ahead: {failure}", stacklevel=5)

    def compile_ours(self, until: float | None) -> None:
        """Compile here what the workers cannot, until a deadline (time.monotonic())."""
        for number in self.ours:
            if until is not None and time.monotonic() >= until:
                return
            try:
                self.jobs[number].here()
            except Exception as error:
                self.note(number, worker.failure_of(error))
            else:
                self.note(number, None)


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
    if batch.left:
        with alone():
            start(batch.left)
            until = _compile_there(batch, seconds)
    if seconds is not None and until is None:
        until = time.monotonic() + seconds
    batch.compile_ours(until)
    return batch.done


def _compile_there(batch: _Batch, seconds: float | None) -> float | None:
    """Compile the workers' share of `batch`. Return the deadline (time.monotonic()); None without a
    limit, or if no worker became ready."""
    until = None
    while batch.left:
        batch.employ()
        now = time.monotonic()
        if seconds is not None and until is None and all(b.ready for b in _builders):
            until = now + seconds
        if until is not None and until <= now:
            break
        for builder in _builders:
            if not builder.ready and now - builder.started > STARTING:
                builder.process.kill()
        pipes = {builder.fileno(): builder for builder in _builders}
        for pipe in wait(list(pipes), LOOK if until is None else min(LOOK, until - now)):
            assert isinstance(pipe, int)
            heard = pipes[pipe]
            try:
                for line in heard.lines():
                    batch.hear(heard, line)
            except EOFError:
                _builders.remove(heard)
                batch.end(heard, heard.end())
    return until


def alone() -> AbstractContextManager[object]:
    """The lock under which one thread at a time submits compile jobs."""
    return _alone


def start(most: int = MOST) -> list[Builder]:
    """Start processes until there are `most`, or one for each core; they take seconds to be ready.
    Return all workers; an empty list, starting none, while another thread is compiling."""
    if not _alone.acquire(blocking=False):
        return []
    try:
        now = _environment()
        for builder in [b for b in _builders if b.environment != now]:
            _builders.remove(builder)
            builder.end()
        return _filled(most)
    finally:
        _alone.release()


def _filled(most: int) -> list[Builder]:
    """The processes, of which those that ended are replaced."""
    for builder in [b for b in _builders if b.job is None and b.process.poll() is not None]:
        _builders.remove(builder)
    root = str(Path(__file__).resolve().parents[2])
    path = [x for x in sys.path if isinstance(x, str)]
    path += [] if root in path else [root]
    while len(_builders) < min(most, MOST, cores()):
        environment = _environment()
        errors = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process runs)
        process = subprocess.Popen(
            [sys.executable, "-c", f"{PATH}MODULES = {_modules}\n{START}", *path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **environment, "CUDA_VISIBLE_DEVICES": ""},
        )
        _builders.append(Builder(process, errors, environment))
    return list(_builders)


def _environment() -> dict[str, str]:
    """The variables that decide what a process compiles, and into which folder."""
    of_the_dsl = {k: v for k, v in os.environ.items() if k.startswith("CUTE_DSL_")}
    return {**of_the_dsl, VARIABLE: str(cache_dir())}


@atexit.register
def stop() -> None:
    """End the processes."""
    for builder in _builders:
        builder.process.kill()
    for builder in _builders:
        builder.process.wait()
    _builders.clear()


def _leave_to_the_parent() -> None:
    """After a fork: the processes, and the lock if another thread held it, are the parent's."""
    global _alone
    _alone = threading.RLock()
    for builder in _builders:
        for pipe in (builder.process.stdin, builder.process.stdout, builder.errors):
            assert pipe is not None
            pipe.close()
    _builders.clear()


os.register_at_fork(after_in_child=_leave_to_the_parent)
