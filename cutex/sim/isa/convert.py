"""Conversions (PTX ISA 9.7.9.21): between integers and floats, packed halves and tf32; those of 8
bits and fewer in `small_floats`."""

from __future__ import annotations

from typing import Any

import numpy as np

from cutex.sim.isa.floating import FLOATS, flush, read_float, rounding_mode
from cutex.sim.numerics.rounding import MODES, add_exactly, narrow
from cutex.sim.numerics.small_floats import (
    FIXED,
    POWERS,
    SMALL,
    from_fixed,
    from_powers,
    from_small,
    to_powers,
    to_small,
)
from cutex.sim.ptx.decode import TYPES, Decoder, Execute, instruction

_TO_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_LARGEST = {"f16": 65504.0, "bf16": 3.3895313892515355e38}


@instruction("cvt")
def cvt(d: Decoder) -> Execute:
    """cvt (9.7.9.21): dispatches by the two types."""
    if d.parts[1] == "pack":
        return _pack_integers(d)
    kinds = [p for p in d.parts[1:] if p in TYPES or p in SMALL or p in (POWERS, FIXED)]
    if len(kinds) != 2:
        raise d.unknown()
    to, frm = kinds
    if to in ("f16x2", "bf16x2") and frm == "f32":
        return _pack(d, to.removesuffix("x2"))
    if to in SMALL:
        return to_small(d, to, frm)
    if frm in SMALL:
        return from_small(d, frm, to)
    if to == POWERS:
        return to_powers(d, frm)
    if frm == POWERS:
        return from_powers(d, to)
    if frm == FIXED:
        return from_fixed(d, to)
    if to == "tf32" and frm == "f32":
        return _to_tf32(d)
    if to in FLOATS:
        return _to_float(d, to, frm)
    if frm in FLOATS:
        return _float_to_integer(d, to, frm)
    return _integer_to_integer(d, to, frm)


def _integer_to_integer(d: Decoder, to: str, frm: str) -> Execute:
    """Integer to integer: truncated or extended; .sat clamps to the range of the result."""
    d.only("sat")
    read, write, kind = d.src(1, frm), d.dst(0, to), TYPES[to]
    if "sat" not in d.mods:
        return lambda b: write(b, np.asarray(read(b)).astype(kind))
    here, there = np.iinfo(TYPES[frm]), np.iinfo(kind)
    low, high = max(here.min, there.min), min(here.max, there.max)
    source = TYPES[frm]
    return lambda b: write(b, np.clip(read(b), source(low), source(high)).astype(kind))


def _float_to_integer(d: Decoder, to: str, frm: str) -> Execute:
    """Float to integer: rounded by the mode and clamped to the range; NaN gives 0 unless one side
    has 64 bits.
    """
    d.only(*_TO_INTEGRAL, "ftz", "sat")
    read, write = read_float(d, 1, frm), d.dst(0, to)
    rounding = _TO_INTEGRAL[next(m for m in _TO_INTEGRAL if m in d.mods)]
    kind = TYPES[to]
    info = np.iinfo(kind)
    nan = 0
    if frm == "f64" or info.bits == 64:
        nan = info.min or 1 << (info.bits - 1)

    def execute(b: Any) -> None:
        x = rounding(np.asarray(read(b), np.float64))
        low, high, unknown = x <= float(info.min), x >= float(info.max), np.isnan(x)
        out = np.where(low | high | unknown, 0, x).astype(kind)
        out = np.where(high, kind(info.max), np.where(low, kind(info.min), out))
        write(b, np.where(unknown, kind(nan), out))

    return execute


def _to_float(d: Decoder, to: str, frm: str) -> Execute:
    """Convert an integer or another float to a float, rounded once; .rni and the like keep the
    format.
    """
    d.only(*MODES, *_TO_INTEGRAL, "ftz", "sat", "relu", "satfinite")
    mode, from_float = rounding_mode(d), frm in FLOATS
    integral = next((f for m, f in _TO_INTEGRAL.items() if m in d.mods), None)
    read = read_float(d, 1, frm) if from_float else d.src(1, frm)
    write = d.dst(0, "b16" if to in ("f16", "bf16") else to)

    def execute(b: Any) -> None:
        x = np.asarray(read(b))
        if not from_float:
            x = _integer_to_f64(x)
        if integral is not None:
            x = integral(x)
        write(b, narrow(_limited(d, x, to), to, mode))

    def _integer_to_f64(x: Any) -> Any:
        """Rounded to odd where float64 cannot hold the integer, unless float64 is the result."""
        if to == "f64" and mode == "rn":
            return x.astype(np.float64)
        high = (x >> x.dtype.type(32)).astype(np.float64) * 2.0**32 if x.itemsize == 8 else 0.0
        low = (x & x.dtype.type(0xFFFFFFFF)) if x.itemsize == 8 else x
        if to != "f64":
            return add_exactly(high, low)
        return _round_sum(high, low.astype(np.float64), mode)

    return execute


