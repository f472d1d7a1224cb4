"""One object decides the order of events, and an operation in flight has its own cost."""

from __future__ import annotations

from collections import Counter

import pytest

from cutex.compile import compile
from cutex.kernels.gemm import stage
from cutex.orders import ORDERS
from cutex.problem.gemm import GemmProblem
from cutex.sim import simulate
from cutex.sim.machine.flight import Flight
from cutex.sim.machine.operation import Engine, Operation
from cutex.sim.policy import policy


@pytest.mark.sweep(2)
@pytest.mark.parametrize("order", ORDERS)
def test_each_order_has_a_policy_of_its_own(order):
    others = {type(policy(o, 0)) for o in ORDERS if o != order}
    assert type(policy(order, 0)) not in others


def test_an_unknown_order_is_refused_by_name():
    with pytest.raises(ValueError, match="order 'lifo': takes one of fifo"):
        policy("lifo", 0)


@pytest.mark.parametrize(
    ("arch", "engine"), [("sm_90a", Engine.WGMMA), ("sm_100a", Engine.TCGEN05_MMA)]
)
def test_an_operation_says_its_engine_bytes_and_flops(arch, engine, monkeypatch):
    """256 x 256 x 128 of bf16, whole tiles of the stage that first stores by TMA."""
    m, n, k = 256, 256, 128
    flops, size = Counter[Engine](), Counter[Engine]()
    issue = Flight.issue

    def noted(flight: Flight, *ops: Operation) -> None:
        for op in ops:
            flops[op.engine] += op.flops
            size[op.engine] += op.bytes
        issue(flight, *ops)

    monkeypatch.setattr(Flight, "issue", noted)
    target = stage(arch, 5)
    kernel = compile(target.kernel(), "bf16", arch)
    problem = GemmProblem(m, n, k, dtype="bf16", init="int")
    a, b = problem.inputs()
    simulate(kernel, a, b, problem.output())
    assert flops == {engine: 2 * m * n * k, Engine.TMA_LOAD: 0, Engine.TMA_STORE: 0}
    assert size[Engine.TMA_STORE] == m * n * 2
    assert size[Engine.TMA_LOAD] >= (m + n) * k * 2  # A and B, each once for a tile of the other
    assert size[engine] >= size[Engine.TMA_LOAD]  # each byte is read by one multiplication or more
