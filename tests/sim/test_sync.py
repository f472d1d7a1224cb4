"""Barriers of a CTA, mbarriers, clusters and shared memory across them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from barriers import CLUSTER_SYNC, EVERY_ORDER, START, again, copy, init, rows, wait
from ptx_kernel import Shape, simulate_ptx

from cutex.sim import BarrierMisuse, Hazards


def each_order(body: str, arrays: dict, shape: Shape, **more) -> list[np.ndarray]:
    """Runs the snippet in every order; the last array, which is the same each time."""
    name = list(arrays)[-1]
    found = []
    for order in EVERY_ORDER:
        fresh = {n: a.copy() for n, a in arrays.items()}
        simulate_ptx(body, fresh, shape, **order, **more)
        found.append(fresh[name])
    for other in found[1:]:
        assert (other == found[0]).all()
    return found[0]


# -- named barriers --------------------------------------------------------------------------------

NEIGHBOURS = """
    .reg .b32 mine, base, next; mov.u32 base, smem; mad.lo.u32 mine, %i, 4, base;
    st.shared.b32 [mine], %i; BARRIER
    add.u32 next, %i, 33; rem.u32 next, next, %threads; mad.lo.u32 next, next, 4, base;
    ld.shared.b32 %r0, [next]; st.global.b32 [%out_i], %r0;
"""


@pytest.mark.parametrize(
    "barrier", ["bar.sync 0;", "bar.sync 5;", "bar.sync 3, 128;", "barrier.sync.aligned 15, 128;",
                "barrier.sync 2;", "barrier.cta.sync.aligned 0;", "mov.b32 %r1, 9; bar.sync %r1;"],
)  # fmt: skip
def test_bar_sync_orders_all_threads(execute, barrier):
    out = np.zeros(128, np.uint32)
    execute(NEIGHBOURS.replace("BARRIER", barrier), {"out": out}, Shape(block=128, smem=512))
    assert (out == (np.arange(128) + 33) % 128).all()


def test_without_a_barrier_it_is_a_race():
    out = np.zeros(128, np.uint32)
    with pytest.raises(Hazards, match=r"race: .* no barrier orders the two"):
        simulate_ptx(NEIGHBOURS.replace("BARRIER", ""), {"out": out}, Shape(block=128, smem=512))


def test_a_barrier_over_half_of_the_warps_orders_only_them():
    half = "setp.lt.u32 %p0, %i, 64; @%p0 bar.sync 1, 64; @!%p0 bar.sync 2, 64;"
    with pytest.raises(Hazards, match="race"):
        simulate_ptx(NEIGHBOURS.replace("BARRIER", half), {"out": np.zeros(128, np.uint32)},
                     Shape(block=128, smem=512))  # fmt: skip


@pytest.mark.parametrize(("bits", "step"), [(8, 1), (16, 2)])
def test_warps_may_write_neighbouring_bytes_of_a_word(bits, step):
    """Warp 0 the even and warp 1 the odd ones; where both write the same, it is a race."""
    body = f"""
    .reg .b32 at, w; mov.u32 at, smem; shr.u32 w, %i, 5; mad.lo.u32 w, %lane, 2, w;
    mad.lo.u32 at, w, {step}, at; cvt.u16.u32 %h0, %i; st.shared.b{bits} [at], %h0; bar.sync 0;
    ld.shared.b{bits} %h1, [at]; cvt.u32.u16 %r0, %h1; st.global.b32 [%out_i], %r0;
    """
    shape = Shape(block=64, smem=256)
    assert each_order(body, {"out": np.zeros(64, np.uint32)}, shape).tolist() == list(range(64))
    both = body.replace("mad.lo.u32 w, %lane, 2, w;", "mad.lo.u32 w, %lane, 2, 0;")
    with pytest.raises(Hazards, match=r"race: .* overwrites shared memory"):
        for order in EVERY_ORDER:
            simulate_ptx(both, {"out": np.zeros(64, np.uint32)}, shape, **order)


HANDOVER = """
    .reg .b32 base, v; mov.u32 base, smem; setp.lt.u32 %p0, %i, 32; mov.b32 %r5, 0; mov.b32 v, 0;
    mad.lo.u32 base, %lane, 4, base;
    @!%p0 bra CONSUMER;
    PRODUCER:
      setp.gt.u32 %p1, %r5, 1; @%p1 bar.sync 1, 64;
      mad.lo.u32 %r0, %r5, 100, %lane; st.shared.b32 [base], %r0; bar.arrive 2, 64;
      @%p1 bra P2; P2: add.u32 %r5, %r5, 1; bar.sync 3, 64; bar.arrive 4, 64;
      setp.lt.u32 %p2, %r5, 6; @%p2 bra PRODUCER; bra END;
    CONSUMER:
      setp.gt.u32 %p1, %r5, 1; @%p1 bar.arrive 1, 64;
      bar.sync 2, 64; ld.shared.b32 %r0, [base]; add.u32 v, v, %r0; bar.arrive 3, 64;
      bar.sync 4, 64;
      add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 6; @%p2 bra CONSUMER;
    END: st.global.b32 [%out_i], v;
