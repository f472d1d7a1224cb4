"""The cache on disk: its folder, the check that only this user can write to it, and its entries.

    <cache>/kernels/<key>/   compiled kernels (cutex/compile/cache.py)
    <cache>/sim/<key>/       their host code, linked for the simulator (cutex/sim/host/linked.py)
    <cache>/tuned/<key>.json configs chosen by time (cutex/bench/autotune.py)
    <cache>/choices/<key>.json  tiles of cutex.matmul chosen by time (cutex/ops/matmul/choices.py)

An entry is a folder, named by the hash of everything that it was made from. It is written under
another name and renamed, so it is complete or absent; a damaged one is made anew.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

from cutex.errors import NoCache

Found = TypeVar("Found")

_SCRATCH = "."  # the prefix of an unfinished entry's name
_DEAD = 3600.0  # age in seconds at which an unfinished entry is taken to be abandoned
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


VARIABLE = "CUTEX_CACHE"  # of the environment


def cache_dir() -> Path:
    """$CUTEX_CACHE, if that is set and not empty; else cutex in the platform's cache folder."""
    given = os.environ.get(VARIABLE)
    if given:
        folder = Path(given).absolute()
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Caches" / "cutex"
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cutex"
    try:
        str(folder).encode("utf-8")
    except UnicodeEncodeError:  # bytes that Python keeps as surrogates
        raise NoCache(
            f"the cache {str(folder)!a} has a name that is no UTF-8, which kernels cannot be "
            "loaded from: set CUTEX_CACHE to another folder"
        ) from None
    return folder


def find_or_build(
    kind: str, key: str, read: Callable[[Path], Found | None], build: Callable[[Path], None]
) -> Found:
    """Return `read`'s result for the entry `key` among those of `kind`, which `build` writes if
    need be.

    `read` takes the entry's folder and returns None for one that is incomplete; `build` fills a
    folder that becomes the entry. Two processes that want the same entry build it once. Raises
    NoCache, with one sentence, where another user could write, or this one cannot.
    """
    from filelock import FileLock

    folder = cache_dir() / kind
    entry = folder / key
    make_private(folder)
    if (found := _read(entry, read)) is not None:
        return found
    with _refusals(folder):
        lock = FileLock(folder / f"{key}.lock")
        lock.acquire()
    try:
        if (found := _read(entry, read)) is not None:  # another process built it while this waited
            return found
        with _refusals(folder):
            _sweep(folder, key)
            _remove(entry)
            scratch = Path(tempfile.mkdtemp(prefix=f"{_SCRATCH}{key}-", dir=folder))
        try:
            with _refusals(folder, _FULL):  # NOTE: a compiler's other errors pass through
                build(scratch)
            with _refusals(folder):
                scratch.rename(entry)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    finally:
        lock.release()
    found = read(entry)
    assert found is not None, f"{entry} does not read back right after it was written"
    return found


def write_file(path: Path, text: str) -> None:
    """Write a file of the cache, complete or not at all. Raises NoCache where that is
    impossible."""
    make_private(path.parent)
    with _refusals(path.parent):
        _sweep(path.parent, path.name)
        if path.is_dir():
            _remove(path)
        fd, scratch = tempfile.mkstemp(prefix=f"{_SCRATCH}{path.name}-", dir=path.parent)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(scratch, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(scratch)
            raise


def _read(entry: Path, read: Callable[[Path], Found | None]) -> Found | None:
    """Read the entry; None if another user can write to it or its files."""
    with suppress(OSError):
        for path in (entry, *entry.iterdir()):
            if _writers(path.lstat()):
                return None
        return read(entry)
    return None


@contextmanager
def _refusals(folder: Path, which: Collection[int] = ()) -> Iterator[None]:
    """A context that turns errors of the disk into NoCache; only those in `which`, if it has
    any."""
    try:
        yield
    except OSError as error:
        if which and error.errno not in which:
            raise
        raise NoCache(
            f"the cache {folder} cannot be written ({error.strerror}): "
            "set CUTEX_CACHE to a folder that can"
        ) from None


# ---- leftovers


@cache
def _swept(folder: Path) -> set[Path]:
    """The old leftovers in `folder`, listed once per process."""
    old = time.time() - _DEAD
    return {p for p in folder.iterdir() if _unfinished(p) and _changed(p) < old}


def _changed(path: Path) -> float:
    """When it was changed last; never, if another process has taken it away meanwhile."""
    with suppress(FileNotFoundError):
        return path.lstat().st_mtime
    return float("inf")


def _unfinished(path: Path) -> bool:
    return path.name.startswith((_SCRATCH, "tmp"))


def _sweep(folder: Path, key: str) -> None:
    """Remove leftovers of processes that were killed: those of this key, whose lock is held, and
    old ones."""
    for path in {*folder.glob(f"{_SCRATCH}{key}-*"), *_swept(folder)}:
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a folder, a file or a broken link, if there is one at `path`."""
    if path.is_dir() and not path.is_symlink():
        with suppress(FileNotFoundError):  # NOTE: another process may remove it at the same time
            shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ---- whose it is


def make_private(folder: Path) -> None:
    """Make `folder`, for this user alone. Raises NoCache if another user can write to it.

    Entries of the cache are loaded as native code: whoever can put a file there runs code as this
    user.
    """
    with _refusals(folder):
        for parent in reversed([folder, *folder.parents]):
            if not parent.exists():
                parent.mkdir(mode=0o700, exist_ok=True)
        lexical, real = folder.absolute(), folder.resolve()
        chain = dict.fromkeys((lexical, real, *lexical.parents, *real.parents))
        states = {path: path.stat() for path in chain}
    for path, found in states.items():
        shared = found.st_mode & stat.S_ISVTX and path not in (lexical, real)
        if not shared and (who := _writers(found)):
            raise NoCache(
                f"{who} can write to {path}, and the cache {folder} holds native code: "
                f"take that right away (chmod go-w), or set CUTEX_CACHE to a folder of your own"
            )


def _writers(found: os.stat_result) -> str | None:
    """The user or group that can write there beside this user and root; None if there is none."""
    if found.st_uid not in (os.getuid(), 0):
        return f"user {found.st_uid}"
    if found.st_mode & stat.S_IWOTH and not stat.S_ISLNK(found.st_mode):
        return "everybody"
    if found.st_mode & stat.S_IWGRP and not _own_group(found.st_gid):
        return f"group {found.st_gid}"
    return None


@cache
def _own_group(gid: int) -> bool:
    """Whether the group is root's, or this user's and nobody else's."""
    import grp
    import pwd

    if gid == 0:
        return True
    try:
        me = pwd.getpwuid(os.getuid())
        return gid == me.pw_gid and set(grp.getgrgid(gid).gr_mem) <= {me.pw_name}
    except KeyError:
        return False


# ---- folders for the DSL


def plain_folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder for files that the DSL dumps.

    NOTE: the DSL passes the folder on in a text of options, which an apostrophe or a blank ends.
    """
    for parent in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"):
        if re.fullmatch(r"[\w./+-]+", parent) and os.access(parent, os.W_OK):
            return tempfile.TemporaryDirectory(prefix="cutex-", dir=parent)
    raise NoCache(
        f"the DSL cannot write to {tempfile.gettempdir()!r}, and there is no /tmp: "
        "set TMPDIR to a folder whose path holds letters, digits and slashes only"
    )
