"""Files that commands write stay what they were where the writing fails."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from cutex.command import writable
from cutex.whole_file import write_whole


def test_what_was_there_stays_if_the_writing_fails(tmp_path):
    file = tmp_path / "table.md"
    write_whole(file, "old")
    file.chmod(0o640)
    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "new\ud800")
    assert [p.name for p in tmp_path.iterdir()] == ["table.md"] and file.read_text() == "old"
    link = tmp_path / "link"
    link.symlink_to(file)
    write_whole(link, "é")
    assert link.is_symlink() and file.read_text(encoding="utf-8") == "é"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_a_failure_names_the_file(tmp_path):
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'") as full:
        write_whole(type(tmp_path)("/dev/full"), "text")
    assert full.value.errno == errno.ENOSPC
    with pytest.raises(FileNotFoundError, match=r"none/x\.svg"):
        write_whole(tmp_path / "none" / "x.svg", "text")


def test_a_new_file_is_as_readable_as_others(tmp_path):
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "page.html", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "page.html").stat().st_mode) == 0o640


def test_whether_a_file_can_be_written_is_seen_without_a_trace(tmp_path):
    """Of work that ends early, or on a full disk, no empty file is left."""
    assert writable("--trace", str(tmp_path / "new")) == tmp_path / "new"
    assert not list(tmp_path.iterdir())
    (tmp_path / "old").write_text("text")
    writable("--trace", str(tmp_path / "old"))
    assert (tmp_path / "old").read_text() == "text"
