"""The cache: its folder, its owner, and damaged entries."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from cutex import cache, simulate
from cutex.compile import Compiled, compile
from cutex.errors import NoCache
from cutex.kernels.gemm import stage
from cutex.sim.host import capture, linked


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Compiled:
    """Stage 0, compiled into a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUTEX_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("cutex.compile.compiling._in_process", {})
        return compile(stage("sm_90a", 0).kernel(), "bf16", "sm_90a")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("CUTEX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def library(compiled: Compiled) -> Path:
    """The host code of `compiled`, linked or found, and loaded."""
    host = capture.HostFunction(compiled.object_path, compiled.symbol)
    return Path(host.library._name)


# ---- where


def test_an_empty_setting_is_none(monkeypatch, tmp_path, compiled):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CUTEX_CACHE", "")
    assert cache.cache_dir() == tmp_path / "cutex"
    assert library(compiled).is_relative_to(tmp_path / "cutex")
    monkeypatch.delenv("CUTEX_CACHE")
    assert cache.cache_dir() == tmp_path / "cutex"
    monkeypatch.setenv("CUTEX_CACHE", "/somewhere/else")
    assert cache.cache_dir() == Path("/somewhere/else")


def test_one_function_says_where_it_is(root):
    asks = [
        str(file.relative_to(root))
        for file in (root / "cutex").rglob("*.py")
        if any(name in file.read_text() for name in ("XDG_CACHE_HOME", '"CUTEX_CACHE"'))
    ]
    assert asks == ["cutex/cache.py"]


# ---- damage


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(file.read_bytes()[:5000]),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(bytes(b ^ 0xFF for b in file.read_bytes())),
        lambda file: file.write_bytes(file.read_bytes()[:-9] + b"\0" + file.read_bytes()[-8:]),
        lambda file: file.unlink(),
        lambda file: (file.parent / "sha256").write_bytes(b"\xff"),
    ],
    ids=["truncated", "empty", "flipped", "one byte", "missing", "checksum"],
)
def test_a_damaged_library_is_linked_anew(here, compiled, damage):
    # NOTE: it is copied away first, because a library that is mapped must not be cut short
    whole = library(compiled)
    content = whole.read_bytes()
    entry = whole.parent
    entry.rename(here / "mapped")
    entry.mkdir(mode=0o700)
    for file in (here / "mapped").iterdir():
        (entry / file.name).write_bytes(file.read_bytes())
    damage(whole)
    assert library(compiled).read_bytes()[:64] == content[:64]
    assert linked._whole(entry, whole.name) == whole


def as_file(entry: Path) -> None:
    entry.write_text("")


def as_broken_link(entry: Path) -> None:
    entry.symlink_to(entry.parent / "nowhere")


def as_folder_of_rubbish(entry: Path) -> None:
    (entry / "deep" / "er").mkdir(parents=True)


@pytest.mark.parametrize("shape", [as_file, as_broken_link, as_folder_of_rubbish])
def test_an_entry_that_is_none_is_made_anew(here, shape):
    (here / "kind").mkdir(parents=True)
    shape(here / "kind" / "key")
    assert cache.find_or_build("kind", "key", read_word, write_word) == "word"
    assert sorted(p.name for p in (here / "kind").iterdir()) == ["key", "key.lock"]


@pytest.mark.parametrize("shape", [as_file, as_broken_link, as_folder_of_rubbish])
def test_a_file_of_the_cache_is_written_over_whatever_is_there(here, shape):
    (here / "tuned").mkdir(parents=True)
    shape(here / "tuned" / "key.json")
    cache.write_file(here / "tuned" / "key.json", "{}")
    assert [(p.name, p.read_text()) for p in (here / "tuned").iterdir()] == [("key.json", "{}")]


def read_word(entry: Path) -> str | None:
    file = entry / "word"
    return file.read_text() if file.is_file() else None


def write_word(folder: Path) -> None:
    (folder / "word").write_text("word")


SLOW = """
import sys, time
from cutex import cache
def build(folder):
    (folder / "half").write_text("")
    print("building", flush=True)
    time.sleep(600)
cache.find_or_build("kind", sys.argv[1], lambda entry: None, build)
"""


