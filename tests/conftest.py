from __future__ import annotations

import atexit
import gc
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import threadpoolctl

from cutex.arch import arch, local_arch
from cutex.bench import timing
from cutex.bench.run import choose_device

ROOT = Path(__file__).resolve().parent.parent
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")  # "gw0", "gw1" and so on with `-n`


def pytest_configure(config: pytest.Config) -> None:
    """Set one thread for each test: `-n` has a worker on each core, and threads that wait for each
    other on a busy core spin, which takes numpy's small products five times as long."""
    atexit.register(gc.freeze)  # or the interpreter looks for cycles before it ends
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # of what tests start
        os.environ.setdefault(name, "1")
    if WORKER or not getattr(config.option, "numprocesses", None):  # a process that runs tests
        import torch

        torch.set_num_threads(1)
        threadpoolctl.threadpool_limits(1)


def pytest_collection_finish() -> None:
    """Collect garbage less often: tracing makes millions of objects, and nearly all stay (5 % of
    the suite's time)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With `-n`, a file's tests run in one process, so that what they share is made once."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # the last files are short ones
    return LoadFileScheduling(config, log)


@pytest.hookimpl(trylast=True)  # when the cases are known
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make no item of a case that `-m "not slow"` would leave out: two of three, which took a third
    of the time to collect. One is left of a function whose cases are all slow."""
    if is_default(metafunc.config):
        metafunc._calls[:] = [c for c, slow in with_slowness(metafunc) if not slow] or (
            metafunc._calls[:1]
        )


def is_default(config: pytest.Config) -> bool:
    return config.option.markexpr == "not slow"


def with_slowness(metafunc: pytest.Metafunc) -> Iterator[tuple[Any, bool]]:
    """The cases of a function, and whether each is slow: said of all, of this one, or as one of a
    sweep's others."""
    all_slow, sweep = (metafunc.definition.get_closest_marker(x) for x in ("slow", "sweep"))
    place = 0
    for case in metafunc._calls:
        slow = bool(all_slow) or any(mark.name == "slow" for mark in case.marks)
        if sweep and not slow:
            slow = not in_part(place, *sweep.args)
            place += 1
        yield case, slow


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """With `-n`, each second process reads the files from the last to the first: what one has
    compiled, tests and modules that they import alike, the other finds as bytecode."""
    report = yield
    if isinstance(collector, pytest.Session | pytest.Dir) and WORKER and int(WORKER[2:]) % 2:
        report.result.reverse()
    return report


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if WORKER:
        items.sort(key=lambda item: item.path.parts)  # in all processes alike
    places: Counter[str] = Counter()
    for item in items:
        sweep = item.get_closest_marker("sweep")
        if sweep and not (item.get_closest_marker("slow") or is_default(config)):
            function = item.nodeid.split("[")[0]
            if not in_part(places[function], *sweep.args):
                item.add_marker(pytest.mark.slow)
            places[function] += 1
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and local_arch() is None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no GPU that cutex knows"))


GOLDEN = (5**0.5 - 1) / 2


def in_part(place: int, part: int) -> bool:
    """Whether a sweep's case of this place is one of the `part`-th that always run: evenly spread,
    the first among them, and in step with no parameter, whose values come round at a fixed
    distance."""
    return place * GOLDEN % 1 < 1 / part


@pytest.fixture
def root() -> Path:
    """The root folder of the clone."""
    return ROOT


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """ "cuda" where the GPU here is of the arch under test, else "sim".

    The arch is that of the test's own parameter: `stage` (a Stage) or `arch` (a name).
    """
    callspec = getattr(request.node, "callspec", None)
    params = callspec.params if callspec is not None else {}
    name = params["stage"].arch if "stage" in params else params["arch"]
    return choose_device("auto", arch(name))


@pytest.fixture
def python():
    """Run Python in the clone with `args`, and return the completed process."""

    def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *args],
            cwd=ROOT,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


class FakeGpu:
    """Stands in for an H200 under torch.cuda: launches advance a clock, graphs repeat theirs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        self.now_us = 0.0
        self.log: list[str] = []  # names of the launches, repeats of one only once
        self.capturing: list[tuple[str, float, Callable[[], object]]] | None = None
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.now_us

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) / 1e3

        class Graph:
            def capture_begin(self) -> None:
                gpu.capturing = []

            def capture_end(self) -> None:
                self.work, gpu.capturing = gpu.capturing, None

            def replay(self) -> None:
                for work in self.work:
                    gpu.launch(*work)

        for name, value in {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_name": lambda device=None: "NVIDIA H200",
            "Event": Event,
            "CUDAGraph": Graph,
            "stream": lambda stream: nullcontext(),
            "synchronize": lambda: None,
            "_sleep": lambda cycles: gpu.launch("sleep", cycles / 2000),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(timing, "_capture_stream", lambda device: None)
        monkeypatch.setattr(timing, "gpu_state", lambda: {"clock_mhz": 1980.0})
        monkeypatch.setattr(timing, "WARM_UP_SECONDS", 0.0)
        monkeypatch.setattr(timing, "ROUNDS", 5)

    def launch(self, name: str, us: float, work: Callable[[], object] = lambda: None) -> None:
        if self.capturing is not None:
            self.capturing.append((name, us, work))
            return
        work()
        self.now_us += us
        if not self.log or self.log[-1] != name:
            self.log.append(name)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)
