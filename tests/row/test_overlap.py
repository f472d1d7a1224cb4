"""Kernels of rows may start while the one before them ends: none touches memory before it waits."""

from __future__ import annotations

import pytest
import torch
from row_calls import rows

import cutex
from cutex.ops.device import forget_plans
from cutex.ops.workspace import forget_flags
from cutex.sim import simulate
from cutex.simulation import SimulatedDevice, simulating

W = torch.ones(64)


def gradient(f):
    """f of rows whose gradient is taken, too."""

    def both(x):
        y = f(x.requires_grad_())
        y.backward(torch.ones_like(y))

    return both


CALLS = {
    "softmax": gradient(cutex.softmax),
    "causal softmax": gradient(lambda x: cutex.softmax(x, causal=True)),
    "layer norm": gradient(lambda x: cutex.layer_norm(x, W, W)),
    "quantized norm": lambda x: cutex.rms_norm(x, W, quantize="fp8_1x128"),
    "losses": gradient(lambda x: cutex.cross_entropy(x, torch.arange(len(x)), reduction="none")),
    "sum of losses": lambda x: cutex.cross_entropy(x, torch.arange(len(x)) % 64),
    "sums": lambda x: cutex.reduce(x, "sum", dim=-1),
    "sums of columns": lambda x: cutex.reduce(x, "sum", dim=0),
    "argmax": lambda x: cutex.reduce(x, "argmax"),
    "scan": cutex.scan,
    "scan by a cluster": lambda x: cutex.scan(x.repeat(10, 1).view(1, -1)[:, :2500]),
    "histogram": lambda x: cutex.histogram(x, 8, low=-1.0, high=1.0),
    "map": lambda x: cutex.map(lambda a: a + 1, x),
    "rope": lambda x: cutex.rope(x.view(1, len(x), 1, 64), *torch.ones(2, len(x), 32)),
}


@pytest.mark.sweep(7)
@pytest.mark.parametrize("name", CALLS)
def test_a_launch_waits_for_the_kernel_before(name):
    """The simulator advises against an access before the wait; it tells of no other."""
    said = []

    def launch(compiled, tensors):
        said.extend(simulate(compiled, *tensors).advisories)

    with simulating(SimulatedDevice("sm_90a", launch)):
        forget_plans()
        many = 600 if name == "sum of losses" else 4  # a second kernel adds many up
        CALLS[name](rows("cpu", (many, 64), torch.bfloat16))
        forget_plans()
        forget_flags(torch.device("cpu"))
    assert not said
