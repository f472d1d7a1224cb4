"""A wait by a flag is as long as its comparison makes it, whatever the simulator has read."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernel import Shape, simulate_ptx
from tensor_maps import aligned

from cutex.sim import Hazards

START = """.reg .b32 f, n, want; setp.eq.u32 %p0, %lane, 0; setp.eq.u32 %p2, %cta, 0;
    mad.wide.u32 %d1, %i, 4, %out; mad.wide.u32 %d2, %lane, 4, %out;"""
LOOK = "ld.acquire.gpu.global.u32 f, [%out];"
# three CTAs write a row each and count; the fourth reads them all
COUNT = f"""{START} setp.eq.u32 %p4, %cta, 3; @%p4 bra R; st.global.u32 [%d1+256], 5;
    bar.warp.sync -1; @%p0 red.release.gpu.global.add.u32 [%out], 1; bra E;
    R: P: LOOK setp.lt.u32 %p3, f, HERE; @%p3 bra P; bar.warp.sync -1; ld.global.u32 %r1, [%d2+256];
    ld.global.u32 %r1, [%d2+384]; ld.global.u32 %r1, [%d2+512]; E:"""
PEELED = COUNT.replace("R: P:", "R: LOOK setp.ge.u32 %p3, f, HERE; @%p3 bra D; P:").replace(
    "@%p3 bra P;", "@%p3 bra P; D:")  # fmt: skip
# CTA 0 writes a row and sets the flag, three times; CTA 1 reads each
ROUNDS = f"""{START} mov.u32 n, 0; @!%p2 bra R; L: mad.wide.u32 %d3, n, 128, %d2;
    st.global.u32 [%d3+256], 5; bar.warp.sync -1; add.u32 n, n, 1; mov.u32 want, HERE;
    @%p0 st.release.gpu.global.u32 [%out], want; setp.lt.u32 %p5, n, 3; @%p5 bra L; bra E;
    R: mad.wide.u32 %d3, n, 128, %d2; add.u32 n, n, 1; mov.u32 want, HERE; P: LOOK
    setp.lt.u32 %p3, f, want; @%p3 bra P; bar.warp.sync -1; ld.global.u32 %r1, [%d3+256];
    setp.lt.u32 %p5, n, 3; @%p5 bra R; E:"""
# CTA 0 tells of its row and then of another; CTA 1 looks at what it has been told of
STATUS = f"""{START} @!%p2 bra R; st.global.u32 [%d2+256], 5; bar.warp.sync -1;
    @%p0 st.release.gpu.global.u32 [%out], 1; st.global.u32 [%d2+384], 6; bar.warp.sync -1;
    @%p0 st.release.gpu.global.u32 [%out], 2; bra E; R: P: LOOK setp.eq.u32 %p3, f, 0; @%p3 bra P;
    bar.warp.sync -1; setp.ge.u32 %p4, f, HERE; @%p4 ld.global.u32 %r1, [%d2+384]; E:"""
WARPS = COUNT.replace("%cta, 3", "%r9, 3").replace(".reg", "shr.u32 %r9, %i, 5; .reg", 1)

CASES = {  # text, shape, too early, right, how the flag is looked at
    "a counter": (COUNT, Shape(grid=4), "2", "3", LOOK),
    "a first look before the loop": (PEELED, Shape(grid=4), "2", "3", LOOK),
    "a number that only the lane that looks has": (
        COUNT.replace("R: P:", "R: @!%p0 bra D; sub.u32 want, HERE, 0; P:").replace(
            "f, HERE; @%p3 bra P;", "f, want; @%p3 bra P; D:"),
        Shape(grid=4), "2", "3", LOOK),
    "bits that producers set": (
        COUNT.replace("@%p0 red.release.gpu.global.add.u32 [%out], 1;",
                      "shl.b32 n, 1, %cta; @%p0 red.release.gpu.global.or.b32 [%out], n;").replace(
            "setp.lt.u32 %p3, f, HERE;", "and.b32 want, f, HERE; setp.ne.u32 %p3, want, HERE;"),
        Shape(grid=4), "3", "7", LOOK),
    "what a shift and a difference leave": (
        COUNT.replace("R: P:", "R: mov.u32 want, 4; P:").replace(
            "setp.lt.u32 %p3, f, HERE;",
            "sub.u32 n, want, f; shr.s32 %r1, n, HERE; setp.ne.u32 %p3, %r1, 0;"),
        Shape(grid=4), "2", "1", LOOK),
    "a relaxed load and a fence": (
        COUNT, Shape(grid=4), "1", "3", "ld.relaxed.gpu.global.u32 f, [%out]; fence.acq_rel.gpu;"),
    "an atomic that adds nothing": (
        COUNT, Shape(grid=4), "2", "3", "atom.acquire.gpu.global.add.u32 f, [%out], 0;"),
    "the CTAs of a cluster": (COUNT, Shape(grid=4, cluster=4), "2", "3", LOOK),
    "warps of a CTA": (WARPS, Shape(block=128), "2", "3", LOOK),
    "the value of the round before": (ROUNDS, Shape(grid=2), "1", "n", LOOK),
    "a status": (STATUS, Shape(grid=2), "1", "2", LOOK),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_wait_that_an_earlier_value_ends_is_found(name):
    text, shape, early, right, look = CASES[name]
    for until in (right, early):
        body = text.replace("LOOK", look).replace("HERE", until)
        out = {"out": aligned(np.zeros(256, np.uint32))}
        if until == right:
            assert not simulate_ptx(body, out, shape).advisories
        else:
            with pytest.raises(Hazards, match=r"race: CTA .* reads out") as told:
                simulate_ptx(body, out, shape)
            within = shape.cluster > 1 or shape.block > 32
            assert within or "may have read an older value" in str(told.value)
