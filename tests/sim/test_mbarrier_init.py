"""An mbarrier is used only after its initialisation (PTX ISA 9.7.13.15, 9.7.13.4).

Within a CTA, bar.sync orders the two. Across CTAs it takes a cluster barrier: one that arrives with
.release, or one that arrives .relaxed behind a fence.mbarrier_init of the thread that initialised.
Copies and commits use their mbarrier by the generic proxy: no fence.proxy.async is needed.
"""

from __future__ import annotations

import numpy as np
import pytest
from barriers import CLUSTER_SYNC, EVERY_ORDER, copy, rows, wait
from mutations import Mutant
from ptx_kernel import Shape, simulate_ptx

from cutex.compile import compile
from cutex.kernels.gemm import stage
from cutex.problem.gemm import GemmProblem
from cutex.sim import BarrierMisuse, Hazards, simulate

each_order = pytest.mark.parametrize(
    "order", EVERY_ORDER, ids=lambda o: "-".join(map(str, o.values()))
)
FENCE = "fence.mbarrier_init.release.cluster;"
RELAXED = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;"


# -- one CTA ---------------------------------------------------------------------------------------

LOCAL = f"""
    .reg .b32 bar, data; mov.u32 bar, smem; add.u32 data, bar, 128; setp.eq.u32 %p0, %i, 0;
    @%p0 mbarrier.init.shared.b64 [bar], 1; BETWEEN setp.eq.u32 %p1, %i, 32;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256; @%p1 {copy("data", "%a", 256)}
    {wait("bar", 0, "W0")} mad.lo.u32 data, %i, 4, data; ld.shared.b32 %r0, [data];
    st.global.b32 [%out_i], %r0;
"""


def local(between: str, **order) -> None:
    a, out = rows(1, 64), np.zeros(64, np.uint32)
    body = LOCAL.replace("BETWEEN", between)
    simulate_ptx(body, {"a": a, "out": out}, Shape(block=64, smem=1024), **order)
    assert (out == a[0]).all()


@pytest.mark.sweep(2)
@each_order
def test_a_barrier_of_the_cta_is_enough_within_it_also_for_copies(order):
    local("bar.sync 0;", **order)
    local("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;", **order)


@pytest.mark.sweep(4)
@each_order
@pytest.mark.parametrize("between", ["", FENCE, "fence.proxy.async;", "bar.warp.sync -1;"])
def test_no_barrier_is_a_race(between, order):
    race = r"warp 1 uses mbarrier 0x400 .*, which .* warp 0 lane 0 initialised: no barrier orders"
    with pytest.raises((Hazards, BarrierMisuse), match=f"{race}|no mbarrier was initialised"):
        local(between, **order)


# -- clusters --------------------------------------------------------------------------------------

# the first threads of both CTAs initialise; each arrives at the other's, or copies into it
REMOTE = f"""
    .reg .b32 bar, rank, there, t; mov.u32 bar, smem; mov.u32 rank, %cluster_ctarank;
    mov.u32 t, %tid.x; setp.eq.u32 %p0, t, 0; setp.eq.u32 %p1, t, 1;
    @%p0 mbarrier.init.shared.b64 [bar], 1; BETWEEN
    xor.b32 rank, rank, 1; mapa.shared::cluster.u32 there, bar, rank;
    USE {wait("bar", 0, "W0")} {CLUSTER_SYNC}
"""
MULTICAST = """
    setp.eq.u32 %p3, rank, 1; and.pred %p3, %p3, %p0; add.u32 there, bar, 128; mov.u16 %h0, 3;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256;
    @%p3 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [there], [%a], 256, [bar], %h0;
"""
USES = {
    "arrive": "@%p0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];",
    "multicast copy": MULTICAST,
    "commit": """setp.eq.u32 %p3, rank, 1; and.pred %p3, %p3, %p0; mov.u16 %h0, 3;
    @%p3 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64
        [bar], %h0;""",
}
ORDERED = {
    "release": CLUSTER_SYNC,  # the example of 9.7.13.15.16
    "fence and relaxed": FENCE + RELAXED,  # the example of 9.7.13.4
    "fence of its thread": "@%p0 " + FENCE + RELAXED,
    "a general fence": "fence.acq_rel.cluster;" + RELAXED,
    "a wider fence": "fence.sc.gpu;" + RELAXED,
}
UNORDERED = {
    "relaxed": RELAXED,
    "fence of another thread": "@%p1 " + FENCE + RELAXED,
    "fence after": RELAXED + FENCE,
    "a fence of the CTA": "fence.acq_rel.cta;" + RELAXED,
    "a fence that acquires": "fence.acquire.cluster;" + RELAXED,
    "a proxy fence": "fence.proxy.async;" + RELAXED,
}


