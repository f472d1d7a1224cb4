"""Races on global memory between the warps of one CTA, or of one cluster."""

from __future__ import annotations

import re

import numpy as np
import pytest
from barriers import each_order
from ptx_kernel import Shape, simulate_ptx

from cutex.sim.errors import Hazards
from cutex.sim.finding import Finding

# The word of another warp of the CTA: %d0 in x; of another lane of the warp: %d1.
OTHER = """xor.b32 %r1, %i, 64; mad.wide.u32 %d0, %r1, 4, %x; xor.b32 %r2, %i, 5;
    mad.wide.u32 %d1, %r2, 4, %x; setp.lt.u32 %p0, %i, 64; setp.eq.u32 %p1, %lane, 0;"""
WRITE, READ = "st.global.u32 [%x_i], %i;", "ld.global.u32 %r0, [%d0]; st.global.u32 [%out_i], %r0;"
FLAG = "add.u64 %d5, %x, 4096;"  # a place that nothing else uses


def hand_over(store: str, load: str, before: str = "", after: str = "") -> str:
    """Warps 0 and 1 write, one thread sets a flag, warps 2 and 3 spin on it and read."""
    return f"""{OTHER} {FLAG} @!%p0 bra TAKE; {WRITE} bar.sync 1, 64; setp.eq.u32 %p2, %i, 0;
        {before} mov.u32 %r3, 1; @%p2 {store} [%d5], %r3; bra END;
        TAKE: {load} %r3, [%d5]; setp.eq.u32 %p3, %r3, 0; @%p3 bra TAKE; {after} {READ} END:"""


SMEM_FLAG = f"""{OTHER} mov.u32 %r9, smem; setp.eq.u32 %p2, %i, 0;
    @%p2 st.shared.u32 [%r9], 0; bar.sync 0; @!%p0 bra TAKE; {WRITE} bar.sync 1, 64;
    mov.u32 %r3, 1; @%p2 st.release.cta.shared.u32 [%r9], %r3; bra END;
    TAKE: ld.acquire.cta.shared.u32 %r3, [%r9]; setp.eq.u32 %p3, %r3, 0; @%p3 bra TAKE; {READ}
    END:"""
MBAR = f"""{OTHER} .reg .b32 bar; mov.u32 bar, smem; setp.eq.u32 %p2, %i, 0;
    @%p2 mbarrier.init.shared.b64 [bar], 64; bar.sync 0; @!%p0 bra TAKE; {WRITE}
    mbarrier.arrive.shared.b64 _, [bar]; bra END;
    TAKE: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra TAKE; {READ} END:"""
LAST = f"""{OTHER} {FLAG} {WRITE} FIRST bar.warp.sync -1; mov.u32 %r3, 0;
    @%p1 ATOM %r3, [%d5], 1; shfl.sync.idx.b32 %r3, %r3, 0, 31, -1; THEN
    setp.ne.u32 %p4, %r3, 3; @%p4 bra END; {READ} END:"""


def last(first: str = "", then: str = "", atom: str = "atom.global.add.u32") -> str:
    """The last of four warps to count reads what the others have written."""
    return LAST.replace("FIRST", first).replace("THEN", then).replace("ATOM", atom)


DIVERGED = f"""{OTHER} setp.ge.u32 %p5, %i, 32; @%p5 bra J; setp.lt.u32 %p6, %lane, 16;
    @!%p6 bra O; st.global.u32 [%x], 1; O: SYNC @%p6 bra J; st.global.u32 [%x], 2; J:"""
HANDED = f"""{OTHER} .reg .b32 bar; mov.u32 bar, smem; setp.eq.u32 %p2, %i, 0;
    @%p2 mbarrier.init.shared.b64 [bar], 1; bar.sync 0; setp.ge.u32 %p5, %i, 32; @%p5 bra END;
    @%p2 st.global.u32 [%x], 5; @%p2 mbarrier.arrive.shared.b64 _, [bar];
    W: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra W;
    ld.global.u32 %r4, [%x]; st.global.u32 [%out_i], %r4; END:"""
FENCE = "fence.acq_rel.cta;"
RELAXED = hand_over("st.relaxed.gpu.global.u32", "ld.relaxed.gpu.global.u32")

