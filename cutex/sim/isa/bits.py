"""Logic, shifts and bit fields (PTX ISA 9.7.8, 9.7.1.16 to 9.7.1.23)."""

from __future__ import annotations

from typing import Any

import numpy as np

from cutex.sim.ptx.declarations import WIDTH
from cutex.sim.ptx.decode import TYPES, UNSIGNED, Decoder, Execute, instruction


@instruction("and", "or", "xor")
def logic(d: Decoder) -> Execute:
    """and, or, xor (9.7.8.1-3), also on predicates."""
    d.only()
    f = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[d.ins.name]
    return d.map(f, 2)


@instruction("not")
def not_(d: Decoder) -> Execute:
    """not (9.7.8.4): the complement, also of predicates."""
    d.only()
    return d.map(np.invert, 1)


@instruction("cnot")
def cnot(d: Decoder) -> Execute:
    """cnot (9.7.8.5): 1 for zero, else 0."""
    d.only()
    return d.map(lambda x: np.asarray(x == 0).astype(TYPES[d.type]), 1)


@instruction("lop3")
def lop3(d: Decoder) -> Execute:
    """lop3 (9.7.8.6): any function of three bits, by its truth table."""
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
    """shl, shr (9.7.8.7, 9.7.8.8): amounts above the width are clamped to it."""
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
    """shf (9.7.8.5): the upper (left) or lower (right) word of the shifted pair {b, a}."""
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


# -- bit fields ------------------------------------------------------------------------------------


def _count_bits(x: Any) -> Any:
    return np.bitwise_count(x).astype(np.uint32)


def _leading_zeros(x: Any, bits: int) -> Any:
    x = np.asarray(x).astype(np.uint64)
    for s in (1, 2, 4, 8, 16, 32):
        x = x | x >> np.uint64(s)
    return (np.uint32(bits) - np.bitwise_count(x)).astype(np.uint32)


@instruction("popc")
def popc(d: Decoder) -> Execute:
    """popc (9.7.1.16): the number of set bits."""
    a, write = d.src(1), d.dst(0, "u32")
    return lambda b: write(b, _count_bits(a(b)))


@instruction("clz")
def clz(d: Decoder) -> Execute:
    """clz (9.7.1.17): the number of leading zeros."""
    a, write, bits = d.src(1), d.dst(0, "u32"), WIDTH[d.type]
    return lambda b: write(b, _leading_zeros(a(b), bits))


@instruction("bfind")
def bfind(d: Decoder) -> Execute:
    """bfind (9.7.1.18): the most significant set bit (of negative numbers: clear bit); all ones if
    none.
    """
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
    """brev (9.7.1.19): the bits in reverse order."""
    a, write, bits, dtype = d.src(1), d.dst(), WIDTH[d.type], TYPES[d.type]

    def execute(b: Any) -> None:
        x = np.asarray(a(b))
        out = np.zeros_like(x)
        for i in range(bits):
            out |= (x >> dtype(i) & dtype(1)) << dtype(bits - 1 - i)
        write(b, out)

    return execute


def _field(pos: Any, length: Any) -> Any:
    """The position and the length of a bit field: only the low 8 bits of each count."""
    byte = np.uint32(255)
    return tuple((np.asarray(v) & byte).astype(np.uint64) for v in (pos, length))


def _low_bits(n: Any) -> Any:
    """A uint64 with its ``n`` lowest bits set."""
    n = np.asarray(n, np.uint64)
    ones = (np.uint64(1) << np.minimum(n, np.uint64(63))) - np.uint64(1)
    return np.where(n >= 64, ~np.uint64(0), ones)


@instruction("bfe")
def bfe(d: Decoder) -> Execute:
    """bfe (9.7.1.20): bits [pos, pos+len); signed types extend the sign of the last existing
    bit."""
    a, pos, length, write = d.src(1), d.src(2, "u32"), d.src(3, "u32"), d.dst()
    bits, dtype, signed = WIDTH[d.type], TYPES[d.type], d.type[0] == "s"
    unsigned = UNSIGNED[bits]

    def execute(b: Any) -> None:
        p, n = _field(pos(b), length(b))
        x = np.asarray(a(b)).view(unsigned).astype(np.uint64)
        last = np.minimum(p + n - np.uint64(1), np.uint64(bits - 1))
        held = np.minimum(n, np.uint64(bits) - np.minimum(p, np.uint64(bits)))  # bits that exist
        out = np.where(p < bits, x >> np.minimum(p, np.uint64(63)), np.uint64(0)) & _low_bits(held)
        if signed:
            negative = (x >> last & np.uint64(1)).astype(bool) & (n > 0)
            out = np.where(negative, out | ~_low_bits(held), out)
        write(b, out.astype(unsigned).view(dtype))

    return execute


