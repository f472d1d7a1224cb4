"""Integer, logic, shift and comparison instructions against Python's integers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from elementwise import apply, crossed, expect_equal, integers
from ptx_kernel import simulate_ptx

DTYPES = {
    "u16": np.uint16, "s16": np.int16, "u32": np.uint32, "s32": np.int32, "u64": np.uint64,
    "s64": np.int64, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64,
}  # fmt: skip
SIGNED = ("s16", "s32", "s64")
UNSIGNED = ("u16", "u32", "u64")
INTEGERS = SIGNED + UNSIGNED


def bits_of(kind: str) -> int:
    return int(kind[1:])


def wrap(value: int, kind: str) -> int:
    bits = bits_of(kind)
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value


def truncated(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


def check(execute, op: str, kind: str, reference, *kinds: str, columns=None, out: str = "") -> None:
    """Compare ``op`` over operands of ``kinds`` with ``reference`` on Python integers."""
    kinds = kinds or (kind, kind)
    columns = columns or [integers(DTYPES[k], seed=i) for i, k in enumerate(kinds)]
    values = crossed(*columns)
    out = out or kind
    operands = ", ".join("{" + name + "}" for name in "abcf"[: len(values)])
    got = apply(execute, f"{op} {{d}}, {operands};", DTYPES[out], *values)
    want = [wrap(reference(*map(int, row)), out) for row in zip(*values, strict=True)]
    expect_equal(got, np.array(want, DTYPES[out]), *values)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize(
    ("op", "reference"),
    [("add", lambda a, b: a + b), ("sub", lambda a, b: a - b), ("min", min), ("max", max)],
)  # fmt: skip
def test_add_sub_min_max(execute, op, reference, kind):
    check(execute, f"{op}.{kind}", kind, reference)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("op", [
    "add.s16", "sub.s16", "min.s16", "max.s16", "min.relu.s16", "max.relu.s16",
    "add.u16", "sub.u16", "min.u16", "max.u16",
])  # fmt: skip
def test_two_integers_of_16_bits_at_once(execute, op):
    name, *relu, kind = op.split(".")
    f = {"add": int.__add__, "sub": int.__sub__, "min": min, "max": max}[name]

    def halves(a: int, b: int) -> int:
        parts = (f(wrap(a >> at, kind), wrap(b >> at, kind)) for at in (0, 16))
        low, high = ((max(p, 0) if relu else p) & 0xFFFF for p in parts)
        return high << 16 | low

    check(execute, f"{op}x2", "b32", halves)


@pytest.mark.parametrize(("op", "sign"), [("add", 1), ("sub", -1)])
def test_saturating_add_and_sub(execute, op, sign):
    clamp = lambda v: max(-(1 << 31), min((1 << 31) - 1, v))
    check(execute, f"{op}.sat.s32", "s32", lambda a, b: clamp(a + sign * b))


def test_saturating_mad(execute):
    clamp = lambda v: max(-(1 << 31), min((1 << 31) - 1, v))
    reference = lambda a, b, c: clamp((a * b >> 32) + c)
    check(execute, "mad.hi.sat.s32", "s32", reference, "s32", "s32", "s32")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("half", ["lo", "hi"])
def test_mul_halves(execute, kind, half):
    shift = bits_of(kind) if half == "hi" else 0
    check(execute, f"mul.{half}.{kind}", kind, lambda a, b: a * b >> shift)


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_mul_wide(execute, kind):
    wide = f"{kind[0]}{2 * bits_of(kind)}"
    check(execute, f"mul.wide.{kind}", kind, lambda a, b: a * b, out=wide)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("half", ["lo", "hi"])
def test_mad_halves(execute, kind, half):
    shift = bits_of(kind) if half == "hi" else 0
    reference = lambda a, b, c: (a * b >> shift) + c
    check(execute, f"mad.{half}.{kind}", kind, reference, kind, kind, kind)


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_mad_wide(execute, kind):
    wide = f"{kind[0]}{2 * bits_of(kind)}"
    check(execute, f"mad.wide.{kind}", kind, lambda a, b, c: a * b + c, kind, kind, wide, out=wide)


@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_mul24_takes_24_bits(execute, kind):
    def low(x: int) -> int:
        x &= 0xFFFFFF
        return x - (1 << 24) if kind == "s32" and x >> 23 else x

    check(execute, f"mul24.lo.{kind}", kind, lambda a, b: low(a) * low(b))
    check(execute, f"mul24.hi.{kind}", kind, lambda a, b: low(a) * low(b) >> 16)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", INTEGERS)
def test_div_rounds_to_zero_and_rem_has_the_sign_of_the_dividend(execute, kind):
    divisors = integers(DTYPES[kind], seed=1)
    columns = [integers(DTYPES[kind]), divisors[divisors != 0]]
    check(execute, f"div.{kind}", kind, truncated, columns=columns)
    check(execute, f"rem.{kind}", kind, lambda a, b: a - b * truncated(a, b), columns=columns)


@pytest.mark.parametrize("op", ["div.u32", "rem.s64"])
def test_a_division_by_zero_is_told(op):
    body = f"""cvt.u64.u32 %d1, %lane; sub.u64 %d1, %d1, FROM; cvt.u32.u64 %r1, %d1;
        {op} {"%r2, %lane, %r1" if "32" in op else "%d2, %d1, %d1"};"""
    assert not simulate_ptx(body.replace("FROM", "40"), {}).advisories
    (told,) = simulate_ptx(body.replace("FROM", "3"), {}).advisories
    assert "warp 0 lane 3 divides by zero: what it gets is not defined" in str(told)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", INTEGERS)
def test_sad(execute, kind):
    check(execute, f"sad.{kind}", kind, lambda a, b, c: c + abs(a - b), kind, kind, kind)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", SIGNED)
@pytest.mark.parametrize(("op", "reference"), [("neg", lambda a: -a), ("abs", abs)])
def test_neg_and_abs(execute, op, reference, kind):
    check(execute, f"{op}.{kind}", kind, reference, kind)


@pytest.mark.parametrize("op", ["min", "max"])
def test_relu_of_min_and_max(execute, op):
    pick = {"min": min, "max": max}[op]
    check(execute, f"{op}.relu.s32", "s32", lambda a, b: max(0, pick(a, b)))


# -- logic and shifts ------------------------------------------------------------------------------

LOGIC = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b}


@pytest.mark.parametrize("kind", ["b16", "b32", "b64"])
def test_logic(execute, kind):
    for op, reference in LOGIC.items():
        check(execute, f"{op}.{kind}", kind, reference)
    check(execute, f"not.{kind}", kind, lambda a: ~a, kind)
    check(execute, f"cnot.{kind}", kind, lambda a: int(a == 0), kind)


def test_logic_of_predicates(execute):
    a, b = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)
    for op, reference in LOGIC.items():
        got = apply(execute, f"{op}.pred {{d}}, {{a}}, {{b}};", bool, a, b)
        expect_equal(got, reference(a, b), a, b)
    expect_equal(apply(execute, "not.pred {d}, {a};", bool, a), ~a, a)
    expect_equal(apply(execute, "mov.pred {d}, {a};", bool, a), a, a)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("table", [0x00, 0x01, 0x3C, 0x80, 0x96, 0xCA, 0xD8, 0xE8, 0xFE, 0xFF])
def test_lop3_is_its_truth_table(execute, table):
    def reference(a: int, b: int, c: int) -> int:
        return sum(
            (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i
            for i in range(32)
        )

    columns = [integers(np.uint32, seed=s, count=4)[::2] for s in range(3)]
    values = crossed(*columns, limit=256)
    got = apply(execute, f"lop3.b32 {{d}}, {{a}}, {{b}}, {{c}}, {table};", np.uint32, *values)
    want = [reference(*map(int, row)) for row in zip(*values, strict=True)]
    expect_equal(got, np.array(want, np.uint32), *values)


AMOUNTS = np.array([0, 1, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 2**31, 2**32 - 1], "u4")


@pytest.mark.parametrize("kind", ["b16", "b32", "b64"])
def test_shl_clamps(execute, kind):
    columns = [integers(DTYPES[kind]), AMOUNTS]
    check(execute, f"shl.{kind}", kind, lambda a, n: a << min(n, 64), columns=columns)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", [*INTEGERS, "b32"])
def test_shr_clamps_and_keeps_the_sign(execute, kind):
    columns = [integers(DTYPES[kind]), AMOUNTS]
    check(execute, f"shr.{kind}", kind, lambda a, n: a >> min(n, 64), columns=columns)


@pytest.mark.parametrize("direction", ["l", "r"])
@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_funnel_shift(execute, direction, mode):
    def reference(a: int, b: int, n: int) -> int:
        n = min(n, 32) if mode == "clamp" else n & 31
        both = b << 32 | a
        return both << n >> 32 if direction == "l" else both >> n

    words = integers(np.uint32, count=10)
    check(execute, f"shf.{direction}.{mode}.b32", "b32", reference, columns=[words, words, AMOUNTS])


# -- bit fields ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_popc_clz_brev(execute, kind):
    bits = bits_of(kind)
    check(execute, f"popc.{kind}", kind, lambda a: a.bit_count(), kind, out="u32")
    check(execute, f"clz.{kind}", kind, lambda a: bits - a.bit_length(), kind, out="u32")
    check(execute, f"brev.{kind}", kind, lambda a: int(f"{a:0{bits}b}"[::-1], 2), kind)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bfind(execute, kind):
    bits = bits_of(kind)

    def highest(a: int) -> int:
        return (~a if a < 0 else a).bit_length() - 1

    check(execute, f"bfind.{kind}", kind, highest, kind, out="u32")
    amount = lambda a: -1 if highest(a) < 0 else bits - 1 - highest(a)
    check(execute, f"bfind.shiftamt.{kind}", kind, amount, kind, out="u32")


FIELDS = np.array([0, 1, 7, 8, 31, 32, 33, 40, 63, 64, 100, 255], np.uint32)  # all that PTX allows


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bfe(execute, kind):
    bits = bits_of(kind)

    def reference(a: int, pos: int, length: int) -> int:
        pos, length = pos & 255, length & 255
        raw = a & ((1 << bits) - 1)
        if kind[0] == "u" or not length:
            sign = 0
        else:
            sign = raw >> min(pos + length - 1, bits - 1) & 1
        held = [i < length and pos + i < bits for i in range(bits)]
        return sum((raw >> (pos + i) & 1 if held[i] else sign) << i for i in range(bits))

    columns = [integers(DTYPES[kind], count=10), FIELDS, FIELDS]
    check(execute, f"bfe.{kind}", kind, reference, columns=columns)


@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_bfi(execute, kind):
    bits = bits_of(kind)

    def reference(a: int, b: int, pos: int, length: int) -> int:
        pos, length = pos & 255, length & 255
        for i in range(length):
            if pos + i < bits:
                b = b & ~(1 << (pos + i)) | (a >> i & 1) << (pos + i)
        return b

    words = integers(DTYPES[kind], count=10)
    check(execute, f"bfi.{kind}", kind, reference, columns=[words, words[::-1], FIELDS, FIELDS])


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_bmsk(execute, mode):
    def reference(first: int, length: int) -> int:
        first, length = (first & 31, length & 31) if mode == "wrap" else (first, min(length, 32))
        return sum(1 << i for i in range(first, min(first + length, 32))) if first < 32 else 0

    check(execute, f"bmsk.{mode}.b32", "b32", reference, columns=[AMOUNTS, AMOUNTS])


@pytest.mark.parametrize("kind", ["u32", "s32"])
@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_szext(execute, kind, mode):
    def reference(a: int, n: int) -> int:
        n = n & 31 if mode == "wrap" else min(n, 32)
        low = a & ((1 << n) - 1)
        return low - (1 << n) if kind == "s32" and n and low >> (n - 1) else low

    columns = [integers(DTYPES[kind]), AMOUNTS]
    check(execute, f"szext.{mode}.{kind}", kind, reference, columns=columns)


def test_prmt(execute):
    def pick(a: int, b: int, selector: int) -> int:
        data = (b << 32 | a).to_bytes(8, "little")
        out = 0
        for i in range(4):
            nibble = selector >> 4 * i & 15
            byte = data[nibble & 7]
            out |= (255 * (byte >> 7) if nibble & 8 else byte) << 8 * i
        return out

    words = integers(np.uint32, seed=9, count=12)
    selectors = np.array([0x3210, 0x7654, 0x5410, 0x7632, 0xFEDC, 0x8888, 0x0C93, 0xFFFF3210], "u4")
    check(execute, "prmt.b32", "b32", pick, columns=[words, words, selectors])


PRMT_MODES = {  # byte of {b, a} for each byte of the result, by selector (PTX ISA table 33)
    "f4e": [(0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)],
    "b4e": [(0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)],
    "rc8": [(0,) * 4, (1,) * 4, (2,) * 4, (3,) * 4],
    "ecl": [(0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)],
    "ecr": [(0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)],
    "rc16": [(0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)],
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mode", PRMT_MODES)
def test_prmt_modes(execute, mode):
    def pick(a: int, b: int, selector: int) -> int:
        data = (b << 32 | a).to_bytes(8, "little")
        return int.from_bytes(bytes(data[i] for i in PRMT_MODES[mode][selector & 3]), "little")

    words = integers(np.uint32, seed=9, count=12)
    columns = [words, words, np.arange(8, dtype=np.uint32)]
    check(execute, f"prmt.b32.{mode}", "b32", pick, columns=columns)


@pytest.mark.parametrize("kinds", [("u32", "u32"), ("s32", "u32"), ("u32", "s32"), ("s32", "s32")])
def test_dot_products(execute, kinds):
    def part(x: int, bits: int, i: int, kind: str) -> int:
        v = x >> bits * i & ((1 << bits) - 1)
        return v - (1 << bits) if kind == "s32" and v >> (bits - 1) else v

    def dp4a(a: int, b: int, c: int) -> int:
        return c + sum(part(a, 8, i, kinds[0]) * part(b, 8, i, kinds[1]) for i in range(4))

    out = "u32" if kinds == ("u32", "u32") else "s32"
    name = ".".join(kinds)
    check(execute, f"dp4a.{name}", kinds[0], dp4a, *kinds, out, out=out)
    for half, first in (("lo", 0), ("hi", 2)):

        def dp2a(a: int, b: int, c: int, first: int = first) -> int:
            pairs = ((part(a, 16, i, kinds[0]), part(b, 8, first + i, kinds[1])) for i in (0, 1))
            return c + sum(x * y for x, y in pairs)

        check(execute, f"dp2a.{half}.{name}", kinds[0], dp2a, *kinds, out, out=out)


# -- extended precision ----------------------------------------------------------------------------


def test_carries_make_wide_additions(execute):
    a, b = crossed(integers(np.uint64), integers(np.uint64, seed=1))
    code = """
    {{ .reg .b32 a0, a1, b0, b1, z; .reg .b64 s;
       mov.b64 {{a0, a1}}, {a}; mov.b64 {{b0, b1}}, {b};
       OP.cc.u32 a0, a0, b0; OPc.cc.u32 a1, a1, b1; OPc.u32 z, 0, 0;
       mov.b64 {d}, {{a0, a1}}; mov.b32 {e}, z; }}
    """
    big = a.astype(object), b.astype(object)
    got, carry = apply(execute, code.replace("OP", "add"), np.uint64, a, b, also=np.uint32)
    expect_equal(got, a + b, a, b)
    expect_equal(carry, (big[0] + big[1] >> 64).astype(np.uint32), a, b)
    got, borrow = apply(execute, code.replace("OP", "sub"), np.uint64, a, b, also=np.uint32)
    expect_equal(got, a - b, a, b)
    expect_equal(borrow, np.where(a < b, 0xFFFFFFFF, 0).astype(np.uint32), a, b)


def test_mad_with_carry_makes_a_wide_product(execute):
    a, b = crossed(integers(np.uint32), integers(np.uint32, seed=1))
    c = np.resize(integers(np.uint64, seed=2), len(a))
    code = """
    {{ .reg .b32 c0, c1; mov.b64 {{c0, c1}}, {c};
       mad.lo.cc.u32 c0, {a}, {b}, c0; madc.hi.u32 c1, {a}, {b}, c1; mov.b64 {d}, {{c0, c1}}; }}
    """
    got = apply(execute, code, np.uint64, a, b, c)
    expect_equal(got, a.astype(np.uint64) * b.astype(np.uint64) + c, a, b, c)


# -- comparisons -----------------------------------------------------------------------------------

COMPARE = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip
UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", [*INTEGERS, "b16", "b32", "b64"])
def test_setp(execute, kind):
    values = crossed(integers(DTYPES[kind]), integers(DTYPES[kind], seed=1))
    names = dict(COMPARE) if kind[0] != "b" else {n: COMPARE[n] for n in ("eq", "ne")}
    if kind[0] == "u":
        names |= {n: COMPARE[same] for n, same in UNSIGNED_NAMES.items()}
    for name, compare in names.items():
        got = apply(execute, f"setp.{name}.{kind} {{d}}, {{a}}, {{b}};", bool, *values)
        expect_equal(got, compare(*values), *values)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("combine", ["and", "or", "xor"])
@pytest.mark.parametrize("negated", ["", "!"])
def test_setp_combines_both_results_with_a_predicate(execute, combine, negated):
    a, b = crossed(np.array([1, 2, 3], np.int32), np.array([1, 2, 3], np.int32))
    a, b, c = np.tile(a, 2), np.tile(b, 2), np.repeat([False, True], len(a))
    code = f"setp.lt.{combine}.s32 {{d}}|{{e}}, {{a}}, {{b}}, {negated}{{c}};"
    p, q = apply(execute, code, bool, a, b, c, also=bool)
    f = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[combine]
    other = ~c if negated else c
    expect_equal(p, f(a < b, other), a, b, c)
    expect_equal(q, f(~(a < b), other), a, b, c)


def test_set_gives_all_ones_or_one(execute):
    a, b = crossed(integers(np.int32), integers(np.int32, seed=1))
    got = apply(execute, "set.lt.u32.s32 {d}, {a}, {b};", np.uint32, a, b)
    expect_equal(got, np.where(a < b, 0xFFFFFFFF, 0).astype(np.uint32), a, b)
    got = apply(execute, "set.ge.f32.s32 {d}, {a}, {b};", np.float32, a, b)
    expect_equal(got, np.where(a >= b, 1, 0).astype(np.float32), a, b)


@pytest.mark.parametrize("kind", ["b16", "s32", "u64", "b64"])
def test_selp(execute, kind):
    a, b = (np.resize(integers(DTYPES[kind], seed=s), 64) for s in (0, 1))
    c = np.arange(64) % 3 == 0
    got = apply(execute, f"selp.{kind} {{d}}, {{a}}, {{b}}, {{c}};", DTYPES[kind], a, b, c)
    expect_equal(got, np.where(c, a, b), a, b, c)


def test_slct_chooses_by_the_sign(execute):
    a, b = (np.resize(integers(np.uint32, seed=s), 64) for s in (0, 1))
    c = np.resize(integers(np.int32, seed=2), 64)
    got = apply(execute, "slct.u32.s32 {d}, {a}, {b}, {c};", np.uint32, a, b, c)
    expect_equal(got, np.where(c >= 0, a, b), a, b, c)
    f = np.resize(np.array([0.0, -0.0, 1.5, -2.0, math.inf, -math.inf, math.nan], "f4"), 64)
    got = apply(execute, "slct.u32.f32 {d}, {a}, {b}, {c};", np.uint32, a, b, f)
    expect_equal(got, np.where(f >= 0, a, b), a, b, f)


def test_immediates_are_read_in_the_type_of_the_instruction(execute):
    a = integers(np.int64)
    texts = {"-1": -1, "0x7fffffff": 0x7FFFFFFF, "0xFFFFFFFFFFFFFFFF": -1, "12U": 12}
    for text, value in texts.items():
        got = apply(execute, f"xor.b64 {{d}}, {{a}}, {text};", np.int64, a)
        expect_equal(got, a ^ np.int64(value), a)
    b = integers(np.int16)
    expect_equal(apply(execute, "add.s16 {d}, {a}, -3;", np.int16, b), b - np.int16(3), b)


@pytest.mark.parametrize("wide", ["s32", "u32", "s64", "u64"])
def test_mov_packs_and_unpacks_vectors(execute, wide):
    x = integers(DTYPES[wide])
    part = bits_of(wide) // 2
    register = {16: "%h", 32: "%r"}[part]
    code = f"""
    mov.b{2 * part} {{{{{register}20, {register}21}}}}, {{a}};
    mov.b{2 * part} {{d}}, {{{{{register}21, {register}20}}}};
    """
    got = apply(execute, code, DTYPES[wide], x)
    swapped = x.view(f"u{part // 8}").reshape(-1, 2)[:, ::-1]
    expect_equal(got, np.ascontiguousarray(swapped).view(DTYPES[wide]).reshape(-1), x)
