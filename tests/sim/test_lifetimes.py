"""A CTA's shared memory ends when it returns: later uses of it are found."""

from __future__ import annotations

import numpy as np
import pytest
from barriers import CLUSTER_SYNC, EVERY_ORDER, copy, init, rows, wait
from ptx_kernel import Shape, simulate_ptx

from cutex.sim import BarrierMisuse, Hazards

each_order = pytest.mark.parametrize(
    "order", EVERY_ORDER, ids=lambda o: "-".join(map(str, o.values()))
)

# -- bulk stores -----------------------------------------------------------------------------------

STORE = """
    .reg .b32 at, mine; mov.u32 at, smem; setp.eq.u32 %p0, %i, 0; mad.lo.u32 mine, %i, 4, at;
    st.shared.b32 [mine], %i; fence.proxy.async.shared::cta; bar.sync 0;
    @%p0 cp.async.bulk.global.shared::cta.bulk_group [%out], [at], 256;
    @%p0 cp.async.bulk.commit_group;
"""


@pytest.mark.sweep(2)
@each_order
def test_the_last_store_is_waited_for(order):
    """Only the thread that issued it can wait; a wait for its reads is enough."""
    out = rows(1, 64)
    shape = Shape(block=64, smem=256)
    for done in ("wait_group.read 0", "wait_group 0"):
        simulate_ptx(f"{STORE} @%p0 cp.async.bulk.{done};", {"out": out}, shape, **order)
        assert (out == np.arange(64)).all()
    for left in ("", "@%p0 cp.async.bulk.wait_group.read 1;"):
        with pytest.raises(
            Hazards, match=r"exit: .* the bulk store .* reads: no thread of the CTA"
        ):
            simulate_ptx(STORE + left, {"out": out}, shape, **order)


@pytest.mark.sweep(2)
@each_order
def test_a_load_that_nobody_waits_for_must_not_outlive_its_cta(order):
    name = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    body = f"""{init(1)} @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256;
        @%p0 {name} [bar+128], [%a], 256, [bar];"""
    arrays, shape = {"a": rows(1, 64)}, Shape(block=64, smem=1024)
    simulate_ptx(body + wait("bar", 0, "W"), arrays, shape, **order)
    with pytest.raises(Hazards, match=r"exit: .* the bulk copy .* writes: no thread of the CTA"):
        simulate_ptx(body, arrays, shape, **order)


# -- clusters --------------------------------------------------------------------------------------

PAIR = Shape(grid=2, cluster=2, smem=64)
READ = f"""
    .reg .b32 at, far, rank; mov.u32 at, smem; mov.u32 rank, %cluster_ctarank;
    mad.lo.u32 %r0, rank, 100, %lane; setp.eq.u32 %p0, %lane, 0; @%p0 st.shared.b32 [at], %r0;
    {CLUSTER_SYNC} xor.b32 rank, rank, 1; mapa.shared::cluster.u32 far, at, rank;
    ld.shared::cluster.b32 %r1, [far]; st.global.b32 [%out_i], %r1;
"""


@pytest.mark.sweep(3)
@each_order
@pytest.mark.parametrize("arrive", ["arrive", "arrive.relaxed"])
def test_a_cta_stays_while_others_read_its_shared_memory(arrive, order):
    out = np.zeros(64, np.uint32)
    stay = f"barrier.cluster.{arrive}.aligned; barrier.cluster.wait.aligned;"
    simulate_ptx(READ + stay, {"out": out}, PAIR, **order)
    assert (out.reshape(2, 32) == [[100], [0]]).all()
    with pytest.raises(Hazards, match=r"exit: .*a load of CTA"):
        simulate_ptx(READ, {"out": out}, PAIR, **order)


ARRIVE = f"""{init(1)} .reg .b32 far, rank; mov.u32 rank, %cluster_ctarank;
    setp.eq.u32 %p0, %lane, 0; {CLUSTER_SYNC}
    xor.b32 %r1, rank, 1; mapa.shared::cluster.u32 far, bar, %r1;
    @%p0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [far];
"""


@pytest.mark.sweep(2)
@each_order
def test_a_cta_stays_until_the_last_remote_arrival(order):
    """It may wait for the phase, as a producer that drains its ring, or for the cluster."""
    for stay in (wait("bar", 0, "W"), CLUSTER_SYNC):
        simulate_ptx(ARRIVE.replace("%i, 0", "%lane, 0") + stay, {}, PAIR, **order)
    with pytest.raises(Hazards, match=r"exit: .*an arrival of CTA"):
        simulate_ptx(ARRIVE.replace("%i, 0", "%lane, 0"), {}, PAIR, **order)