"""


AGAIN = "FIRST 1, 64; bar.sync 1, 64;"
COUNTED_TWICE = "bar.arrive 1, 96; setp.lt.u32 %p0, %i, 32; @%p0 bar.sync 1, 96; bar.sync 0;"


@pytest.mark.parametrize("order", ["fifo", "eager"])
def test_an_arrival_that_waits_for_nothing_is_not_followed_by_another(order):
    """PTX ISA 9.7.13.1: bar.arrive, then any other, before the barrier is known to be reset."""
    simulate_ptx(AGAIN.replace("FIRST", "bar.sync"), {}, Shape(block=64), order=order)
    with pytest.raises(Hazards, match=r"arrives at named barrier 1 again, and nothing"):
        simulate_ptx(AGAIN.replace("FIRST", "bar.arrive"), {}, Shape(block=64), order=order)


@pytest.mark.parametrize("order", ["fifo", "eager", "starved", "random"])
def test_a_warp_may_count_twice_in_one_phase(order):
    """As FlashAttention's does that arrives with all, then waits as the one that stores."""
    simulate_ptx(COUNTED_TWICE, {}, Shape(block=64), order=order)


@pytest.mark.parametrize("threads", [1, 16, 48, 97])
@pytest.mark.parametrize(
    "barrier", ["bar.sync 0", "barrier.sync 1", "bar.sync 2, ALL", "barrier.cta.sync 3, ALL"]
)
def test_the_last_warp_need_not_be_whole(execute, barrier, threads):
    out = np.zeros(threads, np.uint32)
    barrier = barrier.replace("ALL", str(-(-threads // 32) * 32))
    body = NEIGHBOURS.replace("BARRIER", f"{barrier};")
    execute(body, {"out": out}, Shape(block=threads, smem=512))
    assert (out == (np.arange(threads) + 33) % threads).all()


def test_lanes_that_have_returned_are_not_waited_for(execute):
    """Nor are the rest of a warp kept by those that return while they wait."""
    out = np.zeros(64, np.uint32)
    body = """
    setp.ge.u32 %p0, %lane, 20; @%p0 ret; setp.ge.u32 %p0, %lane, 10; @%p0 bra LATER;
    barrier.sync 0; st.global.b32 [%out_i], 1; ret;
    LATER: ret;
    """
    execute(body, {"out": out}, Shape(block=64))
    assert out.tolist() == ([1] * 10 + [0] * 22) * 2
    each_order(body, {"out": out}, Shape(block=64))


def test_producer_and_consumer_warps_hand_over_by_arrive_and_sync(execute):
    out = np.zeros(64, np.uint32)
    execute(HANDOVER, {"out": out}, Shape(block=64, smem=256))
    want = [0] * 32 + [sum(100 * r + lane for r in range(6)) for lane in range(32)]
    assert out.tolist() == want
    assert each_order(HANDOVER, {"out": out}, Shape(block=64, smem=256)).tolist() == want


def test_warps_that_have_returned_are_not_waited_for(execute):
    out = np.zeros(128, np.uint32)
    body = """
    setp.ge.u32 %p0, %i, 96; @%p0 ret; bar.sync 0; setp.lt.u32 %p1, %i, 32; @%p1 ret; bar.sync 0;
    bar.sync 1, 64; st.global.b32 [%out_i], 1;
    """
    execute(body, {"out": out}, Shape(block=128))
    assert out.tolist() == [0] * 32 + [1] * 64 + [0] * 32
    each_order(body, {"out": out}, Shape(block=128))


@pytest.mark.parametrize(
    ("op", "name"), [("popc.u32", "count"), ("and.pred", "all"), ("or.pred", "any")]
)
def test_bar_red_gives_everyone_the_votes_of_all(execute, op, name):
    for limit, threads in product((0, 1, 40, 96), (96, 81)):
        out = np.zeros(threads, np.uint32)
        result = "%r0" if name == "count" else "%p1"
        body = f"""
        setp.lt.u32 %p0, %i, {limit}; bar.red.{op} {result}, 3, %p0;
        {"" if name == "count" else "selp.b32 %r0, 1, 0, %p1;"} st.global.b32 [%out_i], %r0;
        """
        execute(body, {"out": out}, Shape(block=threads))
        count = min(limit, threads)
        assert (out == {"count": count, "all": count == threads, "any": count > 0}[name]).all()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("mov.b32 %r0, 16; bar.sync %r0;", "barrier 16 does not exist"),
        ("mov.b32 %r0, 40; bar.sync 1, %r0;", "a thread count of 40 is no multiple of"),
        ("setp.lt.u32 %p0, %i, 32; @%p0 bar.sync 1, 96; @!%p0 bar.sync 1, 64;",
         "arrives at barrier 1 with a count of 64 threads, others with 96"),
        ("setp.lt.u32 %p0, %lane, 9; @%p0 bar.sync 0;", "with lanes 0,1,2,3,4,5,6,7,8 only"),
    ],
)  # fmt: skip
def test_misused_barriers(body, sentence):
    with pytest.raises(BarrierMisuse, match=sentence):
        simulate_ptx(body, {}, Shape(block=64))


# -- mbarriers -------------------------------------------------------------------------------------


def test_a_phase_ends_with_the_last_arrival(execute):
    """Tests of both parities after each of 3 arrivals, over three phases."""
    out = np.zeros((9, 2), np.uint32)
    tests = ""
    for i in range(9):
        tests += "mbarrier.arrive.shared.b64 _, [bar];"
        for p in (0, 1):
            tests += (
                f"mbarrier.test_wait.parity.shared.b64 %p1, [bar], {p}; selp.b32 %r0, 1, 0, %p1;"
            )
            tests += f"st.global.b32 [%out+{8 * i + 4 * p}], %r0;"
    execute(f"{init(3)} {tests}", {"out": out}, Shape(block=1, smem=64))
    phases = [(i + 1) // 3 for i in range(9)]
    assert out.tolist() == [[n % 2 == 1, n % 2 == 0] for n in phases]


def test_arrival_tokens_name_their_phase(execute):
    out = np.zeros(4, np.uint32)

    def look(token: str, place: int) -> str:
        test = f"mbarrier.test_wait.shared.b64 %p1, [bar], {token}; selp.b32 %r0, 1, 0, %p1;"
        return f"{test} st.global.b32 [%out+{place}], %r0;"

    body = f"""{init(2)} .reg .b64 first, second;
    mbarrier.arrive.shared.b64 first, [bar]; {look("first", 0)}
    mbarrier.arrive.shared.b64 second, [bar]; {look("first", 4)} {look("second", 8)}
    mbarrier.arrive.shared.b64 second, [bar]; {look("second", 12)}
    """
    execute(body, {"out": out}, Shape(block=1, smem=64))
    assert out.tolist() == [0, 1, 1, 0]


def test_arrivals_with_a_count_and_arrive_drop(execute):
    """5 expected: 2 + 1 dropped + 2 end the first phase; 4 are expected from then on."""
    out = np.zeros(3, np.uint32)

    def test(parity: int, place: int) -> str:
        wait = f"mbarrier.test_wait.parity.shared.b64 %p1, [bar], {parity};"
        return f"{wait} selp.b32 %r0, 1, 0, %p1; st.global.b32 [%out+{place}], %r0;"

    body = f"""{init(5)}
    mbarrier.arrive.shared.b64 _, [bar], 2; mbarrier.arrive_drop.shared.b64 _, [bar];
    mbarrier.arrive.shared.b64 _, [bar], 2; {test(0, 0)}
    mbarrier.arrive.shared.b64 _, [bar], 3; {test(1, 4)}
    mbarrier.arrive.shared.b64 _, [bar], 1; {test(1, 8)}
    """
    execute(body, {"out": out}, Shape(block=1, smem=64))
    assert out.tolist() == [1, 0, 1]


RING = f"""
    .reg .b32 full, empty, n, ring, place, parity, v, k; .reg .b64 from;
    mov.u32 ring, smem; add.u32 full, ring, 1024; add.u32 empty, full, 16; setp.eq.u32 %p0, %i, 0;
    @%p0 mbarrier.init.shared.b64 [full], 1; @%p0 mbarrier.init.shared.b64 [full+8], 1;
    @%p0 mbarrier.init.shared.b64 [empty], 32; @%p0 mbarrier.init.shared.b64 [empty+8], 32;
    fence.mbarrier_init.release.cluster; bar.sync 0;
    mov.b32 n, 0; mov.b32 v, 0; setp.lt.u32 %p1, %i, 32; @!%p1 bra CONSUME;
    elect.sync _|%p2, -1; @!%p2 bra END;
    PRODUCE:
      and.b32 k, n, 1; shr.u32 parity, n, 1; and.b32 parity, parity, 1; xor.b32 parity, parity, 1;
      mad.lo.u32 place, k, 8, empty; {wait("place", "parity", "W0")}
      mad.lo.u32 place, k, 8, full; mbarrier.arrive.expect_tx.shared.b64 _, [place], 128;
      mad.wide.u32 from, n, 128, %a; mad.lo.u32 %r1, k, 512, ring;
      cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [from], 128, [place];
      add.u32 n, n, 1; setp.lt.u32 %p3, n, 7; @%p3 bra PRODUCE; bra END;
    CONSUME:
      and.b32 k, n, 1; shr.u32 parity, n, 1; and.b32 parity, parity, 1;
      mad.lo.u32 place, k, 8, full; {wait("place", "parity", "W1")}
      mad.lo.u32 %r1, k, 512, ring; mad.lo.u32 %r1, %lane, 4, %r1; ld.shared.b32 %r2, [%r1];
      mad.lo.u32 v, v, 3, %r2; mad.lo.u32 place, k, 8, empty;
      mbarrier.arrive.shared.b64 _, [place];
      add.u32 n, n, 1; setp.lt.u32 %p3, n, 7; @%p3 bra CONSUME;
    END: st.global.b32 [%out_i], v;
"""


def test_a_ring_of_bulk_copies(execute):
    a, out = rows(7, 32), np.zeros(64, np.uint32)
    execute(RING, {"a": a, "out": out}, Shape(block=64, smem=2048))
    want = np.zeros(32, np.uint32)
    for row in a:
        want = want * np.uint32(3) + row
    assert (out[32:] == want).all()
    each_order(RING, {"a": rows(7, 32), "out": out}, Shape(block=64, smem=2048))


def test_bytes_may_come_before_they_are_announced(execute):
    """The transaction count is negative for a while; the phase still waits for the arrival."""
    a, out = rows(1, 64), np.zeros(64, np.uint32)
    body = f"""{init(2)} .reg .b32 data; add.u32 data, bar, 128;
    @%p0 {copy("data", "%a", 256)} @%p0 mbarrier.arrive.shared.b64 _, [bar];
    bar.sync 0; @%p0 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 256;
    @%p0 mbarrier.arrive.shared.b64 _, [bar]; {wait("bar", 0, "W0")}
    mad.lo.u32 data, %i, 4, data; ld.shared.b32 %r0, [data]; st.global.b32 [%out_i], %r0;
    """
    execute(body, {"a": a, "out": out}, Shape(block=64, smem=1024))
    assert (out == a[0]).all()
    each_order(body, {"a": rows(1, 64), "out": out}, Shape(block=64, smem=1024))


def test_two_copies_may_share_a_phase(execute):
    a, out = rows(1, 64), np.zeros(64, np.uint32)
    body = f"""{init(1)}
    .reg .b32 data, high; add.u32 data, bar, 128; add.u32 high, bar, 256;
    .reg .b64 second; add.u64 second, %a, 128;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256;
    @%p0 {copy("data", "%a", 128)} @%p0 {copy("high", "second", 128)} {wait("bar", 0, "W0")}
    mad.lo.u32 data, %i, 4, data; ld.shared.b32 %r0, [data]; st.global.b32 [%out_i], %r0;
    """
    execute(body, {"a": a, "out": out}, Shape(block=64, smem=1024))
    assert (out == a[0]).all()


def test_a_phase_without_bytes_of_its_own_completes_by_complete_tx(execute):
    out = np.zeros(2, np.uint32)
    test = "mbarrier.test_wait.parity.shared.b64 %p1, [bar], 0; selp.b32 %r0, 1, 0, %p1;"
    body = f"""{init(1)} mbarrier.arrive.expect_tx.shared.b64 _, [bar], 64;
    {test} st.global.b32 [%out], %r0;
    mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 64;
    {test} st.global.b32 [%out+4], %r0;
    """
    execute(body, {"out": out}, Shape(block=1, smem=64))
    assert out.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (init(1).replace("[bar], 1;", "[bar], 0;"), r"mbarrier.init with count 0; it takes 1\.\."),
        (init(1) + "mbarrier.arrive.shared.b64 _, [bar], 2;",
         r"lane 0 arrives 2 times on mbarrier 0x400 .*, which expects only 1 more of 1 in phase 0"),
        (init(3) + "mbarrier.arrive.shared.b64 _, [bar]; mbarrier.init.shared.b64 [bar], 3;",
         "initialises mbarrier 0x400 .* again while it is in use"),
        ("mov.u32 %r0, smem; mbarrier.arrive.shared.b64 _, [%r0+8];",
         r"no mbarrier was initialised at shared 0x408 of CTA \(0,0,0\)"),
        (init(1) + "mbarrier.inval.shared.b64 [bar]; mbarrier.arrive.shared.b64 _, [bar];",
         "no mbarrier was initialised at shared 0x400"),
        (init(1) + "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 1048575;"
         "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 1;", r"leaves its range of \+-10"),
    ],
)  # fmt: skip
def test_misused_mbarriers(body, sentence):
    with pytest.raises(BarrierMisuse, match=sentence):
        simulate_ptx(body, {}, Shape(block=1, smem=64))


