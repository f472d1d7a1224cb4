"""mma.sync against a product of matrices, whose elements are put into registers by PTX's
formulas."""

from __future__ import annotations

import numpy as np
import pytest
from operands import FORMATS, size_of, small_integers
from ptx_kernel import Shape, simulate_ptx

from cutex.sim import BarrierMisuse, UnknownInstruction

OUT = {"f32": np.float32, "f16": np.float16, "s32": np.int32}
CASES = [
    *((kind, k, out) for kind in ("f16", "bf16") for k in (8, 16) for out in ("f32", "f16")
      if kind == "f16" or out == "f32"),
    ("tf32", 4, "f32"), ("tf32", 8, "f32"), ("e4m3", 32, "f32"), ("e5m2", 32, "f32"),
    ("s8", 16, "s32"), ("s8", 32, "s32"), ("u8", 32, "s32"),
]  # fmt: skip


def place_of_a(t: int, i: int, per: int) -> tuple[int, int]:
    """Row and column of element i of lane t, ``per`` of them in a register (9.7.14.5.8 and on)."""
    register, within = divmod(i, per)
    return t // 4 + 8 * (register % 2), t % 4 * per + within + 4 * per * (register // 2)


def place_of_b(t: int, i: int, per: int) -> tuple[int, int]:
    register, within = divmod(i, per)
    return t % 4 * per + within + 4 * per * register, t // 4


def place_of_c(t: int, i: int) -> tuple[int, int]:
    return t // 4 + 8 * (i // 2), t % 4 * 2 + i % 2


def lanes(matrix: np.ndarray, kind, count: int, place) -> np.ndarray:
    """The elements of each lane, (32, count), as 32-bit words."""
    out = np.array([[matrix[place(t, i)] for i in range(count)] for t in range(32)]).astype(kind)
    return np.ascontiguousarray(out).view(np.uint32).reshape(32, -1)


def text(op: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> str:
    names, loads = {}, []
    for at, (name, words) in zip((0, 16, 32, 48), {"d": c, "a": a, "b": b, "c": c}.items(),
                                 strict=True):  # fmt: skip
        registers = [f"%r{at + i}" for i in range(words.shape[1])]
        names[name] = "{" + ", ".join(registers) + "}"
        if name != "d":
            loads += [f"ld.global.b32 {r}, [%{name}_i+{4 * i}];" for i, r in enumerate(registers)]
    stores = [f"st.global.b32 [%out_i+{4 * i}], %r{i};" for i in range(c.shape[1])]
    product = f"{op} {names['d']}, {names['a']}, {names['b']}, {names['c']};"
    return "\n".join([*loads, product, *stores])


def run(execute, kind: str, k: int, out: str, more: str = "", seed: int = 0, c=None, **how):
    """Return D and the expected D."""
    per = 4 // size_of(kind)
    a, b = small_integers(kind, (16, k), seed), small_integers(kind, (k, 8), seed + 1)
    c = np.random.default_rng(seed + 2).integers(-9, 10, (16, 8)) if c is None else c
    words = {
        "a": lanes(a, FORMATS[kind], 16 * k // 32, lambda t, i: place_of_a(t, i, per)),
        "b": lanes(b, FORMATS[kind], 8 * k // 32, lambda t, i: place_of_b(t, i, per)),
        "c": lanes(c, OUT[out], 4, place_of_c),
    }
    arrays = {**words, "out": np.zeros_like(words["c"])}
    op = f"mma.sync.aligned.m16n8k{k}.row.col{more}.{out}.{kind}.{kind}.{out}"
    execute(text(op, *words.values()), arrays, Shape(), **how)
    got = arrays["out"].view(OUT[out]).reshape(32, 4)
    d = np.zeros((16, 8), OUT[out])
    for t in range(32):
        for i in range(4):
            d[place_of_c(t, i)] = got[t, i]
    return d, a @ b + c


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("kind", "k", "out"), CASES)
def test_a_warp_multiplies(execute, kind, k, out):
    if kind in ("e4m3", "e5m2"):
        execute = lambda *given: simulate_ptx(*given, arch="sm_100a")
    d, want = run(execute, kind, k, out)
    np.testing.assert_array_equal(d, want)


@pytest.mark.parametrize("saturate", ["", ".satfinite"])
def test_integers_wrap_or_saturate(execute, saturate):
    edge = np.where(np.arange(128).reshape(16, 8) % 2, (1 << 31) - 5, -(1 << 31) + 5)
    d, want = run(execute, "s8", 32, "s32", saturate, c=edge)
    limits = np.iinfo(np.int32)
    assert ((want < limits.min) | (want > limits.max)).any()
    expected = want.clip(limits.min, limits.max) if saturate else want.astype(np.int32)
    np.testing.assert_array_equal(d, expected)


def test_each_warp_has_its_own():
    """Four warps in one numpy call, one of which takes no part."""
    a = np.random.default_rng(0).integers(0, 1 << 16, (128, 4), np.uint32)
    a[:] = np.float16(1).view(np.uint16) * np.uint32(0x10001)
    out = np.zeros((128, 4), np.float32)
    body = """
    ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%a_i]; shr.u32 %r8, %i, 5; cvt.rn.f32.u32 %r9, %r8;
    mov.b32 %r10, %r9; mov.b32 %r11, %r9; mov.b32 %r12, %r9;
    setp.ne.u32 %p0, %r8, 2;
    @%p0 mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
        {%r9, %r10, %r11, %r12}, {%r0, %r1, %r2, %r3}, {%r0, %r1}, {%r9, %r10, %r11, %r12};
    st.global.v4.b32 [%out_i], {%r9, %r10, %r11, %r12};
    """
    simulate_ptx(body, {"a": a, "out": out}, Shape(block=128))
    want = np.repeat([16.0, 17.0, 2.0, 19.0], 32)
    assert (out == want[:, None]).all()


def test_half_a_warp_cannot_multiply():
    body = """setp.lt.u32 %p0, %lane, 16; @%p0 mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32
        {%r0, %r1, %r2, %r3}, {%r4, %r5}, {%r6}, {%r0, %r1, %r2, %r3};"""
    with pytest.raises(BarrierMisuse, match=r"with lanes 0,1,2,.* only, but it is .aligned"):
        simulate_ptx(body, {})


@pytest.mark.parametrize(
    "op",
    [
        "m8n8k4.row.col.f64.f64.f64.f64",
        "m16n8k64.row.col.f32.f16.f16.f32",
        "m16n8k16.row.col.f32.f16.e4m3.f32",
    ],
)
def test_other_products_are_not_defined(op):
    body = f"mma.sync.aligned.{op} {{%r0, %r1, %r2, %r3}}, {{%r4, %r5}}, {{%r6}}, {{%r7, %r8}};"
    with pytest.raises(UnknownInstruction, match="does not define this form"):
        simulate_ptx(body, {}, assembles=False)
