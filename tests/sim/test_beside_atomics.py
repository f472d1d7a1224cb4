"""Ordinary accesses beside atomics and flags, with a barrier between them or without one."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernel import Shape, simulate_ptx
from tensor_maps import aligned

from cutex.sim.errors import Hazards, SimError
from cutex.sim.finding import Finding

# In shared memory: the thread's own word %r7, and %r8, that of a thread of another warp.
WORDS = """mov.u32 %r9, smem; shl.b32 %r7, %i, 2; add.u32 %r7, %r9, %r7; xor.b32 %r8, %i, 64;
    shl.b32 %r8, %r8, 2; add.u32 %r8, %r9, %r8; setp.eq.u32 %p0, %i, 0;"""
ZERO, COUNT = "st.shared.u32 [%r7], 0;", "red.shared.add.u32 [%r8], 1;"
READ = "ld.shared.u32 %r1, [%r7]; st.global.u32 [%out_i], %r1;"
COPY = "cp.async.bulk.global.shared::cta.bulk_group [%x], [%r9], 512;"
COPY = f"@%p0 {COPY} @%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;"
FENCE = "fence.proxy.async.shared::cta;"
TRY = """setp.ne.u32 %p2, %lane, 0; @%p2 bra OFF; T: add.u32 %r3, %r2, 3;
    atom{space}.cas.b32 %r4, [{at}], %r2, %r3; setp.ne.u32 %p1, %r4, %r2; mov.u32 %r2, %r4;
    @%p1 bra T; OFF: bar.sync 0;"""

RACES = {
    "counted up before the zero": f"{WORDS} {ZERO} {COUNT} bar.sync 0; {READ}",
    "counted up after the read": f"{WORDS} {ZERO} bar.sync 0; {READ} {COUNT}",
    "read before the count": f"{WORDS} {ZERO} bar.sync 0; {COUNT} {READ}",
    "zero again": f"{WORDS} {ZERO} bar.sync 0; {COUNT} {ZERO} bar.sync 0; {READ}",
    "read behind a barrier of half": f"""{WORDS} {ZERO} bar.sync 0; {COUNT} shr.u32 %r5, %i, 6;
        add.u32 %r5, %r5, 1; bar.sync %r5, 64; {READ}""",
    "stored by TMA, no barrier": f"{WORDS} {ZERO} bar.sync 0; {COUNT} {FENCE} {COPY}",
    "stored by TMA, no fence": f"{WORDS} {ZERO} {FENCE} bar.sync 0; {COUNT} bar.sync 0; {COPY}",
    "of global memory, read": "red.global.add.u32 [%x], 1; ld.global.u32 %r1, [%x];"
    "st.global.u32 [%out_i], %r1;",
}
RIGHT = {
    "barriers": f"{WORDS} {ZERO} bar.sync 0; {COUNT} bar.sync 0; {READ} bar.sync 0; {ZERO}",
    "counts only": f"{WORDS} {ZERO} bar.sync 0; {COUNT} red.shared.add.u32 [%r7], 1;",
    "of one warp": f"""{WORDS} {ZERO} bar.warp.sync -1; red.shared.add.u32 [%r7], 1;
        bar.warp.sync -1; {READ}""",
    "stored by TMA": f"{WORDS} {ZERO} bar.sync 0; {COUNT} {FENCE} bar.sync 0; {COPY}",
}
ASKED = {  # loads that an atomic on the same place follows, which reads it again
    "compare and swap": f"""{WORDS} {ZERO} bar.sync 0; ld.shared.u32 %r2, [%r9];
        {TRY.format(space=".shared", at="%r9")} {READ}""",
    "compare and swap, global": f"ld.global.u32 %r2, [%x]; {TRY.format(space='', at='%x')}",
    "a maximum": """ld.global.u32 %r2, [%x]; setp.gt.u32 %p1, %i, %r2;
        @%p1 red.global.max.u32 [%x], %i;""",
}


def run(text: str, **shape: int) -> list[Finding]:
    arrays = {"x": aligned(np.zeros(256, np.uint32)), "out": np.zeros(512, np.uint32)}
    return simulate_ptx(text, arrays, Shape(block=128, smem=1024, **shape)).advisories


@pytest.mark.parametrize("text", RACES.values(), ids=RACES)
def test_an_ordinary_access_beside_an_atomic_is_found(text):
    with pytest.raises(Hazards) as told:
        run(text)
    first = str(told.value.findings[0])
    assert first.startswith(("race: ", "proxy: ")) and first.count("PTX line") >= 2
    assert ("by an atomic" in first) or ("atomics" in first) or ("was changed at" in first)


@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_behind_barriers_it_is_clean(text):
    assert run(text) == []


@pytest.mark.parametrize("text", ASKED.values(), ids=ASKED)
def test_a_load_that_an_atomic_follows_is_an_advisory(text):
    assert "race" in {finding.rule for finding in run(text)}


@pytest.mark.parametrize(("store", "load"), [("volatile", "weak"), ("weak", "volatile")])
def test_a_volatile_access_beside_an_ordinary_one(store, load):
    """A load that waits for it without an order may get either; a store before it is no race."""
    text = f"{WORDS} @%p0 st.{store}.shared.u32 [%r9], 1; ld.{load}.shared.u32 %r1, [%r9];"
    if load == "weak":
        with pytest.raises(Hazards, match=r"race: .* reads shared memory .* wrote at PTX line"):
            run(text)
    else:
        assert {finding.rule for finding in run(text)} == {"race"}


# -- the last of several CTAs ----------------------------------------------------------------------

LAST = """mov.u32 %r9, smem; add.u64 %d5, %x, 512; st.global.u32 [%out_i], %i; BEFORE bar.sync 0;
    setp.eq.u32 %p0, %tid, 0; FIRST @%p0 atom.global.add.u32 %r1, [%d5], 1;
    @%p0 st.shared.u32 [%r9], %r1; THEN bar.sync 0; ld.shared.u32 %r1, [%r9];
    setp.ne.u32 %p1, %r1, 3; @%p1 bra END; AFTER mad.wide.u32 %d1, %tid, 4, %out;
    ld.global.u32 %r2, [%d1]; ld.global.u32 %r3, [%d1+512]; add.u32 %r2, %r2, %r3;
    mad.wide.u32 %d2, %tid, 4, %x; st.global.u32 [%d2], %r2; END:""".replace("%tid", "%r20")
LAST = f"mov.u32 %r20, %tid.x; {LAST}"
GPU = "fence.acq_rel.gpu;"


def last(**fences: str) -> str:
    text = LAST
    for place in ("BEFORE", "FIRST", "THEN", "AFTER"):
        text = text.replace(place, fences.get(place.lower(), ""))
    return text


def test_fences_of_the_thread_that_counts_order_the_ctas():
    assert run(last(first=f"@%p0 {GPU}", then=f"@%p0 {GPU}"), grid=4) == []


def test_fences_of_all_threads_before_the_barrier_break_the_letter_only():
    """As in PyTorch's reductions over several CTAs."""
    (only,) = {a.message for a in run(last(before=GPU, after=GPU), grid=4)}
    assert "no fence of its own" in only


