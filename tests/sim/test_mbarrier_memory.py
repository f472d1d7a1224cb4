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
RIGHT = {
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
