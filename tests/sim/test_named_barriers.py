"""Named barriers of a CTA: bar.sync, bar.arrive and bar.red (PTX ISA 9.7.13.1)."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from barriers import EVERY_ORDER, each_order
from ptx_kernel import Shape, simulate_ptx

from cutex.sim import BarrierMisuse, Hazards

NEIGHBOURS = """
    .reg .b32 mine, base, next; mov.u32 base, smem; mad.lo.u32 mine, %i, 4, base;
    st.shared.b32 [mine], %i; BARRIER
    add.u32 next, %i, 33; rem.u32 next, next, %threads; mad.lo.u32 next, next, 4, base;
    ld.shared.b32 %r0, [next]; st.global.b32 [%out_i], %r0;
"""


@pytest.mark.sweep(2)
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
    """Warp 0 writes the even and warp 1 the odd ones; where both write the same byte, it is a
    race."""
    body = f"""
    .reg .b32 at, w; mov.u32 at, smem; shr.u32 w, %i, 5; mad.lo.u32 w, %lane, 2, w;
    mad.lo.u32 at, w, {step}, at; cvt.u16.u32 %h0, %i; st.shared.b{bits} [at], %h0; bar.sync 0;
    ld.shared.b{bits} %h1, [at]; cvt.u32.u16 %r0, %h1; st.global.b32 [%out_i], %r0;
    """
    shape = Shape(block=64, smem=256)
    assert each_order(body, {"out": np.zeros(64, np.uint32)}, shape).tolist() == list(range(64))
    both = body.replace("mad.lo.u32 w, %lane, 2, w;", "mad.lo.u32 w, %lane, 2, 0;")
    with pytest.raises(
        Hazards, match=r"race: .* (overwrites|store different values to) shared memory"
    ):
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
    """As in FlashAttention, where a warp arrives with all, then waits as the one that stores."""
    simulate_ptx(COUNTED_TWICE, {}, Shape(block=64), order=order)


@pytest.mark.sweep(3)
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
    """Nor does the rest of a warp wait for lanes that return during the wait."""
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
        ("setp.lt.u32 %p0, %i, 32; @%p0 bar.red.popc.u32 %r0, 1, 64, %p0; @!%p0 bar.sync 1, 64;",
         "arrives at barrier 1 by bar.sync, others by bar.red"),
    ],
)  # fmt: skip
def test_misused_barriers(body, sentence):
    with pytest.raises(BarrierMisuse, match=sentence):
        simulate_ptx(body, {}, Shape(block=64))


GROUPS = {  # of two warps each
    "one barrier for both": ("bar.sync 1, 64;", False),
    "one of its own for each": ("bar.sync %r1, 64;", True),
    "barrier 0, and then that of all": ("@%p0 bar.sync 0, 64; bar.sync 0;", False),
    "one for both, that of all in between": (
        "@%p0 bar.sync 1, 64; bar.sync 0; @!%p0 bar.sync 1, 64;", True
    ),
}  # fmt: skip


@pytest.mark.parametrize(("waits", "right"), GROUPS.values(), ids=GROUPS)
def test_groups_of_warps_that_share_a_barrier_may_meet_the_other(waits, right):
    body = f"shr.u32 %r1, %i, 6; setp.eq.u32 %p0, %r1, 0; add.u32 %r1, %r1, 1; {waits}"
    if right:
        simulate_ptx(body, {}, Shape(block=128))
        return
    with pytest.raises(Hazards, match=r"warp 2 arrives at named barrier \d, and nothing .* may"):
        simulate_ptx(body, {}, Shape(block=128))
