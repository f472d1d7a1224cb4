"""A fault in a compiled kernel is reported as what it is, in every order of events."""

from __future__ import annotations

import pytest
from mutations import (
    expect_tx_plus,
    flipped_parity,
    other_swizzle,
    store_past_the_end,
    without,
)

from cutex.compile import compile
from cutex.kernels.gemm import stage
from cutex.problem.gemm import GemmProblem
from cutex.sim import BadAddress, BarrierMisuse, Deadlock, Hazards, simulate

ARCHS = ("sm_90a", "sm_100a")
RINGS = [(arch, number) for arch in ARCHS for number in (2, 3)]
ORDERS = [{"order": "fifo"}, {"order": "random", "seed": 1}, {"order": "random", "seed": 2}]
PROBLEM = GemmProblem(300, 264, 520, dtype="bf16", init="int")


@pytest.fixture(scope="module")
def kernels():
    return {key: compile(stage(*key).kernel(), "bf16", key[0]) for key in RINGS}


def run(kernel, **order):
    a, b = PROBLEM.inputs("cpu")
    c = PROBLEM.output("cpu")
    simulate(kernel, a, b, c, **order)
    return PROBLEM.check(a, b, c)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("key", RINGS)
def test_the_unchanged_kernel_has_no_finding(kernels, key):
    assert run(kernels[key]).ok


@pytest.mark.sweep(6)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("key", RINGS)
@pytest.mark.parametrize("delta", [16, 16384])
def test_too_large_expect_tx_names_the_missing_bytes(kernels, key, delta, order):
    with pytest.raises(
        Deadlock, match=rf"tx-count {delta} \(expect_tx announced {49152 + delta} bytes, 49152 came"
    ):
        run(expect_tx_plus(kernels[key], delta), **order)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("key", RINGS)
def test_too_small_expect_tx_names_the_surplus(kernels, key, order):
    with pytest.raises(
        Deadlock, match=r"tx-count -16 \(49152 bytes came, expect_tx announced only 49136\)"
    ):
        run(expect_tx_plus(kernels[key], -16), **order)


def test_expect_tx_without_one_operand_lets_the_mma_read_too_early(kernels):
    """16384 bytes are exactly A's box: the phase can complete before B has come, and an MMA then
    reads B in flight.
    """
    found = set()
    for seed in range(6):
        try:
            run(expect_tx_plus(kernels["sm_100a", 3], -16384), order="random", seed=seed)
        except (Deadlock, Hazards) as error:
            found.add(type(error).__name__)
            assert "tx-count" in str(error) or "still being written by the TMA load" in str(error)
    assert found


@pytest.mark.sweep(2)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("number", [2, 3])
def test_a_dropped_commit_is_a_deadlock_on_the_barrier_it_would_arrive_on(kernels, number, order):
    with pytest.raises(Deadlock, match=r"1 of 1 arrivals pending") as report:
        run(without(kernels["sm_100a", number], "tcgen05.commit"), **order)
    assert "pipeline.py" in str(report.value)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("number", [2, 3])
def test_a_dropped_arrive_is_a_deadlock_on_the_empty_barrier(kernels, number, order):
    with pytest.raises(Deadlock, match=r"0 phases complete, 8 of 8 arrivals pending") as report:
        run(without(kernels["sm_90a", number], "mbarrier.arrive.shared"), **order)
    assert "last touched by nobody" in str(report.value)


@pytest.mark.parametrize("number", [2, 3])
def test_a_consumer_that_waits_with_the_wrong_parity_reads_what_tma_still_writes(kernels, number):
    """The first full-barrier wait with parity 1 passes on a fresh barrier: the report names the
    wait that passed.
    """
    with pytest.raises((Hazards, Deadlock)) as report:
        run(flipped_parity(kernels["sm_90a", number], 1))
    text = str(report.value)
    assert "still being written by the TMA load" in text
    assert "last waited with parity 1" in text and "passed after 0 completed phases" in text


@pytest.mark.sweep(4)
@pytest.mark.parametrize("key", RINGS)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_every_flipped_parity_is_found(kernels, key, which):
    with pytest.raises((Deadlock, Hazards, BarrierMisuse)) as report:
        run(flipped_parity(kernels[key], which))
    tells = ("would pass", "last waited with parity", "tensor memory", "expects only 0 more of 1")
    assert any(tell in str(report.value) for tell in tells)


@pytest.mark.sweep(18)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("key", RINGS)
def test_a_wrong_swizzle_names_both_swizzles(kernels, key, order):
    written = r"was written by the TMA load at PTX line \d+ with 128-byte swizzle"
    with pytest.raises(Hazards, match=rf"64-byte swizzle\) {written}"):
        run(other_swizzle(kernels[key], key[0]), **order)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("key", RINGS)
def test_a_store_past_the_end_names_lane_warp_address_and_tensor(kernels, key, order):
    where = r"(\d+ bytes (past the end of|before) m[ABC]|in the padding of)"
    with pytest.raises(BadAddress, match=rf"warp \d+ lane \d+ stores 0x[0-9a-f]+, {where}"):
        # NOTE: tensors lie where the host has them, other tensors perhaps 16 MB further
        run(store_past_the_end(kernels[key], 1 << 30), **order)


@pytest.mark.parametrize("number", [2, 3])
def test_registers_read_before_wait_group(kernels, number):
    """Without any wait_group the epilogue reads accumulators in flight, and smem is overwritten
    under the wgmma.
    """
    mutant = without(kernels["sm_90a", number], "wgmma.wait_group")
    with pytest.raises(
        Hazards, match=r"still being read by the wgmma|accumulator register before wgmma.wait_group"
    ):
        run(mutant)


@pytest.mark.parametrize("key", RINGS)
def test_a_barrier_that_was_never_initialised(kernels, key):
    with pytest.raises(
        BarrierMisuse, match=r"no mbarrier was initialised at shared \S*ab\.full\[0\]"
    ):
        run(without(kernels[key], "mbarrier.init"))


def test_tensor_memory_that_is_not_given_back(kernels):
    with pytest.raises(Hazards, match=r"returns without tcgen05.dealloc of \d+ columns"):
        run(without(kernels["sm_100a", 3], "tcgen05.dealloc"))