def test_what_a_killed_process_leaves_is_swept_away(here, root):
    env = {**os.environ, "PYTHONPATH": str(root)}
    for key in ("same", "other"):
        process = subprocess.Popen(
            [sys.executable, "-c", SLOW, key], env=env, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "building\n"
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    left = [p for p in (here / "kind").iterdir() if p.name.startswith(".")]
    assert len(left) == 2
    (other,) = (p for p in left if p.name.startswith(".other-"))
    long_ago = time.time() - 2 * cache._DEAD
    os.utime(other, (long_ago, long_ago))
    cache.find_or_build("kind", "same", read_word, write_word)
    names = {p.name for p in (here / "kind").iterdir() if p.suffix != ".lock"}
    assert names == {"same"}


def test_what_another_process_finishes_meanwhile_is_no_error(here, monkeypatch):
    """Its unfinished entry is listed, and gone when it is looked at."""
    (here / "kind").mkdir(parents=True, mode=0o700)
    listed = Path.iterdir
    gone = here / "kind" / ".other-1"
    monkeypatch.setattr(
        Path, "iterdir", lambda p: [*listed(p), *([gone] if p == here / "kind" else [])]
    )
    assert cache.find_or_build("kind", "key", read_word, write_word)


def test_a_build_that_fails_leaves_nothing(here):
    def fail(folder: Path) -> None:
        write_word(folder)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cache.find_or_build("kind", "key", read_word, fail)
    assert [p.name for p in (here / "kind").iterdir()] == ["key.lock"]


# ---- whose


def test_nothing_native_is_loaded_from_where_others_write(here, compiled, tmp_path):
    library(compiled)
    for path in (here / "sim", here, tmp_path):
        before = stat.S_IMODE(path.stat().st_mode)
        path.chmod(before | stat.S_IWOTH)
        with pytest.raises(NoCache, match=r"everybody can write to .* CUTEX_CACHE") as refused:
            library(compiled)
        assert "\n" not in str(refused.value)
        path.chmod(before)
    library(compiled)


def test_a_sticky_folder_above_is_safe_and_the_cache_itself_is_not(here, tmp_path):
    here.mkdir(mode=0o700)
    tmp_path.chmod(0o1777)
    cache.make_private(here)
    here.chmod(0o1777)
    with pytest.raises(NoCache, match="everybody"):
        cache.make_private(here)


@pytest.mark.parametrize(
    ("mode", "owner", "group", "who"),
    [
        (0o755, 4000, 4000, "user 4000"),
        (0o757, 0, 0, "everybody"),
        (0o775, 0, 4000, "group 4000"),
        (0o755, 0, 4000, None),
        (0o775, 0, 0, None),
    ],
)
def test_owner_and_mode_decide(mode, owner, group, who):
    found = os.stat_result((stat.S_IFDIR | mode, 0, 0, 0, owner, group, 0, 0, 0, 0))
    assert cache._writers(found) == who


def test_an_entry_that_others_wrote_is_made_anew(here, compiled):
    first = library(compiled)
    before = first.stat().st_ino
    first.chmod(0o777)
    assert library(compiled).stat().st_ino != before


def test_what_the_cache_makes_is_for_this_user_alone(here):
    old = os.umask(0)
    try:
        cache.find_or_build("kind", "key", read_word, write_word)
    finally:
        os.umask(old)
    for path in (here, here / "kind", here / "kind" / "key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


# ---- the parts that a run needs


def test_a_linked_kernel_needs_no_c_compiler(here, compiled, monkeypatch, tmp_path):
    library(compiled)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    compiled.__dict__.pop("_cutex_sim", None)
    a, b, c = (torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(3))
    assert simulate(compiled, a, b, c).launches == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_cache_that_refuses_is_one_sentence_and_exit_code_2(
    code, here, monkeypatch, capsys, tmp_path
):
    from cutex.gemm import main

    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("cutex.compile.compiling._in_process", {})
    monkeypatch.setattr(cache.tempfile, "mkdtemp", refuse)
    given = ["--stage", "0", "--device", "sim", "--mnk", "64,64,64", "--out", str(tmp_path / "out")]
    assert main(given) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert f"{here / 'kernels'} cannot be written ({os.strerror(code)})" in sentence
