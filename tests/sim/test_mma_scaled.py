"""mma.sync with scale factors of blocks against a product of matrices, whose elements and factors
are put into registers by PTX's formulas."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from ptx_kernel import Shape, simulate_ptx

from cutex.sim import UnknownInstruction

SMALL = {
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn, "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}  # fmt: skip
FACTORS = {"ue8m0": ml_dtypes.float8_e8m0fnu, "ue4m3": ml_dtypes.float8_e4m3fn}
CASES = [  # kind, scale_vec, factors per row, type of the factors, types of A and B
    ("mxf4", ".scale_vec::2X", 2, "ue8m0", "e2m1", "e2m1"),
    ("mxf4", "", 2, "ue8m0", "e2m1", "e2m1"),
    ("mxf4nvf4", ".scale_vec::2X", 2, "ue8m0", "e2m1", "e2m1"),
    ("mxf4nvf4", ".scale_vec::4X", 4, "ue4m3", "e2m1", "e2m1"),
    *(("mxf8f6f4", ".scale_vec::1X", 1, "ue8m0", a, b)
      for a, b in zip(SMALL, [*list(SMALL)[2:], *list(SMALL)[:2]], strict=True)),
    *(("f8f6f4", "", 0, "", a, b) for a, b in (("e4m3", "e2m1"), ("e2m3", "e3m2"))),
]  # fmt: skip


def registers(matrix: np.ndarray, count: int, packed: bool, of_a: bool) -> np.ndarray:
    """The words of each lane, (32, count): of A row t / 4 (+ 8), of B column t / 4."""
    per, kind = (8 if packed else 4), matrix.dtype
    out = np.zeros((32, count), np.uint32)
    for lane in range(32):
        for r in range(count):
            for i in range(per):
                along = lane % 4 * per + i + 4 * per * (r // 2 if of_a else r)
                line = lane // 4 + (8 * (r % 2) if of_a else 0)
                raw = int(matrix[line, along].view(np.uint8))
                raw <<= 2 if kind == SMALL["e2m1"] and not packed else 0
                out[lane, r] |= raw << (4 * i if packed else 8 * i)
    return out


def factor_words(factors: np.ndarray, byte: int, thread: int, of_a: bool) -> np.ndarray:
    """The words of each lane, (32,); what no factor is in holds other bits."""
    out = np.random.default_rng().integers(0, 256, (32, 4)).astype(np.uint8)
    for line, row in enumerate(factors.view(np.uint8)):
        lane = 4 * (line % 8) + (2 * thread + line // 8 if of_a else thread)
        out[lane, byte : byte + len(row)] = row
    return out.view(np.uint32).reshape(32)


def drawn(kind: str, shape: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng().integers(-3, 4, shape).astype(SMALL[kind])


def instruction(kind: str, size: str, factor: str, types: tuple[str, str], k: int) -> str:
    block = f".block_scale{size}" if factor else ""
    end = f".{factor}" if factor else ""
    shape = f"m16n8k{k}.row.col"
    return f"mma.sync.aligned.{shape}.kind::{kind}{block}.f32.{types[0]}.{types[1]}.f32{end}"


@pytest.mark.sweep(3)
@pytest.mark.parametrize("ids", [(0, 0), (2, 1)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_a_scaled_product(case, ids):
    kind, size, count, factor, a_type, b_type = case
    packed = kind.startswith("mxf4")
    k = 64 if packed else 32
    byte = min(ids[0], 4 - count)
    byte, (of_a, of_b) = byte, (ids[1], 3 * ids[1])
    a, b = drawn(a_type, (16, k)), drawn(b_type, (8, k))
    c = np.random.default_rng().integers(-9, 10, (16, 8)).astype(np.float32)
    arrays = {
        "a": registers(a, 4, packed, True), "b": registers(b, 2, packed, False),
        "c": np.array([[c[t // 4 + 8 * (i // 2), t % 4 * 2 + i % 2] for i in range(4)]
                       for t in range(32)], np.float32),
        "out": np.zeros((32, 4), np.float32),
    }  # fmt: skip
    loads = [f"ld.global.b32 %r{10 + i}, [%a_i+{4 * i}];" for i in range(4)]
    loads += [f"ld.global.b32 %r{20 + i}, [%b_i+{4 * i}];" for i in range(2)]
    loads += [f"ld.global.b32 %r{30 + i}, [%c_i+{4 * i}];" for i in range(4)]
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    scales = ""
    if count:
        rng = np.random.default_rng()
        pick = lambda rows: (
            2.0 ** rng.integers(-2, 3, (rows, count)) if factor == "ue8m0"
            else rng.integers(1, 9, (rows, count)) / 4
        ).astype(FACTORS[factor])  # fmt: skip
        fa, fb = pick(16), pick(8)
        arrays["fa"] = factor_words(fa, byte, of_a, True)
        arrays["fb"] = factor_words(fb, byte, of_b, False)
        loads += ["ld.global.b32 %r40, [%fa_i]; ld.global.b32 %r41, [%fb_i];"]
        loads += [f"mov.u16 %h0, {byte}; mov.u16 %h1, {of_a}; mov.u16 %h2, {of_b};"]
        scales = ", {%r40}, {%h0, %h1}, {%r41}, {%h0, %h2}"
        wide_a *= np.repeat(fa.astype(np.float64), k // count, 1)
        wide_b *= np.repeat(fb.astype(np.float64), k // count, 1)
    op = instruction(kind, size, factor, (a_type, b_type), k)
    product = (
        f"{op} {{%r0, %r1, %r2, %r3}}, {{%r10, %r11, %r12, %r13}}, {{%r20, %r21}}, "
        f"{{%r30, %r31, %r32, %r33}}{scales};"
    )
    stores = [f"st.global.b32 [%out_i+{4 * i}], %r{i};" for i in range(4)]
    simulate_ptx("\n".join([*loads, product, *stores]), arrays, arch="sm_120a")
    want = wide_a @ wide_b.T + c
    got = np.zeros((16, 8))
    for t in range(32):
        for i in range(4):
            got[t // 4 + 8 * (i // 2), t % 4 * 2 + i % 2] = arrays["out"][t, i]
    np.testing.assert_array_equal(got, want)
    assert np.abs(want).max() > 5


@pytest.mark.parametrize(
    "op",
    [
        instruction("mxf4", ".scale_vec::4X", "ue8m0", ("e2m1", "e2m1"), 64),
        instruction("mxf4", ".scale_vec::2X", "ue4m3", ("e2m1", "e2m1"), 64),
        instruction("mxf4", ".scale_vec::2X", "ue8m0", ("e4m3", "e4m3"), 64),
        instruction("mxf8f6f4", ".scale_vec::1X", "ue8m0", ("e4m3", "e4m3"), 64),
        instruction("f8f6f4", "", "ue8m0", ("e4m3", "e4m3"), 32),
    ],
)
def test_forms_that_do_not_exist_are_refused(op):
    text = f"{op} {{%r0, %r1, %r2, %r3}}, {{%r0, %r1, %r2, %r3}}, {{%r4, %r5}}, "
    text += "{%r0, %r1, %r2, %r3}, {%r6}, {0, 0}, {%r7}, {0, 0};"
    with pytest.raises(UnknownInstruction, match="PTX line"):
        simulate_ptx(text, {}, arch="sm_120a", assembles=False)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("bits", "form"), [(4, "b4x16_p64"), (6, "b6x16_p32")])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_unpacks_elements_of_few_bits(bits, form, count):
    """Lane t gets row t / 4, elements 4 (t % 4) and on; 4 bits in the middle of their bytes."""
    codes = np.random.default_rng().integers(0, 1 << bits, (8 * count, 16))
    rows = np.zeros((8 * count, 16), np.uint8)
    for row, line in zip(rows, codes, strict=True):
        number = sum(int(code) << bits * i for i, code in enumerate(line))
        row[:] = np.frombuffer(number.to_bytes(16, "little"), np.uint8)
    arrays = {"rows": rows.view(np.uint32), "out": np.zeros((32, count), np.uint32)}
    loads = "".join(
        f"ld.global.b32 %r{10 + i}, [%d1+{4 * i}]; st.shared.b32 [%r1+{4 * i}], %r{10 + i};"
        for i in range(4)
    )
    names = ", ".join(f"%r{20 + i}" for i in range(count))
    stores = "".join(f"st.global.b32 [%out_i+{4 * i}], %r{20 + i};" for i in range(count))
    body = f"""rem.u32 %r2, %lane, {8 * count}; mul.lo.u32 %r3, %r2, 16; mov.u32 %r1, smem;
    add.u32 %r1, %r1, %r3; mul.wide.u32 %d0, %r2, 16; add.u64 %d1, %rows, %d0; {loads}
    bar.sync 0;
    ldmatrix.sync.aligned.m8n16.x{count}.shared.b8x16.{form} {{{names}}}, [%r1]; {stores}"""
    simulate_ptx(body, arrays, Shape(smem=1024), arch="sm_120a")
    got = arrays["out"].view(np.uint8).reshape(32, count, 4)
    for t in range(32):
        for m in range(count):
            want = codes[8 * m + t // 4, 4 * (t % 4) : 4 * (t % 4) + 4] << (2 if bits == 4 else 0)
            np.testing.assert_array_equal(got[t, m], want)