RACES = {
    "write, read": f"{OTHER} {WRITE} {READ}",
    "read, write": f"{OTHER} {READ} {WRITE}",
    "write, write": f"{OTHER} {WRITE} add.u32 %r3, %i, 1000; st.global.u32 [%d0], %r3;",
    "bytes of one word": f"""{OTHER} cvt.u16.u32 %h0, %i; add.u64 %d2, %x_i, 2;
        st.global.u16 [%d2], %h0; {READ}""",
    "vectors": f"""{OTHER} and.b32 %r4, %i, 31; mad.wide.u32 %d2, %r4, 16, %x;
        setp.ge.u32 %p4, %i, 32; @%p4 bra TAKE;
        st.global.v4.u32 [%d2], {{%i, %i, %i, %i}}; TAKE: ld.global.v4.u32 {{%r5, %r6, %r7, %r8}},
        [%d2]; @!%p4 bra END; st.global.u32 [%out_i], %r5; END:""",
    "a barrier before the write only": f"{OTHER} bar.sync 0; {WRITE} {READ}",
    "a barrier of other warps": f"{OTHER} {WRITE} @%p0 bra ON; bar.sync 1, 64; ON: {READ}",
    "bar.arrive where a sync is meant": f"{OTHER} {WRITE} bar.arrive 2, 128; {READ}",
    "a sync of the warp only": f"{OTHER} {WRITE} bar.warp.sync -1; {READ}",
    "a relaxed flag": RELAXED,
    "a volatile flag": hand_over("st.volatile.global.u32", "ld.volatile.global.u32"),
    "a relaxed flag of the CTA": hand_over("st.relaxed.cta.global.u32", "ld.relaxed.cta.u32"),
    "released, not acquired": hand_over("st.release.gpu.global.u32", "ld.relaxed.gpu.global.u32"),
    "acquired, not released": hand_over("st.relaxed.gpu.global.u32", "ld.acquire.gpu.global.u32"),
    "a relaxed flag in shared memory": re.sub("release|acquire", "relaxed", SMEM_FLAG),
    "an mbarrier's relaxed arrival": MBAR.replace("arrive.shared", "arrive.relaxed.cta.shared"),
    "an mbarrier's relaxed wait": MBAR.replace("parity.shared", "parity.relaxed.cta.shared"),
    "the last to count, no fence": last(),
    "the last to count, one fence": last("fence.acq_rel.gpu;"),
    "the last to count, released only": last(atom="atom.release.gpu.global.add.u32"),
    "a load of constants behind a barrier": f"""{OTHER} {WRITE} bar.sync 0;
        ld.global.nc.u32 %r0, [%d0]; st.global.u32 [%out_i], %r0;""",
    "an atomic of another": f"{OTHER} {WRITE} red.global.add.u32 [%d0], 1;",
    "a copy by cp.async": f"""{OTHER} {WRITE} mov.u32 %r9, smem; shl.b32 %r8, %i, 2;
        add.u32 %r9, %r9, %r8; cp.async.ca.shared.global [%r9], [%d0], 4; cp.async.wait_all;""",
    "a load by TMA": f"""{OTHER} .reg .b32 bar; mov.u32 bar, smem; setp.eq.u32 %p2, %i, 0;
        @%p2 mbarrier.init.shared.b64 [bar], 1; bar.sync 0; {WRITE}
        @%p2 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 512; mov.u32 %r9, smem;
        add.u32 %r9, %r9, 512;
        @%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%x], 512,
        [bar]; W: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra W;""",
}
RIGHT = {
    "a barrier between": f"{OTHER} {WRITE} bar.sync 0; {READ}",
    "a barrier before the overwrite": f"{OTHER} {READ} bar.sync 0; {WRITE}",
    "a named barrier of both": f"{OTHER} {WRITE} bar.sync 3, 128; {READ}",
    "an mbarrier": MBAR,
    "a relaxed arrival behind a fence": MBAR.replace("mbarrier.arrive.shared",
        f"{FENCE} mbarrier.arrive.relaxed.cta.shared"),
    "a relaxed wait before a fence": MBAR.replace("parity.shared", "parity.relaxed.cta.shared")
        .replace("@!%p3 bra TAKE;", f"@!%p3 bra TAKE; {FENCE}"),
    "the last to count, fences": last("fence.acq_rel.gpu;", "fence.acq_rel.gpu;"),
    "the last to count, acquired and released": last(
        then="bar.warp.sync -1;", atom="atom.acq_rel.gpu.global.add.u32"
    ),
    "lanes that have diverged, behind a sync": DIVERGED.replace("SYNC", "bar.warp.sync -1;"),
    "one lane hands over by an mbarrier": HANDED,
    "a load of constants of another tensor": f"{OTHER} ld.global.nc.u32 %r0, [%d0];"
    "st.global.u32 [%out_i], %r0;",
    "a barrier of the cluster": f"{OTHER} {WRITE} barrier.cluster.arrive.aligned;"
    f"barrier.cluster.wait.aligned; {READ}",
    "release and acquire": hand_over("st.release.gpu.global.u32", "ld.acquire.gpu.global.u32"),
    "release and acquire of the CTA": hand_over("st.release.cta.global.u32",
                                                "ld.acquire.cta.global.u32"),
    "fences and a relaxed flag": hand_over("st.relaxed.gpu.global.u32", "ld.relaxed.gpu.global.u32",
                                           "fence.acq_rel.gpu;", "fence.acq_rel.gpu;"),
    "membar and a volatile flag": hand_over("st.volatile.global.u32", "ld.volatile.global.u32",
                                            "membar.cta;", "membar.cta;"),
    "fences of the CTA": hand_over("st.relaxed.cta.global.u32", "ld.relaxed.cta.global.u32",
                                   "fence.acq_rel.cta;", "fence.acq_rel.cta;"),
    "a flag in shared memory": SMEM_FLAG,
    "the same value twice": f"{OTHER} mov.u32 %r3, 9; st.global.u32 [%x_i], %r3;"
    "st.global.u32 [%d0], %r3;",
    "its own word": f"{OTHER} {WRITE} ld.global.u32 %r0, [%x_i]; st.global.u32 [%out_i], %r0;",
    "reads only": f"{OTHER} {READ}",
    "atomics only": f"{OTHER} red.global.add.u32 [%d0], 1; red.global.add.u32 [%x_i], 1;",
    "atomics of the CTA only": f"{OTHER} red.cta.global.add.u32 [%d0], 1;"
    "red.cta.global.add.u32 [%x_i], 1;",
    "lanes behind a sync": f"{OTHER} {WRITE} bar.warp.sync -1; ld.global.u32 %r0, [%d1];"
    "st.global.u32 [%out_i], %r0;",
}  # fmt: skip