def test_an_mbarrier_may_be_made_anew_where_another_is_done(execute):
    out = np.zeros(1, np.uint32)
    body = f"""{init(1)} mbarrier.arrive.shared.b64 _, [bar]; mbarrier.inval.shared.b64 [bar];
    mbarrier.init.shared.b64 [bar], 2; mbarrier.arrive.shared.b64 _, [bar];
    mbarrier.test_wait.parity.shared.b64 %p1, [bar], 0; selp.b32 %r0, 1, 2, %p1;
    st.global.b32 [%out], %r0;
    """
    execute(body, {"out": out}, Shape(block=1, smem=64))
    assert out[0] == 2


# -- clusters --------------------------------------------------------------------------------------


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


# -- memory flags ----------------------------------------------------------------------------------

CHAIN = f"""
    .reg .b64 flag; .reg .b32 got; mul.wide.u32 flag, %cta, 4; add.u64 flag, flag, %flags;
    setp.eq.u32 %p0, %i, 0; setp.eq.u32 %p1, %cta, LAST; {START} mov.b32 got, 1;
    @%p1 bra GO;
    SPIN: ld.acquire.gpu.global.b32 got, [flag+4]; setp.eq.u32 %p2, got, 0;
    {again("SPIN", "%p2")}
    GO: bar.sync 0; mov.u32 %r5, %tid.x; setp.eq.u32 %p3, %r5, 0; add.u32 got, got, 1;
    @%p3 st.release.gpu.global.b32 [flag], got;
"""


