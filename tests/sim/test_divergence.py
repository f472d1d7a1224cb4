"""Lanes of a warp that go different ways, and meet again."""

from __future__ import annotations

import numpy as np
import pytest
from barriers import START, again, wait
from ptx_kernel import Shape, simulate_ptx

from cutex.orders import ORDERS
from cutex.sim import Deadlock
from cutex.sim.ptx.flow import ControlFlow
from cutex.sim.ptx.parse import parse

LANES = np.arange(32)


def test_nested_branches(execute):
    out = np.zeros(64, np.int32)
    body = """
    and.b32 %r0, %i, 1; setp.ne.u32 %p0, %r0, 0; and.b32 %r0, %i, 2; setp.ne.u32 %p1, %r0, 0;
    and.b32 %r0, %i, 4; setp.ne.u32 %p2, %r0, 0; mov.b32 %r1, 0;
    @%p0 bra ODD;
      @%p1 bra A; add.s32 %r1, %r1, 1; bra B; A: add.s32 %r1, %r1, 10; B:
      @!%p2 bra C; add.s32 %r1, %r1, 100; C: bra JOIN;
    ODD:
      @!%p2 bra D; @%p1 bra E; add.s32 %r1, %r1, 1000; bra D; E: add.s32 %r1, %r1, 5000; D:
    JOIN:
    shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1; mad.lo.s32 %r1, %r2, 2, %r1;
    st.global.b32 [%out_i], %r1;
    """
    execute(body, {"out": out}, Shape(block=64))

    def value(i: int) -> int:
        p0, p1, p2 = (bool(i & m) for m in (1, 2, 4))
        if p0:
            return 0 if not p2 else 5000 if p1 else 1000
        return (10 if p1 else 1) + 100 * p2

    assert out.tolist() == [value(i) + 2 * value(i ^ 1) for i in range(64)]