def remote(between: str, use: str, **order) -> None:
    body = REMOTE.replace("BETWEEN", between).replace("USE", USES[use])
    shape = Shape(grid=2, block=64, cluster=2, smem=1024)
    simulate_ptx(body, {"a": rows(1, 64)}, shape, arch="sm_100a", **order)


@pytest.mark.sweep(5)
@each_order
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("between", ORDERED)
def test_what_releases_it_to_the_cluster(between, use, order):
    remote(ORDERED[between], use, **order)


@pytest.mark.sweep(5)
@each_order
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("between", UNORDERED)
def test_a_relaxed_barrier_without_its_fence_is_a_race(between, use, order):
    with pytest.raises(Hazards, match=r"barrier\.cluster\.arrive\.relaxed does not release it"):
        remote(UNORDERED[between], use, **order)


STORE = f"""
    .reg .b32 rank, mine, far; mov.u32 rank, %cluster_ctarank; mov.u32 mine, smem;
    mad.lo.u32 mine, %lane, 4, mine; st.shared.b32 [mine], rank; BETWEEN
    xor.b32 rank, rank, 1; mapa.shared::cluster.u32 far, mine, rank;
    ld.shared::cluster.b32 %r0, [far]; {CLUSTER_SYNC}
"""


@pytest.mark.sweep(2)
@each_order
def test_a_relaxed_barrier_releases_ordinary_stores_only_behind_a_fence(order):
    shape = Shape(grid=2, cluster=2, smem=256)
    fenced = "fence.acq_rel.cluster;" + RELAXED
    simulate_ptx(STORE.replace("BETWEEN", fenced), {}, shape, **order)
    for between in (RELAXED, FENCE + RELAXED, RELAXED + "fence.acq_rel.cluster;"):
        with pytest.raises(Hazards, match="no barrier orders the two"):
            simulate_ptx(STORE.replace("BETWEEN", between), {}, shape, **order)


# -- a kernel of a pair ----------------------------------------------------------------------------

PROBLEM = GemmProblem(300, 264, 200, init="int")


@pytest.fixture(scope="module")
def kernel():
    return compile(stage("sm_90a", 6).kernel(), "bf16", "sm_90a")


def run(kernel, ptx: str) -> None:
    a, b = PROBLEM.inputs("cpu")
    c = PROBLEM.output("cpu")
    simulate(Mutant(kernel.object_path, kernel.symbol, ptx), a, b, c)
    assert PROBLEM.check(a, b, c).ok


def test_a_gemm_that_drops_the_fence_behind_a_relaxed_barrier_is_found(kernel):
    relaxed = kernel.ptx
    arrive = "barrier.cluster.arrive"
    assert FENCE in relaxed and f"{arrive}.relaxed" in relaxed
    run(kernel, relaxed)
    releases = relaxed.replace(f"{arrive}.relaxed", arrive, 1)
    run(kernel, releases.replace(FENCE, ""))  # the barrier itself does
    with pytest.raises(Hazards, match=r"race: .* uses mbarrier .* \(initialised at .*pipeline\.py"):
        run(kernel, relaxed.replace(FENCE, ""))