def test_a_cta_may_spin_on_a_flag_that_a_later_cta_sets(execute):
    """Each waits for the CTA after it: in order of launch the first can only spin."""
    flags = np.zeros(24, np.uint32)
    body = CHAIN.replace("LAST", "23")
    execute(body, {"flags": flags}, Shape(grid=24, block=64))
    assert flags.tolist() == list(range(25, 1, -1))
    flags[:] = 0
    each_order(body, {"flags": flags}, Shape(grid=24, block=64))


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


def test_a_spin_on_test_wait_lets_the_copy_complete(execute):
    a, out = rows(1, 64), np.zeros(64, np.uint32)
    body = f"""{init(1)} .reg .b32 data; add.u32 data, bar, 128;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256; @%p0 {copy("data", "%a", 256)}
    {START} SPIN: mbarrier.test_wait.parity.shared.b64 %p1, [bar], 0; {again("SPIN", "!%p1")}
    mad.lo.u32 data, %i, 4, data; ld.shared.b32 %r0, [data]; st.global.b32 [%out_i], %r0;
    """
    execute(body, {"a": a, "out": out}, Shape(block=64, smem=1024))
    assert (out == a[0]).all()


def test_a_loop_on_the_clock_ends(execute):
    out = np.zeros(64, np.uint32)
    body = """
    .reg .b64 start, now; mov.u64 start, %clock64;
    L: mov.u64 now, %clock64; sub.u64 now, now, start; setp.lt.u64 %p0, now, 20000; @%p0 bra L;
    nanosleep.u32 100; st.global.b32 [%out_i], 1;
    """
    execute(body, {"out": out}, Shape(block=64))
    assert out.all()
