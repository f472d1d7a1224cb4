"""Hazards that give wrong numbers in some schedules only are found in every order."""

from __future__ import annotations

import re

import cutlass
import pytest
import torch
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator
from mutations import Mutant

from cutex.compile import compile
from cutex.kernels.gemm import stages
from cutex.orders import ORDERS
from cutex.problem.gemm import GemmProblem
from cutex.sim import Hazards, SimError, simulate

PROBLEM = GemmProblem(300, 264, 200, dtype="fp16", init="int")
ALL = [stage for arch in ("sm_90a", "sm_100a") for stage in stages(arch)]
STORES = [s for s in ALL if s.config().epi_n]  # their epilogue goes through shared memory


def run(kernel, **order):
    a, b = PROBLEM.inputs("cpu")
    c = PROBLEM.output("cpu")
    report = simulate(kernel, a, b, c, **order)
    assert not report.findings
    return PROBLEM.check(a, b, c)


ADVERSARIAL = [o for o in ORDERS if o not in ("fifo", "random")]
TURNS = [  # each stage in every second order, its neighbours in the others; the rest with -m slow
    pytest.param(
        s, order, id=f"{s.arch}-{s.number}-{order}",
        marks=pytest.mark.slow if (s.number + i) % 2 else (),
    )
    for s in ALL
    for i, order in enumerate(ADVERSARIAL)
]  # fmt: skip


@pytest.mark.sweep(36)
@pytest.mark.parametrize(("stage", "order"), TURNS)
def test_every_stage_is_exact_under_adversarial_orders(stage, order):
    kernel = compile(stage.kernel(), "fp16", stage.arch)
    check = run(kernel, order=order, seed=stage.number)  # another late warp for each stage
    assert check.ok, check.message


def mutants(kernel, pattern: str) -> list[Mutant]:
    """One mutant for each match of ``pattern``, without it."""
    return [
        Mutant(kernel.object_path, kernel.symbol, kernel.ptx[: m.start()] + kernel.ptx[m.end() :])
        for m in re.finditer(pattern, kernel.ptx)
    ]


def findings(kernel, **order) -> str:
    try:
        run(kernel, **order)
    except SimError as error:
        return str(error)
    return ""


@pytest.mark.sweep(18)
@pytest.mark.parametrize("stage", STORES, ids=lambda s: f"{s.arch}-{s.number}")
def test_a_missing_proxy_fence_is_found_in_fifo_order(stage):
    kernel = compile(stage.kernel(), "fp16", stage.arch)
    without = mutants(kernel, r"fence\.proxy\.async[^;]*;")
    assert any("no fence.proxy.async in between" in findings(m) for m in without)


@pytest.mark.sweep(18)
@pytest.mark.parametrize("stage", STORES, ids=lambda s: f"{s.arch}-{s.number}")
def test_a_store_issued_before_all_warps_wrote_their_part_is_found_in_fifo_order(stage):
    """The bug of a public ladder: no barrier between the writes of four warps and the TMA store."""
    kernel = compile(stage.kernel(), "fp16", stage.arch)
    without = mutants(kernel, r"(?<=\n)\s*(bar\.sync|barrier\.sync\S*)\s[^;]*;")
    found = "the TMA store .* reads .*no barrier orders the two"
    assert any(re.search(found, findings(m)) for m in without)  # until one is


@pytest.mark.sweep(18)
@pytest.mark.parametrize("stage", STORES, ids=lambda s: f"{s.arch}-{s.number}")
def test_a_slot_reused_while_one_store_too_many_may_be_pending_is_found_in_fifo_order(stage):
    kernel = compile(stage.kernel(), "fp16", stage.arch)
    wait = r"(cp\.async\.bulk\.wait_group\.read\s+)(\d+)"
    ptx = re.sub(wait, lambda m: f"{m.group(1)}{int(m.group(2)) + 1}", kernel.ptx)
    report = findings(Mutant(kernel.object_path, kernel.symbol, ptx))
    assert re.search("a store .* overwrites .* still being read by the TMA store", report)


def test_ordinary_stores_and_loads_of_two_warps_need_a_barrier():
    """A kernel whose warp 1 reads the words that warp 0 wrote: right with bar.sync, without it a
    race.
    """

    def kernel_of(with_barrier: bool):
        @cute.kernel
        def kernel(out: cute.Tensor):
            smem = SmemAllocator()
            words = smem.allocate_array(Int32, 64)
            thread, _, _ = cute.arch.thread_idx()
            words[thread] = thread
            if cutlass.const_expr(with_barrier):
                cute.arch.sync_threads()
            out[thread] = words[63 - thread]

        @cute.jit
        def launch(out: cute.Tensor):
            kernel(out).launch(grid=[1, 1, 1], block=[64, 1, 1])

        return launch

    out = torch.zeros(64, dtype=torch.int32)
    simulate(kernel_of(True), out)
    assert out.tolist() == list(range(63, -1, -1))
    with pytest.raises(
        Hazards, match=r"reads shared memory words\[\d+\] .*, which .* wrote at PTX line"
    ):
        simulate(kernel_of(False), out)
