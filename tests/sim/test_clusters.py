"""CTAs that wait for each other: by cluster barriers, shared memory of the cluster, or flags in
global memory.
"""

from __future__ import annotations

import numpy as np
import pytest
from barriers import CLUSTER_SYNC, START, again, each_order
from ptx_kernel import Shape, simulate_ptx

from cutex.sim import BarrierMisuse, UnknownInstruction


@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
def test_every_cta_writes_into_its_neighbours_shared_memory(execute, cluster):
    out = np.zeros((16, 64), np.uint32)
    body = f"""
    .reg .b32 rank, size, peer, mine, far; mov.u32 rank, %cluster_ctarank;
    mov.u32 size, %cluster_nctarank; mov.u32 mine, smem; mov.u32 %r5, %tid.x;
    mad.lo.u32 mine, %r5, 4, mine; st.shared.b32 [mine], 0; {CLUSTER_SYNC}
    add.u32 peer, rank, 1; rem.u32 peer, peer, size; mapa.shared::cluster.u32 far, mine, peer;
    mad.lo.u32 %r0, %cta, 1000, %r5; st.shared::cluster.b32 [far], %r0; {CLUSTER_SYNC}
    ld.shared.b32 %r1, [mine]; st.global.b32 [%out_i], %r1;
    """
    flat = out.reshape(-1)
    execute(body, {"out": flat}, Shape(grid=16, block=64, cluster=cluster, smem=256))
    cta = np.arange(16)
    writer = cta // cluster * cluster + (cta % cluster - 1) % cluster
    assert (out == writer[:, None] * 1000 + np.arange(64)).all()
    shape = Shape(grid=16, block=64, cluster=cluster, smem=256)
    assert (each_order(body, {"out": flat}, shape) == flat).all()


def test_generic_addresses_reach_the_peer_too(execute):
    out = np.zeros((4, 32), np.uint32)
    body = f"""
    .reg .b32 rank, peer, mine, v; .reg .b64 own, far; mov.u32 rank, %cluster_ctarank;
    mov.u32 mine, smem; mad.lo.u32 mine, %lane, 4, mine; cvt.u64.u32 own, mine;
    cvta.shared.u64 own, own; mad.lo.u32 v, %cta, 100, %lane; st.b32 [own], v; {CLUSTER_SYNC}
    xor.b32 peer, rank, 1; mapa.u64 far, own, peer; ld.b32 %r0, [far];
    getctarank.u64 %r1, far; getctarank.shared::cluster.u32 %r2, mine;
    mad.lo.u32 %r0, %r1, 10000, %r0; mad.lo.u32 %r0, %r2, 100000, %r0; {CLUSTER_SYNC}
    st.global.b32 [%out_i], %r0;
    """
    execute(body, {"out": out.reshape(-1)}, Shape(grid=4, cluster=2, smem=128))
    cta, rank = np.arange(4)[:, None], np.arange(4)[:, None] % 2
    want = (cta ^ 1) * 100 + np.arange(32) + (rank ^ 1) * 10000 + rank * 100000
    assert (out == want).all()


