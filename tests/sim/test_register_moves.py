"""The rules of setmaxnreg: all warps of a warpgroup, the same count, synchronised between two."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernel import Shape, simulate_ptx

from cutex.sim.errors import Hazards

DEC, INC = "setmaxnreg.dec.sync.aligned.u32", "setmaxnreg.inc.sync.aligned.u32"
WARP = "mov.u32 %r0, %tid.x; shr.u32 %r0, %r0, 5;"

WRONG = {
    "one warp without": f"{WARP} setp.eq.u32 %p0, %r0, 2; @%p0 bra END; {DEC} 40; END:",
    "only one warp": f"{WARP} setp.ne.u32 %p0, %r0, 1; @%p0 bra END; {DEC} 40; END:",
    "another count": f"{WARP} setp.eq.u32 %p0, %r0, 3; @%p0 bra B; {DEC} 40; bra END; B: {DEC} 48;"
    "END:",
    "nothing between two": f"{DEC} 40; {INC} 80;",
    "a barrier of others between": f"{DEC} 40; {WARP} setp.lt.u32 %p0, %r0, 2; @!%p0 bra ON;"
    f"bar.sync 1, 64; ON: {INC} 80;",
    "an increase to fewer": f"{DEC} 40; bar.sync 0; {INC} 32;",
    "a decrease to more": f"{DEC} 40; bar.sync 0; {DEC} 48;",
    "the barrier before both": f"bar.sync 0; {DEC} 40; {DEC} 32;",
}
RIGHT = {
    "once": f"{DEC} 40;",
    "as many again": f"{DEC} 40; bar.sync 0; {INC} 40; bar.sync 0; {DEC} 40;",
    "a barrier between two": f"{DEC} 40; bar.sync 0; {INC} 80;",
    "another count in another warpgroup": f"{WARP} setp.lt.u32 %p0, %r0, 4; @%p0 bra A; {INC} 200;"
    f"bra END; A: {DEC} 40; END:",
    "an mbarrier between two": f"""{DEC} 40; .reg .b32 bar; mov.u32 bar, smem;
    setp.eq.u32 %p0, %i, 0; @%p0 mbarrier.init.shared.b64 [bar], 256; bar.sync 0; {DEC} 32;
    mbarrier.arrive.shared.b64 _, [bar];
    W: mbarrier.try_wait.parity.shared.b64 %p1, [bar], 0; @!%p1 bra W; {INC} 40;""",
}


def run(text: str) -> None:
    simulate_ptx(text, {"out": np.zeros(256, np.uint32)}, Shape(block=256, smem=64))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_a_broken_rule_is_found(text):
    with pytest.raises(Hazards) as told:
        run(text)
    first = str(told.value.findings[0])
    assert first.startswith("setmaxnreg: CTA (0,0,0) warp") and "PTX line" in first


@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_a_kernel_that_keeps_them_is_clean(text):
    run(text)
