"""Matrix fragments (ldmatrix, stmatrix, movmatrix), against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernel import Shape, simulate_ptx

from cutex.sim import BarrierMisuse, UnknownInstruction

ADDRESS = """
.reg .b32 base, here; mov.u32 base, smem; mad.lo.u32 here, %lane, 48, base;
"""


@pytest.mark.sweep(2)
@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_gives_each_lane_two_neighbours_of_a_row(execute, count, trans):
    """Rows 48 bytes apart: matrix i is rows 8 i .. 8 i + 7."""
    a = np.arange(32 * 8, dtype=np.uint16).reshape(32, 8)
    out = np.zeros((32, count), np.uint32)
    names = ", ".join(f"%r{4 + i}" for i in range(count))
    stores = " ".join(f"st.global.b32 [%out_i+{4 * i}], %r{4 + i};" for i in range(count))
    body = f"""{ADDRESS}
    ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [%a_i];
    st.shared.v4.b32 [here], {{%r0, %r1, %r2, %r3}};
    bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{names}}}, [here];
    {stores}"""
    execute(body, {"a": a, "out": out}, Shape(smem=32 * 48))
    for i in range(count):
        matrix = a[8 * i : 8 * i + 8]
        matrix = matrix.T if trans else matrix
        for t in range(32):
            low, high = matrix[t // 4, 2 * (t % 4)], matrix[t // 4, 2 * (t % 4) + 1]
            assert out[t, i] == int(high) << 16 | int(low)


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("op", ["ldmatrix", "stmatrix"])
def test_the_number_of_matrices_may_stand_before_their_shape(op, trans):
    """As in the inline PTX of CUTLASS and of those who took it from there."""
    registers, results = "{%r4, %r5}", []
    for form in (f"m8n8.x2{trans}", f"x2{trans}.m8n8"):
        of = {"ldmatrix": f"ldmatrix.sync.aligned.m8n8.x2.shared.b16 {registers}, [here];"}
        of["stmatrix"] = "stmatrix.sync.aligned.m8n8.x2.shared.b16 [here], {%r0, %r1};"
        of[op] = of[op].replace("m8n8.x2", form)
        out = np.zeros((32, 2), np.uint32)
        body = f"""{ADDRESS} mul.lo.u32 %r0, %lane, 77773; not.b32 %r1, %r0;
        {of["stmatrix"]} bar.sync 0; {of["ldmatrix"]} st.global.v2.b32 [%out_i], {registers};"""
        simulate_ptx(body, {"out": out}, Shape(smem=32 * 48))
        results.append(out)
    assert results[0].any() and (results[0] == results[1]).all()


def test_movmatrix_transposes_across_the_warp(execute):
    """Lane t has row t / 4, columns 2 (t % 4) + {0, 1}; of two warps one alone takes part."""
    a = np.random.default_rng(0).integers(0, 1 << 16, (2, 8, 8), dtype=np.uint16)
    words = np.ascontiguousarray(a).view(np.uint32).reshape(64, 1)
    out = np.zeros_like(words)
    body = """
    ld.global.b32 %r0, [%a_i]; setp.lt.u32 %p1, %i, 32; mov.b32 %r1, %r0;
    @%p1 movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r0;
    st.global.b32 [%out_i], %r1;"""
    execute(body, {"a": words, "out": out}, Shape(block=64))
    got = out.view(np.uint16).reshape(2, 8, 8)
    assert (got[0] == a[0].T).all() and (got[1] == a[1]).all()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_is_its_inverse(execute, count, trans):
    a = np.arange(32 * 4, dtype=np.uint32).reshape(32, 4) * 0x10003
    out = np.zeros((32, 4), np.uint32)
    names = ", ".join(f"%r{i}" for i in range(count))
    back = ", ".join(f"%r{8 + i}" for i in range(count))
    stores = " ".join(f"st.global.b32 [%out_i+{4 * i}], %r{8 + i};" for i in range(count))
    body = f"""{ADDRESS}
    ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [%a_i];
    stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [here], {{{names}}};
    bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{back}}}, [here];
    {stores}"""
    execute(body, {"a": a, "out": out}, Shape(smem=32 * 48))
    assert (out[:, :count] == a[:, :count]).all()


def _place(t: int, value: int, modes: tuple, values: tuple) -> int:
    """The byte of a matrix of 16-byte rows that is a value of lane t, by DSL layouts, (count,
    stride).
    """
    place = t % 4 * modes[0] + t // 4 * modes[1]
    for count, stride in values:
        place += value % count * stride
        value //= count
    return place


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_of_8_bit_elements(count):
    """StMatrix16x8x8bOp: ((4,8),(1,2,2)):((32,1),(1,16,8)), a matrix 128 bytes on."""
    a = np.random.default_rng(count).integers(0, 256, (32, 16), dtype=np.uint8)
    out = np.zeros((32, 16), np.uint8)
    names = ", ".join(f"%r{i}" for i in range(count))
    body = f"""{ADDRESS}
    ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [%a_i];
    st.shared.v4.b32 [here], {{0, 0, 0, 0}};
    bar.sync 0;
    stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8 [here], {{{names}}};
    bar.sync 0;
    ld.shared.v4.b32 {{%r0, %r1, %r2, %r3}}, [here];
    st.global.v4.b32 [%out_i], {{%r0, %r1, %r2, %r3}};"""
    simulate_ptx(body, {"a": a, "out": out}, Shape(smem=32 * 48), arch="sm_100a")
    got = out.reshape(-1)
    for t in range(32):
        for v in range(4 * count):
            assert got[_place(t, v, (32, 1), ((2, 16), (2, 8), (4, 128)))] == a[t, v]


@pytest.mark.parametrize("count", [1, 2])
def test_ldmatrix_of_8_bit_elements(count):
    """LdMatrix16x16x8bOp: ((4,8),(1,4,2)):((64,1),(1,16,8)), a matrix 256 bytes on; lane l gives
    the address of row l."""
    a = np.random.default_rng(count).integers(0, 256, (32, 16), dtype=np.uint8)
    out = np.zeros((32, 16), np.uint8)
    names = ", ".join(f"%r{4 + i}" for i in range(2 * count))
    stores = " ".join(f"st.global.b32 [%out_i+{4 * i}], %r{4 + i};" for i in range(2 * count))
    body = f"""{ADDRESS}
    ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [%a_i];
    st.shared.v4.b32 [here], {{%r0, %r1, %r2, %r3}};
    bar.sync 0;
    ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.b8 {{{names}}}, [here];
    {stores}"""
    simulate_ptx(body, {"a": a, "out": out}, Shape(smem=32 * 48), arch="sm_100a")
    source = a.reshape(-1)
    for t in range(32):
        for v in range(8 * count):
            assert out[t, v] == source[_place(t, v, (64, 1), ((4, 16), (2, 8), (2, 256)))]


@pytest.mark.parametrize(
    "op", ["m16n16.x4.trans.shared.b8", "m16n16.x1.shared.b8", "m8n8.x1.shared.b8"]
)
def test_other_fragments_of_8_bit_elements_do_not_exist(op):
    with pytest.raises(UnknownInstruction, match="does not define this form"):
        simulate_ptx(
            f"{ADDRESS} ldmatrix.sync.aligned.{op} {{%r0, %r1}}, [here];", {}, Shape(smem=2048),
            arch="sm_100a", assembles=False,
        )  # fmt: skip


def test_only_the_warps_that_execute_a_fragment_move_take_part():
    out = np.zeros(64, np.uint32)
    body = """
    .reg .b32 base, here; mov.u32 base, smem; mad.lo.u32 here, %i, 16, base;
    st.shared.v4.b32 [here], {%i, 0, 0, 0}; mov.b32 %r0, 1000;
    setp.lt.u32 %p0, %i, 32; @!%p0 mov.u32 here, 7; bar.sync 0;
    @%p0 stmatrix.sync.aligned.m8n8.x1.shared.b16 [here], {%r0};
    @%p0 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r0}, [here];
    st.global.b32 [%out_i], %r0;
    """
    simulate_ptx(body, {"out": out}, Shape(block=64, smem=1024))
    assert (out == 1000).all()


def test_half_a_warp_cannot_load_matrices():
    body = f"""{ADDRESS} setp.lt.u32 %p0, %lane, 16;
    @%p0 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r0}}, [here];"""
    with pytest.raises(BarrierMisuse, match=r"with lanes 0,1,2,.* only, but it is .aligned"):
        simulate_ptx(body, {}, Shape(smem=2048))
