"""Floating-point formats in exact fractions: the reference for arithmetic.

Every number of every format here is a Python float, exactly, so values are passed as floats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np


@dataclass(frozen=True)
class Format:
    """``precision`` counts the hidden bit; ``largest`` overrides IEEE's largest number."""

    name: str
    width: int
    exponent_bits: int
    precision: int
    largest: float | None = None
    finite: bool = False  # neither infinities nor NaN

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def top(self) -> float:
        if self.largest is not None:
            return self.largest
        return math.ldexp(2 - 2.0 ** (1 - self.precision), self.bias)

    def decode(self, bits: int) -> float:
        fraction_bits = self.precision - 1
        sign = -1.0 if bits >> (self.width - 1) else 1.0
        exponent = bits >> fraction_bits & ((1 << self.exponent_bits) - 1)
        fraction = bits & ((1 << fraction_bits) - 1)
        if exponent == (1 << self.exponent_bits) - 1 and not self.finite:
            if self.largest is None:
                return sign * math.inf if fraction == 0 else math.nan
            if fraction == (1 << fraction_bits) - 1:  # e4m3fn: one NaN, no infinity
                return math.nan
        hidden = 1 << fraction_bits if exponent else 0
        return math.copysign(
            math.ldexp(fraction + hidden, max(exponent, 1) - self.bias - fraction_bits), sign
        )

    def flush(self, value: float) -> float:
        return math.copysign(0.0, value) if abs(value) < self.smallest_normal else value

    def round(self, exact: Fraction | float, mode: str = "rn") -> float:
        """The format's number for an exact value in ``mode`` (rn, rz, rm, rp, rna); infinity past
        the top.
        """
        if isinstance(exact, float):
            if not math.isfinite(exact) or exact == 0:
                return exact
            exact = Fraction(exact)
        if exact == 0:
            return 0.0
        sign, size = (-1 if exact < 0 else 1), abs(exact)
        exponent = size.numerator.bit_length() - size.denominator.bit_length()
        exponent += 1 if size >= Fraction(2) ** (exponent + 1) else 0
        exponent -= 1 if size < Fraction(2) ** exponent else 0
        unit = Fraction(2) ** (max(exponent, 1 - self.bias) - self.precision + 1)
        units = size / unit
        whole = units.numerator // units.denominator
        rest = units - whole
        up = {
            "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1),
            "rna": rest >= Fraction(1, 2),
            "rz": False,
            "rm": sign < 0 and rest > 0,
            "rp": sign > 0 and rest > 0,
        }[mode]
        value = (whole + up) * unit
        if value > Fraction(self.top):
            away = {"rz": False, "rm": sign < 0, "rp": sign > 0}.get(mode, True)
            return sign * (math.inf if away else self.top)
        return math.copysign(float(value), sign)


F16 = Format("f16", 16, 5, 11)
BF16 = Format("bf16", 16, 8, 8)
F32 = Format("f32", 32, 8, 24)
F64 = Format("f64", 64, 11, 53)
TF32 = Format("tf32", 19, 8, 11)
E4M3 = Format("e4m3", 8, 4, 4, 448.0)
E5M2 = Format("e5m2", 8, 5, 3)
E2M3 = Format("e2m3", 6, 2, 4, 7.5, finite=True)
E3M2 = Format("e3m2", 6, 3, 3, 28.0, finite=True)
E2M1 = Format("e2m1", 4, 2, 2, 6.0, finite=True)
FORMATS = {f.name: f for f in (F16, BF16, F32, F64)}


def arithmetic(name: str, form: Format, mode: str, *values: float) -> float:
    """The result of add, sub, mul, div, fma or sqrt, rounded once."""
    plain = _plain(name, *values)
    by_zero = name == "div" and values[1] == 0
    if by_zero or not all(map(math.isfinite, values)):
        return plain
    if name == "sqrt":
        return _sqrt(form, mode, values[0])
    exact = _exact(name, *map(Fraction, values))
    if exact == 0:
        return _zero(name, mode, *values)
    return form.round(exact, mode)


def _zero(name: str, mode: str, a: float, b: float, c: float = 0.0) -> float:
    """The sign of an exact zero: a product's own sign; for a sum, that of both terms, or
    ``mode``'s.
    """
    sign = lambda x: math.copysign(1, x)
    if name in ("mul", "div"):
        return math.copysign(0.0, sign(a) * sign(b))
    terms = {"add": (sign(a), sign(b)), "sub": (sign(a), -sign(b))}
    first, second = terms.get(name, (sign(a) * sign(b), sign(c)))
    if first == second:
        return math.copysign(0.0, first)
    return -0.0 if mode == "rm" else 0.0


def _exact(name: str, a: Fraction, b: Fraction, c: Fraction = Fraction(0)) -> Fraction:
    return {
        "add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b, "div": lambda: a / b,
        "fma": lambda: a * b + c,
    }[name]()  # fmt: skip


def _plain(name: str, *values: float) -> float:
    """The result by the rules for infinities, NaN and zeros."""
    with np.errstate(all="ignore"):
        a, *rest = map(np.float64, values)
        if name == "sqrt":
            return float(np.sqrt(a))
        b, *more = rest
        if name == "fma":
            return float(a * b + more[0])
        f = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[name]
        return float(f(a, b))


def _sqrt(form: Format, mode: str, value: float) -> float:
    if value <= 0:
        return _plain("sqrt", value)
    x = Fraction(value)
    scale = 1 << 2 * (form.width + form.bias)
    root = Fraction(math.isqrt(x.numerator * x.denominator * scale * scale), scale * x.denominator)
    if root * root != x:
        root += Fraction(1, 4 * scale * x.denominator)  # between two candidates: never a tie
    return form.round(root, mode)


def sample(form: Format, count: int, seed: int = 0) -> np.ndarray:
    """Bits of edge values and random ones, as unsigned integers."""
    random = np.random.default_rng(seed)
    one = form.bias << (form.precision - 1)
    infinity = ((1 << form.exponent_bits) - 1) << (form.precision - 1)
    edges = [0, 1, 2, (1 << (form.precision - 1)) - 1, 1 << (form.precision - 1)]
    edges += [
        (1 << (form.precision - 1)) + 1,
        one - 1,
        one,
        one + 1,
        one + (1 << (form.precision - 2)),
    ]
    edges += [infinity - 1, infinity, infinity + (1 << (form.precision - 2))]
    edges += [one + (k << (form.precision - 1)) for k in (1, 2, form.precision, -form.precision)]
    bits = [e | sign << (form.width - 1) for e in edges for sign in (0, 1)]
    near = [
        one + int(random.integers(-1 << form.precision, 1 << form.precision))
        for _ in range(count // 2)
    ]
    bits += [n | int(random.integers(2)) << (form.width - 1) for n in near]
    bits += [
        int.from_bytes(random.bytes(8), "little") >> (64 - form.width) for _ in range(count // 2)
    ]
    return np.array(bits, f"u{form.width // 8}")


def decode(form: Format, bits: np.ndarray) -> list[float]:
    return [form.decode(int(b)) for b in bits]
