"""Integer arithmetic (PTX ISA 9.7.1, 9.7.2); float forms of the same opcodes are passed to
floating.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cutex.sim.isa.floating import arithmetic, change_sign, extremum, is_float
from cutex.sim.machine.batch import Batch
from cutex.sim.ptx.declarations import WIDTH
from cutex.sim.ptx.decode import TYPES, UNSIGNED, Decoder, Execute, instruction

_WIDE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
_PAIRS = {"s16x2": np.int16, "u16x2": np.uint16}


@instruction("add", "sub")
def add_sub(d: Decoder) -> Execute:
    """add, sub (9.7.1.1, 9.7.1.2): modulo 2^n, or saturated; .cc (9.7.2) keeps the carry or
    borrow."""
    f = np.add if d.ins.name == "add" else np.subtract
    if pair := _pair(d):
        d.only(pair)
        return _on_pairs(d, pair, f)
    if is_float(d):
        return arithmetic(d, d.ins.name)
    d.only("sat", "cc")
    if "cc" in d.mods:
        return _with_carry(d, lambda x, y: (x, y), False)
    if "sat" not in d.mods:
        return d.map(f, 2)
    info = np.iinfo(np.int32)
    return d.map(lambda x, y: np.clip(f(x, y, dtype=np.int64), info.min, info.max), 2)


def _pair(d: Decoder) -> str | None:
    """The type of two integers of 16 bits in each operand, if the instruction names one."""
    return next((p for p in d.parts if p in _PAIRS), None)


def _on_pairs(d: Decoder, pair: str, f: Any) -> Execute:
    """``f`` of the halves of two operands, half by half."""
    d.type = "b32"

    def both(x: Any, y: Any) -> Any:
        x, y = (np.ascontiguousarray(v).view(_PAIRS[pair]) for v in np.broadcast_arrays(x, y))
        return f(x, y).view(np.uint32)

    return d.map(both, 2)


@instruction("addc", "subc")
def add_sub_carried(d: Decoder) -> Execute:
    """addc, subc (9.7.2.2, 9.7.2.4): with the carry kept by an earlier instruction."""
    d.only("cc")
    return _with_carry(d, lambda x, y: (x, y), True)


def _with_carry(d: Decoder, terms: Any, carried: bool) -> Execute:
    """x +- y +- carry, of the two ``terms`` made of the operands."""
    reads, write = [d.src(k + 1) for k in range(len(d) - 1)], d.dst()
    bits, keeps, subtract = WIDTH[d.type], "cc" in d.mods, d.ins.name.startswith("sub")
    unsigned, carry = UNSIGNED[bits], d.m.carry

    def execute(b: Any) -> None:
        x, y = terms(*(b.lanes(r(b)) for r in reads))
        x, y = x.view(unsigned), y.view(unsigned)
        c = (carry[b.idx] if carried else np.zeros((b.n, 32), bool)).astype(unsigned)
        if subtract:
            out = x - y - c
            over = (x < y) | ((x == y) & (c == 1))
        else:
            out = x + y + c
            over = (out < x) | ((out == x) & (c == 1))
        write(b, out.view(TYPES[d.type]))
        if keeps:
            carry[b.idx] = np.where(b.active(), over, carry[b.idx])

    return execute


@instruction("mul")
def mul(d: Decoder) -> Execute:
    """mul (9.7.1.3): .lo the low half, .hi the high half, .wide twice the width."""
    if is_float(d):
        return arithmetic(d, "mul")
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
    """The high half of a 64x64 product, from 32-bit halves."""
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


@instruction("mad", "madc")
def mad(d: Decoder) -> Execute:
    """mad, madc (9.7.1.4, 9.7.2.5, 9.7.2.6): a * b + c, with the halves of mul, or saturated."""
    if is_float(d):
        return arithmetic(d, "fma")
    d.only("lo", "hi", "wide", "cc", "sat")
    product = _product(d)
    if "cc" in d.mods or d.ins.name == "madc":
        return _with_carry(d, lambda x, y, z: (z, product(x, y)), d.ins.name == "madc")
    kind = _WIDE[d.type] if "wide" in d.mods else d.type
    if "sat" in d.mods:
        info = np.iinfo(np.int32)
        add = lambda x, y: np.clip(np.add(x, y, dtype=np.int64), info.min, info.max)
    else:
        add = np.add
    a, b2, c, write = d.src(1), d.src(2), d.src(3, kind), d.dst(0, kind)
    return lambda b: write(b, add(product(a(b), b2(b)), c(b)))


@instruction("mul24", "mad24")
def mul24(d: Decoder) -> Execute:
    """mul24, mad24 (9.7.1.5, 9.7.1.6): the low or high 32 of the 48 bits of a 24-bit product."""
    d.only("lo", "hi")
    shift = np.int64(16 if "hi" in d.mods else 0)
    kind = TYPES[d.type]

    def product(x: Any, y: Any) -> Any:
        x, y = (_extend(np.asarray(v).astype(np.int64), 24, d.type[0] == "s") for v in (x, y))
        return ((x * y) >> shift).astype(kind)

    if d.ins.name == "mul24":
        return d.map(product, 2)
    return d.map(lambda x, y, z: product(x, y) + z, 3)


def _extend(x: Any, bits: int, signed: bool) -> Any:
    """The low ``bits`` of int64 values, sign- or zero-extended."""
    x = x & np.int64((1 << bits) - 1)
    return np.where(x >> (bits - 1) != 0, x - (1 << bits), x) if signed else x


@instruction("dp4a", "dp2a")
def dot_product(d: Decoder) -> Execute:
    """dp4a, dp2a (9.7.1.24, 9.7.1.25): c + the products of 4 bytes, or of 2 halves with 2 bytes of
    b.
    """
    d.only("lo", "hi")
    kinds = [p for p in d.parts[1:] if p in ("u32", "s32")]
    a, b2, c = (d.src(k + 1, "u32") for k in range(3))
    write = d.dst(0, "u32")
    width, count = (8, 4) if d.ins.name == "dp4a" else (16, 2)
    first = 2 if "hi" in d.mods else 0

    def part(x: Any, bits: int, i: int, kind: str) -> Any:
        return _extend(np.asarray(x).astype(np.int64) >> (bits * i), bits, kind == "s32")

    def execute(b: Any) -> None:
        x, y = a(b), b2(b)
        terms = (
            part(x, width, i, kinds[0]) * part(y, 8, first + i, kinds[1]) for i in range(count)
        )
        write(b, (np.asarray(c(b)).astype(np.int64) + sum(terms)).astype(np.uint32))

    return execute


def _divide(x: Any, y: Any, remainder: bool) -> Any:
    """The quotient truncated towards zero, or the remainder; by zero all ones (undefined in
    PTX)."""
    x, y = np.broadcast_arrays(x, y)
    zero = y == 0
    safe = np.where(zero, y.dtype.type(1), y)
    if x.dtype.kind == "u":
        out = x % safe if remainder else x // safe
    else:
        out = np.fmod(x, safe) if remainder else (x - np.fmod(x, safe)) // safe
    return np.where(zero, y.dtype.type(-1) if y.dtype.kind == "i" else ~y.dtype.type(0), out)


def _division(d: Decoder, remainder: bool) -> Execute:
    d.only()
    x, y, write = d.src(1), d.src(2), d.dst()

    def execute(b: Batch) -> None:
        divisor = y(b)
        if not np.all(divisor):
            _tell_zero(d, b, np.broadcast_to(divisor == 0, (b.n, 32)) & b.active())
        write(b, _divide(x(b), divisor, remainder))

    return execute


def _tell_zero(d: Decoder, b: Batch, zero: np.ndarray) -> None:
    """Tell of the first lane, of those ``zero`` (n, 32), that divides by zero."""
    if zero.any():
        row, lane = (int(v[0]) for v in np.nonzero(zero))
        d.m.findings.add(
            "division",
            f"{d.m.grid.name_warp(int(b.idx[row]))} lane {lane} divides by zero: what it gets is "
            "not defined",
            d.ins,
            advisory=True,
        )


@instruction("div")
def div(d: Decoder) -> Execute:
    """div (9.7.1.8): truncated towards zero."""
    return arithmetic(d, "div") if is_float(d) else _division(d, remainder=False)


@instruction("rem")
def rem(d: Decoder) -> Execute:
    """rem (9.7.1.9): the remainder, with the sign of the dividend."""
    return _division(d, remainder=True)


@instruction("min", "max")
def minimum(d: Decoder) -> Execute:
    """min, max (9.7.1.12, 9.7.1.13); .relu makes what is below zero zero."""
    pick = np.minimum if d.ins.name == "min" else np.maximum
    f = (lambda x, y: np.maximum(pick(x, y), 0)) if "relu" in d.mods else pick
    if pair := _pair(d):
        d.only(pair, "relu")
        return _on_pairs(d, pair, f)
    if is_float(d):
        return extremum(d)
    d.only("relu")
    return d.map(f, 2)


@instruction("neg", "abs")
def negate(d: Decoder) -> Execute:
    """neg, abs (9.7.1.10, 9.7.1.11)."""
    if is_float(d):
        return change_sign(d)
    d.only()
    return d.map(np.negative if d.ins.name == "neg" else np.abs, 1)


@instruction("sad")
def sad(d: Decoder) -> Execute:
    """sad (9.7.1.7): c + |a - b|."""
    return d.map(lambda x, y, z: z + np.where(x > y, x - y, y - x), 3)
