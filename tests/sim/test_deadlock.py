"""A wait that never ends is reported as a deadlock, with every waiter and its wait."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from barriers import CLUSTER_SYNC, EVERY_ORDER, copy, init, rows
from ptx_kernel import Shape, simulate_ptx

from cutex.sim import BarrierMisuse, Deadlock, SimError

SLEEP = "W: mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], PARITY; @!%p1 bra W;"


def deadlock(body: str, arrays: dict, shape: Shape, **order) -> str:
    with pytest.raises(Deadlock) as report:
        simulate_ptx(body, arrays, shape, **order)
    text = str(report.value)
    head = "deadlock: no warp can run and nothing is in flight"
    assert text.startswith((f"{head}: CTA (", f"{head}\n"))
    return text


@pytest.mark.sweep(2)
@pytest.mark.parametrize("order", EVERY_ORDER, ids=lambda o: "-".join(map(str, o.values())))
def test_a_wait_for_an_arrival_that_never_comes(order):
    body = init(3) + "@%p0 mbarrier.arrive.shared.b64 _, [bar];" + SLEEP.replace("PARITY", "0")
    text = deadlock(body, {}, Shape(block=96, smem=64), **order)
    assert re.search(r"CTA \(0,0,0\) warp \d \(and 2 more like it\) waits for parity 0", text)
    assert "(that is for phase 0; a wait for parity 1 would pass) of mbarrier 0x400" in text
    assert "0 phases complete, 2 of 3 arrivals pending, tx-count 0" in text
    assert "last touched by CTA (0,0,0) warp 0 lane 0 at PTX line" in text
    assert re.search(r"at PTX line \d+: mbarrier.try_wait.parity", text)
    assert "3 warps are blocked, 0 have returned" in text


def test_who_is_absent_from_a_clusters_barrier_comes_first():
    body = f"""{init(1).replace("%i, 0", "%lane, 0")} setp.eq.u32 %p2, %cta, 1; @!%p2 bra END;
    {SLEEP.replace("PARITY", "0")}
    END: {CLUSTER_SYNC}"""
    text = deadlock(body, {}, Shape(grid=2, cluster=2, smem=64))
    blocked = "deadlock: no warp can run and nothing is in flight: CTA (1,0,0)"
    assert text.startswith(blocked) and "none of 1 arrivals came" in text.split("\n")[0]


def test_bytes_that_never_come():
    body = f"""{init(1)} .reg .b32 data; add.u32 data, bar, 128;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 96; @%p0 {copy("data", "%a", 64)}
    {SLEEP.replace("PARITY", "0")}"""
    text = deadlock(body, {"a": rows(1, 64)}, Shape(smem=1024))
    assert "tx-count 32 (expect_tx announced 96 bytes, 64 came and no copy is in flight)" in text


def test_more_bytes_than_were_announced():
    body = f"""{init(1)} .reg .b32 data; add.u32 data, bar, 128;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 32; @%p0 {copy("data", "%a", 64)}
    {SLEEP.replace("PARITY", "0")}"""
    text = deadlock(body, {"a": rows(1, 64)}, Shape(smem=1024))
    assert "tx-count -32 (64 bytes came, expect_tx announced only 32)" in text


def test_a_wait_one_phase_too_far():
    body = init(1) + "@%p0 mbarrier.arrive.shared.b64 _, [bar];" + SLEEP.replace("PARITY", "1")
    text = deadlock(body, {}, Shape(smem=64))
    assert "1 phase complete" in text and "a wait for parity 0 would pass" in text


def test_a_named_barrier_that_too_few_reach():
    text = deadlock("setp.lt.u32 %p0, %i, 64; @%p0 bar.sync 7, 96;", {}, Shape(block=96))
    assert "waits at named barrier 7" in text or "named barrier 7 of CTA (0,0,0)" in text
    assert (
        "64 of 96 threads have arrived" in text and "2 warps are blocked, 1 have returned" in text
    )


def test_two_named_barriers_in_opposite_order():
    body = """
    setp.lt.u32 %p0, %i, 32; @%p0 bar.sync 1, 64; @%p0 bar.sync 2, 64;
    @!%p0 bar.sync 2, 64; @!%p0 bar.sync 1, 64;
    """
    text = deadlock(body, {}, Shape(block=64))
    for number in (1, 2):
        assert f"named barrier {number} of CTA (0,0,0): 32 of 64 threads have arrived" in text


def test_a_cluster_barrier_names_who_is_missing():
    body = f"""
    mov.u32 %r0, %cluster_ctarank; setp.eq.u32 %p0, %r0, 1; @%p0 bra STAY; {CLUSTER_SYNC} bra END;
    STAY: bar.sync 1, 64; END:
    """
    text = deadlock(body, {}, Shape(grid=2, cluster=2))
    assert (
        "the cluster barrier, at which CTA (1,0,0) (rank 1 of its cluster) warp 0 has not arrived"
        in text
    )
    assert "named barrier 1 of CTA (1,0,0): 32 of 64" in text


@pytest.mark.sweep(2)
@pytest.mark.parametrize("order", EVERY_ORDER, ids=lambda o: "-".join(map(str, o.values())))
def test_a_spin_on_memory_that_nobody_writes(order):
    flag = np.zeros(1, np.uint32)
    body = """
    setp.lt.u32 %p0, %i, 32; @%p0 ret;
    L: ld.volatile.global.b32 %r0, [%flag]; setp.eq.u32 %p1, %r0, 0; @%p1 bra L;
    """
    text = deadlock(body, {"flag": flag}, Shape(block=96), **order)
    assert re.search(
        r"warp \d \(and 1 more like it\) goes round a loop in which nothing changes", text
    )
    assert "2 warps are blocked, 1 have returned" in text


def test_a_spin_that_counts_its_rounds_is_a_deadlock_too():
    flag = np.zeros(1, np.uint32)
    body = """
    mov.b32 %r1, 0; L: add.u32 %r1, %r1, 1; ld.acquire.gpu.global.b32 %r0, [%flag];
    setp.eq.u32 %p1, %r0, 0; @%p1 bra L;
    """
    assert "goes round a loop" in deadlock(body, {"flag": flag}, Shape(block=32))


WAIT_FOR_THE_LAST = """
    .reg .b32 last; mov.u32 last, %nctaid.x; sub.u32 last, last, 1; setp.eq.u32 %p0, %cta, last;
    @%p0 st.release.gpu.global.b32 [%flag], 1;
    L: ld.acquire.gpu.global.b32 %r0, [%flag]; setp.eq.u32 %p1, %r0, 0; @%p1 bra L;
