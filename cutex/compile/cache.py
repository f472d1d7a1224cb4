"""Compiled kernels on disk.

An entry is one folder, named by the hash of everything that it was made from:

    <cache>/kernels/<key>/{kernel.o, kernel.ptx, kernel.cubin, meta.json}

It is written under another name and renamed, so it is there whole or not at all; meta.json holds
each file's checksum, and an entry that does not match is built anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cutex.compile.arguments import Argument
from cutex.compile.compiled import Compiled

FILES = {"object": "kernel.o", "ptx": "kernel.ptx", "cubin": "kernel.cubin"}


def cache_dir() -> Path:
    """$CUTEX_CACHE, or cutex in the platform's cache folder."""
    if "CUTEX_CACHE" in os.environ:
        return Path(os.environ["CUTEX_CACHE"])
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "cutex"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cutex"


def find_or_build(
    entry: Path, key: str, operands: tuple[Argument, ...], build: Callable[[Path], None]
) -> Compiled:
    from filelock import FileLock

    if found := read(entry, key, operands):
        return found
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.with_suffix(".lock").touch()
    except OSError as error:
        raise ValueError(
            f"the cache {entry.parent} cannot be written ({error.strerror}): "
            "set CUTEX_CACHE to a folder that can"
        ) from None
    with FileLock(entry.with_suffix(".lock")):
        if found := read(entry, key, operands):  # another process built it while this one waited
            return found
        shutil.rmtree(entry, ignore_errors=True)  # corrupt, or not there
        scratch = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=entry.parent))
        try:
            build(scratch)
            scratch.rename(entry)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        compiled = read(entry, key, operands)
        assert compiled is not None, f"{entry} does not read back right after it was written"
        compiled.from_cache = False
        return compiled


def read(entry: Path, key: str, operands: tuple[Argument, ...]) -> Compiled | None:
    """The entry, if it is complete and every checksum matches; else None."""
    try:
        meta = json.loads((entry / "meta.json").read_bytes())
        data = {kind: (entry / name).read_bytes() for kind, name in FILES.items()}
        whole = (
            meta["key"] == key
            and meta.pop("checksum") == digest(canonical(meta))
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
        ptx=data["ptx"].decode(),
        cubin=data["cubin"],
        object_path=entry / FILES["object"],
        dynamic_smem=meta["dynamic_smem"],
        key=key,
        compile_seconds=meta["compile_seconds"],
        from_cache=True,
    )


def canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
