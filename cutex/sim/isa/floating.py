"""Floating-point arithmetic (PTX ISA 9.7.3 to 9.7.5).

Halves are computed in float64 and rounded once. Approximate functions (ex2.approx, ...) are
computed as exactly as float64 allows and rounded: the hardware's results differ by about 2 ulp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cutex.sim.numerics.rounding import (
    MODES,
    SMALLEST_NORMAL,
    add_exactly,
    fma_f32,
    in_fractions,
    narrow,
    widen,
)
from cutex.sim.ptx.decode import TYPES, Decoder, Execute, Read, Write, instruction

FLOATS = ("f16", "bf16", "f32", "f64")
PACKED = {"f16x2": ("f16", 2), "bf16x2": ("bf16", 2), "f32x2": ("f32", 2)}
_SIGN = {
    "f16": 0x8000, "bf16": 0x8000, "f32": 1 << 31, "f64": 1 << 63, "f16x2": 0x80008000,
    "bf16x2": 0x80008000, "f32x2": 1 << 63 | 1 << 31,
}  # fmt: skip


def is_float(d: Decoder) -> bool:
    return d.type in FLOATS or d.type in PACKED


def rounding_mode(d: Decoder) -> str:
    return next((m for m in MODES if m in d.mods), "rn")


def flush(values: Any, kind: str) -> Any:
    """``values`` with subnormal numbers replaced by zeros of their sign (.ftz)."""
    small = np.abs(values) < SMALLEST_NORMAL[kind]
    return np.where(small, np.copysign(np.zeros_like(values), values), values)


def read_float(d: Decoder, k: int, type_: str = "") -> Read:
    """A function that reads operand ``k`` for computation: (n, 32), or (n, 32, 2) for packed
    types."""
    type_ = type_ or d.type
    kind, count = PACKED.get(type_, (type_, 1))
    if count == 1:
        raw = d.src(k, type_)
        read = lambda b: widen(raw(b), kind)
    else:
        raw = d.src(k, "b64" if kind == "f32" else "b32")
        part = np.float32 if kind == "f32" else np.uint16

        def read(b: Any) -> Any:
            words = np.ascontiguousarray(b.lanes(raw(b)))
            return widen(words.view(part).reshape(b.n, 32, 2), kind)

    return (lambda b: flush(read(b), kind)) if "ftz" in d.mods else read


def write_float(d: Decoder) -> Write:
    """A function that writes results in the type of ``d``, with its rounding, .sat, .relu, .ftz."""
    kind, count = PACKED.get(d.type, (d.type, 1))
    finish, mode = _finish(d, kind), rounding_mode(d)
    if count == 1:
        put = d.dst(0, "b16" if kind in ("f16", "bf16") else kind)
        return lambda b, v: put(b, narrow(finish(v), kind, mode))
    word = np.uint64 if kind == "f32" else np.uint32
    put = d.dst(0, "b64" if kind == "f32" else "b32")

    def write(b: Any, v: Any) -> None:
        parts = np.broadcast_to(narrow(finish(v), kind, mode), (b.n, 32, 2))
        put(b, np.ascontiguousarray(parts).view(word).reshape(b.n, 32))

    return write


def _finish(d: Decoder, kind: str) -> Callable[[Any], Any]:
    saturate, relu, ftz = "sat" in d.mods, "relu" in d.mods, "ftz" in d.mods
    if not (saturate or relu or ftz):
        return lambda v: v

    def finish(v: Any) -> Any:
        if saturate:
            v = np.where(np.isnan(v), np.zeros_like(v), np.clip(v, 0, 1))
        if relu:
            v = np.where(v <= 0, np.zeros_like(v), v)
        return flush(v, kind) if ftz else v

    return finish


# -- add, sub, mul, div, fma -----------------------------------------------------------------------

_NATIVE = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


def _wide(name: str, mode: str) -> Callable[..., Any]:
    """The operation in float64, such that one more rounding gives the correctly rounded result."""
    if name in ("add", "sub"):
        sign = 1.0 if name == "add" else -1.0
        return lambda x, y: add_exactly(x, sign * np.asarray(y, np.float64), mode)
    if name == "fma":  # NOTE: the product of two float32 numbers is exact in float64
        return lambda x, y, z: add_exactly(np.asarray(x, np.float64) * y, z, mode)
    f = _NATIVE[name]  # NOTE: float32 quotients are never near enough to a tie to round wrongly
    return lambda x, y: f(np.asarray(x, np.float64), np.asarray(y, np.float64))


def arithmetic(d: Decoder, name: str) -> Execute:
    """add, sub, mul, div, fma (9.7.3.3 to 9.7.3.8, 9.7.4, 9.7.5); in mixed precision the last
    operand is f32.
    """
    d.only(*MODES, "ftz", "sat", "relu", "approx", "full")
    types = [p for p in d.parts[1:] if p in FLOATS or p in PACKED]
    count = 3 if name == "fma" else 2
    if len(types) == 2 and types[0] == "f32" and types[1] in ("f16", "bf16"):
        d.type, inner = "f32", types[1]
    elif len(types) == 1:
        inner = d.type
    else:
        raise d.unknown("operand types")
    kinds = [inner] * (count - 1) + [d.type]
    reads = [read_float(d, k + 1, kind) for k, kind in enumerate(kinds)]
    mode, write = rounding_mode(d), write_float(d)
    if d.type == "f64":
        if mode == "rn" and name != "fma":
            f: Any = _NATIVE[name]
        else:
            f = lambda *operands: in_fractions(name, mode, *operands)
    elif d.type in ("f32", "f32x2") and mode == "rn" and name != "fma" and "ftz" not in d.mods:
        f = _NATIVE[name]
    elif d.type in ("f32", "f32x2") and mode == "rn" and name == "fma":
        f = fma_f32
    else:
        f = _wide(name, mode)
    return lambda b: write(b, f(*(read(b) for read in reads)))


@instruction("fma")
def fma(d: Decoder) -> Execute:
    """fma (9.7.3.7): a * b + c, rounded once."""
    return arithmetic(d, "fma")


# -- min, max, neg, abs ----------------------------------------------------------------------------


def extremum(d: Decoder) -> Execute:
    """min, max (9.7.3.11, 9.7.3.12): numbers before NaN unless .NaN; -0 is below +0."""
    d.only("ftz", "NaN", "xorsign", "abs")
    count = len(d) - 1
    lower, propagate, absolute = d.ins.name == "min", "NaN" in d.mods, "abs" in d.mods
    signed = "xorsign" in d.mods
    if signed and count == 3:
        raise d.unknown("three operands with .xorsign")
    reads, write = [read_float(d, k + 1) for k in range(count)], write_float(d)
    pick: Any = {
        (True, False): np.fmin, (True, True): np.minimum,
        (False, False): np.fmax, (False, True): np.maximum,
    }[lower, propagate]  # fmt: skip

    def choose(x: Any, y: Any) -> Any:
        negative = np.signbit(x)
        zeros = np.where(negative, x, y) if lower else np.where(negative, y, x)
        return np.where(x == y, zeros, pick(x, y))

    def execute(b: Any) -> None:
        values = [np.asarray(r(b)) for r in reads]
        sign = np.signbit(values[0]) ^ np.signbit(values[1])
        out, *others = [np.abs(v) for v in values] if absolute else values
        for other in others:
            out = choose(out, other)
        write(b, np.where(sign, -out, out) if signed else out)

    return execute


def change_sign(d: Decoder) -> Execute:
    """neg, abs (9.7.3.9, 9.7.3.10): changes only the sign bit."""
    d.only("ftz")
    kind = f"b{64 if _SIGN[d.type] >> 32 else 32 if _SIGN[d.type] >> 16 else 16}"
    if "ftz" in d.mods:
        x, write = read_float(d, 1), write_float(d)
        f = np.negative if d.ins.name == "neg" else np.abs
        return lambda b: write(b, f(x(b)))
    bits, put = d.src(1, kind), d.dst(0, kind)
    sign = TYPES[kind](_SIGN[d.type])
    if d.ins.name == "neg":
        return lambda b: put(b, bits(b) ^ sign)
    return lambda b: put(b, bits(b) & ~sign)


@instruction("copysign")
def copysign(d: Decoder) -> Execute:
    """copysign (9.7.3.2): the magnitude of b with the sign of a."""
    x, y, write = d.src(1), d.src(2), d.dst()
    return lambda b: write(b, np.copysign(y(b), x(b)))


# -- functions of one operand ----------------------------------------------------------------------

_UNARY: dict[str, Any] = {
    "sqrt": np.sqrt, "rcp": lambda x: 1 / x, "rsqrt": lambda x: 1 / np.sqrt(x), "ex2": np.exp2,
    "lg2": np.log2, "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
}  # fmt: skip


@instruction(*_UNARY)
def unary(d: Decoder) -> Execute:
    """rcp, sqrt, rsqrt, sin, cos, lg2, ex2, tanh (9.7.3.13 to 9.7.3.22)."""
    d.only(*MODES, "ftz", "approx")
    if d.type == "f64" and rounding_mode(d) != "rn":
        raise d.unknown(f".{rounding_mode(d)}.f64")
    x, write, f = read_float(d, 1), write_float(d), _UNARY[d.ins.name]
    return lambda b: write(b, f(np.asarray(x(b), np.float64)))


@instruction("testp")
def testp(d: Decoder) -> Execute:
    """testp (9.7.3.1): whether a float is finite, infinite, a number, normal or subnormal."""
    smallest = SMALLEST_NORMAL[d.type]
    test: Any = {
        "finite": np.isfinite, "infinite": np.isinf, "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        # NOTE: a zero counts as normal, as the ISA says and an H200 does
        "normal": lambda x: np.isfinite(x) & ((np.abs(x) >= smallest) | (x == 0)),
        "subnormal": lambda x: (np.abs(x) < smallest) & (x != 0),
    }[d.parts[1]]  # fmt: skip
    x, write = d.src(1), d.dst(0, "pred")
    return lambda b: write(b, test(x(b)))
