"""Lanes of one store that write different values to one place."""

from __future__ import annotations

import re

import numpy as np
import pytest
from ptx_kernel import Shape, simulate_ptx

from cutex.sim.errors import Hazards

CLASH = {
    "global": "st.global.u32 [%out], %lane;",
    "generic": "cvta.global.u64 %d0, %out; st.u32 [%d0], %lane;",
    "two lanes": "shr.u32 %r1, %lane, 1; mad.wide.u32 %d0, %r1, 4, %out;"
    "st.global.u32 [%d0], %lane;",
    "half a vector": "mov.u32 %r1, 5; st.global.v2.u32 [%out], {%r1, %lane};",
    "two bytes": "cvt.u16.u32 %h0, %lane; st.global.u8 [%out], %h0;",
    "shared": "mov.u32 %r0, smem; st.shared.u32 [%r0], %lane;",
    "matrix rows": "mov.u32 %r0, smem; stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r0], {%lane};",
    "in other order": "xor.b32 %r1, %lane, 21; and.b32 %r1, %r1, 15;"
    "mad.wide.u32 %d0, %r1, 4, %out; st.global.u32 [%d0], %lane;",
}
FINE = {
    "one value": "mov.u32 %r1, 7; st.global.u32 [%out], %r1;",
    "each its own": "st.global.u32 [%out_i], %lane;",
    "reversed": "xor.b32 %r1, %i, 31; mad.wide.u32 %d0, %r1, 4, %out; st.global.u32 [%d0], %lane;",
    "atomic": "red.global.add.u32 [%out], %lane;",
    "one lane": "setp.eq.u32 %p0, %lane, 3; @%p0 st.global.u32 [%out], %lane;",
    "shared, one value": "mov.u32 %r0, smem; st.shared.u32 [%r0], 9;",
    "pairs of the same": "shr.u32 %r1, %lane, 1; mad.wide.u32 %d0, %r1, 4, %out;"
    "st.global.u32 [%d0], %r1;",
}


def store(text: str) -> None:
    simulate_ptx(text, {"out": np.zeros(64, np.uint32)}, Shape(smem=1024))


@pytest.mark.parametrize("text", CLASH.values(), ids=CLASH)
def test_different_values_at_one_place_are_found(text):
    with pytest.raises(Hazards) as told:
        store(text)
    first = str(told.value.findings[0])
    assert re.search(
        r"^race: lanes \d+ and \d+ of CTA \(0,0,0\) warp 0 store different values to", first
    )
    assert "PTX line" in first


@pytest.mark.parametrize("text", FINE.values(), ids=FINE)
def test_the_same_value_or_other_places_are_not(text):
    store(text)
