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


@pytest.mark.sweep(2)
@pytest.mark.parametrize("text", CLASH.values(), ids=CLASH)
def test_different_values_at_one_place_are_found(text):
    with pytest.raises(Hazards) as told:
        store(text)
    first = str(told.value.findings[0])
    assert re.search(
        r"^race: lanes \d+ and \d+ of CTA \(0,0,0\) warp 0 store different values to", first
    )
    assert "PTX line" in first


def test_lanes_that_copy_from_different_places_to_one_are_found():
    x = {"x": np.arange(32, dtype=np.uint32)}
    copy = "mov.u32 %r0, smem; cp.async.ca.shared.global [%r0], [{}], 4; cp.async.wait_all;"
    with pytest.raises(Hazards, match=r"^(.|\n)*race: lanes \d+ and \d+ .* different values to"):
        simulate_ptx(copy.format("%x_i"), x, Shape(smem=64))
    simulate_ptx(copy.format("%x"), x, Shape(smem=64))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("text", FINE.values(), ids=FINE)
def test_the_same_value_or_other_places_are_not(text):
    store(text)


WARPS = {
    "global": "mov.u32 %r1, %tid.x; shr.u32 %r1, %r1, 5; st.global.u32 [%out], %r1;",
    "shared": "mov.u32 %r1, %tid.x; shr.u32 %r1, %r1, 5; mov.u32 %r0, smem; st.shared.u32 [%r0],"
    "%r1;",
    "one lane each": "mov.u32 %r1, %tid.x; shr.u32 %r1, %r1, 5; setp.eq.u32 %p0, %lane, 4;"
    "@%p0 st.global.u32 [%out+8], %r1;",
    "across": "xor.b32 %r1, %lane, 31; mad.wide.u32 %d0, %r1, 4, %out; st.global.u32 [%d0], %i;",
}


@pytest.mark.parametrize("text", WARPS.values(), ids=WARPS)
def test_warps_that_store_side_by_side_are_found(text):
    with pytest.raises(Hazards) as told:
        simulate_ptx(text, {"out": np.zeros(64, np.uint32)}, Shape(block=96, smem=1024))
    first = str(told.value.findings[0])
    assert re.search(r"^race: CTA .* warp \d and CTA .* warp \d store different values", first)


@pytest.mark.parametrize("text", [
    "st.global.u32 [%out], 7;", "mov.u32 %r0, smem; st.shared.u32 [%r0], 7;",
    "st.relaxed.gpu.global.u32 [%out], 7;",
    "mov.u32 %r1, %tid.x; shr.u32 %r1, %r1, 5; setp.eq.u32 %p0, %lane, 4;"
    "@%p0 st.relaxed.gpu.global.u32 [%out+8], %r1;",
], ids=["global", "shared", "strong", "strong, of different values"])  # fmt: skip
def test_warps_that_store_the_same_or_strongly_are_not(text):
    simulate_ptx(text, {"out": np.zeros(64, np.uint32)}, Shape(block=96, smem=1024))


def test_clusters_that_store_side_by_side_are_a_race_of_clusters():
    with pytest.raises(Hazards, match="writes out"):
        simulate_ptx("st.global.u32 [%out], %cta;", {"out": np.zeros(64, np.uint32)}, Shape(grid=3))