def _round_sum(high: Any, low: Any, mode: str) -> Any:
    near = high + low
    lost = low - (near - high)
    toward = {"rm": lost < 0, "rp": lost > 0, "rz": np.where(near > 0, lost < 0, lost > 0)}[mode]
    return np.where(toward, np.nextafter(near, np.where(lost < 0, -np.inf, np.inf)), near)


def _limited(d: Decoder, x: Any, to: str) -> Any:
    """A value that is about to be rounded to ``to``, after .sat, .relu, .satfinite and .ftz."""
    if "sat" in d.mods:
        x = np.where(np.isnan(x), np.zeros_like(x), np.clip(x, 0, 1))
    if "relu" in d.mods:
        x = np.where(x <= 0, np.zeros_like(x), x)
    if "satfinite" in d.mods:
        x = np.clip(x, -_LARGEST[to], _LARGEST[to])
    return flush(x, to) if "ftz" in d.mods and to == "f32" else x


def _pack(d: Decoder, half: str) -> Execute:
    """Two float32 packed into one word, the first source in the upper half."""
    d.only("rn", "rz", "relu", "satfinite")
    high, low, write = d.src(1, "f32"), d.src(2, "f32"), d.dst(0, "b32")
    mode = rounding_mode(d)

    def rounded(x: Any) -> Any:
        return np.asarray(narrow(_limited(d, np.asarray(x), half), half, mode)).astype(np.uint32)

    return lambda b: write(b, rounded(high(b)) << np.uint32(16) | rounded(low(b)))


def _pack_integers(d: Decoder) -> Execute:
    """Two s32 clamped to 16 bits or fewer, the first above the second, and above both the low bits
    of the third operand (PTX ISA, cvt.pack).
    """
    d.only("pack", "sat", "u4", "s4", "u2", "s2")
    high, low, write = d.src(1, "s32"), d.src(2, "s32"), d.dst(0, "b32")
    kind = d.parts[3]
    bits = int(kind[1:])
    least, most = (
        (0, (1 << bits) - 1) if kind[0] == "u" else (-(1 << bits - 1), (1 << bits - 1) - 1)
    )
    above = d.src(3, "b32") if bits < 16 else None

    def clamped(x: Any) -> Any:
        return np.clip(x, least, most).astype(np.uint32) & np.uint32((1 << bits) - 1)

    def execute(b: Any) -> None:
        out = clamped(high(b)) << np.uint32(bits) | clamped(low(b))
        write(b, out if above is None else out | above(b) << np.uint32(2 * bits))

    return execute


def _to_tf32(d: Decoder) -> Execute:
    """Float32 to tf32, with 10 mantissa bits: .rna to nearest, ties away; .rn ties to even."""
    d.only("rna", "rn", "rz", "satfinite", "relu")
    x, write = d.src(1, "f32"), d.dst(0, "b32")
    largest = np.float32(3.4011621342146535e38)

    def execute(b: Any) -> None:
        value = np.ascontiguousarray(x(b))
        u = value.view(np.uint32)
        if "rna" in d.mods:
            u = u + np.uint32(0x1000)
        elif "rn" in d.mods:
            u = u + np.uint32(0xFFF) + (u >> np.uint32(13) & np.uint32(1))
        out = (u & np.uint32(0xFFFFE000)).view(np.float32)
        if "satfinite" in d.mods:
            out = np.clip(out, -largest, largest)
        if "relu" in d.mods:
            out = np.where(out <= 0, np.float32(0), out)
        write(b, np.where(np.isnan(value), np.uint32(0x7FFFFFFF), out.view(np.uint32)))

    return execute
