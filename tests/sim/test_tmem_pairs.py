"""Tensor memory of pairs of CTAs: they allocate and give back together."""

from __future__ import annotations

import numpy as np
import pytest
from barriers import ALLOC, FREE
from ptx_kernel import Shape, simulate_ptx

from cutex.sim.errors import Deadlock, Hazards, SimError

SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
ORDERS = ("fifo", "eager", "starved", "peer-late", "random")


OUT = np.zeros(128, np.uint32)


def run(body: str, warps: int = 1, ctas: int = 2, **how) -> None:
    shape = Shape(grid=ctas, block=32 * warps, cluster=ctas, smem=1024)
    simulate_ptx(body, {"out": np.zeros(128, np.uint32)}, shape, arch="sm_100a", **how)


def pairs(end: str, before: str = "") -> str:
    """Both CTAs of a pair allocate all columns, and end with `end`."""
    return f"""
        mov.u32 %r0, smem; {ALLOC.format(g=2, at=0, n=512)} ld.shared.u32 %r12, [%r0];
        .reg .b32 rank; mov.u32 rank, %cluster_ctarank; setp.eq.u32 %p1, rank, 0; {before} {end}
    """


def load_of(address: str) -> str:
    """A store and a load of a column, each waited for."""
    return f"""tcgen05.st.sync.aligned.32x32b.x1.b32 [{address}], {{%lane}};
        tcgen05.wait::st.sync.aligned;
        tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r15}}, [{address}]; tcgen05.wait::ld.sync.aligned;
    """


@pytest.mark.parametrize("order", ORDERS)
def test_pairs_deallocate_together(order):
    """Table 48 of PTX ISA 9.7.16.5: it may hang where one CTA waits for the other in between."""
    free = FREE.format(g=2, at=12, n=512)
    run(pairs(f"{SYNC} {free}"), warps=1, ctas=2, order=order)
    run(pairs(f"{free} {SYNC}", before=SYNC), warps=1, ctas=2, order=order)
    with pytest.raises(Deadlock, match=r"dealloc.*: the other CTA of the pair, .* has not come"):
        run(
            pairs(f"@%p1 bra LEFT; {free} {SYNC} ret; LEFT: {SYNC} {free}", before=SYNC),
            warps=1,
            ctas=2,
            order=order,
        )


@pytest.mark.parametrize("order", ORDERS)
def test_pairs_give_up_their_permit_together(order):
    free = FREE.format(g=2, at=12, n=512)
    give_up = "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;"
    run(pairs(f"{SYNC} {free}", before=give_up), warps=1, ctas=2, order=order)
    with pytest.raises(Deadlock, match=r"relinquish.*: the other CTA of the pair"):
        run(
            pairs(f"{SYNC} {free}", before=f"@!%p1 bra ON; {give_up} ON:"),
            warps=1,
            ctas=2,
            order=order,
        )


@pytest.mark.parametrize("order", ORDERS)
def test_a_pair_deallocates_after_what_both_have_loaded(order):
    load = load_of("%r12")
    fence = "tcgen05.fence::before_thread_sync;"
    free = FREE.format(g=2, at=12, n=512)
    run(pairs(f"{SYNC} {free}", before=load + fence), warps=1, ctas=2, order=order)
    shape = Shape(grid=2, block=32, cluster=2, smem=1024)
    apart = pairs(free, before=SYNC + load + fence)
    (told,) = simulate_ptx(apart, {"out": OUT}, shape, arch="sm_100a", order=order).advisories
    assert "only the peer's tcgen05.dealloc, for which this one need not wait" in told.message


@pytest.mark.parametrize("order", ORDERS)
def test_a_relaxed_cluster_barrier_orders_tensor_memory_with_a_fence_before_it(order):
    """It releases no memory, but the fences compose with whatever orders execution (9.7.16.6.3)."""
    relaxed = SYNC.replace("arrive", "arrive.relaxed")
    body = f"""
        mov.u32 %r0, smem; mov.u32 %r1, %tid.x; setp.lt.u32 %p2, %r1, 32;
        @%p2 {ALLOC.format(g=2, at=0, n=512)} bar.sync 0; ld.shared.u32 %r12, [%r0];
        {load_of("%r12")}
        FENCE {relaxed} @%p2 {FREE.format(g=2, at=12, n=512)}
    """
    shape = Shape(grid=2, block=64, cluster=2, smem=1024)
    for fence in ("tcgen05.fence::before_thread_sync;", ""):
        text = body.replace("FENCE", fence)
        report = simulate_ptx(text, {"out": OUT}, shape, arch="sm_100a", order=order)
        assert not report.findings
        told = [a.message for a in report.advisories]
        assert bool(told) is not bool(fence)
        assert all("tcgen05.fence is missing" in message for message in told)


