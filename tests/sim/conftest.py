from __future__ import annotations

import pytest
from ptx_kernel import run_on_gpu, simulate_ptx

from cutex.arch import local_arch


def _devices() -> dict:
    arch = local_arch()
    here = {"cuda": run_on_gpu} if arch is not None and arch.name == "sm_90a" else {}
    return {"sim": simulate_ptx, **here}


DEVICES = _devices()


@pytest.fixture(params=DEVICES)
def execute(request: pytest.FixtureRequest):
    """Runs a PTX snippet on (body, arrays, shape): in the simulator, and on a Hopper GPU here."""
    return DEVICES[request.param]