"""
RESIDENT = {  # by threads, shared memory, CTAs of an SM
    "one CTA for each SM": (Shape(grid=132, block=1024, smem=200 << 10), 1),
    "two by shared memory": (Shape(grid=264, block=64, smem=100 << 10), 2),
    "two by threads": (Shape(grid=264, block=1024), 2),
    "sixteen by threads": (Shape(grid=2112, block=128), 16),
    "32 at most": (Shape(grid=4224, block=32), 32),
}


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "per_sm"), RESIDENT.values(), ids=RESIDENT)
def test_ctas_may_wait_for_each_other_as_far_as_the_gpu_holds_them(shape, per_sm):
    simulate_ptx(WAIT_FOR_THE_LAST, {"flag": np.zeros(1, np.uint32)}, shape)
    more = replace(shape, grid=shape.grid + 1)
    text = deadlock(WAIT_FOR_THE_LAST, {"flag": np.zeros(1, np.uint32)}, more)
    assert (
        f"1 of the grid's clusters have not started: {shape.grid} CTAs run side by side, {per_sm} "
        "on each of the 132 SMs of one H200" in text
    )


def test_a_spin_with_atomics_that_change_nothing():
    lock = np.ones(1, np.uint32)
    body = "L: atom.global.cas.b32 %r0, [%lock], 0, 1; setp.ne.u32 %p0, %r0, 0; @%p0 bra L;"
    assert "goes round a loop" in deadlock(body, {"lock": lock}, Shape(block=64))


def test_a_loop_that_can_never_end():
    assert "goes round a loop" in deadlock("L: mov.b32 %r0, 1; bra L;", {}, Shape(block=64))


@pytest.mark.slow
def test_long_loops_of_work_are_no_deadlock():
    a, out = np.arange(9000, dtype=np.uint32), np.zeros(32, np.uint32)
    body = """
    mov.b32 %r1, 0; mov.b32 %r2, 0; mov.u64 %d0, %a;
    L: ld.global.b32 %r0, [%d0]; add.u32 %r1, %r1, %r0; add.u64 %d0, %d0, 4; add.u32 %r2, %r2, 1;
    setp.lt.u32 %p0, %r2, 9000; @%p0 bra L; st.global.b32 [%out_i], %r1;
    """
    simulate_ptx(body, {"a": a, "out": out})
    assert (out == a.sum()).all()


# -- setmaxnreg ------------------------------------------------------------------------------------

ROLES = """
    setp.lt.u32 %p0, %i, 128; @!%p0 bra MORE; LESS bra END;
    MORE: setmaxnreg.inc.sync.aligned.u32 232;
    END: st.global.b32 [%out_i], 1;