def run(text: str, **how) -> list[Finding]:
    arrays = {"x": np.zeros(2048, np.uint32), "out": np.zeros(128, np.uint32)}
    return simulate_ptx(text, arrays, Shape(block=128, smem=2048), **how).advisories


@pytest.mark.sweep(4)
@pytest.mark.parametrize("text", RACES.values(), ids=RACES)
def test_a_race_is_found(text):
    with pytest.raises(Hazards) as told:
        run(text)
    first = str(told.value.findings[0])
    assert first.startswith("race: ") and first.count("PTX line") >= 2
    assert "CTA (0,0,0) warp" in first and "[" in first


@pytest.mark.sweep(4)
@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_a_kernel_that_synchronises_is_clean(text):
    assert run(text) == []


@pytest.mark.sweep(2)
@pytest.mark.parametrize("order", ["eager", "starved", "random"])
@pytest.mark.parametrize("name", ["write, read", "read, write", "write, write"])
def test_races_do_not_depend_on_the_order(name, order):
    with pytest.raises(Hazards, match="race: "):
        run(RACES[name], order=order)


def test_lanes_that_have_diverged_race():
    text = f"{OTHER} @!%p1 bra ON; st.global.u32 [%x_i], 7; ON: and.b32 %r4, %i, 96;"
    text += "mad.wide.u32 %d2, %r4, 4, %x; ld.global.u32 %r0, [%d2]; st.global.u32 [%out_i], %r0;"
    with pytest.raises(Hazards, match=r"lane 1 of CTA .* reads x\[0\] .*its lane 0 wrote it"):
        run(text)
    run(text.replace("ON:", "ON: bar.warp.sync -1;"))


