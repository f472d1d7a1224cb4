"""Kernels by the DSL's building blocks: each is right without a finding, and with a planted fault
the simulator tells.
"""

from __future__ import annotations

from pathlib import Path

import library_kernels
import pytest
import torch
from test_planted import load

from cutex.sim import SimError, simulate

SOURCE = Path(library_kernels.__file__)
ROOM, DONE = "  # of room for the result\n", "  # of the result\n"
BARRIER = "            cute.arch.barrier(barrier_id=1, number_of_threads=ADDERS)"
PLANTS = {  # by kernel: what is replaced, by what, and what is told
    "product": [
        ("cp_async_wait_group(STAGES - 2)", "cp_async_wait_group(STAGES - 1)", "race"),
        ("        cute.arch.sync_threads()  # of a slab\n", "", "race"),
        ("        cute.arch.cp_async_commit_group()  # of the slab ahead\n", "", "race"),
        ("        cute.arch.cp_async_commit_group()  # of a first slab\n", "", "race"),
        ("    tCrC.fill(0.0)\n", "", "uninitialised"),
    ],
    "doubled": [
        ("            pipe.consumer_release(state)\n", "", "deadlock"),
        ("            pipe.consumer_wait(state)\n", "", "race"),
        (f"{BARRIER}{ROOM}", "", "race"),
        ("wait_group(2, read=True)", "wait_group(3, read=True)", "race"),
        ("            cute.arch.fence_view_async_shared()\n", "", "proxy"),
        (f"{BARRIER}{DONE}", "", "race"),
        ("group(0, read=True)  # before the CTA ends", "group(1, read=True)", "exit"),
        ("tx_count=ROWS * COLUMNS * 4", "tx_count=ROWS * COLUMNS * 2", "deadlock"),
        ("Agent.Thread, ADDERS // 32)", "Agent.Thread, ADDERS // 32 - 1)", "barrier"),
        ("ADDERS)  # of room", "ADDERS + 32)  # of room", "deadlock"),
    ],
    "scan": [
        ('sem="acquire"', 'sem="relaxed"', "race"),
        ('sem="release"', 'sem="relaxed"', "race"),
        ("    cute.arch.sync_threads()  # of the warps' sums\n", "", "race"),
        ("    cute.arch.sync_threads()  # of the sum before\n", "", "race"),
    ],
    "sent": [
        ("_tx(loaded, 32 * 32 * 4)", "_tx(loaded, 32 * 32 * 2)", "bytes announced"),
        ("cutlass.Int16(3)", "cutlass.Int16(1)", "deadlock"),
        ("cluster_arrive_relaxed()  # both have a barrier", "sync_threads()", "barrier"),
        ("cute.arch.mbarrier_wait(loaded, 0)", "cute.arch.mbarrier_wait(loaded, 1)", "race"),
    ],
}


def run(module, kernel: str):
    arguments, expected = module.operands(kernel)
    report = simulate(getattr(module, kernel), *arguments, arch="sm_90a")
    return report, arguments[-1], expected


@pytest.mark.slow
@pytest.mark.parametrize("kernel", library_kernels.KERNELS)
def test_it_is_right_and_nothing_is_found(kernel):
    report, result, expected = run(library_kernels, kernel)
    assert torch.equal(result, expected) and not report.findings


@pytest.mark.slow
@pytest.mark.parametrize("kernel, plant", [(k, p) for k, each in PLANTS.items() for p in each])
def test_a_planted_fault_is_found(kernel, plant, tmp_path):
    old, new, says = plant
    text = SOURCE.read_text()
    assert text.count(old) == 1, "a plant changes one place"
    module, _ = load(text.replace(old, new), tmp_path)
    with pytest.raises(SimError) as raised:
        run(module, kernel)
    assert says in str(raised.value).partition("\n    ")[0]
