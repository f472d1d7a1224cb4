"""The bits that fp8 sums on Hopper keep, against the rule in exact integers."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from cutex.sim.numerics.fp8_sum import add_products


def exponent(x: Fraction) -> int:
    e = 0
    while abs(x) >= Fraction(2) ** (e + 1):
        e += 1
    while abs(x) < Fraction(2) ** e:
        e -= 1
    return e


def cut(x: Fraction, at: int) -> Fraction:
    """Truncate towards zero, to a multiple of 2^at."""
    unit = Fraction(2) ** at
    return int(x / unit) * unit


def one_sum(old: float, a: np.ndarray, b: np.ndarray) -> Fraction:
    pairs = [(Fraction(float(x)), Fraction(float(y))) for x, y in zip(a, b, strict=True)]
    pairs = [(x, y) for x, y in pairs if x and y]
    start = Fraction(float(old))
    exponents = [exponent(x) + exponent(y) for x, y in pairs] + ([exponent(start)] if start else [])
    if not exponents:
        return Fraction(0)
    at = max(exponents) - 13
    total = sum((cut(x * y, at) for x, y in pairs), cut(start, at))
    return cut(total, exponent(total) - 13) if total else total


@pytest.mark.sweep(2)
@pytest.mark.parametrize("scale", [2.0**-8, 1.0, 64.0])
@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_products_are_aligned_and_cut_off(dtype: type, scale: float) -> None:
    r = np.random.default_rng(int(scale * 256))
    a, b = ((r.standard_normal((6, 32)) * s).astype(dtype).astype(np.float32) for s in (scale, 1.0))
    a[0, :30], a[1] = 0, 0
    old = (r.standard_normal((6, 6)) * scale * 20).astype(np.float32)
    old[:, 0] = 0
    got = add_products(old, a, b)
    for i in range(6):
        for j in range(6):
            assert Fraction(float(got[i, j])) == one_sum(old[i, j], a[i], b[j])


def test_a_small_addend_next_to_a_large_one_is_lost() -> None:
    a = np.zeros((1, 32), np.float32)
    b = np.ones((1, 32), np.float32)
    a[0, :2] = 256, 2.0**-6
    assert add_products(np.zeros((1, 1), np.float32), a, b) == 256  # 2^-6 is 14 bits below
    a[0, 1] = 2.0**-5
    assert add_products(np.zeros((1, 1), np.float32), a, b) == 256 + 2.0**-5


def test_what_is_not_finite_stays_so_and_nothing_else() -> None:
    a, b = np.ones((2, 32), np.float32), np.ones((1, 32), np.float32)
    a[0, 3] = np.nan
    got = add_products(np.zeros((2, 1), np.float32), a, b)
    assert np.isnan(got[0, 0]) and got[1, 0] == 32
