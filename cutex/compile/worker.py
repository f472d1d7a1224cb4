"""The work of a process that compiles kernels for another one.

A job is a pickle behind its length, on standard input; the answer is a line of JSON on standard
output: null once the kernel is on disk, or why it did not compile. A line before the first answer
says that the compiler is imported. The process does without torch, whose import takes longer than
that of the compiler and its first kernel.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

LENGTH = struct.Struct("<Q")
MESSAGE = 400  # characters of an error
READY = "ready"


class Job(NamedTuple):
    """A kernel to compile: `module`.`kernel`(`config`), for inputs of `dtype`."""

    module: str
    kernel: str
    config: Any
    dtype: str
    arch: str


def message_of(job: Job) -> bytes:
    """The bytes that `work` reads a job from."""
    found = pickle.dumps(job)
    return LENGTH.pack(len(found)) + found


def work(*modules: str) -> None:
    """Import `modules`, then compile jobs until standard input closes."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints of others must not mix with the answers
    with no_torch():
        import tvm_ffi  # noqa: F401  # it imports torch where there is one, and needs none
    for module in modules:
        import_module(module)
    print(READY, file=out, flush=True)
    while (head := sys.stdin.buffer.read(LENGTH.size)) and len(head) == LENGTH.size:
        (length,) = LENGTH.unpack(head)
        print(json.dumps(answer(sys.stdin.buffer.read(length))), file=out, flush=True)


def answer(message: bytes) -> str | None:
    """Compile a pickled job; None, or why it failed."""
    from cutex.compile.compiling import compile

    try:
        job = pickle.loads(message)
        kernel = getattr(import_module(job.module), job.kernel)(job.config)
        compile(kernel, job.dtype, job.arch)
    except Exception as error:
        return failure_of(error)
    return None


def failure_of(error: Exception) -> str:
    """The kind of an error and its first line."""
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first}"[:MESSAGE]


@contextmanager
def no_torch() -> Iterator[None]:
    """A context in which torch cannot be imported, unless it is already."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]