@instruction("bfi")
def bfi(d: Decoder) -> Execute:
    """bfi (9.7.1.21): b with the low ``len`` bits of a inserted at ``pos``."""
    a, into, pos, length, write = d.src(1), d.src(2), d.src(3, "u32"), d.src(4, "u32"), d.dst()
    bits, dtype = WIDTH[d.type], TYPES[d.type]

    def execute(b: Any) -> None:
        p, n = _field(pos(b), length(b))
        shift = np.minimum(p, np.uint64(63))
        mask = np.where(p >= bits, np.uint64(0), _low_bits(n) << shift)
        x = np.asarray(a(b)).astype(np.uint64) << shift
        y = np.asarray(into(b)).astype(np.uint64)
        write(b, ((y & ~mask) | (x & mask)).astype(dtype))

    return execute


def _amount(d: Decoder, read: Any, limit: int) -> Any:
    """A function that reads a bit count: .wrap modulo 32, .clamp at most ``limit``."""
    if "wrap" in d.mods:
        return lambda b: np.asarray(read(b)).astype(np.uint64) & np.uint64(31)
    return lambda b: np.minimum(np.asarray(read(b)).astype(np.uint64), np.uint64(limit))


@instruction("bmsk")
def bmsk(d: Decoder) -> Execute:
    """bmsk (9.7.1.23): ones in [a, a+b)."""
    d.only("clamp", "wrap")
    first, length = _amount(d, d.src(1, "u32"), 32), _amount(d, d.src(2, "u32"), 32)
    write = d.dst()
    return lambda b: write(b, (_low_bits(length(b)) << first(b)).astype(np.uint32))


@instruction("szext")
def szext(d: Decoder) -> Execute:
    """szext (9.7.1.22): the low b bits of a, sign- or zero-extended."""
    d.only("clamp", "wrap")
    a, count, write = d.src(1, "u32"), _amount(d, d.src(2, "u32"), 32), d.dst(0, "u32")
    signed = d.type == "s32"

    def execute(b: Any) -> None:
        n = count(b)
        ones = _low_bits(n)
        x = np.asarray(a(b)).astype(np.uint64) & ones
        if signed:
            last = x >> (np.maximum(n, np.uint64(1)) - np.uint64(1)) & np.uint64(1)
            x = np.where((last == 1) & (n > 0), x | ~ones, x)
        write(b, x.astype(np.uint32))

    return execute


# byte of {b, a} for each byte of the result, by the selector's low two bits (9.7.8.9, table)
_PERMUTATIONS = {
    "f4e": [(0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)],
    "b4e": [(0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)],
    "rc8": [(0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)],
    "ecl": [(0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)],
    "ecr": [(0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)],
    "rc16": [(0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)],
}


@instruction("prmt")
def prmt(d: Decoder) -> Execute:
    """prmt (9.7.8.9): each nibble of the selector picks a byte of {b, a}; its bit 3 replicates the
    sign.
    """
    d.only(*_PERMUTATIONS)
    a, b2, selector, write = d.src(1), d.src(2), d.src(3), d.dst()
    mode = next((m for m in _PERMUTATIONS if m in d.mods), None)
    table = np.array(_PERMUTATIONS[mode], np.uint32) if mode else None
    nibbles = np.arange(0, 16, 4, dtype=np.uint32)

    def execute(b: Any) -> None:
        words = np.stack([b.lanes(v(b)) for v in (a, b2)], -1)
        data = np.ascontiguousarray(words).view(np.uint8)  # (n, 32, 8)
        s = b.lanes(selector(b))
        picks = table[s & 3] if table is not None else s[..., None] >> nibbles & np.uint32(15)
        out = np.take_along_axis(data, (picks & np.uint32(7)).astype(np.int64), -1)
        out = np.where(picks & np.uint32(8), np.where(out >> 7, 255, 0).astype(np.uint8), out)
        write(b, np.ascontiguousarray(out).view(np.uint32).reshape(b.n, 32))

    return execute
