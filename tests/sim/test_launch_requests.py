"""The rules of cluster launch control after a refusal."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernel import Shape, simulate_ptx

from cutex.sim.errors import Hazards

# Each CTA writes its number to `out`, then takes over others until one request is refused.
KERNEL = """.reg .b32 bar; mov.u32 bar, smem; setp.eq.u32 %p0, %tid.x, 0;
    @%p0 mbarrier.init.shared.b64 [bar], 1; bar.sync 0;
    .reg .b32 reply; .reg .b128 %handle; mov.u32 reply, smem; add.u32 reply, reply, 16;
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, 0;
    NEXT: mad.wide.u32 %d0, %r1, 4, %out; @%p0 st.global.u32 [%d0], %r1; BEFORE
    fence.proxy.async.shared::cta;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 16;
    @%p0 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128
        [reply], [bar];
    and.b32 %r3, %r2, 1; add.u32 %r2, %r2, 1;
    W: mbarrier.try_wait.parity.shared.b64 %p1, [bar], %r3; @!%p1 bra W;
    ld.shared.b128 %handle, [reply]; bar.sync 0; READ
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %handle; LOOK
    @!%p2 bra END; @%p2 clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r1, %handle;
    bra NEXT; END: AFTER
"""
REQUEST = """fence.proxy.async.shared::cta; @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 16;
    @%p0 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128
    [reply], [bar]; and.b32 %r3, %r2, 1;
    V: mbarrier.try_wait.parity.shared.b64 %p1, [bar], %r3; @!%p1 bra V;"""
TAKE = "clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r5, %handle;"


def run(**parts: str) -> None:
    text = KERNEL
    for name in ("BEFORE", "READ", "LOOK", "AFTER"):
        text = text.replace(name, parts.get(name.lower(), ""))
    out = np.zeros(600, np.uint32)
    shape = Shape(grid=600, block=64, smem=1024)
    simulate_ptx(text, {"out": out}, shape, arch="sm_100a", assembles=False)
    assert out.tolist() == list(range(600))


def test_the_loop_that_ends_with_the_refusal_is_clean():
    run()


@pytest.mark.parametrize("after", [
    REQUEST,
    f"setp.ge.u32 %p3, %tid.x, 32; @%p3 bra OUT; {REQUEST} OUT:",
], ids=["all warps", "the warp that asks"])  # fmt: skip
def test_a_request_after_a_refusal_is_found(after):
    with pytest.raises(Hazards) as told:
        run(after=after)
    first = str(told.value.findings[0])
    assert first.startswith("launch control: CTA (") and "PTX line" in first
    assert "requests another cluster after it has seen a refusal" in first


def test_a_request_after_another_warp_has_seen_the_refusal_is_found():
    """Warp 1 alone looks; a barrier tells warp 0, which asks again."""
    look = "setp.ge.u32 %p3, %tid.x, 32; @!%p3 bra ON;"
    text = KERNEL.replace("READ", look).replace("LOOK", "ON: bar.sync 0;")
    text = text.replace("@!%p2 bra END; @%p2 clusterlaunchcontrol.query_cancel.get_first_ctaid::x"
                        ".b32.b128 %r1, %handle;", "setp.lt.u32 %p4, %r2, 3;")  # fmt: skip
    text = text.replace("bra NEXT;", "@%p4 bra NEXT;").replace("BEFORE", "").replace("AFTER", "")
    with pytest.raises(Hazards, match=r"requests another cluster after CTA .* warp 1 has seen a"):
        shape = Shape(grid=2, block=64, smem=1024)
        simulate_ptx(text, {"out": np.zeros(600, np.uint32)}, shape, arch="sm_100a",
                     assembles=False)  # fmt: skip


@pytest.mark.parametrize("use", [
    "mad.wide.u32 %d1, %r5, 4, %out; @%p0 st.global.u32 [%d1], %r5;",
    "@%p0 st.global.u32 [%out_i], %r5;",
    "and.b32 %r6, %r5, 255; mad.wide.u32 %d1, %r6, 4, %out; @%p0 ld.global.u32 %r7, [%d1];",
    "mov.u32 %r6, %r5; add.u32 %r6, %r6, 1; and.b32 %r6, %r6, 7; shl.b32 %r6, %r6, 2;"
    "add.u32 %r6, %r6, reply; @%p0 ld.shared.u32 %r7, [%r6+128];",
], ids=["address", "value", "of a load", "of shared memory"])  # fmt: skip
def test_an_access_by_the_coordinates_of_a_refused_reply_is_found(use):
    with pytest.raises((Hazards, Exception)) as told:
        run(look=f"{TAKE} @%p2 bra OVER; {use} OVER:")
    assert "accesses memory by the coordinates of a reply" in str(told.value)


@pytest.mark.parametrize("use", [
    "", "add.u32 %r6, %r5, 1; shl.b32 %r6, %r6, 3;", "selp.b32 %r6, %r5, 0, %p2;"
    "and.b32 %r6, %r6, 1; shl.b32 %r6, %r6, 2;"
    "add.u32 %r6, %r6, reply; ld.shared.u32 %r7, [%r6+128];",
    "selp.u32 %r6, 1, 0, %p2; @%p0 st.shared.v2.u32 [reply+128], {%r5, %r6};",
], ids=["not used", "computed with", "selected", "handed on beside the refusal"])  # fmt: skip
def test_coordinates_that_nothing_is_accessed_by_are_clean(use):
    run(look=f"{TAKE} {use}")
