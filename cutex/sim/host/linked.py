"""The library of a kernel's host code, linked with ``shim.c``, in the cache."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from cutex import cache
from cutex.errors import NoCompiler
from cutex.sim.errors import SimError

_LIBRARY, _SHIM, _CHECKSUM = "kernel.so", "shim.o", "sha256"  # of entries of the cache


def c_compiler() -> str:
    """The path of the system C compiler ($CC, cc, gcc or clang). Raises NoCompiler."""
    for name in filter(None, [os.environ.get("CC"), "cc", "gcc", "clang"]):
        path = shutil.which(name)
        if path:
            return path
    raise NoCompiler(
        "the simulator needs a C compiler to link a kernel's host code, and found none of $CC, "
        "cc, gcc, clang on PATH: install one (for instance the package gcc) or set CC"
    )


def link(object_file: Path) -> Path:
    """The shared library of ``object_file`` and the shim; cached by content, verified by its
    checksum.

    Raises NoCompiler where it is not in the cache and there is no C compiler, NoCache without a
    cache of this user's own, SimError with the linker's message if it fails.
    """
    shim = Path(__file__).with_name("shim.c")
    made_of = _sha256(shim.read_bytes() + object_file.read_bytes())

    def build(folder: Path) -> None:
        # NOTE: -Bsymbolic keeps the shim's symbols from being taken from a real runtime that the
        # process has loaded
        inputs = [str(_compiled(shim)), str(object_file)]
        library = folder / _LIBRARY
        why = _run_compiler("-shared", *inputs, "-Wl,-Bsymbolic", "-Wl,-z,defs", to=library)
        if why:
            raise SimError(
                f"the host code of {object_file.name} does not link with the simulator's "
                f"shim:\n{why}"
            )

    return _entry(_LIBRARY, made_of, build)


def _compiled(shim: Path) -> Path:
    """The object file of the shim, of which each kernel's library takes a copy."""
    compiler = c_compiler()

    def build(folder: Path) -> None:
        if why := _run_compiler("-c", "-fPIC", "-O1", str(shim), to=folder / _SHIM):
            raise SimError(f"{compiler} does not compile the simulator's shim:\n{why}")

    made_of = shim.read_bytes() + f"{compiler} {platform.machine()}".encode()
    return _entry(_SHIM, _sha256(made_of), build)


def _entry(name: str, made_of: str, build: Callable[[Path], None]) -> Path:
    """The file `name` in the cache's entry for `made_of`; `build` writes it if it is not there
    whole."""

    def build_and_sum(folder: Path) -> None:
        build(folder)
        digest = _sha256((folder / name).read_bytes())
        (folder / _CHECKSUM).write_text(digest, encoding="utf-8")

    return cache.find_or_build("sim", made_of[:32], lambda e: _whole(e, name), build_and_sum)


def _whole(entry: Path, name: str) -> Path | None:
    """The file `name` of a cache entry, or None if its checksum is wrong."""
    try:
        content = (entry / name).read_bytes()
        right = (entry / _CHECKSUM).read_text(encoding="utf-8") == _sha256(content)
    except (OSError, ValueError):
        return None
    return entry / name if right else None


def _run_compiler(*arguments: str, to: Path) -> str:
    """Run the C compiler; return its message if it fails, else ""."""
    done = subprocess.run(
        [c_compiler(), *arguments, "-o", str(to)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "TMPDIR": str(to.parent), "LC_ALL": "C"},
    )
    if done.returncode and (why := os.strerror(errno.ENOSPC)) in done.stderr:
        raise OSError(errno.ENOSPC, why, str(to.parent))
    return done.stderr or "no message" if done.returncode else ""


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
