"""cutex.matmul in the simulator of each thread, and what the README writes."""

from __future__ import annotations

import threading

import pytest
import torch
from matmul_stand_in import agree

import cutex
from cutex.ops.matmul import eager

A, B = (
    torch.randn(*shape, generator=torch.Generator().manual_seed(7)).bfloat16()
    for shape in ((16, 24), (24, 8))
)


@pytest.mark.slow
def test_simulators_nest_and_belong_to_their_thread() -> None:
    found: dict[str, object] = {}

    def elsewhere() -> None:
        try:
            cutex.matmul(A, B)
        except ValueError as error:
            found["outside"] = str(error)
        with cutex.ops.simulated("sm_100a"):
            found["inside"] = (cutex.ops.device.simulated_arch(), cutex.matmul(A, B))

    want = A @ B
    with cutex.ops.simulated("sm_90a"):
        assert agree(cutex.matmul(A, B), want)
        with cutex.ops.simulated("sm_100a", order="random", seed=1):
            assert cutex.ops.device.simulated_arch() == "sm_100a"
            assert agree(cutex.matmul(A, B), want)
            with pytest.raises(ValueError, match="arch 'sm_70'"), cutex.ops.simulated("sm_70"):
                pass
        assert cutex.ops.device.simulated_arch() == "sm_90a"
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert cutex.ops.device.simulated_arch() == "sm_90a"
        assert agree(cutex.matmul(A, B), want)
    assert "runs on an Ampere or newer GPU" in str(found["outside"])
    assert found["inside"][0] == "sm_100a" and agree(found["inside"][1], want)
    assert cutex.ops.device.simulated_arch() is None and not eager.PLANS
    with pytest.raises(ValueError, match="runs on an Ampere or newer GPU"):
        cutex.matmul(A, B)


def test_a_plan_of_another_threads_simulator_is_not_run() -> None:
    """Plans are one table for all threads; a call here uses the simulator of its own thread."""
    made, done = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with cutex.ops.simulated():
            cutex.matmul(A, B)
            made.set()
            done.wait(60)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    made.wait(60)
    try:
        assert eager.PLANS
        with pytest.raises(ValueError, match="runs on an Ampere or newer GPU"):
            cutex.matmul(A, B)
    finally:
        done.set()
        thread.join()


def test_an_error_within_leaves_no_simulator_behind() -> None:
    with pytest.raises(KeyError), cutex.ops.simulated():
        raise KeyError
    assert cutex.ops.device.simulated_arch() is None
    with pytest.raises(TypeError, match=r"simulated\(\) has no option 'sed', it takes arch, order"):
        cutex.ops.simulated(sed=1).__enter__()
    assert cutex.ops.device.simulated_arch() is None


@pytest.mark.slow
def test_what_the_readme_writes_needs_one_import(python) -> None:
    lines = (
        "import cutex",
        "assert 'torch' not in __import__('sys').modules",
        "with cutex.ops.simulated('sm_100a'):",
        "    import torch",
        "    x, w, r = (torch.ones(16, 16, dtype=torch.bfloat16) for _ in range(3))",
        "    y = cutex.matmul(x, w.mT, bias=r[0], activation='gelu', residual=r)",
        "    assert (y == 18).all()",
    )
    done = python("-c", "\n".join(lines))
    assert done.returncode == 0, done.stderr
