from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cutex.arch import arch, local_arch
from cutex.run import choose_device

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and local_arch() is None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no GPU that cutex knows"))


@pytest.fixture
def root() -> Path:
    """The clone that the tests stand in."""
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
    """Run this Python in the clone with `args`; returns the completed process."""

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
