"""Files that are written completely or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    """Write ``file``, of which what was there stays if that fails, as on a full disk; a device or a
    pipe, and a file in a folder that takes no other, are written to as they are. Raises OSError
    that names the file.
    """
    target = file.resolve()  # a link stays one
    try:
        if target.exists() and not (target.is_file() and os.access(target.parent, os.W_OK)):
            target.write_text(text, encoding="utf-8")
        else:
            _replace(target, text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None


def _replace(file: Path, text: str) -> None:
    fd, scratch = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as out:
            out.write(text)
        if file.exists():
            shutil.copymode(file, scratch)
        else:
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(scratch, 0o666 & ~mask)
        os.replace(scratch, file)
    except BaseException:
        os.unlink(scratch)
        raise
