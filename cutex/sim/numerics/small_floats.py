"""Conversions of pairs of 8-, 6- and 4-bit floats and of powers of two (PTX ISA 9.7.9.21).

Points that the ISA leaves open, such as the code of a NaN, follow CUDA's own emulation on hosts
(cuda_fp8.hpp, cuda_fp6.hpp, cuda_fp4.hpp).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cutex.sim.isa.floating import read_float
from cutex.sim.numerics.rounding import narrow
from cutex.sim.ptx.decode import Decoder, Execute


@dataclass(frozen=True)
class Small:
    """A type of pairs: ``place`` bits per element; ``nan`` is the code of a NaN."""

    kind: Any
    largest: float
    nan: int
    place: int = 8


SMALL = {
    "e4m3x2": Small(ml_dtypes.float8_e4m3fn, 448.0, 0x7F),
    "e5m2x2": Small(ml_dtypes.float8_e5m2, 57344.0, 0x7F),
    "e2m3x2": Small(ml_dtypes.float6_e2m3fn, 7.5, 0x1F),  # a byte each, its upper bits zero
    "e3m2x2": Small(ml_dtypes.float6_e3m2fn, 28.0, 0x1F),
    "e2m1x2": Small(ml_dtypes.float4_e2m1fn, 6.0, 0x7, place=4),
}
POWERS = "ue8m0x2"  # unsigned: 2^(code - 127), 255 for a NaN
FIXED = "s2f6x2"  # signed, two bits before the point and six behind it


def _pair(d: Decoder, frm: str) -> tuple[Any, Any]:
    """Readers of the upper and of the lower source: two float32, or the halves of a word."""
    if frm == "f32":
        return read_float(d, 1, "f32"), read_float(d, 2, "f32")
    if frm not in ("f16x2", "bf16x2"):
        raise d.unknown()
    both = read_float(d, 1, frm)
    return (lambda b: both(b)[..., 1]), (lambda b: both(b)[..., 0])


def to_small(d: Decoder, to: str, frm: str) -> Execute:
    """Convert to a pair of small floats, rounded to nearest and saturated; the first source is in
    the upper place.
    """
    d.only("rn", "satfinite", "relu", *SMALL)
    upper, lower = _pair(d, frm)
    form, relu = SMALL[to], "relu" in d.mods
    write = d.dst(0, "b16" if form.place == 8 else "b8")

    def code(x: Any) -> Any:
        x = np.asarray(x)
        kept = np.where(x <= 0, np.zeros_like(x), x) if relu else x
        rounded = np.clip(kept, -form.largest, form.largest).astype(form.kind).view(np.uint8)
        return np.where(np.isnan(x), np.uint8(form.nan), rounded).astype(np.uint16)

    return lambda b: write(b, code(upper(b)) << np.uint16(form.place) | code(lower(b)))


def from_small(d: Decoder, frm: str, to: str) -> Execute:
    """Convert a pair of small floats to two halves, exactly."""
    d.only("rn", "relu", *SMALL)
    if to != "f16x2":
        raise d.unknown()
    form, relu = SMALL[frm], "relu" in d.mods
    raw, write = d.src(1, "b16" if form.place == 8 else "b8"), d.dst(0, "b32")

    def execute(b: Any) -> None:
        words = b.lanes(raw(b)).astype(np.uint16)
        codes = np.stack([words & (1 << form.place) - 1, words >> form.place], -1)
        pairs = codes.astype(np.uint8).view(form.kind).astype(np.float32)  # (n, 32, 2)
        pairs = np.where(pairs <= 0, np.float32(0), pairs) if relu else pairs
        write(b, narrow(pairs, "f16").view(np.uint32).reshape(b.n, 32))

    return execute


def to_powers(d: Decoder, frm: str) -> Execute:
    """The power of two next below (.rz) or above (.rp) the magnitude of each source."""
    d.only("rz", "rp", "satfinite", POWERS)
    upper, lower = _pair(d, frm)
    above, write = "rp" in d.mods, d.dst(0, "b16")
    most = 254 if "satfinite" in d.mods else 255

    def code(x: Any) -> Any:
        fraction, exponent = np.frexp(np.abs(np.asarray(x).astype(np.float64)))  # fraction < 1
        power = exponent - np.where(above & (fraction > 0.5), 0, 1)
        power = np.where(fraction == 0, -127, np.where(np.isinf(fraction), 128, power))
        codes = np.clip(power + 127, 0, most)
        return np.where(np.isnan(x), 255, codes).astype(np.uint16)

    return lambda b: write(b, code(upper(b)) << np.uint16(8) | code(lower(b)))


def from_powers(d: Decoder, to: str) -> Execute:
    """Convert two powers of two to two bf16, exactly."""
    d.only("rn", POWERS)
    if to != "bf16x2":
        raise d.unknown()
    raw, write = d.src(1, "b16"), d.dst(0, "b32")

    def half(code: Any) -> Any:
        subnormal = np.where(code == 0, 0x40, code << 7)  # 2^-127
        return np.where(code == 255, 0x7FFF, subnormal).astype(np.uint32)

    def execute(b: Any) -> None:
        words = b.lanes(raw(b)).astype(np.uint32)
        write(b, half(words >> np.uint32(8)) << np.uint32(16) | half(words & np.uint32(255)))

    return execute


def from_fixed(d: Decoder, to: str) -> Execute:
    """Two fixed-point numbers, each times a power of two, to two bf16.

    The DSL converts int8 to bf16 by it: a scale of 2^6, 0x85, makes the bytes integers.
    """
    d.only("rn", "satfinite", "relu", "scaled", "n2", "ue8m0", FIXED)
    if to != "bf16x2":
        raise d.unknown()
    raw, write, relu = d.src(1, "b16"), d.dst(0, "b32"), "relu" in d.mods
    scale = d.src(2, "b16") if "scaled" in d.mods else lambda b: np.uint16(0x7F7F)
    most = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max) if "satfinite" in d.mods else np.inf

    def half(byte: Any, code: Any) -> Any:
        power = np.ldexp(1.0, code.astype(np.int32) - 127)
        x = byte.astype(np.uint8).view(np.int8) / 64.0 * np.where(code == 255, np.nan, power)
        x = np.where(x <= 0, 0.0, x) if relu else x
        return narrow(np.clip(x, -most, most), "bf16").astype(np.uint32)

    def execute(b: Any) -> None:
        words, codes = (b.lanes(r(b)).astype(np.uint16) for r in (raw, scale))
        upper = half(words >> np.uint16(8), codes >> np.uint16(8))
        write(b, upper << np.uint32(16) | half(words & np.uint16(255), codes & np.uint16(255)))

    return execute