def test_loops_of_different_length(execute):
    out = np.zeros((96, 2), np.uint32)
    body = """
    add.u32 %r0, %i, 1; mov.b32 %r1, 0;
    LOOP: setp.eq.u32 %p0, %r0, 1; @%p0 bra END;
      add.u32 %r1, %r1, 1; and.b32 %r2, %r0, 1; setp.ne.u32 %p1, %r2, 0; @%p1 bra ODD;
      shr.u32 %r0, %r0, 1; bra LOOP;
      ODD: mad.lo.u32 %r0, %r0, 3, 1; bra LOOP;
    END: activemask.b32 %r3; st.global.v2.b32 [%out_i], {%r1, %r3};
    """
    execute(body, {"out": out}, Shape(block=96))

    def steps(n: int) -> int:
        count = 0
        while n != 1:
            n, count = (3 * n + 1 if n & 1 else n // 2), count + 1
        return count

    assert out[:, 0].tolist() == [steps(i + 1) for i in range(96)]


def test_a_warp_is_whole_again_after_a_loop():
    """The simulator's behaviour; hardware promises it only to instructions that synchronise."""
    out = np.zeros(32, np.uint32)
    body = """
    mov.b32 %r0, 0; LOOP: add.u32 %r0, %r0, 1; setp.lt.u32 %p0, %r0, %lane; @%p0 bra LOOP;
    activemask.b32 %r1; st.global.b32 [%out_i], %r1;
    """
    for order in ORDERS:
        out[:] = 0
        simulate_ptx(body, {"out": out}, order=order)
        assert (out == 0xFFFFFFFF).all()


def test_lanes_that_return_early_are_not_waited_for(execute):
    out = np.zeros((64, 2), np.uint32)
    body = """
    setp.ge.u32 %p0, %lane, 10; @%p0 ret;
    setp.lt.u32 %p1, %lane, 5; @%p1 bra FEW; bra JOIN; FEW: setp.eq.u32 %p2, %lane, 2; @%p2 exit;
    JOIN: activemask.b32 %r2; vote.sync.ballot.b32 %r0, %p1, %r2;
    redux.sync.add.u32 %r1, %lane, %r2;
    st.global.v2.b32 [%out_i], {%r0, %r1};
    """
    execute(body, {"out": out}, Shape(block=64))
    left = [lane for lane in range(10) if lane != 2]
    ballots, sums = out[:, 0].reshape(2, 32), out[:, 1].reshape(2, 32)
    assert (ballots[:, [2, *range(10, 32)]] == 0).all()
    # NOTE: whether the two sides of the branch vote together is the compiler's choice
    assert (np.bitwise_or.reduce(ballots[:, left], 1) == 0b11011).all()
    assert set(sums[:, left].reshape(-1).tolist()) <= {sum(left), 0 + 1 + 3 + 4, 5 + 6 + 7 + 8 + 9}


def test_a_block_that_is_no_multiple_of_the_warp(execute):
    out = np.zeros(70, np.uint32)
    body = """
    activemask.b32 %r0; vote.sync.ballot.b32 %r1, 1, %r0; bar.sync 0;
    st.global.b32 [%out_i], %r1;
    """.replace("%r1, 1,", "%r1, %p0,").replace(
        "activemask", "setp.eq.u32 %p0, 0, 0; activemask", 1
    )
    execute(body, {"out": out}, Shape(block=70))
    assert (out[:64] == 0xFFFFFFFF).all() and (out[64:] == 0x3F).all()


# -- lanes that wait for lanes of their own warp ---------------------------------------------------


@pytest.mark.parametrize("first", ["setp.eq.u32", "setp.ne.u32"], ids=["waiter low", "waiter high"])
def test_one_side_of_a_branch_waits_for_a_flag_that_the_other_sets(execute, first):
    """Either side may come first in the program."""
    flag, out = np.zeros(1, np.uint32), np.zeros(32, np.uint32)
    wait = f"""
      {START} SPIN: ld.volatile.global.b32 %r0, [%flag]; setp.eq.u32 %p1, %r0, 0;
      {again("SPIN", "%p1")}
    """
    raise_flag = "mov.b32 %r0, 7; st.volatile.global.b32 [%flag], %r0;"
    low, high = (wait, raise_flag) if first == "setp.eq.u32" else (raise_flag, wait)
    body = f"""
    {first} %p0, %lane, 5; @!%p0 bra OTHER; {low} bra JOIN; OTHER: {high} JOIN:
    ld.volatile.global.b32 %r0, [%flag]; st.global.b32 [%out_i], %r0;
    """
    execute(body, {"flag": flag, "out": out})
    assert (out == 7).all()


def test_one_side_sleeps_at_an_mbarrier_on_which_the_other_arrives(execute):
    out = np.zeros(32, np.uint32)
    body = f"""
    .reg .b32 bar; mov.u32 bar, smem; setp.eq.u32 %p0, %lane, 0;
    @%p0 mbarrier.init.shared.b64 [bar], 31; bar.sync 0;
    @!%p0 bra OTHERS;
      {wait("bar", 0, "WAIT")}
      bra JOIN;
    OTHERS: mbarrier.arrive.shared.b64 _, [bar];
    JOIN: st.global.b32 [%out_i], 1;
    """
    execute(body, {"out": out}, Shape(smem=64))
    assert (out == 1).all()


def test_each_lane_in_turn():
    """Lane k waits until the counter is k, then raises it: no lane can go before the one below.

    It is the simulator's behaviour: whether hardware lets lanes leave the loop alone is the
    compiler's choice.
    """
    counter, out = np.zeros(1, np.uint32), np.zeros(32, np.uint32)
    body = """
    SPIN: ld.relaxed.gpu.global.b32 %r0, [%counter];
    setp.ne.u32 %p0, %r0, %lane; @%p0 bra SPIN;
    st.global.b32 [%out_i], %r0; add.u32 %r0, %r0, 1; st.relaxed.gpu.global.b32 [%counter], %r0;
    """
    simulate_ptx(body, {"counter": counter, "out": out})
    assert counter[0] == 32 and (out == LANES).all()


def test_bar_warp_sync_joins_different_places(execute):
    """Lanes meet at different instructions; the writes of one side before are visible to the other
    after.
    """
    out = np.zeros(32, np.uint32)
    body = """
    .reg .b32 mine, peer, x; mov.u32 mine, smem; xor.b32 x, %lane, 16; mad.lo.u32 peer, x, 4, mine;
    mad.lo.u32 mine, %lane, 4, mine; setp.lt.u32 %p0, %lane, 16; @%p0 bra LOW;
      mul.lo.u32 x, %lane, 3; st.volatile.shared.b32 [mine], x; bar.warp.sync -1;
      ld.volatile.shared.b32 %r0, [peer]; bra JOIN;
    LOW: mul.lo.u32 x, %lane, 5; st.volatile.shared.b32 [mine], x; bar.warp.sync -1;
      ld.volatile.shared.b32 %r0, [peer];
    JOIN: st.global.b32 [%out_i], %r0;
    """
    execute(body, {"out": out}, Shape(smem=128))
    peer = LANES ^ 16
    assert (out == np.where(peer < 16, peer * 5, peer * 3)).all()


def test_lanes_that_wait_for_different_barriers(execute):
    out = np.zeros(64, np.uint32)
    body = f"""
    .reg .b32 bar, mine; mov.u32 bar, smem; mad.lo.u32 mine, %lane, 8, bar;
    setp.lt.u32 %p0, %i, 32; @%p0 mbarrier.init.shared.b64 [mine], 1; bar.sync 0;
    @!%p0 bra ARRIVE;
      {wait("mine", 0, "WAIT")}
      bra JOIN;
    ARRIVE: mbarrier.arrive.shared.b64 _, [mine];
    JOIN: st.global.b32 [%out_i], 1;
    """
    execute(body, {"out": out}, Shape(block=64, smem=256))
    assert (out == 1).all()


def test_an_elected_lane_that_waits_for_ever_is_a_deadlock_of_that_lane():
    body = """
    .reg .b32 bar; mov.u32 bar, smem; setp.eq.u32 %p0, %lane, 3;
    @%p0 mbarrier.init.shared.b64 [bar], 1; bar.sync 0; @!%p0 bra JOIN;
    WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [bar], 0; @!%p1 bra WAIT;
    JOIN: bar.sync 0;
    """
    with pytest.raises(Deadlock, match=r"CTA \(0,0,0\) warp 0 lane 3 waits for parity 0"):
        simulate_ptx(body, {}, Shape(smem=64))


# -- post-dominators -------------------------------------------------------------------------------


def flow_of(body: str) -> ControlFlow:
    text = (
        f".version 8.6\n.target sm_90a\n.entry k() {{ .reg .pred %p<4>; .reg .b32 %r<4>;\n{body}}}"
    )
    return ControlFlow(parse(text)["k"].code)


def test_both_sides_of_a_branch_meet_behind_it():
    flow = flow_of("@%p0 bra A; mov.b32 %r0, 1; bra B; A: mov.b32 %r0, 2; B: mov.b32 %r0, 3; ret;")
    assert flow.beyond(1) == {2, 4, 5} and flow.beyond(3) == {4, 5} and flow.beyond(0) == {4, 5}


def test_all_leave_a_loop_at_its_end():
    flow = flow_of("L: mov.b32 %r0, 1; @%p0 bra L; mov.b32 %r0, 2; ret;")
    assert flow.beyond(0) == {1, 2, 3} and flow.beyond(2) == {3}


def test_nobody_waits_behind_a_return():
    flow = flow_of("@%p0 ret; mov.b32 %r0, 1; ret;")
    assert flow.beyond(0) == set() and flow.beyond(1) == {2}


def test_a_loop_without_a_way_out():
    flow = flow_of("@%p0 bra L; mov.b32 %r0, 1; ret; L: mov.b32 %r0, 2; bra L;")
    assert flow.beyond(0) == set() and flow.beyond(1) == {2} and 4 in flow.beyond(3)
