"""Kernels compiled in parallel, into the cache on disk, by children of one process.

That process starts on first use, imports the compiler once, forks a child for each kernel, and
stays. It imports only cutex: the caller's script is not run again in it, whatever it does at its
top level. A child whose kernel is no longer wanted is ended, so that it takes no time from others.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import selectors
import struct
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from cutex.arch import ARCHS
from cutex.problem.stage import package

if TYPE_CHECKING:
    from cutex.kernels.gemm.signature import GeneralConfig

MOST = 16  # children at a time
MESSAGE = 400  # characters of a child's error
START = "from cutex.ops.building import serve; serve()"
LENGTH = struct.Struct("<Q")  # the length in bytes before each batch

Job = tuple["GeneralConfig", str]  # a config and its arch


@dataclass
class _Server:
    """The caller's side of that process: batches of jobs go in, a line for each job comes out."""

    process: subprocess.Popen[bytes]
    batches: int = 0
    ready: bool = False  # it has reported that the compiler is imported
    unread: bytes = b""

    def give(self, jobs: Sequence[Job]) -> None:
        """Compile `jobs` in order, and drop the jobs of earlier batches."""
        assert self.process.stdin is not None
        self.batches += 1
        message = pickle.dumps((self.batches, list(jobs)))
        self.process.stdin.write(LENGTH.pack(len(message)) + message)
        self.process.stdin.flush()

    def lines(self, until: float | None) -> Iterator[bytes]:
        """The lines that the process prints, until the time `until` or until the process ends."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as said:
            said.register(self.process.stdout, selectors.EVENT_READ)
            while True:
                line, found, rest = self.unread.partition(b"\n")
                if found:
                    self.unread = rest
                    yield line
                    continue
                wait = None if until is None else until - time.monotonic()
                if (wait is not None and wait <= 0) or not said.select(wait):
                    return
                more = os.read(self.process.stdout.fileno(), 1 << 16)
                if not more:
                    return
                self.unread += more


_servers: list[_Server] = []  # none, or the one
_told: set[str] = set()  # the reasons that warnings have given


def build(
    jobs: Sequence[Job],
    seconds: float | None = None,
    ended: Callable[[], object] = lambda: None,
) -> list[bool]:
    """Compile `jobs` in order, and call `ended` after each. Return for each whether it is on disk,
    at the latest `seconds` after the compiler is imported; a job that does not compile is not, and
    a warning says why, once for each reason."""
    done = [False] * len(jobs)
    if not jobs:
        return done
    server = start()
    try:
        if not server.ready:
            server.ready = next(server.lines(None), b"") == b"ready"
        server.give(jobs)
        until = None if seconds is None else time.monotonic() + seconds
        left = len(jobs)
        for line in server.lines(until):
            batch, number, failure = json.loads(line)
            if batch == server.batches:
                done[number] = failure is None
                left -= 1
                ended()
                if failure is not None and failure not in _told:
                    _told.add(failure)
                    warnings.warn(f"a kernel was not built ahead: {failure}", stacklevel=2)
            if not left:
                return done
        server.give(())
    except BrokenPipeError:
        stop()  # it ended; the next call starts another
    return done


def start() -> _Server:
    """Start the process, unless it runs; it takes seconds to be ready."""
    if _servers and _servers[0].process.poll() is None:
        return _servers[0]
    stop()
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(x for x in (root, os.environ.get("PYTHONPATH")) if x)
    process = subprocess.Popen(
        [sys.executable, "-c", START],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
    )
    _servers.append(_Server(process))
    return _servers[0]


@atexit.register
def stop() -> None:
    """End the process, and with it its children."""
    for server in _servers:
        assert server.process.stdin is not None
        server.process.terminate()
        server.process.wait()
    _servers.clear()


# ---- in that process


@dataclass
class _Children:
    """The compiling children, each with the read end of a pipe that closes when the child ends."""

    jobs: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # batch, number, pid

    def fork(self, batch: int, number: int, job: Job) -> int:
        """Fork a child that compiles `job`; return the read end of its pipe."""
        from cutex.ops.plan import kernel_for

        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                kernel_for(*job)
                code = 0
            except BaseException as error:
                first, *_ = str(error).splitlines() or [""]
                os.write(theirs, f"{type(error).__name__}: {first}"[:MESSAGE].encode())
            finally:
                os._exit(code)
        os.close(theirs)
        self.jobs[ours] = batch, number, pid
        return ours

    def reap(self, pipe: int) -> tuple[int, int, str | None]:
        """The batch and number of a child that ended, and None if its kernel is on disk, else the
        reason why it is not."""
        batch, number, pid = self.jobs.pop(pipe)
        said = os.read(pipe, 4 * MESSAGE).decode(errors="replace")
        os.close(pipe)
        _, status = os.waitpid(pid, 0)
        if status == 0:
            return batch, number, None
        return batch, number, said or f"the compiler ended with {os.waitstatus_to_exitcode(status)}"

    def end(self) -> None:
        """End all children, without waiting for them."""
        from signal import SIGKILL

        for _, _, pid in self.jobs.values():
            os.kill(pid, SIGKILL)


def serve() -> None:
    """Compile the jobs read from standard input until it closes; runs in a process of its own."""
    import gc
    import signal

    for arch in ARCHS:  # children share the modules imported here
        import_module(f"{package('gemm', arch)}.general")
    out = os.dup(1)
    os.dup2(2, 1)  # prints of the compiler must not mix with the answers
    children = _Children()

    def ended(*_: object) -> None:
        children.end()
        os._exit(0)

    signal.signal(signal.SIGTERM, ended)
    gc.freeze()
    os.write(out, b"ready\n")
    most = min(MOST, os.cpu_count() or 1)
    queue: deque[tuple[int, int, Job]] = deque()
    with selectors.DefaultSelector() as ready:
        ready.register(0, selectors.EVENT_READ)
        while True:
            while queue and len(children.jobs) < most:
                ready.register(children.fork(*queue.popleft()), selectors.EVENT_READ)
            for event, _ in ready.select():
                if event.fd:
                    ready.unregister(event.fd)
                    os.write(out, json.dumps(children.reap(event.fd)).encode() + b"\n")
                    continue
                try:
                    batch, jobs = pickle.loads(_read(*LENGTH.unpack(_read(LENGTH.size))))
                except EOFError:
                    ended()
                children.end()
                queue = deque((batch, i, job) for i, job in enumerate(jobs))


def _read(count: int) -> bytes:
    """Exactly `count` bytes of standard input."""
    parts = []
    while count:
        part = os.read(0, count)
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
