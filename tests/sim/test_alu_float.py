"""Floating-point instructions against arithmetic in exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from elementwise import apply, crossed
from softfloat import BF16, F16, F32, F64, FORMATS, Format, arithmetic, decode, sample

STORED = {"f16": np.uint16, "bf16": np.uint16, "f32": np.uint32, "f64": np.uint64}


def operands(form: Format, count: int, each: int = 60, limit: int = 1500) -> list[np.ndarray]:
    return crossed(*(sample(form, each, seed) for seed in range(count)), limit=limit)


def differs(form: Format, bits: int, want: float) -> bool:
    got = form.decode(bits)
    if math.isnan(want):
        return not math.isnan(got)
    return not (got == want and math.copysign(1, got) == math.copysign(1, want))


def expect(form: Format, got: np.ndarray, reference, *columns: np.ndarray) -> None:
    """Assert that each decoded result is ``reference`` of the decoded operands."""
    rows = zip(*(decode(form, c) for c in columns), strict=True)
    for k, (bits, row) in enumerate(zip(got.tolist(), rows, strict=True)):
        want = reference(*row)
        if differs(form, bits, want):
            at = ", ".join(f"{v!r} (0x{int(c[k]):x})" for v, c in zip(row, columns, strict=True))
            raise AssertionError(f"{at}: got {form.decode(bits)!r} (0x{bits:x}), want {want!r}")


def check(execute, op: str, form: Format, reference, count: int, limit: int = 1500) -> None:
    columns = operands(form, count, limit=limit)
    names = ", ".join("{" + n + "}" for n in "abc"[:count])
    got = apply(execute, f"{op} {{d}}, {names};", STORED[form.name], *columns)
    expect(form, got, reference, *columns)


NAMES = {"add": 2, "sub": 2, "mul": 2, "fma": 3}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("name", NAMES)
def test_f32_in_every_rounding(execute, name, mode):
    reference = lambda *v: arithmetic(name, F32, mode, *v)
    check(execute, f"{name}.{mode}.f32", F32, reference, NAMES[name])


@pytest.mark.sweep(3)
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("name", NAMES)
def test_f64_in_every_rounding(execute, name, mode):
    reference = lambda *v: arithmetic(name, F64, mode, *v)
    check(execute, f"{name}.{mode}.f64", F64, reference, NAMES[name], limit=500)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("form", [F16, BF16], ids=lambda f: f.name)
@pytest.mark.parametrize("name", NAMES)
def test_halves_round_once(execute, name, form):
    reference = lambda *v: arithmetic(name, form, "rn", *v)
    check(execute, f"{name}.rn.{form.name}", form, reference, NAMES[name])


def test_a_fused_sum_at_a_midpoint_is_rounded_by_a_tail_that_float64_cannot_hold(execute):
    """(1 + 2^-12)^2 lies between two float32 numbers; so do 1.5 of the least subnormal one."""
    a = np.array([1 + 2.0**-12] * 3 + [2.0**-100] * 3 + [2.0**-75] * 2, np.float32)
    b = np.array([1 + 2.0**-12] * 3 + [1.5 * 2.0**-49] * 3 + [2.0**-75] * 2, np.float32)
    c = np.array([2.0**-80, -(2.0**-80), 0, 0, 2.0**-149, -(2.0**-149), 0, 2.0**-149], np.float32)
    got = apply(execute, "fma.rn.f32 {d}, {a}, {b}, {c};", np.uint32, a, b, c)
    expect(F32, got, lambda *v: arithmetic("fma", F32, "rn", *v), *_bits(a, b, c))


def test_a_sum_whose_tail_float64_cannot_hold_is_rounded_by_it(execute):
    a = np.array([1.0, 1.0, -1.0, 1.0, 2.0**100], np.float32)
    b = np.array([2.0**-80, -(2.0**-80), 2.0**-80, 0.0, -(2.0**-149)], np.float32)
    for mode in ("rz", "rm", "rp"):
        got = apply(execute, f"add.{mode}.f32 {{d}}, {{a}}, {{b}};", np.uint32, a, b)
        expect(F32, got, lambda x, y, m=mode: arithmetic("add", F32, m, x, y), *_bits(a, b))


def test_fma_does_not_round_twice(execute):
    """The product is just beside a tie of float32, by less than float64 would show."""
    x, y = np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12)
    exact = float(x) * float(y)
    z = np.array([2.0**30 * s for s in (1, -1, 3, 5)] + [2.0**-90, -(2.0**-90)], np.float32)
    a, b = np.full(6, x), np.full(6, y)
    got = apply(execute, "fma.rn.f32 {d}, {a}, {b}, {c};", np.uint32, a, b, z)
    assert exact
    expect(F32, got, lambda *v: arithmetic("fma", F32, "rn", *v), *_bits(a, b, z))


def _bits(*columns: np.ndarray) -> list[np.ndarray]:
    return [c.view(np.uint32) for c in columns]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_div_rcp_sqrt(execute, mode):
    check(execute, f"div.{mode}.f32", F32, lambda a, b: arithmetic("div", F32, mode, a, b), 2, 800)
    check(execute, f"rcp.{mode}.f32", F32, lambda a: arithmetic("div", F32, mode, 1.0, a), 1)
    check(execute, f"sqrt.{mode}.f32", F32, lambda a: arithmetic("sqrt", F32, mode, a), 1)


def test_div_rcp_sqrt_of_f64(execute):
    check(execute, "div.rn.f64", F64, lambda a, b: arithmetic("div", F64, "rn", a, b), 2, 800)
    check(execute, "rcp.rn.f64", F64, lambda a: arithmetic("div", F64, "rn", 1.0, a), 1)
    check(execute, "sqrt.rn.f64", F64, lambda a: arithmetic("sqrt", F64, "rn", a), 1)


@pytest.mark.parametrize("name", NAMES)
def test_ftz_flushes_operands_and_result(execute, name):
    """A result is flushed by its exact value: one that rounds up to the smallest normal number is
    a zero, as on an H200.
    """

    def reference(*v: float) -> float:
        v = tuple(map(F32.flush, v))
        result = F32.flush(arithmetic(name, F32, "rn", *v))
        if name in ("mul", "fma") and all(map(math.isfinite, v)):
            exact = Fraction(v[0]) * Fraction(v[1]) + (Fraction(v[2]) if name == "fma" else 0)
            if 0 < abs(exact) < Fraction(F32.smallest_normal):
                return math.copysign(0.0, exact)
        return result

    check(execute, f"{name}.rn.ftz.f32", F32, reference, NAMES[name])


@pytest.mark.parametrize("name", NAMES)
def test_sat_clamps_and_makes_nan_zero(execute, name):
    def reference(*v: float) -> float:
        r = arithmetic(name, F32, "rn", *v)
        return 0.0 if math.isnan(r) or r <= 0 else min(r, 1.0)

    columns = operands(F32, NAMES[name])
    names = ", ".join("{" + n + "}" for n in "abc"[: NAMES[name]])
    got = apply(execute, f"{name}.rn.sat.f32 {{d}}, {names};", np.uint32, *columns)
    expect(F32, got & np.uint32(0x7FFFFFFF), reference, *columns)
    assert not (got[got != 0x80000000] >> 31).any()


@pytest.mark.parametrize("form", [F16, BF16], ids=lambda f: f.name)
def test_fma_relu(execute, form):
    def reference(a: float, b: float, c: float) -> float:
        r = arithmetic("fma", form, "rn", a, b, c)
        return 0.0 if r < 0 else abs(r) if r == 0 else r

    columns = operands(form, 3)
    got = apply(
        execute, f"fma.rn.relu.{form.name} {{d}}, {{a}}, {{b}}, {{c}};", np.uint16, *columns
    )
    got = np.where(got == 0x8000, 0, got).astype(np.uint16)
    expect(form, got, reference, *columns)


# -- min, max, neg, abs ----------------------------------------------------------------------------


def choose(name: str, nan: bool, *values: float) -> float:
    """IEEE minimumNumber (or, with ``nan``, minimum): -0 is below +0."""
    numbers = [v for v in values if not math.isnan(v)]
    if not numbers or (nan and len(numbers) < len(values)):
        return math.nan
    key = lambda v: (v, math.copysign(1, v))
    return (min if name == "min" else max)(numbers, key=key)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["min", "max"])
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_min_and_max(execute, name, form):
    check(execute, f"{name}.{form.name}", form, lambda a, b: choose(name, False, a, b), 2)
    if form is not F64:
        check(execute, f"{name}.NaN.{form.name}", form, lambda a, b: choose(name, True, a, b), 2)
    if form is F32:
        flushed = lambda a, b: F32.flush(choose(name, False, F32.flush(a), F32.flush(b)))
        check(execute, f"{name}.ftz.f32", form, flushed, 2)


@pytest.mark.parametrize("name", ["min", "max"])
def test_xorsign_abs(execute, name):
    def reference(a: float, b: float) -> float:
        r = choose(name, False, abs(a), abs(b))
        return r if math.copysign(1, a) == math.copysign(1, b) else -r

    a, b = (c[~np.isnan(c.view(np.float32))] for c in (sample(F32, 60, s) for s in (0, 1)))
    columns = crossed(a, b)
    got = apply(execute, f"{name}.xorsign.abs.f32 {{d}}, {{a}}, {{b}};", np.uint32, *columns)
    expect(F32, got, reference, *columns)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_neg_abs(execute, form):
    check(execute, f"neg.{form.name}", form, lambda a: -a, 1)
    check(execute, f"abs.{form.name}", form, abs, 1)
    if form is F32:
        check(execute, "neg.ftz.f32", form, lambda a: -F32.flush(a), 1)
        check(execute, "abs.ftz.f32", form, lambda a: abs(F32.flush(a)), 1)


@pytest.mark.parametrize("form", [F32, F64], ids=lambda f: f.name)
def test_copysign_takes_the_sign_of_its_first_operand(execute, form):
    a, b = operands(form, 2)
    got = apply(execute, f"copysign.{form.name} {{d}}, {{a}}, {{b}};", STORED[form.name], a, b)
    top = STORED[form.name](1 << (form.width - 1))
    numbers = [not math.isnan(form.decode(int(v))) for v in b]
    assert (got == (a & top | b & ~top))[numbers].all()


# -- packed ----------------------------------------------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize("form", [F16, BF16], ids=lambda f: f.name)
@pytest.mark.parametrize("name", [*NAMES, "min", "max", "neg", "abs"])
def test_packed_halves_are_two_halves(execute, name, form):
    count = NAMES.get(name, 2 if name in ("min", "max") else 1)
    columns = [c[: len(c) // 2 * 2] for c in operands(form, count)]
    names = ", ".join("{" + n + "}" for n in "abc"[:count])
    rounding = ".rn" if name in NAMES else ""
    code = f"{name}{rounding}.{form.name}x2 {{d}}, {names};"
    got = apply(execute, code, np.uint32, *(c.view(np.uint32) for c in columns)).view(np.uint16)
    single = {
        "min": lambda a, b: choose("min", False, a, b), "neg": lambda a: -a, "abs": abs,
        "max": lambda a, b: choose("max", False, a, b),
    }.get(name, lambda *v: arithmetic(name, form, "rn", *v))  # fmt: skip
    expect(form, got, single, *columns)


def test_packed_f32_of_sm_100():
    from ptx_kernel import simulate_ptx

    def execute(*a, **k):
        return simulate_ptx(*a, arch="sm_100a", **k)

    for name, mode in [("add", "rn"), ("sub", "rz"), ("mul", "rp"), ("fma", "rn"), ("add", "rm")]:
        columns = [c[: len(c) // 2 * 2] for c in operands(F32, NAMES[name])]
        names = ", ".join("{" + n + "}" for n in "abc"[: NAMES[name]])
        code = f"{name}.{mode}.f32x2 {{d}}, {names};"
        got = apply(execute, code, np.uint64, *(c.view(np.uint64) for c in columns))
        reference = lambda *v, n=name, m=mode: arithmetic(n, F32, m, *v)
        expect(F32, got.view(np.uint32), reference, *columns)


@pytest.mark.parametrize("form", [F16, BF16], ids=lambda f: f.name)
def test_mixed_precision_of_sm_100(form):
    from ptx_kernel import simulate_ptx

    def execute(*a, **k):
        return simulate_ptx(*a, arch="sm_100a", **k)

    a, b = operands(form, 2, limit=600)
    c = np.resize(sample(F32, 200, 5), len(a))
    for name, op in [("fma", "fma.rn"), ("add", "add")]:
        names = "{a}, {b}, {c}" if name == "fma" else "{a}, {c}"
        got = apply(execute, f"{op}.f32.{form.name} {{d}}, {names};", np.uint32, a, b, c)
        for k, bits in enumerate(got.tolist()):
            x, y, z = form.decode(int(a[k])), form.decode(int(b[k])), F32.decode(int(c[k]))
            want = arithmetic(name, F32, "rn", *((x, y, z) if name == "fma" else (x, z)))
            assert not differs(F32, bits, want), (x, y, z)


# -- approximate functions -------------------------------------------------------------------------

APPROXIMATE = {  # function, largest error: relative, or absolute below 1 (PTX ISA 9.7.3)
    "rcp.approx.f32": (lambda x: 1 / x, 2**-22, 0),
    "rcp.approx.ftz.f32": (lambda x: 1 / x, 2**-22, 0),
    "sqrt.approx.f32": (np.sqrt, 2**-21, 0),
    "rsqrt.approx.f32": (lambda x: 1 / np.sqrt(x), 2**-21, 0),
    "ex2.approx.f32": (np.exp2, 2**-21, 0),
    "ex2.approx.ftz.f32": (np.exp2, 2**-21, 0),
    "lg2.approx.f32": (np.log2, 2**-20, 2**-20),
    "tanh.approx.f32": (np.tanh, 2**-10, 0),
    "sin.approx.f32": (np.sin, 0, 2**-19),
    "cos.approx.f32": (np.cos, 0, 2**-19),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("op", APPROXIMATE)
def test_approximate_functions_stay_within_their_error(execute, op):
    f, relative, absolute = APPROXIMATE[op]
    random = np.random.default_rng(3)
    x = (
        random.uniform(-3, 3, 400)
        if op[:3] in ("sin", "cos", "tan")
        else random.uniform(-90, 90, 400)
    )
    x = x.astype(np.float32)
    if op[:3] in ("sqr", "rsq", "lg2"):
        x = np.abs(x)
    got = apply(execute, f"{op} {{d}}, {{a}};", np.float32, x)
    want = f(x.astype(np.float64))
    assert (np.abs(got - want) <= relative * np.abs(want) + absolute).all()


def test_approximate_functions_at_the_edges(execute):
    inf, nan = math.inf, math.nan
    x = np.array([0.0, -0.0, inf, -inf, nan], np.float32)
    for op, want in {
        "rcp.approx.f32": [inf, -inf, 0.0, -0.0, nan],
        "rsqrt.approx.f32": [inf, -inf, 0.0, nan, nan],
        "sqrt.approx.f32": [0.0, -0.0, inf, nan, nan],
        "ex2.approx.f32": [1.0, 1.0, inf, 0.0, nan],
        "lg2.approx.f32": [-inf, -inf, inf, nan, nan],
        "tanh.approx.f32": [0.0, -0.0, 1.0, -1.0, nan],
        "sin.approx.f32": [0.0, -0.0, nan, nan, nan],
        "cos.approx.f32": [1.0, 1.0, nan, nan, nan],
    }.items():
        got = apply(execute, f"{op} {{d}}, {{a}};", np.uint32, x)
        wrong = [v for v, g, w in zip(x, got.tolist(), want, strict=True) if differs(F32, g, w)]
        assert not wrong, (op, wrong)


def test_ex2_of_the_softmax_range_underflows_to_zero(execute):
    x = np.array([-126.0, -127.0, -149.0, -150.5, -1000.0, 127.0, 128.0], np.float32)
    flushed = apply(execute, "ex2.approx.ftz.f32 {d}, {a};", np.float32, x)
    assert flushed.tolist() == [2.0**-126, 0.0, 0.0, 0.0, 0.0, 2.0**127, math.inf]
    kept = apply(execute, "ex2.approx.f32 {d}, {a};", np.float32, x)
    np.testing.assert_allclose(kept[1:3], [2.0**-127, 2.0**-149], rtol=2**-21)  # approximate


@pytest.mark.parametrize("op", ["ex2.approx.f16x2", "tanh.approx.f16x2", "tanh.approx.bf16x2",
                                "ex2.approx.ftz.bf16x2"])  # fmt: skip
def test_approximate_packed_halves(execute, op):
    form = BF16 if "bf16" in op else F16
    x = np.random.default_rng(1).uniform(-4, 4, 256)
    half = np.array([_nearest(form, v) for v in x], np.uint16)
    got = apply(execute, f"{op} {{d}}, {{a}};", np.uint32, half.view(np.uint32)).view(np.uint16)
    f = np.exp2 if op[0] == "e" else np.tanh
    want = f(np.array(decode(form, half)))
    error = np.abs(np.array(decode(form, got)) - want) / np.abs(want)
    assert error.max() < 2.0 ** (-form.precision + 2)


def _nearest(form: Format, value: float) -> int:
    size = (
        (np.float32(value).view(np.uint32) >> 16) if form is BF16 else np.float16(value).view("u2")
    )
    return int(size)


# -- comparisons -----------------------------------------------------------------------------------

ORDERED = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_setp_ordered_and_unordered(execute, form):
    columns = operands(form, 2)
    rows = list(zip(*(decode(form, c) for c in columns), strict=True))
    unordered = np.array([math.isnan(a) or math.isnan(b) for a, b in rows])
    wanted = {"num": ~unordered, "nan": unordered}
    for name, compare in ORDERED.items():
        holds = np.array([compare(a, b) for a, b in rows])
        wanted[name], wanted[f"{name}u"] = holds & ~unordered, holds | unordered
    for name, want in wanted.items():
        got = apply(execute, f"setp.{name}.{form.name} {{d}}, {{a}}, {{b}};", bool, *columns)
        assert (got == want).all(), name


def test_setp_ftz_flushes_both(execute):
    columns = operands(F32, 2)
    got = apply(execute, "setp.lt.ftz.f32 {d}, {a}, {b};", bool, *columns)
    rows = zip(*(decode(F32, c) for c in columns), strict=True)
    assert got.tolist() == [F32.flush(a) < F32.flush(b) for a, b in rows]


@pytest.mark.parametrize("form", [F16, BF16], ids=lambda f: f.name)
def test_setp_of_packed_halves_writes_one_predicate_for_each(execute, form):
    a, b = (c[: len(c) // 2 * 2] for c in operands(form, 2))
    code = f"setp.lt.{form.name}x2 {{d}}|{{e}}, {{a}}, {{b}};"
    low, high = apply(execute, code, bool, a.view(np.uint32), b.view(np.uint32), also=bool)
    want = [x < y for x, y in zip(decode(form, a), decode(form, b), strict=True)]
    assert low.tolist() == want[::2] and high.tolist() == want[1::2]


@pytest.mark.parametrize("form", [F32, F64], ids=lambda f: f.name)
def test_testp(execute, form):
    (x,) = operands(form, 1)
    values = decode(form, x)
    tests = {
        "finite": math.isfinite, "infinite": math.isinf, "notanumber": math.isnan,
        "number": lambda v: not math.isnan(v),
        "normal": lambda v: math.isfinite(v) and (v == 0 or abs(v) >= form.smallest_normal),
        "subnormal": lambda v: 0 < abs(v) < form.smallest_normal,
    }  # fmt: skip
    for name, test in tests.items():
        got = apply(execute, f"testp.{name}.{form.name} {{d}}, {{a}};", bool, x)
        assert got.tolist() == [test(v) for v in values], name


def test_float_immediates(execute):
    x = np.array([1.5, -2.0, 1e10], np.float32)
    for text in ("0f3F800000", "1.0", "0F3f800000"):
        got = apply(execute, f"add.f32 {{d}}, {{a}}, {text};", np.float32, x)
        assert (got == x + np.float32(1)).all()
    y = np.array([1.5, -2.0, 1e100])
    for text in ("0d3FF0000000000000", "1.0", "1e0"):
        got = apply(execute, f"add.f64 {{d}}, {{a}}, {text};", np.float64, y)
        assert (got == y + 1).all()