@pytest.mark.parametrize("fences", [{}, {"before": GPU}, {"after": GPU}, {"first": f"@%p0 {GPU}"}])
def test_less_is_a_race(fences):
    with pytest.raises(Hazards, match=r"race: CTA .* reads out\[.*nothing orders the two"):
        run(last(**fences), grid=4)


@pytest.mark.parametrize(
    "op", ["red.shared.add.u32 [%r7], 1;", "atom.shared.max.u32 %r1, [%r7], 1;"]
)
def test_an_atomic_on_what_nothing_has_written_is_found(op):
    run(f"{WORDS} {ZERO} bar.sync 0; {op}")
    with pytest.raises(Hazards, match=r"uninitialised: .* lane 0 changes shared memory 0x400 by"):
        run(f"{WORDS} {op}")


# -- bulk stores in no group -----------------------------------------------------------------------


@pytest.mark.parametrize("after", ["", "bar.sync 0; st.shared.u32 [%r7], 5;"])
def test_a_bulk_store_that_nobody_commits_is_named(after):
    copy = COPY.replace("@%p0 cp.async.bulk.commit_group;", "")
    with pytest.raises(SimError) as told:
        run(f"{WORDS} {ZERO} {FENCE} bar.sync 0; {copy} {after}")
    head = str(told.value).split("\n")[1]
    assert "no cp.async.bulk.commit_group of its thread has come since" in head
