"""Memory of mbarriers that something else is written to."""

from __future__ import annotations

import pytest
from barriers import copy, init, rows, wait
from ptx_kernel import Shape, simulate_ptx

from cutex.sim.errors import Hazards

ARRIVE = "@%p0 mbarrier.arrive.shared.b64 _, [bar];"
BYTES = "@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 16;"
FIRST = f"{init(1)} {ARRIVE} {wait('bar', 0, 'W0')} bar.sync 0;"
AGAIN = f"{ARRIVE} {wait('bar', 1, 'W1')}"
OVER = "@%p0 st.shared.u32 [bar+4], 7; bar.sync 0;"
INVAL = "@%p0 mbarrier.inval.shared.b64 [bar]; bar.sync 0;"

WRONG = {
    "a store, then an arrival": f"{FIRST} {OVER} {AGAIN}",
    "a wide store of the word before": f"""{init(1).replace("smem;", "smem; add.u32 bar, bar, 8;")}
        {ARRIVE} @%p0 st.shared.v4.u32 [bar+-8], {{%i, %i, %i, %i}}; {wait("bar", 0, "W0")}""",
    "a bulk load, then a wait": f"""{init(1)} {BYTES} @%p0 {copy("bar", "%x", 16)}
        {wait("bar", 0, "W0")}""",
    "another warp's": f"""{FIRST} setp.eq.u32 %p2, %i, 40; @%p2 st.shared.u8 [bar+3], 1; bar.sync 0;
        {AGAIN}""",
}
WRONG |= {
    "a cp.async, then an arrival": f"""{FIRST} @%p0 cp.async.ca.shared.global [bar], [%x], 8;
        cp.async.wait_all; bar.sync 0; {AGAIN}""",
}
ZERO = "@%p0 st.shared.v4.u32 [bar+-16], {0, 0, 0, 0}; @%p0 st.shared.u64 [bar+8], 0;"
READS = {
    "a load": f"{FIRST} ld.shared.u32 %r1, [bar+4]; {AGAIN}",
    "a load of many bytes, as the last": f"{FIRST} ld.shared.v4.u32 {{%r1, %r2, %r3, %r4}}, [bar];",
    "a volatile load of a generic address": f"""{FIRST} cvta.shared.u64 %d1, smem;
        ld.volatile.u64 %d2, [%d1];""",
    "an atomic": f"{FIRST} @%p0 atom.shared.add.u32 %r1, [bar], 0;",
    "a bulk store": f"""{init(1).replace("smem;", "smem; add.u32 bar, bar, 16;")} {ZERO} {ARRIVE}
        fence.proxy.async.shared::cta; add.u32 %r9, bar, -16;
        @%p0 cp.async.bulk.global.shared::cta.bulk_group [%x], [%r9], 32;
        @%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;""",
}
RIGHT = {
    "a load beside it": f"{FIRST} @%p0 ld.shared.u32 %r1, [bar+8]; {AGAIN}",
    "a load of what was stored after its last use": f"{FIRST} {OVER} ld.shared.u32 %r1, [bar+4];",
    "a load behind inval": f"{FIRST} {INVAL} ld.shared.u32 %r1, [bar];",
    "beside it": f"{init(1)} @%p0 st.shared.u32 [bar+8], 7; {ARRIVE} {wait('bar', 0, 'W0')}",
    "not used any more": f"{FIRST} {OVER}",
    "inval before": f"{FIRST} {INVAL} {OVER}",
    "a new one afterwards": f"""{FIRST} {INVAL} {OVER} @%p0 mbarrier.init.shared.b64 [bar], 1;
        bar.sync 0; {ARRIVE} {wait("bar", 0, "W1")}""",
    "a bulk load beside it": f"""{init(1)} add.u32 %r9, bar, 16; {BYTES}
        @%p0 {copy("%r9", "%x", 16)} {wait("bar", 0, "W0")}""",
}


def run(text: str) -> None:
    simulate_ptx(text, {"x": rows(2, 32)}, Shape(block=64, smem=64))


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_a_write_to_an_mbarrier_that_is_used_again_is_found(text):
    with pytest.raises(Hazards) as told:
        run(text)
    first = str(told.value.findings[0])
    assert first.startswith("barrier misuse: ") and "writes to the memory of mbarrier 0x4" in first
    assert first.count("PTX line") >= 3


@pytest.mark.parametrize("text", READS.values(), ids=READS)
def test_a_read_of_an_mbarrier_is_found(text):
    with pytest.raises(Hazards) as told:
        run(text)
    found = [str(f) for f in told.value.findings if f.rule == "barrier misuse"]
    assert "reads the memory of mbarrier 0x4" in found[0] and "opaque" in found[0]


@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_other_writes_are_clean(text):
    run(text)


@pytest.mark.parametrize("order", ["fifo", "starved"])
def test_an_mbarrier_is_invalidated_behind_the_waits_of_others(order):
    gone = "setp.eq.u32 %p5, %i, 32; @%p5 mbarrier.inval.shared.b64 [bar];"
    text = f"{init(1)} {ARRIVE} {wait('bar', 0, 'W0')}"
    simulate_ptx(f"{text} bar.sync 0; {gone}", {}, Shape(block=64, smem=64), order=order)
    with pytest.raises(Hazards, match=r"race: .* warp 1 invalidates mbarrier 0x400 .*, which CTA"):
        simulate_ptx(f"{text} {gone}", {}, Shape(block=64, smem=64), order=order)
