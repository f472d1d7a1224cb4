"""Rounding of exact results to float formats in each direction, and the bf16 that numpy lacks.

Sums that float64 cannot hold are rounded to odd there: the last bit is set if anything was lost, so
that rounding once more to a narrower format gives the correctly rounded exact sum.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

MODES = ("rn", "rz", "rm", "rp")  # to nearest even, to zero, down, up
SMALLEST_NORMAL = {"f16": 2.0**-14, "bf16": 2.0**-126, "f32": 2.0**-126, "f64": 2.0**-1022}

_SIXTEEN = np.uint32(16)
_BELOW_F32 = np.uint64((1 << 29) - 1)  # the bits of a float64 that a normal float32 lacks
_HALF_ULP_F32 = np.uint64(1 << 28)


def bf16_to_f32(x: Any) -> Any:
    words = np.asarray(x).astype(np.uint32)
    return np.left_shift(words, _SIXTEEN, out=words if words.ndim else None).view(np.float32)


def f32_to_bf16(x: Any, mode: str = "rn") -> Any:
    """float32 as bf16 bits; rn to nearest even, rz truncated. NaN is 0x7fff, as in hardware."""
    x = np.ascontiguousarray(x, np.float32)
    u = x.view(np.uint32)
    if mode == "rn":
        u = u + np.uint32(0x7FFF) + (u >> np.uint32(16) & np.uint32(1))
    elif mode in ("rm", "rp"):
        away = np.signbit(x) == (mode == "rm")
        u = u + np.where(away & np.isfinite(x), np.uint32(0xFFFF), np.uint32(0))
    bits = (u >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(x)
    return np.where(nan, np.uint16(0x7FFF), bits) if nan.any() else bits


def widen(bits: Any, kind: str) -> Any:
    """Bits or values of a float type as an array to compute with (float32, float64 for f64)."""
    if kind == "bf16":
        return bf16_to_f32(bits)
    if kind == "f16":
        return np.asarray(bits).view(np.float16).astype(np.float32)
    return bits


def narrow(values: Any, kind: str, mode: str = "rn") -> Any:
    """The inverse of `widen`, rounded once: values for f32 and f64, bits for halves.

    ``values`` may be float64 where ``kind`` is narrower.
    """
    values = np.asarray(values)
    if kind == "bf16":
        return f32_to_bf16(_odd_f32(values) if values.dtype == np.float64 else values, mode)
    if kind == "f16":
        bits = _to_type(values, np.float16, mode).view(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FFF), bits)
    return values if kind == "f64" else _to_type(values, np.float32, mode)


def _to_type(values: np.ndarray, dtype: Any, mode: str) -> Any:
    near = values.astype(dtype)
    if mode == "rn" or values.dtype == dtype:
        return near
    exact, back = values.astype(np.float64), near.astype(np.float64)
    up, down = np.nextafter(near, dtype(np.inf)), np.nextafter(near, dtype(-np.inf))
    floor, ceiling = np.where(back > exact, down, near), np.where(back < exact, up, near)
    if mode == "rz":
        return np.where(exact < 0, ceiling, floor)
    return floor if mode == "rm" else ceiling


def _odd_f32(values: np.ndarray) -> Any:
    near = values.astype(np.float32)
    lost = values - near.astype(np.float64)
    return _set_last_bit(near, np.where(np.isinf(near), -near, lost), np.isfinite(values))


def _set_last_bit(near: np.ndarray, lost: np.ndarray, applies: Any) -> Any:
    """``near`` where it is odd or nothing was ``lost``, else its neighbour on that side."""
    even = near.view(f"u{near.itemsize}") & near.view(f"u{near.itemsize}").dtype.type(1) == 0
    side = np.where(lost > 0, np.inf, -np.inf).astype(near.dtype)
    return np.where(applies & even & (lost != 0), np.nextafter(near, side), near)


def add_exactly(x: Any, y: Any, mode: str = "rn") -> Any:
    """x + y of float64 arrays, rounded to odd; an exact zero has the sign of ``mode``."""
    x, y = np.broadcast_arrays(np.asarray(x, np.float64), np.asarray(y, np.float64))
    near = x + y
    part = near - x
    lost = (x - (near - part)) + (y - part)
    if mode == "rm":
        near = np.where((near == 0) & (np.signbit(x) | np.signbit(y)), -0.0, near)
    return _set_last_bit(np.ascontiguousarray(near), lost, np.isfinite(near))


def fma_f32(x: Any, y: Any, z: Any) -> Any:
    """x * y + z of float32 arrays, rounded once, to nearest even.

    The product is exact in float64, and the sum rounded there; rounding it again is wrong only at
    midpoints of float32 numbers, all of which float64 has: these, and subnormal results, whose
    midpoints lie elsewhere, are computed again with a sum rounded to odd.
    """
    product = np.asarray(x, np.float64) * y
    near = np.asarray(product + z)
    midpoints = (near.view(np.uint64) & _BELOW_F32) == _HALF_ULP_F32
    small = np.abs(near) < SMALLEST_NORMAL["f32"]
    if midpoints.any() or near[small].any():
        near = np.asarray(add_exactly(product, z))
    return near.astype(np.float32)


_FRACTIONS: dict[str, Any] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b, "fma": lambda a, b, c: a * b + c,
}  # fmt: skip


def in_fractions(name: str, mode: str, *operands: Any) -> Any:
    """add, sub, mul, div or fma of float64 arrays, rounded once: computed exactly, value by
    value."""
    arrays = np.broadcast_arrays(*(np.asarray(o, np.float64) for o in operands))
    flat = [a.reshape(-1).tolist() for a in arrays]
    out = [_in_fractions(name, mode, values) for values in zip(*flat, strict=True)]
    return np.array(out, np.float64).reshape(arrays[0].shape)


def _in_fractions(name: str, mode: str, values: tuple[float, ...]) -> float:
    f = _FRACTIONS[name]
    plain = f(*map(np.float64, values))
    if not all(map(np.isfinite, values)) or (name == "div" and values[1] == 0):
        return plain
    exact = f(*map(Fraction, values))
    if exact:
        return _round_fraction(exact, mode)
    if mode == "rm" and name in ("add", "sub", "fma"):  # zeros of a sum are negative, but +0 + +0
        first, *last = values
        return -f(np.float64(-first), *map(np.float64, last[:-1]), np.float64(-last[-1]))
    return plain


def _round_fraction(exact: Fraction, mode: str) -> float:
    try:
        near = exact.numerator / exact.denominator  # to nearest even
    except OverflowError:
        near = np.inf if exact > 0 else -np.inf
    above = near > exact
    if mode == "rn" or near == exact:
        return near
    down = mode == "rm" or (mode == "rz" and exact > 0)
    if above == down:
        return float(np.nextafter(near, -np.inf if down else np.inf))
    return near
