"""Arrivals on an mbarrier that may count in the phase before the one that they are meant for."""

from __future__ import annotations

import numpy as np
import pytest
from barriers import each_order, init, wait
from ptx_kernel import Shape, simulate_ptx

from cutex.sim.errors import Hazards

ARRIVE = "mbarrier.arrive.shared.b64 _, [bar];"
WARP = "mov.u32 %r0, %tid.x; shr.u32 %r0, %r0, 5; and.b32 %r1, %tid.x, 31; setp.eq.u32 %p1, %r1, 0;"
END = "bar.sync 0;"

WRONG = {
    # warp 0 and warp 1 are meant to arrive once in each phase
    "each arrives twice and waits for nothing": f"""{init(2)} {WARP} setp.lt.u32 %p3, %r0, 2;
        and.pred %p1, %p1, %p3; @%p1 {ARRIVE} @%p1 {ARRIVE} {END}""",
    "one waits, the other does not": f"""{init(2)} {WARP} setp.lt.u32 %p3, %r0, 2; @!%p3 bra OFF;
        @%p1 {ARRIVE} setp.eq.u32 %p4, %r0, 0; @!%p4 bra GO; {wait("bar", 0, "W")}
        GO: @%p1 {ARRIVE} OFF: {END}""",
    "one arrives for both": f"""{init(2)} {WARP} setp.eq.u32 %p3, %r0, 0; and.pred %p4, %p1, %p3;
        @%p4 {ARRIVE} @%p4 {ARRIVE} setp.eq.u32 %p3, %r0, 1; and.pred %p4, %p1, %p3;
        @%p4 {ARRIVE} @%p4 {ARRIVE} {END}""",
    "in a loop": f"""{init(2)} {WARP} setp.lt.u32 %p3, %r0, 2; and.pred %p1, %p1, %p3;
        mov.u32 %r5, 0; L: @%p1 {ARRIVE} add.u32 %r5, %r5, 1; setp.lt.u32 %p5, %r5, 4;
        @%p5 bra L; {END}""",
}
RIGHT = {
    "both wait": f"""{init(2)} {WARP} setp.lt.u32 %p3, %r0, 2; @!%p3 bra OFF;
        @%p1 {ARRIVE} {wait("bar", 0, "W")} @%p1 {ARRIVE} OFF: {END}""",
    "a barrier between": f"""{init(2)} {WARP} setp.lt.u32 %p3, %r0, 2; and.pred %p1, %p1, %p3;
        @%p1 {ARRIVE} bar.sync 1, 96; @%p1 {ARRIVE} {END}""",
    "one for all": f"""{init(1)} {WARP} setp.eq.u32 %p3, %r0, 0; and.pred %p1, %p1, %p3;
        @%p1 {ARRIVE} @%p1 {ARRIVE} @%p1 {ARRIVE} {END}""",
    "one that is meant to count twice": f"""{init(2)} {WARP} setp.eq.u32 %p3, %r0, 0;
        and.pred %p1, %p1, %p3; @%p1 {ARRIVE} @%p1 {ARRIVE} @%p1 {ARRIVE} @%p1 {ARRIVE}
        {END}""",
    "every lane": f"""{init(64)} {WARP} setp.lt.u32 %p3, %r0, 2; @!%p3 bra OFF; {ARRIVE}
        {wait("bar", 0, "W")} {ARRIVE} OFF: {END}""",
}


def run(text: str) -> None:
    simulate_ptx(text, {"out": np.zeros(96, np.uint32)}, Shape(block=96, smem=64))


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_an_arrival_that_may_count_too_early_is_found(text):
    with pytest.raises(Hazards) as told:
        run(text)
    first = str(told.value.findings[0])
    assert first.startswith("barrier: CTA (0,0,0) warp") and "PTX line" in first
    assert "nothing that it has waited for says that phase" in first


@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_an_arrival_behind_the_phase_before_is_clean(text):
    run(text)


# A ring of two slots that a cluster of two fills by multicast: its consumers free a slot in both
# CTAs, each by another warp, and only the bytes of the other CTA say that it is free there.
RING = """
    .reg .b32 full, empty, rank, peer, at;
    mov.u32 full, smem; add.u32 empty, full, 16; mov.u32 rank, %cluster_ctarank;
    setp.eq.u32 %p0, %tid.x, 0;
    @!%p0 bra READY;
    mbarrier.init.shared.b64 [full], 1; mbarrier.init.shared.b64 [full+8], 1;
    mbarrier.init.shared.b64 [empty], 2; mbarrier.init.shared.b64 [empty+8], 2;
    fence.mbarrier_init.release.cluster;
    READY: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    shr.u32 %r0, %tid.x, 5; and.b32 %r1, %tid.x, 31; setp.eq.u32 %p1, %r1, 0;
    mov.u32 %r10, 0; setp.eq.u32 %p2, %r0, 2; @%p2 bra LOAD;
    mapa.shared::cluster.u32 peer, empty, %r0;  // warp w frees the slot in CTA w
    TAKE: and.b32 %r11, %r10, 1; shr.u32 %r12, %r10, 1; and.b32 %r12, %r12, 1;
    shl.b32 at, %r11, 3; add.u32 %r13, full, at; add.u32 %r14, peer, at;
    W0: mbarrier.try_wait.parity.shared.b64 %p3, [%r13], %r12; @!%p3 bra W0;
    bar.sync 1, 64;
    @%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r14];
    add.u32 %r10, %r10, 1; setp.lt.u32 %p4, %r10, 6; @%p4 bra TAKE; bra DONE;
    LOAD: and.b32 %r11, %r10, 1; shr.u32 %r12, %r10, 1; and.b32 %r12, %r12, 1;
    shl.b32 at, %r11, 3; add.u32 %r13, full, at; add.u32 %r14, empty, at; xor.b32 %r12, %r12, 1;
    W1: mbarrier.try_wait.parity.shared.b64 %p3, [%r14], %r12; @!%p3 bra W1;
    setp.ne.u32 %p5, %r1, 0; @%p5 bra NEXT;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r13], 256;
    shl.b32 %r15, rank, 7; shl.b32 %r16, %r11, 8; add.u32 %r16, %r16, full;
    add.u32 %r16, %r16, 128; add.u32 %r16, %r16, %r15; mov.u16 %h0, 3;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%r16], [%x], 128, [%r13], %h0;
    NEXT: add.u32 %r10, %r10, 1; setp.lt.u32 %p4, %r10, 6; @%p4 bra LOAD;
    DONE: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    st.global.u32 [%out_i], 1;
"""


def test_bytes_that_others_send_tell_that_a_slot_is_free():
    arrays = {"x": np.zeros(64, np.uint32), "out": np.zeros(192, np.uint32)}
    shape = Shape(grid=2, block=96, cluster=2, smem=2048)
    assert each_order(RING, arrays, shape).all()