"""


def test_setmaxnreg_waits_for_registers_that_others_give_back():
    """3 warpgroups have 168 each: 24 for one leaves 240 for each of the others."""
    body = ROLES.replace("LESS", "bar.sync 1, 128; setmaxnreg.dec.sync.aligned.u32 24;")
    for order in EVERY_ORDER:
        out = np.zeros(384, np.uint32)
        simulate_ptx(body, {"out": out}, Shape(block=384), **order)
        assert out.all()


def test_setmaxnreg_that_can_never_have_its_registers_is_a_deadlock():
    out = np.zeros(384, np.uint32)
    text = deadlock(ROLES.replace("LESS", ""), {"out": out}, Shape(block=384))
    assert re.search(r"setmaxnreg.inc: \d+ registers wanted, \d+ free in the CTA's pool", text)


def test_setmaxnreg_has_no_registers_that_the_launch_did_not_get():
    """5 warpgroups have 96 each: 24 for one leaves 112 for each of the others, not 120."""
    for registers, enough in ((112, True), (120, False)):
        body = ROLES.replace("LESS", "setmaxnreg.dec.sync.aligned.u32 24;")
        body = body.replace("232", str(registers))
        out = np.zeros(640, np.uint32)
        if enough:
            simulate_ptx(body, {"out": out}, Shape(block=640))
            assert out.all()
        else:
            text = deadlock(body, {"out": out}, Shape(block=640))
            assert "768 registers wanted" in text


def test_two_ctas_of_an_sm_share_the_registers_that_setmaxnreg_moves():
    """4 warpgroups of either have 64 each: 40 for three leave 136 for the last, not 144."""
    for registers, enough in ((136, True), (144, False)):
        body = ROLES.replace("128", "384").replace("232", str(registers))
        body = body.replace("LESS", "setmaxnreg.dec.sync.aligned.u32 40;")
        out, shape = np.zeros(512, np.uint32), Shape(block=512, ctas_per_sm=2)
        if enough:
            simulate_ptx(body, {"out": out}, shape)
            assert out.all()
        else:
            assert "2560 registers wanted, 1536 free" in deadlock(body, {"out": out}, shape)


def test_setmaxnreg_takes_steps_of_8():
    with pytest.raises(BarrierMisuse, match=r"setmaxnreg 20: takes 24..256 in steps of 8"):
        body = "setmaxnreg.dec.sync.aligned.u32 20;"
        simulate_ptx(body, {}, Shape(block=128), assembles=False)


# -- events before the deadlock --------------------------------------------------------------------


@pytest.mark.parametrize("end", ["bar.sync 1, 64;", "ld.global.u32 %r1, [%x+4096];"])
def test_races_found_before_the_end_of_a_run_are_told_with_it(end):
    """The end of the run is a deadlock, or an access outside every tensor."""
    body = f"""mov.u32 %r9, smem; setp.ge.u32 %p0, %i, 32; @%p0 st.shared.b32 [%r9], %i;
        @!%p0 ld.shared.b32 %r0, [%r9]; @%p0 bra END; {end} END:"""
    with pytest.raises(
        SimError, match=r"(?s)(deadlock|bad address): .*found before that:\s+race: "
    ):
        simulate_ptx(body, {"x": np.zeros(4, np.uint32)}, Shape(block=64, smem=64))
