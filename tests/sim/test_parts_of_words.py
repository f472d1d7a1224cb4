"""Warps that share a word of shared memory, each a part of it."""

from __future__ import annotations

import numpy as np
import pytest
from barriers import copy, init, wait
from ptx_kernel import Shape, simulate_ptx
from tensor_maps import aligned

from cutex.sim.errors import Hazards

# warp w of four has byte w of each of 32 words, of two has half w: %r7 is its own place
BYTE = """mov.u32 %r9, smem; and.b32 %r7, %i, 31; shl.b32 %r7, %r7, 2; shr.u32 %r5, %i, 5;
    add.u32 %r7, %r7, %r9; mov.u32 %r8, %r7; add.u32 %r7, %r7, %r5; mov.u16 %h0, 7;"""
HALF = BYTE.replace("add.u32 %r7, %r7, %r5;", "shl.b32 %r6, %r5, 1; add.u32 %r7, %r7, %r6;")
ZERO = "setp.lt.u32 %p0, %i, 32; mov.u32 %r1, 0; @%p0 st.shared.u32 [%r8], %r1; bar.sync 0;"
OUT = "cvt.u32.u16 %r2, %h0; st.global.u32 [%out_i], %r2;"
READ, WRITE = "ld.shared.{0} %h0, [%r7];", "st.shared.{0} [%r7], %h0;"
KINDS = {"bytes": (BYTE, "u8", 4), "halves": (HALF, "u16", 2)}


def run(text: str, warps: int) -> list:
    arrays = {"out": np.zeros(32 * warps, np.uint32)}
    return simulate_ptx(text, arrays, Shape(block=32 * warps, smem=256)).advisories


