"""The processes that build kernels ahead, of which stand-ins answer at once: shared by threads,
left to the parent by a fork, started with this process's own modules and cache, and never waited
for in vain."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch

from cutex.ops import building
from cutex.ops.matmul.arrange import arrange
from cutex.ops.matmul.checks import Call
from cutex.ops.matmul.plan import call_class, candidates, job

ANSWERS = """
import os, struct, sys, time
print("ready", flush=True)
while head := sys.stdin.buffer.read(8):
    sys.stdin.buffer.read(*struct.unpack("<Q", head))
    print({answer}, flush=True)
"""
FINE = ANSWERS.format(answer='"null"')


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    building.stop()
    building._told.clear()
    monkeypatch.setenv("CUTEX_CACHE", str(tmp_path))
    monkeypatch.setattr(building, "START", FINE)
    yield
    building.stop()


def jobs(count: int) -> list[building.Job]:
    a = torch.ones(64, 64, dtype=torch.bfloat16)
    arranged = arrange(Call(a, a.mT), torch.empty(64, 64, dtype=torch.bfloat16), "sm_90a")
    layouts = arranged.a, arranged.b, arranged.out
    calls = call_class(arranged.sizes, layouts, arranged.ops, "sm_90a")
    return [job(config, "sm_90a") for config in islice(candidates(calls), count)]


def test_threads_that_build_at_once_hear_of_their_own_jobs() -> None:
    some, found = jobs(24), {}
    threads = [
        threading.Thread(
            target=lambda i=i: found.update({i: building.build(some[6 * i : 6 * i + 6])}),
            daemon=True,
        )
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == {i: [True] * 6 for i in range(4)}


def test_a_thread_starts_none_while_another_has_kernels_compiled() -> None:
    with building.alone():
        thread = threading.Thread(target=building.start)
        thread.start()
        thread.join(60)
        assert not thread.is_alive() and not building._builders


@pytest.mark.parametrize("seconds", [1e12, float("inf")])
def test_the_time_may_be_endless(seconds: float) -> None:
    assert building.build(jobs(2), seconds) == [True, True]


def test_what_others_print_at_the_start_is_no_answer(monkeypatch, tmp_path) -> None:
    """As a sitecustomize may."""
    (tmp_path / "sitecustomize.py").write_text('print("hello", b"\\xff")')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert building.build(jobs(2)) == [True, True]


def test_modules_are_found_where_this_process_finds_them(monkeypatch, tmp_path) -> None:
    """Not in the working directory, nor only where PYTHONPATH says."""
    (tmp_path / "struct.py").write_text("raise SystemExit('of the working directory')")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    monkeypatch.setattr(building, "START", f"import mine\n{FINE}")
    assert building.build(jobs(1)) == [True]


def test_what_ends_a_process_while_it_imports_is_told(monkeypatch) -> None:
    monkeypatch.setattr(building, "START", "import no_such_module")
    told = "the compiler ended with 1: ModuleNotFoundError: No module named 'no_such_module'"
    with pytest.warns(UserWarning, match=told):
        assert building.build(jobs(5), seconds=60.0) == [False] * 5


def test_a_process_that_never_gets_ready_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr(building, "START", "import time; time.sleep(3600)")
    monkeypatch.setattr(building, "STARTING", 0.1)
    monkeypatch.setattr(building, "LOOK", 0.1)
    with pytest.warns(UserWarning, match="the compiler ended with -9"):
        assert building.build(jobs(3), seconds=60.0) == [False] * 3


def test_an_idle_process_may_end_while_others_compile(monkeypatch) -> None:
    monkeypatch.setattr(building, "cores", lambda: 2)
    monkeypatch.setattr(building, "START", ANSWERS.format(answer='time.sleep(0.3) or "null"'))
    idle, _ = building.start(2)
    ended = []

    def end_the_idle() -> None:
        if not ended:
            idle.process.kill()
        ended.append(None)

    assert building.build(jobs(2), ended=end_the_idle).count(True) >= 1
    assert building.build(jobs(4)) == [True] * 4


@pytest.mark.parametrize("name", ["CUTEX_CACHE", "CUTE_DSL_LINEINFO"])
def test_processes_work_in_todays_environment(monkeypatch, tmp_path, name: str) -> None:
    file = f'os.environ["CUTEX_CACHE"] + "/built " + os.environ[{name!r}][-1]'
    writes = f'open({file}, "w") and "null"'
    monkeypatch.setattr(building, "START", ANSWERS.format(answer=writes))
    for letter in "ab":
        (tmp_path / letter).mkdir(exist_ok=True)
        monkeypatch.setenv(name, str(tmp_path / letter))
        assert building.build(jobs(1)) == [True]
        assert (Path(os.environ["CUTEX_CACHE"]) / f"built {letter}").exists()


def test_a_relative_cache_is_that_of_the_working_directory(monkeypatch, tmp_path) -> None:
    writes = 'open(os.environ["CUTEX_CACHE"], "w") and "null"'
    monkeypatch.setattr(building, "START", ANSWERS.format(answer=writes))
    monkeypatch.setenv("CUTEX_CACHE", "cache")
    for name in "ab":
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert building.build(jobs(1)) == [True]
        assert (tmp_path / name / "cache").exists()


def test_a_fork_leaves_them_to_the_parent() -> None:
    some = jobs(3)
    assert building.build(some[:1]) == [True]
    (builder,) = building.start(1)
    with building.alone():  # as another thread may hold it
        child = os.fork()
        if child == 0:
            try:
                mine = building.start(1) != [builder] and building.build(some[1:2]) == [True]
                building.stop()
                os._exit(0 if mine else 1)
            finally:
                os._exit(2)
    until = time.monotonic() + 120
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < until:
        time.sleep(0.01)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)
    assert building.start(1) == [builder] and building.build(some[2:]) == [True]


def test_ctrl_c_leaves_processes_that_can_be_used(monkeypatch) -> None:
    monkeypatch.setattr(building, "START", ANSWERS.format(answer='time.sleep(0.5) or "null"'))

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        building.build(jobs(6), ended=interrupted)
    assert building.build(jobs(2)) == [True, True]
    with building.alone():
        pass