def test_clusters_number_their_ctas(execute):
    out = np.zeros((12, 8), np.uint32)
    names = ("ctaid.x", "clusterid.x", "cluster_ctaid.x", "cluster_nctaid.x", "nclusterid.x",
             "cluster_ctarank", "cluster_nctarank", "nctaid.x")  # fmt: skip
    body = "setp.eq.u32 %p0, %lane, 0; mul.wide.u32 %d0, %cta, 32; add.u64 %d0, %d0, %out;"
    for i, name in enumerate(names):
        body += f"mov.u32 %r0, %{name}; @%p0 st.global.b32 [%d0+{4 * i}], %r0;"
    execute(body, {"out": out}, Shape(grid=12, cluster=4))
    want = [[c, c // 4, c % 4, 4, 3, c % 4, 4, 12] for c in range(12)]
    assert out.tolist() == want


REMOTE = f"""
    .reg .b32 bar, rank, peer, there, data; .reg .b64 to; mov.u32 bar, smem; setp.eq.u32 %p0, %i, 0;
    mov.u32 rank, %cluster_ctarank; mov.u32 %r5, %tid.x; setp.eq.u32 %p0, %r5, 0;
    @%p0 mbarrier.init.shared.b64 [bar], 64; fence.mbarrier_init.release.cluster; {CLUSTER_SYNC}
    xor.b32 peer, rank, 1; add.u32 data, bar, 64; mad.lo.u32 data, %r5, 4, data;
    mapa.shared::cluster.u32 there, data, peer; mad.lo.u32 %r0, rank, 1000, %r5;
    st.shared::cluster.b32 [there], %r0; mapa.shared::cluster.u32 there, bar, peer;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];
    {START} W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [bar], 0;
    {again("W", "!%p1")}
    ld.shared.b32 %r1, [data]; st.global.b32 [%out_i], %r1; {CLUSTER_SYNC}
"""


def test_remote_arrivals_order_what_was_written_across(execute):
    out = np.zeros((4, 64), np.uint32)
    shape = Shape(grid=4, block=64, cluster=2, smem=512)
    execute(REMOTE, {"out": out.reshape(-1)}, shape)
    rank = np.arange(4)[:, None] % 2
    assert (out == (rank ^ 1) * 1000 + np.arange(64)).all()
    assert (each_order(REMOTE, {"out": out.reshape(-1)}, shape) == out.reshape(-1)).all()


def test_atomics_on_a_peers_shared_memory(execute):
    out = np.zeros(8, np.uint32)
    body = f"""
    .reg .b32 place, far, rank; mov.u32 place, smem; mov.u32 rank, %cluster_ctarank;
    setp.eq.u32 %p0, %lane, 0; @%p0 st.shared.b32 [place], 0; {CLUSTER_SYNC}
    mapa.shared::cluster.u32 far, place, 0; add.u32 %r0, rank, 1;
    red.relaxed.cluster.shared::cluster.add.u32 [far], %r0; {CLUSTER_SYNC}
    ld.shared.b32 %r1, [place]; mul.wide.u32 %d0, %cta, 4; add.u64 %d0, %d0, %out;
    @%p0 st.global.b32 [%d0], %r1;
    """
    execute(body, {"out": out}, Shape(grid=8, cluster=4, smem=64))
    assert out.tolist() == [32 * (1 + 2 + 3 + 4), 0, 0, 0] * 2


def test_ctas_that_have_returned_are_not_waited_for_by_their_cluster(execute):
    out = np.zeros(4, np.uint32)
    body = f"""
    mov.u32 %r0, %cluster_ctarank; setp.eq.u32 %p0, %r0, 1; @%p0 ret; {CLUSTER_SYNC}
    mul.wide.u32 %d0, %cta, 4; add.u64 %d0, %d0, %out; st.global.b32 [%d0], 1;
    """
    execute(body, {"out": out}, Shape(grid=4, block=64, cluster=2))
    assert out.tolist() == [1, 0, 1, 0]


def test_a_cluster_barrier_can_be_used_again_and_again(execute):
    out = np.zeros(4 * 32, np.uint32)
    body = f"""
    .reg .b32 mine, far, rank, n, peer, size; mov.u32 mine, smem; mad.lo.u32 mine, %lane, 4, mine;
    mov.u32 rank, %cluster_ctarank; mov.u32 size, %cluster_nctarank; mov.b32 n, 0;
    mov.u32 %r0, rank;
    ROUND: st.shared.b32 [mine], %r0; {CLUSTER_SYNC}
      add.u32 peer, rank, 1; rem.u32 peer, peer, size; mapa.shared::cluster.u32 far, mine, peer;
      ld.shared::cluster.b32 %r1, [far]; mad.lo.u32 %r0, %r0, 3, %r1; {CLUSTER_SYNC}
      add.u32 n, n, 1; setp.lt.u32 %p0, n, 5; @%p0 bra ROUND;
    st.global.b32 [%out_i], %r0;
    """
    execute(body, {"out": out}, Shape(grid=4, cluster=4, smem=128))
    v = [0, 1, 2, 3]
    for _ in range(5):
        v = [v[i] * 3 + v[(i + 1) % 4] for i in range(4)]
    assert (out.reshape(4, 32) == np.array(v)[:, None]).all()
    each_order(body, {"out": out}, Shape(grid=4, cluster=4, smem=128))


CHAIN = f"""
    .reg .b64 flag; .reg .b32 got; mul.wide.u32 flag, %cta, 4; add.u64 flag, flag, %flags;
    setp.eq.u32 %p0, %i, 0; setp.eq.u32 %p1, %cta, LAST; {START} mov.b32 got, 1;
    @%p1 bra GO;
    SPIN: ld.acquire.gpu.global.b32 got, [flag+4]; setp.eq.u32 %p2, got, 0;
    {again("SPIN", "%p2")}
    GO: bar.sync 0; mov.u32 %r5, %tid.x; setp.eq.u32 %p3, %r5, 0; add.u32 got, got, 1;
    @%p3 st.release.gpu.global.b32 [flag], got;
"""


@pytest.mark.slow
def test_a_cta_may_spin_on_a_flag_that_a_later_cta_sets(execute):
    """Each waits for the CTA after it: in order of launch the first can only spin."""
    flags = np.zeros(24, np.uint32)
    body = CHAIN.replace("LAST", "23")
    execute(body, {"flags": flags}, Shape(grid=24, block=64))
    assert flags.tolist() == list(range(25, 1, -1))
    flags[:] = 0
    each_order(body, {"flags": flags}, Shape(grid=24, block=64))


@pytest.mark.slow
def test_an_atomic_ticket_serialises_ctas_in_any_order(execute):
    state = np.zeros(2, np.uint32)
    body = f"""
    .reg .b32 mine, now, v; mov.u32 %r5, %tid.x; setp.ne.u32 %p0, %r5, 0; @%p0 bra END;
    {START} mov.u32 mine, %cta;
    SPIN: atom.acquire.gpu.global.add.u32 now, [%state], 0; setp.ne.u32 %p1, now, mine;
    {again("SPIN", "%p1")}
    ld.global.b32 v, [%state+4]; mad.lo.u32 v, v, 3, mine; st.global.b32 [%state+4], v;
    atom.release.gpu.global.add.u32 now, [%state], 1;
    END:
    """.replace("ld.global.b32 v", "ld.relaxed.gpu.global.b32 v")
    execute(body, {"state": state}, Shape(grid=9, block=32))
    want = 0
    for cta in range(9):
        want = want * 3 + cta
    assert state.tolist() == [9, want]
    each_order(body, {"state": np.zeros(2, np.uint32)}, Shape(grid=9, block=32))


def test_a_loop_on_the_clock_ends(execute):
    out = np.zeros(64, np.uint32)
    body = """
    .reg .b64 start, now; mov.u64 start, %clock64;
    L: mov.u64 now, %clock64; sub.u64 now, now, start; setp.lt.u64 %p0, now, 20000; @%p0 bra L;
    nanosleep.u32 100; st.global.b32 [%out_i], 1;
    """
    execute(body, {"out": out}, Shape(block=64))
    assert out.all()


def test_a_cluster_has_at_most_16_ctas():
    simulate_ptx("", {}, Shape(grid=16, cluster=16))
    with pytest.raises(ValueError, match="a cluster of 32 CTAs, a GPU takes at most 16"):
        simulate_ptx("", {}, Shape(grid=32, cluster=32))


def test_some_lanes_at_the_barrier_of_a_cluster():
    """.aligned says that all lanes execute it; without that some may, which is not defined here."""
    shape, lane = Shape(grid=2, cluster=2), "setp.eq.u32 %p0, %lane, 0;"
    for aligned, error in ((".aligned", BarrierMisuse), ("", UnknownInstruction)):
        barrier = f"@%p0 barrier.cluster.arrive{aligned}; @%p0 barrier.cluster.wait{aligned};"
        with pytest.raises(error, match="all lanes must" if aligned else "only whole warps"):
            simulate_ptx(lane + barrier, {}, shape, assembles=False)