@pytest.mark.parametrize("own, width, warps", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("turns", [1, 2])
def test_each_reads_and_writes_its_own(own, width, warps, turns):
    text = (READ + WRITE).format(width) * turns
    assert run(f"{own} {ZERO} {text} {OUT}", warps) == []


# the place of the warp behind, or of the first for the last
NEXT = "add.u32 %r6, %r5, 1; and.b32 %r6, %r6, {mask}; {shift} add.u32 %r7, %r8, %r6;"


@pytest.mark.parametrize("own, width, warps", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("first", [READ, WRITE], ids=["read", "written"])
@pytest.mark.parametrize("second", [READ, WRITE], ids=["then read", "then written"])
def test_anothers_part_is_a_race(own, width, warps, first, second):
    shift = "" if warps == 4 else "shl.b32 %r6, %r6, 1;"
    then = NEXT.format(mask=warps - 1, shift=shift)
    text = f"{own} {ZERO} {first} {then} {second} {OUT}".format(width)
    if first is second is READ:
        assert run(text, warps) == []
        return
    with pytest.raises(Hazards, match="no barrier orders the two"):
        run(text, warps)


def test_a_part_that_was_written_before_the_other_one_is_not_forgotten():
    """Half 0 by warp 0, half 1 by warp 1, which alone meets the reader."""
    wait = "setp.eq.u32 %p1, %r5, 0; @%p1 bra END; bar.sync 1, 64;"
    read = "setp.ne.u32 %p2, %r5, 2; @%p2 bra END; ld.shared.u32 %r3, [%r8]; END: " + OUT
    write = "setp.eq.u32 %p3, %r5, 2; @!%p3 st.shared.u16 [%r7], %h0;"
    text = f"{HALF} {ZERO} {write} {wait} {read}"
    with pytest.raises(Hazards, match=r"warp 0 (has written|wrote)"):
        run(text, 3)
    both = text.replace("@%p1 bra END; bar.sync 1, 64;", "bar.sync 1, 96;")
    assert run(both, 3) == []


@pytest.mark.parametrize("half, value", [(0, 0x7FFF), (1, 0xFFFF)])
def test_a_nan_beside_a_half_that_nothing_has_written_is_a_value(half, value):
    """The word is then the one that stands for what nothing has written."""
    text = f"""mov.u32 %r9, smem; mad.lo.u32 %r7, %i, 4, %r9; mov.b16 %h0, {value};
        st.shared.b16 [%r7+{2 * half}], %h0;
        ld.shared.u32 %r1, [%r7]; mov.b32 {{%h1, %h2}}, %r1;
        cvt.u32.u16 %r2, %h{half + 1}; st.global.u32 [%out_i], %r2;"""
    out = np.zeros(32, np.uint32)
    assert simulate_ptx(text, {"out": out}, Shape(smem=256)).advisories == []
    assert (out == value).all()
    with pytest.raises(Hazards, match=r"uninitialised: .* stores into global memory a value"):
        simulate_ptx(text.replace("st.shared.b16", "//"), {"out": out}, Shape(smem=256))


@pytest.mark.parametrize("store", [
    "mov.u32 %r2, {word}; st.shared.u32 [%r7], %r2;",
    "mov.b16 %h0, {low}; mov.b16 %h1, {high}; st.shared.v2.b16 [%r7], {{%h0, %h1}};",
    "mov.u32 %r2, {word}; st.global.u32 [%out_i], %r2; bar.warp.sync -1;"
    "cp.async.ca.shared.global [%r7], [%out_i], 4; cp.async.wait_all;",
])  # fmt: skip
def test_two_nans_are_a_value(store):
    store = store.format(word=0xFFFF7FFF, low=0x7FFF, high=0xFFFF)
    text = f"""mov.u32 %r9, smem; mad.lo.u32 %r7, %i, 4, %r9; {store}
        ld.shared.u32 %r1, [%r7]; st.global.u32 [%out_i], %r1;"""
    out = np.zeros(32, np.uint32)
    assert simulate_ptx(text, {"out": out}, Shape(smem=256)).advisories == []
    assert (out == 0xFFFF7FFF).all()


def test_what_nothing_has_written_is_so_where_it_is_stored_again():
    text = """mov.u32 %r9, smem; mad.lo.u32 %r7, %i, 4, %r9; ld.shared.u32 %r1, [%r7];
        st.shared.u32 [%r7+128], %r1; ld.shared.u32 %r2, [%r7+128]; st.global.u32 [%out_i], %r2;"""
    with pytest.raises(Hazards, match=r"uninitialised: .* stores into global memory a value"):
        simulate_ptx(text, {"out": np.zeros(32, np.uint32)}, Shape(smem=256))


ELEMENT = """mov.u32 %r9, smem; mad.lo.u32 %r7, %i, {size}, %r9; mov.u16 %h1, {value}; HERE
    ld.shared.u{bits} %h2, [%r7]; cvt.u32.u16 %r2, %h2; st.global.u32 [%out_i], %r2;"""


@pytest.mark.parametrize(("bits", "value"), [(16, 5), (16, 0x7FFF), (8, 0xFF), (8, 0x7F)])
def test_the_last_element_of_a_row(bits, value):
    """Beside others that are written; NaNs look like what nothing has written."""
    store = f"st.shared.u{bits} [%r7], %h1;"
    text, out = ELEMENT.format(size=bits // 8, value=value, bits=bits), np.zeros(32, np.uint32)
    assert not simulate_ptx(text.replace("HERE", store), {"out": out}, Shape(smem=256)).advisories
    assert (out == value).all()
    fault = text.replace("HERE", f"setp.ne.u32 %p0, %i, 31; @%p0 {store}")
    with pytest.raises(Hazards, match=r"lane 31 stores into global memory a value that comes from"):
        simulate_ptx(fault, {"out": out}, Shape(smem=256))


def test_nans_that_a_bulk_copy_brings_are_values():
    text = f"""{init(1)} mad.lo.u32 %r3, %i, 4, bar; mov.u32 %r5, 0xffff7fff;
        st.global.u32 [%x_i], %r5; fence.proxy.async.global; bar.sync 0;
        @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128; @%p0 {copy("bar+128", "%x", 128)}
        {wait("bar", 0, "W")} ld.shared.u16 %h2, [%r3+128]; st.global.u16 [%out_i], %h2;"""
    arrays = {"x": aligned(np.zeros(32, np.uint32)), "out": np.zeros(32, np.uint32)}
    assert simulate_ptx(text, arrays, Shape(smem=256)).advisories == []
    assert (arrays["out"] == 0x7FFF).all()


@pytest.mark.parametrize(("other", "told"), [(0, False), (1, True)])
def test_a_lane_reads_the_half_that_it_has_stored_itself(other, told):
    text = f"""mov.u32 %r9, smem; mad.lo.u32 %r7, %i, 2, %r9; xor.b32 %r5, %i, {other};
        mad.lo.u32 %r8, %r5, 2, %r9; mov.u16 %h1, 5; st.shared.u16 [%r7], %h1;
        ld.shared.u16 %h2, [%r8]; cvt.u32.u16 %r2, %h2; st.global.u32 [%out_i], %r2;"""
    found = simulate_ptx(text, {"out": np.zeros(32, np.uint32)}, Shape(smem=256)).advisories
    assert ["bar.warp.sync is missing" in str(f) for f in found] == [True] * told