def test_lanes_that_have_diverged_and_write_differently_race():
    with pytest.raises(Hazards, match=r"lane 16 of CTA .* overwrites x\[0\] .*lane \d+ wrote it"):
        run(DIVERGED.replace("SYNC", ""))


def test_lanes_of_whole_instructions_are_an_advisory():
    """Hardware executes one after the other."""
    (only,) = run(f"{OTHER} {WRITE} ld.global.u32 %r0, [%d1]; st.global.u32 [%out_i], %r0;")
    assert only.rule == "race" and "no bar.warp.sync orders the two lanes" in only.message


# -- bulk stores -----------------------------------------------------------------------------------

BULK = """mov.u32 %r9, smem; shl.b32 %r8, %i, 2; add.u32 %r7, %r9, %r8; st.shared.u32 [%r7], 5;
    fence.proxy.async.shared::cta; bar.sync 0; setp.eq.u32 %p0, %i, 0; @!%p0 bra ON;
    cp.async.bulk.global.shared::cta.bulk_group [%x], [%r9], 512; cp.async.bulk.commit_group;
    cp.async.bulk.wait_group{}; ON: bar.sync 0;"""
AFTER = {
    "another reads": "ld.global.u32 %r0, [%x_i]; st.global.u32 [%out_i], %r0;",
    "another writes": "setp.ge.u32 %p1, %i, 32; @%p1 st.global.u32 [%x_i], 1;",
    "the thread itself writes": "@%p0 st.global.u32 [%x], 1;",
    "the thread itself reads": "@%p0 ld.global.u32 %r0, [%x]; @%p0 st.global.u32 [%out], %r0;",
    "an atomic": "setp.eq.u32 %p1, %i, 40; @%p1 red.global.add.u32 [%x+64], 1;",
}


@pytest.mark.parametrize("text", AFTER.values(), ids=AFTER)
def test_after_a_wait_for_the_reads_of_a_bulk_store_its_writes_are_not_done(text):
    with pytest.raises(Hazards) as told:
        run(BULK.format(".read 0") + text)
    first = str(told.value.findings[0])
    assert first.startswith("race: ") and "a bulk store of CTA (0,0,0) warp 0" in first


@pytest.mark.parametrize("text", AFTER.values(), ids=AFTER)
def test_after_a_wait_for_all_of_it_they_are(text):
    assert run(BULK.format(" 0") + text) == []


def test_a_bulk_store_of_what_another_has_read_is_found():
    text = "ld.global.u32 %r0, [%x_i]; st.global.u32 [%out_i], %r0;"
    alone = BULK.format(" 0").replace("fence.proxy", f"{text} fence.proxy")
    assert run(alone) == []  # the barrier before the store orders them
    late = BULK.format(" 0").replace("@!%p0 bra ON;", f"@%p0 bra GO; {text} bra ON; GO:")
    with pytest.raises(Hazards, match=r"race: .*a bulk store .*writes x\[.*has read|reads x\["):
        run(late)


