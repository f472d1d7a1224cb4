"""Integer, logic and shift instructions (PTX ISA 9.7.1, 9.7.2, 9.7.6, 9.7.8), and set-predicate
(9.7.7).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cutex.sim.decode import TYPES, Decoder, Execute, instruction
from cutex.sim.floating import float_binary, fma, is_float, read_float
from cutex.sim.ptx import WIDTH

_WIDE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}


def _apply(d: Decoder, f: Any, sources: int) -> Execute:
    reads, write = [d.src(k + 1) for k in range(sources)], d.dst()
    return lambda b: write(b, f(*(r(b) for r in reads)))


@instruction("add", "sub")
def add_sub(d: Decoder) -> Execute:
    """9.7.1.1, 9.7.1.2: modulo 2^n."""
    if is_float(d):
        return float_binary(d, np.add if d.ins.name == "add" else np.subtract)
    d.only()
    return _apply(d, np.add if d.ins.name == "add" else np.subtract, 2)


@instruction("mul")
def mul(d: Decoder) -> Execute:
    """9.7.1.3: .lo low half, .hi high half, .wide twice the width."""
    if is_float(d):
        return float_binary(d, np.multiply)
    d.only("lo", "hi", "wide")
    product = _product(d)
    a, b2, write = d.src(1), d.src(2), d.dst(0, _WIDE[d.type] if "wide" in d.mods else d.type)
    return lambda b: write(b, product(a(b), b2(b)))


def _product(d: Decoder) -> Any:
    if "wide" in d.mods:
        big = TYPES[_WIDE[d.type]]
        return lambda x, y: np.asarray(x).astype(big) * np.asarray(y).astype(big)
    if "hi" not in d.mods:
        return np.multiply
    if WIDTH[d.type] < 64:
        big, small = (np.int64 if d.type[0] == "s" else np.uint64), TYPES[d.type]
        bits = WIDTH[d.type]
        return lambda x, y: (
            (np.asarray(x).astype(big) * np.asarray(y).astype(big)) >> big(bits)
        ).astype(small)
    return _high_64_signed if d.type[0] == "s" else _high_64


def _high_64(x: Any, y: Any) -> Any:
    """High half of a 64x64 product, from 32-bit halves."""
    x, y = np.asarray(x, np.uint64), np.asarray(y, np.uint64)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a, b, c, e = x & low, x >> half, y & low, y >> half
    middle = (a * c >> half) + (b * c & low) + (a * e & low)
    return b * e + (b * c >> half) + (a * e >> half) + (middle >> half)


def _high_64_signed(x: Any, y: Any) -> Any:
    x, y = np.asarray(x, np.int64), np.asarray(y, np.int64)
    high = _high_64(x.view(np.uint64), y.view(np.uint64))
    high = (
        high
        - np.where(x < 0, y.view(np.uint64), np.uint64(0))
        - np.where(y < 0, x.view(np.uint64), np.uint64(0))
    )
    return high.view(np.int64)


@instruction("mad")
def mad(d: Decoder) -> Execute:
    """9.7.1.4: a * b + c, halves as in mul."""
    if is_float(d):
        return fma(d)
    d.only("lo", "hi", "wide")
    product = _product(d)
    kind = _WIDE[d.type] if "wide" in d.mods else d.type
    a, b2, c, write = d.src(1), d.src(2), d.src(3, kind), d.dst(0, kind)
    return lambda b: write(b, product(a(b), b2(b)) + c(b))


def _divide(x: Any, y: Any, remainder: bool) -> Any:
    """Truncated towards zero; by zero gives all ones (unspecified in PTX)."""
    x, y = np.broadcast_arrays(x, y)
    zero = y == 0
    safe = np.where(zero, y.dtype.type(1), y)
    if x.dtype.kind == "u":
        out = x % safe if remainder else x // safe
    else:
        out = np.fmod(x, safe) if remainder else (x - np.fmod(x, safe)) // safe
    return np.where(zero, y.dtype.type(-1) if y.dtype.kind == "i" else ~y.dtype.type(0), out)


@instruction("div")
def div(d: Decoder) -> Execute:
    """9.7.1.8"""
    if is_float(d):
        return float_binary(d, np.divide)
    d.only()
    return _apply(d, lambda x, y: _divide(x, y, False), 2)


@instruction("rem")
def rem(d: Decoder) -> Execute:
    """9.7.1.9: the sign of the dividend."""
    d.only()
    return _apply(d, lambda x, y: _divide(x, y, True), 2)


@instruction("and", "or", "xor")
def logic(d: Decoder) -> Execute:
    """9.7.8.1-3, also on predicates."""
    d.only()
    return _apply(
        d, {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[d.ins.name], 2
    )


@instruction("not")
def not_(d: Decoder) -> Execute:
    """9.7.8.4"""
    d.only()
    return _apply(d, np.invert, 1)


@instruction("lop3")
def lop3(d: Decoder) -> Execute:
    """9.7.8.6: any function of three bits, by its truth table."""
    d.only()
    a, b2, c, table, write = d.src(1), d.src(2), d.src(3), d.immediate(4), d.dst()

    def execute(b: Any) -> None:
        x, y, z = a(b), b2(b), c(b)
        out = np.zeros((b.n, 32), np.uint32)
        for i in range(8):
            if table >> i & 1:
                out |= (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
        write(b, out)

    return execute


@instruction("shl", "shr")
def shift(d: Decoder) -> Execute:
    """9.7.8.7, 9.7.8.8: amounts above the width are clamped to it."""
    d.only()
    a, amount, write = d.src(1), d.src(2, "u32"), d.dst()
    bits, left, dtype = WIDTH[d.type], d.ins.name == "shl", TYPES[d.type]
    signed = d.type[0] == "s"

    def execute(b: Any) -> None:
        x, n = np.asarray(a(b)), np.asarray(amount(b))
        over = n >= bits
        n = np.where(over, np.uint32(bits - 1), n).astype(dtype)
        if left:
            write(b, np.where(over, dtype(0), x << n))
        elif signed:
            write(b, x >> n)
        else:
            write(b, np.where(over, dtype(0), x >> n))

    return execute


@instruction("shf")
def funnel_shift(d: Decoder) -> Execute:
    """9.7.8.5: the upper (left) or lower (right) word of the shifted pair {b, a}."""
    d.only("l", "r", "wrap", "clamp")
    a, b2, amount, write = d.src(1), d.src(2), d.src(3), d.dst()
    wrap, left = "wrap" in d.mods, "l" in d.mods

    def execute(b: Any) -> None:
        n = np.asarray(amount(b))
        n = ((n & np.uint32(31)) if wrap else np.minimum(n, np.uint32(32))).astype(np.uint64)
        both = np.asarray(b2(b)).astype(np.uint64) << np.uint64(32) | np.asarray(a(b)).astype(
            np.uint64
        )
        out = (both << n) >> np.uint64(32) if left else both >> n
        write(b, out.astype(np.uint32))

    return execute


@instruction("min", "max")
def minimum(d: Decoder) -> Execute:
    """9.7.1.12, 9.7.1.13; floats as IEEE minimumNumber unless .NaN (9.7.3.11)."""
    if is_float(d):
        nan = "NaN" in d.mods
        pick = {
            ("min", 0): np.fmin,
            ("min", 1): np.minimum,
            ("max", 0): np.fmax,
            ("max", 1): np.maximum,
        }
        f = pick[d.ins.name, nan]
        if len(d) == 4:
            return _three(d, f)
        return float_binary(d, f)
    d.only("relu")
    f = np.minimum if d.ins.name == "min" else np.maximum
    if "relu" in d.mods:
        return _apply(d, lambda x, y: np.maximum(f(x, y), 0), 2)
    return _apply(d, f, 2)


def _three(d: Decoder, f: Any) -> Execute:
    d.only("NaN", "ftz")
    return _apply(d, lambda x, y, z: f(f(x, y), z), 3)


@instruction("neg", "abs")
def negate(d: Decoder) -> Execute:
    """9.7.1.10, 9.7.1.11 and 9.7.3.9, 9.7.3.10"""
    if d.type in ("bf16", "bf16x2", "f16x2", "f32x2"):
        sign = {
            "bf16": 0x8000,
            "bf16x2": 0x80008000,
            "f16x2": 0x80008000,
            "f32x2": 0x8000000080000000,
        }[d.type]
        word = TYPES[d.type](sign)
        return _apply(d, (lambda x: x ^ word) if d.ins.name == "neg" else (lambda x: x & ~word), 1)
    d.only("ftz")
    return _apply(d, np.negative if d.ins.name == "neg" else np.abs, 1)


def _count_bits(x: Any) -> Any:
    return np.bitwise_count(x).astype(np.uint32)


def _leading_zeros(x: Any, bits: int) -> Any:
    x = np.asarray(x).astype(np.uint64)
    for s in (1, 2, 4, 8, 16, 32):
        x = x | x >> np.uint64(s)
    return (np.uint32(bits) - np.bitwise_count(x)).astype(np.uint32)


@instruction("popc")
def popc(d: Decoder) -> Execute:
    """9.7.1.16"""
    a, write = d.src(1), d.dst(0, "u32")
    return lambda b: write(b, _count_bits(a(b)))


@instruction("clz")
def clz(d: Decoder) -> Execute:
    """9.7.1.17"""
    a, write, bits = d.src(1), d.dst(0, "u32"), WIDTH[d.type]
    return lambda b: write(b, _leading_zeros(a(b), bits))


@instruction("bfind")
def bfind(d: Decoder) -> Execute:
    """9.7.1.18: the most significant set (of negative numbers: clear) bit; all ones if none."""
    d.only("shiftamt")
    a, write, bits = d.src(1), d.dst(0, "u32"), WIDTH[d.type]
    unsigned = TYPES[f"u{bits}"]

    def execute(b: Any) -> None:
        x = np.asarray(a(b))
        x = np.where(x < 0, ~x, x).view(unsigned) if x.dtype.kind == "i" else x
        at = np.uint32(bits - 1) - _leading_zeros(x, bits)
        write(
            b,
            np.where(
                x == 0,
                np.uint32(0xFFFFFFFF),
                np.uint32(bits - 1) - at if "shiftamt" in d.mods else at,
            ),
        )

    return execute


@instruction("brev")
def brev(d: Decoder) -> Execute:
    """9.7.1.19"""
    a, write, bits, dtype = d.src(1), d.dst(), WIDTH[d.type], TYPES[d.type]

    def execute(b: Any) -> None:
        x = np.asarray(a(b))
        out = np.zeros_like(x)
        for i in range(bits):
            out |= (x >> dtype(i) & dtype(1)) << dtype(bits - 1 - i)
        write(b, out)

    return execute


@instruction("bfe")
def bfe(d: Decoder) -> Execute:
    """9.7.1.20: bits [pos, pos+len), sign-extended for signed types."""
    a, pos, length, write = d.src(1), d.src(2, "u32"), d.src(3, "u32"), d.dst()
    bits, dtype, signed = WIDTH[d.type], TYPES[d.type], d.type[0] == "s"

    def execute(b: Any) -> None:
        p = (np.asarray(pos(b)) & np.uint32(255)).astype(np.int64)
        n = (np.asarray(length(b)) & np.uint32(255)).astype(np.int64)
        x = np.asarray(a(b))
        sign_at = np.minimum(p + n - 1, bits - 1)
        field = np.where(
            p < bits, x.astype(np.uint64) >> np.minimum(p, bits - 1).astype(np.uint64), np.uint64(0)
        )
        keep = np.where(
            n >= 64,
            np.uint64(2**64 - 1),
            (np.uint64(1) << np.minimum(n, 63).astype(np.uint64)) - np.uint64(1),
        )
        out = field & keep
        if signed:
            negative = (
                x.astype(np.uint64) >> np.maximum(sign_at, 0).astype(np.uint64) & np.uint64(1)
            ).astype(bool) & (n > 0)
            out = np.where(negative, out | ~keep, out)
        write(b, out.astype(TYPES[f"u{bits}"]).view(dtype))

    return execute


@instruction("bfi")
def bfi(d: Decoder) -> Execute:
    """9.7.1.21: inserts the low ``len`` bits of a into b at ``pos``."""
    a, into, pos, length, write = d.src(1), d.src(2), d.src(3, "u32"), d.src(4, "u32"), d.dst()
    bits, dtype = WIDTH[d.type], TYPES[d.type]

    def execute(b: Any) -> None:
        p = (np.asarray(pos(b)) & np.uint32(255)).astype(np.uint64)
        n = (np.asarray(length(b)) & np.uint32(255)).astype(np.uint64)
        ones = np.where(
            n >= 64, np.uint64(2**64 - 1), (np.uint64(1) << np.minimum(n, 63)) - np.uint64(1)
        )
        mask = np.where(p >= bits, np.uint64(0), ones << np.minimum(p, 63))
        x = np.asarray(a(b)).astype(np.uint64) << np.minimum(p, 63)
        y = np.asarray(into(b)).astype(np.uint64)
        write(b, ((y & ~mask) | (x & mask)).astype(dtype))

    return execute


@instruction("prmt")
def prmt(d: Decoder) -> Execute:
    """9.7.8.9, default mode: each nibble of the selector picks a byte of {b, a}, bit 3 replicates
    its sign.
    """
    d.only()
    a, b2, selector, write = d.src(1), d.src(2), d.src(3), d.dst()

    def execute(b: Any) -> None:
        both = np.asarray(b2(b)).astype(np.uint64) << np.uint64(32) | np.asarray(a(b)).astype(
            np.uint64
        )
        s = np.asarray(selector(b)).astype(np.uint64)
        out = np.zeros((b.n, 32), np.uint64)
        for i in range(4):
            nibble = s >> np.uint64(4 * i) & np.uint64(15)
            byte = both >> ((nibble & np.uint64(7)) * np.uint64(8)) & np.uint64(255)
            sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
            out |= np.where(nibble & np.uint64(8), sign, byte) << np.uint64(8 * i)
        write(b, out.astype(np.uint32))

    return execute


@instruction("sad")
def sad(d: Decoder) -> Execute:
    """9.7.1.7: c + |a - b|"""
    return _apply(d, lambda x, y, z: z + np.where(x > y, x - y, y - x), 3)


_COMPARE: dict[str, Any] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
    "hs": np.greater_equal,
}  # fmt: skip


_COMBINE: dict[str | None, Any] = {
    "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, None: lambda x, y: x,
}  # fmt: skip


def _comparison(d: Decoder) -> Any:
    name = d.parts[1]
    if name in _COMPARE:
        compare = _COMPARE[name]
        if not is_float(d):
            return compare
        if name == "ne":  # ordered
            return lambda x, y: np.not_equal(x, y) & ~np.isnan(x) & ~np.isnan(y)
        return compare
    if name == "num":
        return lambda x, y: ~np.isnan(x) & ~np.isnan(y)
    if name == "nan":
        return lambda x, y: np.isnan(x) | np.isnan(y)
    if name.endswith("u") and name[:-1] in _COMPARE:  # unordered: true where either is NaN
        compare = _COMPARE[name[:-1]]
        return lambda x, y: compare(x, y) | np.isnan(x) | np.isnan(y)
    raise d.unknown(f"comparison .{name}")


def _comparands(d: Decoder) -> tuple[Any, Any]:
    if is_float(d):
        return read_float(d, 1), read_float(d, 2)
    return d.src(1), d.src(2)


@instruction("setp")
def setp(d: Decoder) -> Execute:
    """9.7.7.2: p = compare [boolop c]; p|q also writes the complement of the comparison, combined
    likewise.
    """
    d.only(
        *_COMPARE, "and", "or", "xor", "ftz", "num", "nan", "equ", "neu", "ltu", "leu", "gtu", "geu"
    )
    compare = _comparison(d)
    combine = next((c for c in ("and", "or", "xor") if c in d.mods), None)
    f = _COMBINE[combine]
    x, y = _comparands(d)
    c = d.src(3, "pred") if combine else (lambda b: True)
    first, second = d.pair(0)
    p = d.write(first, "pred")
    q = d.write(second, "pred") if second is not None else None

    def execute(b: Any) -> None:
        t = np.broadcast_to(compare(x(b), y(b)), (b.n, 32))
        other = c(b)
        p(b, f(t, other))
        if q:
            q(b, f(~t, other))

    return execute


@instruction("set")
def set_(d: Decoder) -> Execute:
    """9.7.7.1: all ones (or 1.0) where the comparison holds."""
    d.only(*_COMPARE, "ftz")
    compare = _comparison(d)
    x, y = _comparands(d)
    result = d.parts[-2]
    write = d.dst(0, result)
    true = (
        np.float32(1) if result == "f32" else TYPES[result](-1 if result[0] == "s" else 0xFFFFFFFF)
    )
    return lambda b: write(b, np.where(compare(x(b), y(b)), true, type(true)(0)))


@instruction("selp")
def selp(d: Decoder) -> Execute:
    """9.7.7.3: c ? a : b"""
    d.only()
    kind = f"b{WIDTH[d.type]}"
    a, b2, c, write = d.src(1, kind), d.src(2, kind), d.src(3, "pred"), d.dst(0, kind)
    return lambda b: write(b, np.where(c(b), a(b), b2(b)))
