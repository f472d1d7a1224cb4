"""Conversions against integers and exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
from elementwise import apply, crossed, expect_equal, integers
from ptx_kernel import simulate_ptx
from softfloat import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    F16,
    F32,
    FORMATS,
    TF32,
    Format,
    decode,
    sample,
)

from cutex.sim.machine.memory import POISON32

INTEGERS = {
    "u8": np.uint8, "s8": np.int8, "u16": np.uint16, "s16": np.int16, "u32": np.uint32,
    "s32": np.int32, "u64": np.uint64, "s64": np.int64,
}  # fmt: skip
STORED = {"f16": np.uint16, "bf16": np.uint16, "f32": np.uint32, "f64": np.uint64}
MODES = ("rn", "rz", "rm", "rp")
INTEGRAL = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


def same(form: Format, bits: int, want: float) -> bool:
    got = form.decode(bits)
    if math.isnan(want):
        return math.isnan(got)
    return got == want and math.copysign(1, got) == math.copysign(1, want)


def expect(form: Format, got: np.ndarray, want: list[float], *sources: object) -> None:
    for k, (bits, value) in enumerate(zip(got.tolist(), want, strict=True)):
        assert same(form, bits, value), (
            f"{[s[k] for s in sources]}: got {form.decode(bits)!r}, want {value!r}"
        )


# -- integers --------------------------------------------------------------------------------------


@pytest.mark.sweep(5)
@pytest.mark.parametrize("to", INTEGERS)
@pytest.mark.parametrize("frm", INTEGERS)
def test_integers_are_truncated_or_extended(execute, frm, to):
    x = integers(INTEGERS[frm])
    got = apply(execute, f"cvt.{to}.{frm} {{d}}, {{a}};", INTEGERS[to], x)
    expect_equal(got, x.astype(INTEGERS[to]), x)
    info, source = np.iinfo(INTEGERS[to]), np.iinfo(INTEGERS[frm])
    if source.min < info.min or source.max > info.max:
        got = apply(execute, f"cvt.sat.{to}.{frm} {{d}}, {{a}};", INTEGERS[to], x)
        want = [max(info.min, min(info.max, int(v))) for v in x]
        expect_equal(got, np.array(want, INTEGERS[to]), x)


@pytest.mark.parametrize("to", ["s8", "u8", "s16", "u16"])
def test_a_narrow_result_is_extended_into_its_wide_register(execute, to):
    x = integers(np.int32)
    got = apply(execute, f"cvt.{to}.s32 {{d}}, {{a}};", np.int32, x)
    expect_equal(got, x.astype(INTEGERS[to]).astype(np.int32), x)
    code = f"{{{{ .reg .b64 t; cvt.u64.u32 t, {{a}}; cvt.{to}.u64 {{d}}, t; }}}}"
    got = apply(execute, code, np.int32, x)
    expect_equal(got, x.astype(INTEGERS[to]).astype(np.int32), x)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", ["u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2"])
def test_two_integers_are_clamped_and_packed_above_what_there_is(execute, kind):
    bits = int(kind[1:])
    least, most = (0, 2**bits - 1) if kind[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    high, low = crossed(integers(np.int32), integers(np.int32, seed=1))
    third = ", {c}" if bits < 16 else ""
    above = integers(np.uint32, seed=2, count=len(high))[: len(high)]
    code = f"cvt.pack.sat.{kind}.s32{'.b32' if third else ''} {{d}}, {{a}}, {{b}}{third};"
    got = apply(execute, code, np.uint32, high, low, *([above] if third else []))
    want = above.astype(np.uint64) << 2 * bits if third else np.zeros(len(high), np.uint64)
    for i, x in enumerate((low, high)):
        clamped = np.clip(x.astype(np.int64), least, most) & (2**bits - 1)
        want |= clamped.astype(np.uint64) << bits * i
    expect_equal(got, want.astype(np.uint32), high, low)


def test_a_narrow_source_is_read_from_the_low_bits_of_its_register(execute):
    x = integers(np.uint32)
    expect_equal(apply(execute, "cvt.s32.s8 {d}, {a};", np.int32, x), x.astype(np.int8), x)
    expect_equal(apply(execute, "cvt.u32.u16 {d}, {a};", np.uint32, x), x.astype(np.uint16), x)


# -- integers and floats ---------------------------------------------------------------------------


ABSENT = {("u8", "bf16"), ("bf16", "u8"), ("bf16", "s8")}  # conversions that PTX does not have
FROM_INTEGER = {*product(["u8", "s16", "u32", "s32", "u64", "s64"], FORMATS)} - ABSENT
TO_INTEGER = {*product(FORMATS, ["u8", "s8", "u16", "s32", "u32", "s64", "u64"])} - ABSENT


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("frm", "to"), sorted(FROM_INTEGER))
def test_integers_to_floats_round_once(execute, frm, to):
    x = integers(INTEGERS[frm], count=200)
    form = FORMATS[to]
    for mode in MODES if to != "bf16" else ("rn",):
        got = apply(execute, f"cvt.{mode}.{to}.{frm} {{d}}, {{a}};", STORED[to], x)
        expect(form, got, [form.round(Fraction(int(v)), mode) for v in x], x)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("frm", "to"), sorted(TO_INTEGER))
def test_floats_to_integers_clamp(execute, frm, to):
    form, info = FORMATS[frm], np.iinfo(INTEGERS[to])
    bits = np.concatenate([sample(form, 100), _near_integers(form)])
    values = decode(form, bits)
    numbers = [v for v in values if not math.isnan(v)]
    bits = bits[[not math.isnan(v) for v in values]]
    for mode, f in INTEGRAL.items():
        got = apply(execute, f"cvt.{mode}.{to}.{frm} {{d}}, {{a}};", INTEGERS[to], bits)
        want = []
        for v in numbers:
            whole = f(v) if math.isfinite(v) else (info.max if v > 0 else info.min)
            want.append(max(info.min, min(info.max, whole)))
        expect_equal(got, np.array(want, INTEGERS[to]), np.array(numbers))


def _near_integers(form: Format) -> np.ndarray:
    values = [
        v + d for v in (0, 1, 2, 3, 100, 127, 128, 255, 256) for d in (-0.5, -0.25, 0.25, 0.5)
    ]
    values += [s * 2.0**k for k in (7, 15, 16, 31, 32, 63, 64) for s in (-1, 1)]
    return np.array([_encode(form, v * s) for v in values for s in (1, -1)], STORED[form.name])


def _encode(form: Format, value: float) -> int:
    if form is BF16:
        return int(np.float32(value).view(np.uint32) >> 16)
    with np.errstate(over="ignore"):
        return int({"f16": np.float16, "f32": np.float32, "f64": np.float64}[form.name](value)
                   .view(STORED[form.name]))  # fmt: skip


def test_nan_to_integer_is_zero_but_the_indefinite_value_where_64_bits_are_involved(execute):
    f32, f64 = np.array([0x7FC00000], np.uint32), np.array([0x7FF8000000000000], np.uint64)
    for to, frm, want in [
        ("s32", "f32", 0), ("u32", "f32", 0), ("s32", "f64", -(1 << 31)), ("u32", "f64", 1 << 31),
        ("s64", "f32", -(1 << 63)), ("u64", "f32", 1 << 63), ("s64", "f64", -(1 << 63)),
    ]:  # fmt: skip
        x = f32 if frm == "f32" else f64
        got = apply(execute, f"cvt.rzi.{to}.{frm} {{d}}, {{a}};", INTEGERS[to], x)
        assert got[0] == INTEGERS[to](want), (to, frm, got[0])


def test_ftz_flushes_before_rounding_to_an_integer(execute):
    x = np.array([1e-40, -1e-40, 1e-30], np.float32)
    assert apply(execute, "cvt.rpi.s32.f32 {d}, {a};", np.int32, x).tolist() == [1, 0, 1]
    assert apply(execute, "cvt.rpi.ftz.s32.f32 {d}, {a};", np.int32, x).tolist() == [0, 0, 1]


# -- floats ----------------------------------------------------------------------------------------

NARROWING = [
    ("f32", "f64", MODES), ("f16", "f32", MODES), ("bf16", "f32", ("rn", "rz")),
    ("f16", "f64", MODES),
]  # fmt: skip


@pytest.mark.parametrize(("to", "frm", "modes"), NARROWING)
def test_narrowing_rounds_in_every_direction(execute, to, frm, modes):
    source, form = FORMATS[frm], FORMATS[to]
    bits = np.concatenate([sample(source, 200), _around(source, form)])
    values = decode(source, bits)
    for mode in modes:
        got = apply(execute, f"cvt.{mode}.{to}.{frm} {{d}}, {{a}};", STORED[to], bits)
        expect(form, got, [form.round(v, mode) for v in values], values)


def _around(source: Format, form: Format) -> np.ndarray:
    """Numbers of ``source`` near ties, subnormal numbers and the top of ``form``."""
    random = np.random.default_rng(5)
    out = []
    for low in decode(form, sample(form, 60)):
        if math.isfinite(low):
            for part in (0.25, 0.5, 0.75):
                unit = Fraction(2) ** (max(math.frexp(low)[1], 2 - form.bias) - form.precision)
                value = float(Fraction(low) + Fraction(part) * unit)
                out += [value, value * (1 + 2.0 ** (2 - source.precision))]
    picked = random.permutation(out)[:200]
    return np.array([_encode(source, v) for v in picked], STORED[source.name])


@pytest.mark.parametrize(("to", "frm"), [("f32", "f16"), ("f64", "f32"), ("f64", "f16"),
                                         ("f32", "bf16"), ("f64", "bf16")])  # fmt: skip
def test_widening_is_exact(execute, to, frm):
    bits = sample(FORMATS[frm], 200)
    got = apply(execute, f"cvt.{to}.{frm} {{d}}, {{a}};", STORED[to], bits)
    expect(FORMATS[to], got, decode(FORMATS[frm], bits), bits)


@pytest.mark.parametrize("kind", ["f16", "f32", "f64"])
def test_rounding_to_an_integral_float_keeps_the_sign_of_zero(execute, kind):
    form = FORMATS[kind]
    bits = np.concatenate([sample(form, 100), _near_integers(form)])
    for mode, f in INTEGRAL.items():
        got = apply(execute, f"cvt.{mode}.{kind}.{kind} {{d}}, {{a}};", STORED[kind], bits)
        want = [math.copysign(f(v), v) if math.isfinite(v) else v for v in decode(form, bits)]
        expect(form, got, want, decode(form, bits))


def test_sat_and_relu(execute):
    bits = sample(F32, 100)
    values = decode(F32, bits)
    got = apply(execute, "cvt.sat.f32.f32 {d}, {a};", np.float32, bits)
    assert (got == [0.0 if math.isnan(v) else min(max(v, 0.0), 1.0) for v in values]).all()
    got = apply(execute, "cvt.rn.relu.bf16.f32 {d}, {a};", np.uint16, bits)
    want = [v if math.isnan(v) else BF16.round(v if v > 0 else 0.0) for v in values]
    expect(BF16, got, want, values)


# -- packed ----------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("form", [F16, BF16], ids=lambda f: f.name)
@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("relu", ["", ".relu"])
def test_two_floats_into_halves_the_first_on_top(execute, form, mode, relu):
    a = np.concatenate([sample(F32, 200), _around(F32, form)])
    b = a[::-1].copy()
    code = f"cvt.{mode}{relu}.{form.name}x2.f32 {{d}}, {{a}}, {{b}};"
    got = apply(execute, code, np.uint32, a, b)
    for half, source in ((got >> 16, a), (got & 0xFFFF, b)):
        values = decode(F32, source)
        if relu:
            values = [v if math.isnan(v) or v > 0 else 0.0 for v in values]
        expect(form, half, [form.round(v, mode) for v in values], values)


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda f: f.name)
def test_fp8_saturates(execute, form):
    a = np.concatenate([sample(F32, 200), _fp8_neighbours(form)])
    b = a[::-1].copy()
    code = f"cvt.rn.satfinite.{form.name}x2.f32 {{d}}, {{a}}, {{b}};"
    got = apply(execute, code, np.uint16, a, b)
    for byte, source in ((got >> 8, a), (got & 0xFF, b)):
        expect(form, byte, [_saturated(form, v) for v in decode(F32, source)], decode(F32, source))


def _saturated(form: Format, value: float) -> float:
    if math.isnan(value):
        return value
    return max(-form.top, min(form.top, form.round(value)))


def _fp8_neighbours(form: Format) -> np.ndarray:
    values = [v for v in (form.decode(b) for b in range(256)) if math.isfinite(v)]
    values += [(a + b) / 2 for a, b in pairwise(values)]
    values += [form.top * s for s in (1.01, 1.05, 1.07, 1.1, 2, -1.1)]
    return np.array(values, np.float32).view(np.uint32)


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda f: f.name)
def test_fp8_to_halves_is_exact_and_back(execute, form):
    pairs = np.arange(256, dtype=np.uint16) * 257
    halves = apply(execute, f"cvt.rn.f16x2.{form.name}x2 {{d}}, {{a}};", np.uint32, pairs)
    want = [form.decode(b) for b in range(256)]
    for half in (halves >> 16, halves & 0xFFFF):
        expect(F16, half, want, want)
    code = f"cvt.rn.satfinite.{form.name}x2.f16x2 {{d}}, {{a}};"
    back = apply(execute, code, np.uint16, halves)
    expect(form, back >> 8, [_saturated(form, v) for v in want], want)


SMALLER = [E2M3, E3M2, E2M1]  # Blackwell's


on_blackwell = partial(simulate_ptx, arch="sm_100a")
of_ptx_9_1 = partial(on_blackwell, assembles=False)  # of later than the tests' other PTX


@pytest.mark.sweep(2)
@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("form", SMALLER, ids=lambda f: f.name)
def test_smaller_floats_saturate_and_a_nan_is_the_largest(form, relu):
    a = np.concatenate([sample(F32, 200), _neighbours(form)])
    b = a[::-1].copy()
    convert = f"cvt.rn.satfinite{relu}.{form.name}x2.f32"
    code = f"{convert} {{d}}, {{a}}, {{b}};"
    if form is E2M1:
        code = "{{ .reg .b8 t; " + f"{convert} t, {{a}}, {{b}};" + " cvt.u16.u8 {d}, t; }}"
    got = apply(on_blackwell, code, np.uint16, a, b)
    place = 4 if form is E2M1 else 8
    for part, source in ((got >> place, a), (got & (1 << place) - 1, b)):
        values = decode(F32, source)
        want = [form.top if math.isnan(v) else _saturated(form, v) for v in values]
        if relu:
            want = [max(v, 0.0) if v != 0 else 0.0 for v in want]
        expect(form, part, want, values)


def _neighbours(form: Format) -> np.ndarray:
    values = [form.decode(b) for b in range(1 << form.width)]
    values += [(a + b) / 2 for a, b in pairwise(values)]
    values += [form.top * s for s in (1.01, 1.05, 1.1, 2, -1.1)]
    return np.array(values, np.float32).view(np.uint32)


@pytest.mark.parametrize("form", SMALLER, ids=lambda f: f.name)
def test_smaller_floats_to_halves_are_exact(form):
    codes = np.arange(1 << form.width, dtype=np.uint16)
    pairs = codes << (4 if form is E2M1 else 8) | codes[::-1]
    code = f"cvt.rn.f16x2.{form.name}x2 {{d}}, {{a}};"
    if form is E2M1:
        code = "{{ .reg .b8 t; cvt.u8.u16 t, {a}; cvt.rn.f16x2.e2m1x2 {d}, t; }}"
    got = apply(on_blackwell, code, np.uint32, pairs)
    for half, source in ((got >> 16, codes), (got & 0xFFFF, codes[::-1])):
        expect(F16, half, [form.decode(int(c)) for c in source], source)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("finite", ["", ".satfinite"])
@pytest.mark.parametrize("mode", ["rz", "rp"])
@pytest.mark.parametrize("source", ["f32", "bf16x2"])
def test_powers_of_two_around_the_size_of_a_number(source, mode, finite):
    edges = [0.0, 2.0**-149, 2.0**-127, 1.5 * 2.0**-127, 2.0**-126, 1.0, 1.25, 2.0**127,
             1.5 * 2.0**127, math.inf]  # fmt: skip
    edges = np.array([*edges, *(-e for e in edges)], np.float32).view(np.uint32)
    a = np.concatenate([sample(F32, 200), edges])
    a = a & 0xFFFF0000 if source == "bf16x2" else a
    b = a[::-1].copy()
    convert = f"cvt.{mode}{finite}.ue8m0x2.{source}"
    if source == "f32":
        got = apply(on_blackwell, f"{convert} {{d}}, {{a}}, {{b}};", np.uint16, a, b)
    else:
        got = apply(on_blackwell, f"{convert} {{d}}, {{a}};", np.uint16, a | b >> 16)
    for byte, bits in ((got >> 8, a), (got & 255, b)):
        assert byte.tolist() == [_power(v, mode == "rp", bool(finite)) for v in decode(F32, bits)]


def _power(value: float, above: bool, finite: bool) -> int:
    """The code of 2^(code - 127), found by trying all codes."""
    if math.isnan(value):
        return 255
    size = Fraction(abs(value)) if math.isfinite(value) else Fraction(2) ** 200
    powers = [Fraction(2) ** (code - 127) for code in range(255)]
    if above:
        fitting = [code for code, p in enumerate(powers) if p >= size]
        return min(fitting, default=254 if finite else 255)
    below = [code for code, p in enumerate(powers) if p <= size]
    return max(below, default=0) if math.isfinite(value) or finite else 255


def test_powers_of_two_to_bf16_are_exact():
    codes = np.arange(256, dtype=np.uint16)
    got = apply(on_blackwell, "cvt.rn.bf16x2.ue8m0x2 {d}, {a};", np.uint32,
                codes << 8 | codes[::-1])  # fmt: skip
    for half, source in ((got >> 16, codes), (got & 0xFFFF, codes[::-1])):
        want = [math.nan if c == 255 else 2.0 ** (int(c) - 127) for c in source]
        expect(BF16, half, want, source)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("scale", [0, 0x70, 0x7F, 0x85, 0xF0, 0xFE, 0xFF])
@pytest.mark.parametrize("form", ["rn", "rn.satfinite", "rn.satfinite.relu"])
def test_fixed_point_to_bf16_with_a_scale(form, scale):
    codes = np.arange(256, dtype=np.uint16)
    code = f"""{{{{ .reg .b16 scale; mov.b16 scale, {scale << 8 | 0x85};
    cvt.{form}.scaled::n2::ue8m0.bf16x2.s2f6x2 {{d}}, {{a}}, scale; }}}}"""
    got = apply(of_ptx_9_1, code, np.uint32, codes << 8 | codes[::-1])
    for half, source, power in ((got >> 16, codes, scale), (got & 0xFFFF, codes[::-1], 0x85)):
        values = [math.ldexp(int(np.uint8(c).view(np.int8)), power - 127 - 6) for c in source]
        want = [BF16.round(v) if v else 0.0 for v in values]
        if "satfinite" in form:
            want = [max(-BF16.top, min(BF16.top, v)) for v in want]
        if "relu" in form:
            want = [max(0.0, v) for v in want]
        expect(BF16, half, [math.nan if power == 255 else v for v in want], source)


def test_the_dsl_converts_int8_to_bf16_by_it():
    """A scale of 0x8585 makes whole numbers of bytes (cutlass.cute.arch.cvt_i8x2_to_bf16x2)."""
    bytes_ = np.arange(-128, 128, dtype=np.int8)
    pairs = bytes_.view(np.uint8).astype(np.uint16)
    code = """{{ .reg .b16 scale; mov.b16 scale, 0x8585;
    cvt.rn.satfinite.scaled::n2::ue8m0.bf16x2.s2f6x2 {d}, {a}, scale; }}"""
    got = apply(of_ptx_9_1, code, np.uint32, pairs << 8 | pairs)
    expect(BF16, got >> 16, [float(v) for v in bytes_], bytes_)


@pytest.mark.parametrize("mode", ["rna", "rn", "rz"])
def test_tf32(execute, mode):
    bits = np.concatenate([sample(F32, 200), _around(F32, TF32_AS_F32)])
    values = decode(F32, bits)
    got = apply(execute, f"cvt.{mode}.tf32.f32 {{d}}, {{a}};", np.uint32, bits)
    expect(TF32, got >> 13, [TF32.round(v, mode) for v in values], values)


TF32_AS_F32 = Format("f32", 32, 8, 11)


def test_a_canonical_nan_comes_out_of_conversions_to_halves(execute):
    x = np.array([0x7FC01234, 0xFFC00001, 0x7F800001], np.uint32)
    assert apply(execute, "cvt.rn.bf16.f32 {d}, {a};", np.uint16, x).tolist() == [0x7FFF] * 3
    assert apply(execute, "cvt.rn.f16.f32 {d}, {a};", np.uint16, x).tolist() == [0x7FFF] * 3


@pytest.mark.parametrize("to", ["f16x2", "bf16x2"])
def test_a_pair_of_canonical_nans_is_not_what_nothing_has_written(execute, to):
    """As P of rows that do not exist, beside keys of -inf: tcgen05.mma may read it."""
    x = np.array([0x7FC01234], np.uint32)
    pair = apply(execute, f"cvt.rn.{to}.f32 {{d}}, {{a}}, {{a}};", np.uint32, x)
    assert pair.tolist() == [0x7FFF7FFF] and pair[0] != POISON32
    halves = POISON32.reshape(1).view(np.uint16)
    assert np.isnan(POISON32.reshape(1).view(np.float32)).all()
    assert np.isnan(halves.view(np.float16)).all()
    assert np.isnan((halves.astype(np.uint32) << 16).view(np.float32)).all()  # as bf16
