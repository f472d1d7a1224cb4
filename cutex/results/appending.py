"""Adding lines to a file that several processes may add to, and that a crash may have torn."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def appending(path: Path) -> Iterator[Callable[[str], None]]:
    """Within, nobody else adds to the file at `path`; what is yielded adds one line.

    Whole or not at all: what a full disk cut short is taken back before OSError is raised. A last
    line torn by a crash is ended first, so that it does not swallow the new one.
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
    """All of `data`: os.write may take less of it, and then say why it took no more."""
    while data:
        written = os.write(fd, data)
        if not written:
            raise OSError("nothing was written")
        data = data[written:]
