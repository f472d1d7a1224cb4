"""What the tests of functions of rows share."""

from __future__ import annotations

import pytest
import torch

import cutex
from cutex.kernels.row import choose
from cutex.ops.device import forget_plans
from cutex.ops.row import launches


@pytest.fixture(autouse=True)
def plans_of_its_own():
    """Each test plans its calls, as its choices say: an earlier test's plan would take them."""
    forget_plans()
    yield
    forget_plans()


@pytest.fixture
def device():
    """The device: a GPU, or the simulator."""
    if torch.cuda.is_available():
        yield "cuda"
    else:
        with cutex.ops.simulated("sm_90a"):
            yield "cpu"


@pytest.fixture
def asked(monkeypatch):
    """The kernels that are asked for: kind, config, dtype, arch."""
    found = []
    kernel_for = launches.kernel_for
    monkeypatch.setattr(launches, "kernel_for", lambda *a: found.append(a) or kernel_for(*a))
    return found


@pytest.fixture
def none_are_few(monkeypatch):
    """Kernels of rows that are not few, though a test's are."""
    monkeypatch.setattr(choose, "FEW", 0)
    monkeypatch.setattr(choose, "ONE_CLUSTER", 0)
    monkeypatch.setattr(choose, "HISTOGRAM_CLUSTER", 0)
