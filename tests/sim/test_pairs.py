"""No signal between the CTAs of a pair can be left out unnoticed."""

from __future__ import annotations

import re

import pytest
from mutations import Mutant, flipped_parity

from cutex.compile import compile
from cutex.kernels.gemm import stage
from cutex.problem.gemm import GemmProblem
from cutex.sim import SimError, simulate

PROBLEM = GemmProblem(1024, 512, 200, init="int")
ORDER = {"order": "peer-late", "seed": 1}
SIGNALS = (
    "tcgen05.commit",  # a slot is empty, an accumulator is full: in both CTAs
    "mbarrier.arrive.shared::cluster",  # an accumulator, a reply has been read: at the leader's
    "mbarrier.arrive.expect_tx.shared::cluster",  # a tile has been asked for: in both CTAs
    "barrier.cluster.wait",  # barriers are ready; the peer needs nothing more
)


@pytest.fixture(scope="module")
def kernel():
    return compile(stage("sm_100a", 8).kernel(), "bf16", "sm_100a")


def run(kernel) -> bool:
    a, b = PROBLEM.inputs()
    c = PROBLEM.output()
    simulate(kernel, a, b, c, **ORDER)
    return PROBLEM.check(a, b, c).ok


def test_the_unchanged_kernel_has_no_finding(kernel) -> None:
    assert run(kernel)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("signal", SIGNALS)
def test_a_signal_left_out_is_found(kernel, signal: str) -> None:
    places = list(re.finditer(rf"^\s*(@!?%p\d+ )?{re.escape(signal)}[^;]*;", kernel.ptx, re.M))
    assert places
    for place in places:
        ptx = kernel.ptx[: place.start()] + kernel.ptx[place.end() :]
        with pytest.raises(SimError):
            run(Mutant(kernel.object_path, kernel.symbol, ptx))


@pytest.mark.slow
def test_a_wait_for_the_other_phase_is_found(kernel) -> None:
    waits = len(re.findall(r"mbarrier\.try_wait\.parity[^;]*?\], (%r\d+|\d)(, 1\d+)?;", kernel.ptx))
    assert waits >= 8
    for which in range(waits):
        with pytest.raises(SimError):
            run(flipped_parity(kernel, which))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("order", ["fifo", "eager", "peer-late"])
def test_an_arrival_that_does_not_release_the_address_of_tensor_memory_is_found(
    kernel, order: str
) -> None:
    """fence.mbarrier_init releases the barriers before it, but not what tcgen05.alloc wrote."""
    first = re.search(r"barrier\.cluster\.arrive(?!\.relaxed)[\w.]*;", kernel.ptx)
    assert first
    relaxed = "barrier.cluster.arrive.relaxed.aligned;"
    ptx = kernel.ptx[: first.start()] + relaxed + kernel.ptx[first.end() :]
    a, b = PROBLEM.inputs()
    with pytest.raises(SimError, match="race"):
        mutant = Mutant(kernel.object_path, kernel.symbol, ptx)
        simulate(mutant, a, b, PROBLEM.output(), order=order, seed=1)
