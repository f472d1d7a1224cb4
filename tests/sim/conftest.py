from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from ptx_kernel import run_on_gpu, simulate_ptx

from cutex.arch import local_arch
from cutex.sim.__main__ import main


def _devices() -> dict:
    arch = local_arch()
    here = {"cuda": run_on_gpu} if arch is not None and arch.name == "sm_90a" else {}
    return {"sim": simulate_ptx, **here}


DEVICES = _devices()


@pytest.fixture(params=DEVICES)
def execute(request: pytest.FixtureRequest):
    """A function that runs a PTX snippet on (body, arrays, shape): in the simulator, and on this
    machine's Hopper GPU, if it has one.
    """
    return DEVICES[request.param]


@pytest.fixture
def run_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., SimpleNamespace]:
    """A function that runs a script's text by `python -m cutex.sim` with options, in this process,
    since a new one would take two seconds to import torch and the DSL.
    """
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("CUTE_DSL_ARCH", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def run(text: str, *options: str, script: tuple[str, ...] = ()) -> SimpleNamespace:
        path = tmp_path / "script.py"
        path.write_text(text)
        linecache.clearcache()
        code = main([*options, str(path), *script])
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    return run
