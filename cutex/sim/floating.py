"""Floating point (PTX ISA 9.7.3-9.7.5), and the conversions of bf16 and fp8 that numpy lacks.

Half types compute in float32 and round once, which is exact for +, -, * and correct for fma up to
double rounding (computed in float64 where that matters). Approximate functions (ex2.approx, ...)
are computed correctly rounded: the hardware's differ by about 2 ulp.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cutex.sim.decode import TYPES, Decoder, Execute, Read, Write, instruction

_ROUNDING = (
    "rn",
    "rz",
    "rm",
    "rp",
    "ftz",
    "sat",
    "approx",
    "full",
    "NaN",
    "xorsign",
    "abs",
    "relu",
)
_PACKED = {"f16x2": ("f16", 2), "bf16x2": ("bf16", 2), "f32x2": ("f32", 2)}


def is_float(d: Decoder) -> bool:
    return d.type in ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "f32x2")


def bf16_to_f32(x: Any) -> Any:
    return (np.asarray(x).astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: Any, mode: str = "rn") -> Any:
    """float32 -> bf16 bits; rn to nearest even, rz truncated. NaN becomes 0x7fff, as the
    hardware's.
    """
    x = np.ascontiguousarray(x, np.float32)
    u = x.view(np.uint32)
    if mode == "rn":
        u = u + np.uint32(0x7FFF) + (u >> np.uint32(16) & np.uint32(1))
    out = (u >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), out)


def widen(bits: Any, kind: str) -> Any:
    """Bits or values of a float type -> an array to compute with (float32, float64 for f64)."""
    if kind == "bf16":
        return bf16_to_f32(bits)
    if kind == "f16":
        return (
            np.asarray(bits).view(np.float16).astype(np.float32)
            if np.asarray(bits).dtype != np.float16
            else bits.astype(np.float32)
        )
    return bits


def narrow(values: Any, kind: str) -> Any:
    """The inverse of `widen`, rounding to nearest even; gives values for f32 and f64, bits for
    halves.
    """
    if kind == "bf16":
        return f32_to_bf16(values)
    if kind == "f16":
        return np.asarray(values).astype(np.float16).view(np.uint16)
    return np.asarray(values, TYPES[kind])


def _lanes(kind: str) -> tuple[str, int]:
    return _PACKED.get(kind, (kind, 1))


def read_float(d: Decoder, k: int) -> Read:
    """Reads operand ``k`` ready to compute with: (n, 32), or (n, 32, 2) for packed types."""
    kind, count = _lanes(d.type)
    if count == 1:
        raw = d.src(k)
        return lambda b: widen(raw(b), kind)
    raw = d.src(k, "b64" if kind == "f32" else "b32")
    part = np.float32 if kind == "f32" else np.uint16

    def read(b: Any) -> Any:
        words = np.broadcast_to(raw(b), (b.n, 32))
        return widen(np.ascontiguousarray(words).view(part).reshape(b.n, 32, 2), kind)

    return read


def write_float(d: Decoder, k: int = 0) -> Write:
    kind, count = _lanes(d.type)
    if count == 1:
        half = kind in ("f16", "bf16")
        put = d.dst(k, "b16" if half else kind)
        return lambda b, v: put(b, narrow(v, kind))
    word = np.uint64 if kind == "f32" else np.uint32
    put = d.dst(k, "b64" if kind == "f32" else "b32")
    return lambda b, v: put(
        b,
        np.ascontiguousarray(np.broadcast_to(narrow(v, kind), (b.n, 32, 2)))
        .view(word)
        .reshape(b.n, 32),
    )


def _finish(d: Decoder) -> Any:
    """.ftz and .sat of a result."""
    flush, saturate, relu = "ftz" in d.mods, "sat" in d.mods, "relu" in d.mods

    def finish(v: Any) -> Any:
        if flush:
            v = np.where(np.abs(v) < np.float32(1.1754944e-38), np.copysign(np.float32(0), v), v)
        if saturate:
            v = np.where(np.isnan(v), np.float32(0), np.clip(v, np.float32(0), np.float32(1)))
        if relu:
            v = np.maximum(v, np.float32(0))
        return v

    return finish if flush or saturate or relu else None


def _directed(d: Decoder, f: Any) -> Any:
    """``f`` rounded as the instruction says, through float64 (whose error is far below half an ulp
    of float32).
    """
    mode = next((m for m in ("rz", "rm", "rp") if m in d.mods), "rn")
    if mode == "rn" or d.type == "f64":
        if mode != "rn":
            raise d.unknown(f".{mode}.f64")
        return f

    def rounded(*args: Any) -> Any:
        exact = f(*(np.asarray(a, np.float64) for a in args))
        near = exact.astype(np.float32)
        up, down = np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))
        above, below = near.astype(np.float64) > exact, near.astype(np.float64) < exact
        floor, ceiling = np.where(above, down, near), np.where(below, up, near)
        if mode == "rm":
            return floor
        if mode == "rp":
            return ceiling
        return np.where(exact < 0, ceiling, floor)

    return rounded


def float_binary(d: Decoder, f: Any) -> Execute:
    """add, sub, mul, div, min, max (9.7.3.3 and on)."""
    d.only(*_ROUNDING)
    x, y, write, finish = read_float(d, 1), read_float(d, 2), write_float(d), _finish(d)
    g = _directed(d, f)
    if finish is None:
        return lambda b: write(b, g(x(b), y(b)))
    return lambda b: write(b, finish(g(x(b), y(b))))


@instruction("fma")
def fma(d: Decoder) -> Execute:
    """9.7.3.7: one rounding; the product of two float32 is exact in float64."""
    d.only(*_ROUNDING)
    x, y, z, write, finish = (
        read_float(d, 1),
        read_float(d, 2),
        read_float(d, 3),
        write_float(d),
        _finish(d),
    )
    g = _directed(d, lambda a, b, c: np.asarray(a, np.float64) * b + c)
    kind = np.float64 if d.type == "f64" else np.float32

    def execute(b: Any) -> None:
        v = np.asarray(g(x(b), y(b), z(b))).astype(kind)
        write(b, finish(v) if finish else v)

    return execute


_UNARY = {
    "sqrt": np.sqrt, "rcp": lambda x: 1 / x, "rsqrt": lambda x: 1 / np.sqrt(x), "ex2": np.exp2,
    "lg2": np.log2, "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
}  # fmt: skip


@instruction(*_UNARY)
def unary(d: Decoder) -> Execute:
    """9.7.3.12 to 9.7.3.21"""
    d.only(*_ROUNDING)
    x, write, finish = read_float(d, 1), write_float(d), _finish(d)
    f = _directed(d, _UNARY[d.ins.name])
    flush = "ftz" in d.mods
    single = d.type != "f64"

    def execute(b: Any) -> None:
        v = np.asarray(x(b))
        if flush:
            v = np.where(np.abs(v) < np.float32(1.1754944e-38), np.copysign(np.float32(0), v), v)
        out = f(v.astype(np.float64))
        out = out.astype(np.float32) if single else out
        write(b, finish(out) if finish else out)

    return execute


@instruction("copysign")
def copysign(d: Decoder) -> Execute:
    """9.7.3.2: the magnitude of b with the sign of a"""
    x, y, write = d.src(1), d.src(2), d.dst()
    return lambda b: write(b, np.copysign(y(b), x(b)))


@instruction("testp")
def testp(d: Decoder) -> Execute:
    """9.7.3.1"""
    tests: dict[str, Any] = {
        "finite": np.isfinite, "infinite": np.isinf, "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= np.finfo(x.dtype).tiny),
        "subnormal": lambda x: (np.abs(x) < np.finfo(x.dtype).tiny) & (x != 0),
    }  # fmt: skip
    test, x, write = tests[d.parts[1]], d.src(1), d.dst(0, "pred")
    return lambda b: write(b, test(x(b)))


_SMALL: dict[str, Any] = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def _to_integer(x: Any, kind: str, mode: str) -> Any:
    """cvt from float: rounded as said, clamped to the range, NaN to 0."""
    rounding = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
    info = np.iinfo(TYPES[kind])
    x = rounding(np.asarray(x, np.float64))
    low = x <= float(info.min)
    high = x >= float(info.max)
    safe = np.where(low | high | np.isnan(x), 0, x).astype(TYPES[kind])
    out = np.where(high, info.max, np.where(low, info.min, safe))
    return np.where(np.isnan(x), 0, out).astype(TYPES[kind])


@instruction("cvt")
def cvt(d: Decoder) -> Execute:
    """9.7.9.21: conversions between integers and floats; packed halves and fp8 from two float32."""
    kinds = [p for p in d.parts[1:] if p in TYPES or p in ("e4m3x2", "e5m2x2")]
    if len(kinds) != 2:
        raise d.unknown()
    to, frm = kinds
    if to in ("f16x2", "bf16x2") and frm == "f32":
        return _cvt_pack(d, to)
    if to in ("e4m3x2", "e5m2x2") or frm in ("e4m3x2", "e5m2x2"):
        return _cvt_fp8(d, to, frm)
    if to == "tf32" and frm == "f32":
        return _cvt_tf32(d)
    d.only("rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "ftz", "sat", "relu", "rna")
    floats = ("f16", "bf16", "f32", "f64")
    raw, saturate = d.src(1, frm), "sat" in d.mods
    if to in floats:
        mode = next((m for m in ("rn", "rz", "rm", "rp") if m in d.mods), "rn")
        integral = next((m for m in ("rni", "rzi", "rmi", "rpi") if m in d.mods), None)
        if mode not in ("rn", "rz") or (mode == "rz" and to != "bf16"):
            raise d.unknown(f"rounding .{mode}")
        write = d.dst(0, "b16" if to in ("f16", "bf16") else to)
        rounding = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil, None: None}[
            integral
        ]

        def to_float(b: Any) -> None:
            x = np.asarray(raw(b))
            x = widen(x, frm) if frm in floats else x
            if rounding is not None:
                x = rounding(x)
            if to != "f64":
                x = x.astype(np.float32)
            if saturate:
                x = np.where(np.isnan(x), 0, np.clip(x, 0, 1)).astype(x.dtype)
            if "relu" in d.mods:
                x = np.maximum(x, 0)
            write(b, f32_to_bf16(x, mode) if to == "bf16" else narrow(x, to))

        return to_float
    write = d.dst(0, to)
    if frm in floats:
        mode = next(m for m in ("rni", "rzi", "rmi", "rpi") if m in d.mods)
        return lambda b: write(b, _to_integer(widen(np.asarray(raw(b)), frm), to, mode))
    if saturate:
        info = np.iinfo(TYPES[to])
        return lambda b: write(
            b, np.clip(np.asarray(raw(b)).astype(object), info.min, info.max).astype(TYPES[to])
        )
    return lambda b: write(b, np.asarray(raw(b)).astype(TYPES[to]))


def _cvt_pack(d: Decoder, to: str) -> Execute:
    """Two float32 into one packed word, the first source in the upper half."""
    d.only("rn", "rz", "relu", "satfinite")
    high, low, write = d.src(1, "f32"), d.src(2, "f32"), d.dst(0, "b32")
    mode = "rz" if "rz" in d.mods else "rn"
    if mode == "rz" and to == "f16x2":
        raise d.unknown(".rz.f16x2")

    def half(x: Any) -> Any:
        x = np.maximum(x, np.float32(0)) if "relu" in d.mods else x
        if "satfinite" in d.mods:
            top = np.float32(65504 if to == "f16x2" else 3.3895314e38)
            x = np.clip(x, -top, top)
        return (
            f32_to_bf16(x, mode)
            if to == "bf16x2"
            else np.asarray(x).astype(np.float16).view(np.uint16)
        )

    def execute(b: Any) -> None:
        upper = np.asarray(half(high(b))).astype(np.uint32) << np.uint32(16)
        write(b, upper | np.asarray(half(low(b))).astype(np.uint32))

    return execute


def _cvt_fp8(d: Decoder, to: str, frm: str) -> Execute:
    d.only("rn", "satfinite", "relu", "e4m3x2", "e5m2x2")
    if frm == "f32" and len(d) == 3:
        high, low, write = d.src(1, "f32"), d.src(2, "f32"), d.dst(0, "b16")
        small = _SMALL[to[:4]]
        top = float(ml_dtypes.finfo(small).max)

        def pack(b: Any) -> None:
            h, lo = (
                np.clip(v, -top, top).astype(small).view(np.uint8).astype(np.uint16)
                for v in (np.asarray(high(b)), np.asarray(low(b)))
            )
            write(b, h << np.uint16(8) | lo)

        return pack
    if to == "f16x2":
        raw, write = d.src(1, "b16"), d.dst(0, "b32")
        small = _SMALL[frm[:4]]

        def unpack(b: Any) -> None:
            two = (
                np.ascontiguousarray(np.broadcast_to(raw(b), (b.n, 32)))
                .view(np.uint8)
                .reshape(b.n, 32, 2)
            )
            write(b, two.view(small).astype(np.float16).view(np.uint32).reshape(b.n, 32))

        return unpack
    raise d.unknown()


def _cvt_tf32(d: Decoder) -> Execute:
    """tf32 keeps 10 mantissa bits: .rna to nearest, ties away; .rn ties to even."""
    d.only("rna", "rn", "rz", "satfinite", "relu")
    x, write = d.src(1, "b32"), d.dst(0, "b32")

    def execute(b: Any) -> None:
        u = np.asarray(x(b))
        if "rna" in d.mods:
            u = u + np.uint32(0x1000)
        elif "rn" in d.mods:
            u = u + np.uint32(0xFFF) + (u >> np.uint32(13) & np.uint32(1))
        write(b, u & np.uint32(0xFFFFE000))

    return execute