def test_after_a_wait_for_the_reads_of_a_bulk_reduction_its_sums_are_not_done():
    text = BULK.replace("cp.async.bulk.global.shared::cta.bulk_group",
                        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32")  # fmt: skip
    run(text.format(" 0") + AFTER["another reads"])
    with pytest.raises(Hazards, match=r"race: .* reads x\[.*a bulk store of CTA \(0,0,0\) warp 0"):
        run(text.format(".read 0") + AFTER["another reads"])


TWICE = """mov.u32 %r9, smem; shl.b32 %r8, %i, 2; add.u32 %r7, %r9, %r8; st.shared.u32 [%r7], %i;
    fence.proxy.async.shared::cta; bar.sync 0; setp.eq.u32 %p0, %i, 0; @!%p0 bra ON;
    cp.async.bulk.global.shared::cta.bulk_group [%x], [%r9], 16; BETWEEN add.u32 %r9, %r9, STEP;
    cp.async.bulk.global.shared::cta.bulk_group [%x], [%r9], 16; cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0; ON:"""
WAITS = "cp.async.bulk.commit_group; cp.async.bulk.wait_group{} 0;"


def test_two_bulk_stores_of_a_thread_to_one_place_have_no_order():
    text = TWICE.replace("STEP", "16")
    for between in ("", "cp.async.bulk.commit_group;", WAITS.format(".read")):
        with pytest.raises(Hazards, match=r"race: a bulk store of .* writes x\[0\]"):
            run(text.replace("BETWEEN", between))
    assert run(text.replace("BETWEEN", WAITS.format(""))) == []
    assert run(TWICE.replace("STEP", "0").replace("BETWEEN", "")) == []  # the same bytes


# -- clusters --------------------------------------------------------------------------------------

PAIR = """mad.wide.u32 %d0, %cta, 4, %x; st.global.u32 [%d0], 8; SYNC xor.b32 %r1, %cta, 1;
    mad.wide.u32 %d1, %r1, 4, %x; ld.global.u32 %r0, [%d1]; st.global.u32 [%out_i], %r0;"""


@pytest.mark.parametrize(("sync", "right"), [
    ("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;", True),
    ("bar.sync 0;", False),
    ("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;", False),
], ids=["a barrier of the cluster", "of the CTA", "a relaxed one"])  # fmt: skip
def test_two_ctas_of_a_cluster(sync, right):
    arrays = {"x": np.zeros(64, np.uint32), "out": np.zeros(64, np.uint32)}
    shape, text = Shape(grid=2, block=32, cluster=2), PAIR.replace("SYNC", sync)
    if right:
        assert (each_order(text, arrays, shape) == 8).all()
    else:
        with pytest.raises(Hazards, match=r"race: .*rank 1 .*: no barrier orders the two"):
            simulate_ptx(text, arrays, shape)


FLAG = """setp.ne.u32 %p0, %lane, 0; @%p0 ret; setp.eq.u32 %p1, %cta, 0; @!%p1 bra READ;
    st.global.u32 [%x], 8; st.release.GIVES.global.u32 [%x+128], 1; ret;
    READ: ld.acquire.TAKES.global.u32 %r0, [%x+128]; setp.eq.u32 %p2, %r0, 0; @%p2 bra READ;
    ld.global.u32 %r1, [%x]; st.global.u32 [%out], %r1;"""
FENCED = FLAG.replace("st.release.GIVES", "fence.acq_rel.GIVES; st.relaxed.gpu").replace(
    "ld.acquire.TAKES.global.u32 %r0, [%x+128];",
    "ld.relaxed.gpu.global.u32 %r0, [%x+128]; fence.acq_rel.TAKES;",
)


@pytest.mark.parametrize("text", [FLAG, FENCED], ids=["accesses", "fences"])
@pytest.mark.parametrize(("gives", "takes"), [("cluster", "gpu"), ("cta", "gpu"), ("gpu", "cta")])
def test_a_flag_between_two_ctas_has_the_scope_of_both(text, gives, takes):
    arrays = {"x": np.zeros(64, np.uint32), "out": np.zeros(1, np.uint32)}
    shape = Shape(grid=2, block=32, cluster=2)
    text = text.replace("GIVES", gives).replace("TAKES", takes)
    if "cta" not in (gives, takes):
        assert (each_order(text, arrays, shape) == 8).all()
        return
    with pytest.raises(Hazards, match=r"race: CTA \(1,0,0\) .* reads x\[0\].*no barrier orders"):
        simulate_ptx(text, arrays, shape)


COPIED = f"""{OTHER} .reg .b32 bar; mov.u32 bar, smem; setp.eq.u32 %p2, %i, 0;
    @%p2 mbarrier.init.shared.b64 [bar], 1; {WRITE} FENCE bar.sync 0;
    @%p2 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 512; add.u32 %r9, bar, 512;
    @%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%x], 512, [bar];
    W: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra W;"""


@pytest.mark.parametrize("fence", ["", "fence.acq_rel.gpu;"])
def test_a_copy_of_what_ordinary_stores_wrote_takes_a_fence_of_proxies(fence):
    with pytest.raises(Hazards) as caught:
        run(COPIED.replace("FENCE", fence))
    assert [f.rule for f in caught.value.findings] == ["proxy"]
    assert not run(COPIED.replace("FENCE", "fence.proxy.async;"))
    assert not run(COPIED.replace("FENCE", "fence.proxy.async.global;"))
