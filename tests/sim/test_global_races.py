"""Clusters that write, or write and read, one place of global memory, and nothing orders them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from mutations import mutate
from ptx_kernel import Shape, simulate_ptx

from cutex.compile import compile
from cutex.kernels.gemm import stage
from cutex.problem.gemm import GemmProblem
from cutex.sim import Hazards, simulate

ORDERS = ["fifo", "eager", "starved", "peer-late", "random"]
FOUR = Shape(grid=4)
ANOTHER = r"race: .* writes \w+\[\d.* wrote another value there .* nothing orders the two"


def run(body: str, order: str = "fifo", **shape) -> np.ndarray:
    x = np.zeros(64, np.uint32)
    simulate_ptx(body, {"x": x}, replace(FOUR, **shape), order=order)
    return x


@pytest.mark.parametrize("order", ORDERS)
def test_different_values_are_a_race(order: str) -> None:
    """Lane by lane all CTAs write to the same words, whether in one step or in several."""
    with pytest.raises(Hazards, match=ANOTHER):
        run("mad.wide.u32 %d0, %lane, 4, %x; st.global.u32 [%d0], %cta;", order)


ADDED = "ld.global.u32 %r0, [%x]; add.u32 %r0, %r0, 1; st.global.u32 [%x], %r0;"


@pytest.mark.parametrize("order", ORDERS)
def test_a_sum_without_atomics_is_a_race(order: str) -> None:
    """All CTAs add to one word: what one reads, another writes."""
    with pytest.raises(Hazards, match=r"race: .*(reads x.0. |which .* read: nothing orders)"):
        run(f"setp.ne.u32 %p0, %lane, 0; @%p0 ret; {ADDED}", order)
    with_atomics = "setp.ne.u32 %p0, %lane, 0; @%p0 ret; red.global.add.u32 [%x], 1;"
    assert run(with_atomics, order)[0] == 4


@pytest.mark.parametrize("order", ORDERS)
def test_what_only_one_cluster_reads_and_writes_is_its_own(order: str) -> None:
    """As is what all read and nobody writes."""
    own = "mad.wide.u32 %d0, %cta, 4, %x; ld.global.u32 %r0, [%d0]; st.global.u32 [%d0], %cta;"
    run(f"{own} ld.global.u32 %r1, [%x+128];", order)


def test_the_same_value_from_all_is_none() -> None:
    assert (run("mad.wide.u32 %d0, %lane, 4, %x; st.global.u32 [%d0], 7;")[:32] == 7).all()


def test_neither_are_places_of_ones_own_nor_two_writes_of_one_cluster() -> None:
    run("mad.wide.u32 %d0, %cta, 4, %x; st.global.u32 [%d0], %cta; st.global.u32 [%d0], 9;")
    run("st.global.u32 [%x], %cta;", cluster=4)


def test_a_kernel_that_can_order_its_clusters_is_not_judged() -> None:
    body = "st.global.u32 [%x], %cta; fence.acq_rel.gpu; red.global.add.u32 [%x+4], 1;"
    assert run(body)[1] == 32 * 4


def test_bulk_stores_are_watched() -> None:
    body = """
    mov.u32 %r0, smem; st.shared.u32 [%r0], %cta; fence.proxy.async.shared::cta;
    setp.ne.u32 %p0, %lane, 0; @%p0 bra done;
    cp.async.bulk.global.shared::cta.bulk_group [%x], [%r0], 16;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    done:
    """
    with pytest.raises(Hazards, match=ANOTHER):
        run(body, block=1, smem=16)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("arch, number", [("sm_90a", 5), ("sm_100a", 4)])
def test_tiles_stored_over_each_other_are_found(arch: str, number: int, order: str) -> None:
    """As if the way out did not count the tiles of M: every row of tiles goes to the first."""
    kernel = compile(stage(arch, number).kernel(), "bf16", arch)
    problem = GemmProblem(512, 256, 64, dtype="bf16", init="int")
    a, b = problem.inputs("cpu")
    simulate(kernel, a, b, problem.output("cpu"), order=order)
    wrong = mutate(
        kernel,
        r"(cp\.async\.bulk\.tensor\.2d\.global\.shared::cta[^\[]*\[%rd\d+, \{%r\d+, )%r\d+(\}\])",
        r"\g<1>0\2",
    )
    with pytest.raises(Hazards, match=ANOTHER):
        simulate(wrong, a, b, torch.zeros(512, 256).bfloat16(), order=order, seed=1)