LOADED = f"""{init(1).replace("%i, 0", "%lane, 0")} .reg .b32 far, rank;
    mov.u32 rank, %cluster_ctarank;
    {CLUSTER_SYNC} @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256;
    @%p0 {copy("bar+128", "%a", 256)} {wait("bar", 0, "W")} MET
    xor.b32 %r1, rank, 1; mapa.shared::cluster.u32 far, bar, %r1;
    ld.shared::cluster.b32 %r2, [far+128]; st.global.b32 [%out_i], %r2; {CLUSTER_SYNC}
"""


@pytest.mark.sweep(3)
@each_order
@pytest.mark.parametrize(("arrive", "advisories"), [("arrive", 0), ("arrive.relaxed", 1)])
def test_a_relaxed_barrier_after_a_wait_is_an_advisory(arrive, advisories, order):
    """The bytes of a TMA load have arrived, but no release makes them visible to the other CTA."""
    a, out = rows(1, 64), np.zeros(64, np.uint32)
    met = f"barrier.cluster.{arrive}.aligned; barrier.cluster.wait.aligned;"
    shape = Shape(grid=2, cluster=2, smem=1024)
    report = simulate_ptx(LOADED.replace("MET", met), {"a": a, "out": out}, shape, **order)
    assert (out == a[0, 0]).all()
    assert len(report.advisories) == advisories
    assert all("only a barrier.cluster.arrive.relaxed" in f.message for f in report.advisories)


# -- readers ---------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@each_order
def test_a_write_comes_after_all_readers_not_only_the_last(order):
    """Warps 1 and 2 read a word that warp 0 overwrites, which is ordered after one of them only."""
    body = """
        .reg .b32 at; mov.u32 at, smem; setp.lt.u32 %p0, %i, 32; @%p0 st.shared.b32 [at], %r9;
        bar.sync 0; @!%p0 ld.shared.b32 %r0, [at]; setp.ge.u32 %p1, %i, 64;
        setp.lt.u32 %p2, %i, 64; @!%p1 bra ONE; FIRST
        ONE: @!%p2 bra TWO; bar.sync 2, 64;
        TWO: @%p0 st.shared.b32 [at], %r8;
    """
    shape = Shape(block=96, smem=64)
    with pytest.raises(Hazards, match=r"memory 0x400, which .* (warp 2 read|warp 0 wrote)"):
        simulate_ptx(body.replace("FIRST", ""), {}, shape, **order)
    both = body.replace("bar.sync 2, 64;", "bar.sync 2, 96;").replace("FIRST", "bar.sync 2, 96;")
    simulate_ptx(both, {}, shape, **order)


# -- barriers of a cluster out of turn -------------------------------------------------------------

TURNS = "barrier.cluster.{}.aligned;"
COME, AWAIT = TURNS.format("arrive"), TURNS.format("wait")


@pytest.mark.sweep(4)
@each_order
@pytest.mark.parametrize(
    "body, sentence",
    [
        (f"{AWAIT} {COME}", "waits at the cluster barrier without having arrived"),
        (f"{COME} {AWAIT} {AWAIT}", "waits at the cluster barrier without having arrived"),
        (f"{COME} {COME} {AWAIT}", "arrives at the cluster barrier again"),
        (f"{COME} bar.sync 0; {COME} {AWAIT}", "arrives at the cluster barrier again"),
    ],
)
def test_each_arrival_at_the_cluster_barrier_has_its_wait(body, sentence, order):
    """It is found also where the barrier happens to be complete (PTX ISA 9.7.13.3)."""
    with pytest.raises(BarrierMisuse, match=sentence):
        simulate_ptx(body, {}, PAIR, **order)
    simulate_ptx(f"{COME} {AWAIT} {COME} {AWAIT} {COME}", {}, PAIR, **order)


STORES = """mov.u32 %r9, smem; mov.u32 %r10, %tid.x; shl.b32 %r8, %r10, 2; add.u32 %r8, %r9, %r8;
    mov.u32 %r7, %cluster_ctarank; xor.b32 %r7, %r7, 1; mapa.shared::cluster.u32 %r6, %r8, %r7;
    START st.shared::cluster.u32 [%r6], %r10; barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned; ld.shared.u32 %r1, [%r8]; st.global.u32 [%out_i], %r1;"""


@pytest.mark.parametrize("arrive", ["", "arrive", "arrive.relaxed"])
def test_a_cta_has_started_before_others_access_its_shared_memory(arrive):
    meet = f"barrier.cluster.{arrive}.aligned; barrier.cluster.wait.aligned;" if arrive else ""
    arrays = {"out": np.zeros(128, np.uint32)}
    shape = Shape(grid=2, block=64, cluster=2, smem=1024)
    if arrive:
        assert simulate_ptx(STORES.replace("START", meet), arrays, shape).advisories == []
        return
    with pytest.raises(Hazards, match=r"start: a store of CTA \(0,0,0\) .* reaches CTA \(1,0,0\)"):
        simulate_ptx(STORES.replace("START", meet), arrays, shape)