@pytest.mark.parametrize("order", ORDERS)
def test_a_pair_deallocates_after_all_warps_of_its_own_ctas(order):
    """The peer's deallocation does not order the CTA's own warps."""
    load = load_of("%r12")
    body = f"""
        mov.u32 %r0, smem; mov.u32 %r1, %tid.x; setp.lt.u32 %p2, %r1, 32;
        @%p2 {ALLOC.format(g=2, at=0, n=512)} bar.sync 0; ld.shared.u32 %r12, [%r0];
        {load} tcgen05.fence::before_thread_sync; TOGETHER @%p2 {FREE.format(g=2, at=12, n=512)}
    """
    run(body.replace("TOGETHER", f"{SYNC} bar.sync 0;"), warps=2, ctas=2, order=order)
    with pytest.raises(
        SimError, match=r"tcgen05\.dealloc of .* no barrier orders|has freed|need not wait"
    ):
        run(body.replace("TOGETHER", ""), warps=2, ctas=2, order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_a_pair_deallocates_after_what_the_peer_allocates(order):
    """A B300 fails where one CTA's dealloc comes first (NVIDIA/cutlass#3435)."""
    free = FREE.format(g=2, at=12, n=512)
    relaxed = SYNC.replace("arrive", "arrive.relaxed")
    for barrier in (SYNC, relaxed):
        run(pairs(free, before=barrier), warps=1, ctas=2, order=order)
    with pytest.raises(Hazards, match=r"dealloc of .* may come before the tcgen05\.alloc of"):
        run(pairs(free), warps=1, ctas=2, order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_a_pair_uses_no_columns_that_one_of_its_ctas_has_begun_to_deallocate(order):
    """Rank 0 deallocates when all have loaded; rank 1 may at once, where it waits for nothing."""
    ld = load_of("%r16")
    body = f"""
        mov.u32 %r0, smem; mov.u32 %r1, %tid.x; setp.lt.u32 %p2, %r1, 32;
        .reg .b32 rank; mov.u32 rank, %cluster_ctarank; setp.eq.u32 %p1, rank, 0;
        .reg .pred %p4; setp.ne.u32 %p4, rank, 0;
        @%p2 {ALLOC.format(g=2, at=0, n=512)} bar.sync 0; ld.shared.u32 %r12, [%r0];
        add.u32 %r16, %r12, 2097152; {SYNC}
        @%p2 bra FIRST; mov.u32 %r18, 50;
        STARTED: ld.acquire.gpu.global.u32 %r17, [%out+4]; setp.eq.u32 %p3, %r17, 0;
        @%p3 bra STARTED;
        LATER: sub.u32 %r18, %r18, 1; setp.ne.u32 %p3, %r18, 0; @%p3 bra LATER;
        {ld} tcgen05.fence::before_thread_sync; WHO bar.arrive 1, 64;
        setp.ne.u32 %p3, %r1, 32; @%p3 ret; @%p1 ret;
        st.release.gpu.global.u32 [%out], 1; ret;
        FIRST: setp.eq.u32 %p3, %r1, 0; and.pred %p3, %p3, %p4;
        @%p3 st.release.gpu.global.u32 [%out+4], 1;
        WHO bar.sync 1, 64; @!%p1 bra FREE;
        SPIN: ld.acquire.gpu.global.u32 %r17, [%out]; setp.eq.u32 %p3, %r17, 0; @%p3 bra SPIN;
        FREE: {FREE.format(g=2, at=12, n=512)}
    """
    run(body.replace("WHO", ""), warps=2, ctas=2, order=order)
    with pytest.raises(SimError, match=r"but .* frees 0\.\.511, and need not"):
        run(body.replace("WHO", "@%p1"), warps=2, ctas=2, order=order)


def test_one_kernel_has_one_kind_of_cta_group():
    sync = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    for groups, told in (((1, 1), 0), ((2, 2), 0), ((1, 2), 1)):
        body = "mov.u32 %r9, smem;" + "".join(
            f"""{ALLOC.format(g=g, at=9, n=32)} ld.shared.u32 %r5, [%r9]; {sync}
            {FREE.format(g=g, at=5, n=32)} {sync}"""
            for g in groups
        )
        report = simulate_ptx(body, {}, Shape(grid=2, cluster=2, smem=64), arch="sm_100a")
        found = [a for a in report.advisories if "one .cta_group" in str(a)]
        assert len(found) == told, (groups, report.advisories)
