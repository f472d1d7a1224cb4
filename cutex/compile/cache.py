"""Compiled kernels on disk.

An entry is one folder, named by the hash of everything that it was made from:

    <cache>/kernels/<key>/{kernel.o, kernel.ptx, kernel.cubin, meta.json}

meta.json holds each file's checksum; an entry that does not match is built again. The key contains
no paths, so an entry may have been compiled from another copy of the same sources: file names in
its PTX are replaced by those of the sources of this process.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cutex import cache
from cutex.compile.arguments import Argument
from cutex.compile.compiled import Compiled

FILES = {"object": "kernel.o", "ptx": "kernel.ptx", "cubin": "kernel.cubin"}


def find_or_build(
    key: str,
    operands: tuple[Argument, ...],
    build: Callable[[Path], None],
    places: Callable[[], dict[str, str]],
) -> Compiled:
    """The kernel with that key; `build` compiles it into a folder if the cache lacks it. `places`
    returns the current files or folders of the top-level modules."""
    built = False

    def build_it(folder: Path) -> None:
        nonlocal built
        build(folder)
        built = True

    def read_it(folder: Path) -> Compiled | None:
        return read(folder, key, operands, places)

    found = cache.find_or_build("kernels", key, read_it, build_it)
    found.from_cache = not built
    return found


def read(
    entry: Path, key: str, operands: tuple[Argument, ...], places: Callable[[], dict[str, str]]
) -> Compiled | None:
    """The kernel in folder `entry`, if it is complete and every checksum matches; else None."""
    try:
        meta = json.loads((entry / "meta.json").read_bytes())
        data = {kind: (entry / name).read_bytes() for kind, name in FILES.items()}
        whole = (
            meta["key"] == key
            and meta.pop("checksum") == digest(canonical(meta))
            and isinstance(meta["places"], dict)
            and isinstance(meta["dynamic_smem"], dict)
            and meta["checksums"] == {kind: digest(content) for kind, content in data.items()}
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not whole:
        return None
    return Compiled(
        symbol=meta["symbol"],
        arch=meta["arch"],
        operands=operands,
        ptx=_moved(data["ptx"].decode(), meta["places"], places()),
        cubin=data["cubin"],
        object_path=entry / FILES["object"],
        dynamic_smem=meta["dynamic_smem"],
        key=key,
        compile_seconds=meta["compile_seconds"],
        from_cache=True,
    )


def _moved(ptx: str, old: dict[str, str], new: dict[str, str]) -> str:
    """The PTX `text` with the old file names of each module replaced by the new ones; line numbers
    stay."""
    for top in old.keys() & new.keys():
        before, now = json.dumps(old[top])[:-1], json.dumps(new[top])[:-1]  # with the quote before
        for after in ('"', "/"):  # a file, or one in a package
            ptx = ptx.replace(before + after, now + after)
    return ptx


def canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
