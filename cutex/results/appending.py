"""Adding lines to a file to which several processes may add, and whose last line a crash may have
torn."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def appending(path: Path) -> Iterator[Callable[[str], None]]:
    """A context in which only this process adds to the file at `path`, by the function that it
    yields.

    A line is added completely or not at all: on a full disk the part of it is removed before
    OSError is raised. A last line torn by a crash is ended first, so that it does not join the new
    one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)

    def add(line: str) -> None:
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        try:
            _write(fd, (("\n" if torn else "") + line + "\n").encode(errors="replace"))
            os.fsync(fd)
        except OSError:
            os.ftruncate(fd, size)
            raise

    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield add
    finally:
        os.close(fd)


def _write(fd: int, data: bytes) -> None:
    """Write all of `data`; os.write may write a part, and raise only when it is called again."""
    while data:
        written = os.write(fd, data)
        if not written:
            raise OSError("nothing was written")
        data = data[written:]
