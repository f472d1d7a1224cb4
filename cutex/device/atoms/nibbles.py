"""Codes of 4 bits in registers, widened to pairs of bf16 or fp16.

A word holds eight codes: nibble i is the low half of pair i, nibble i + 4 the high half; of e2m1
for bf16 the bits lie elsewhere (problem/w4/layout.py, E2M1_PLACES). An integer is or-ed into the
mantissa of a float whose unit is 1, from which its zero, as such a float, is subtracted: exact. Or
it is left among the least bits of a float, whose unit is the same while the exponent is 0 or 1: a
tiny number, which one operation scales and takes its zero off. The bits of an e2m1 are put where
the float has them, exponent 0 where it has that of its least normal number: exact, subnormal
numbers too, times a power of two.

NOTE: inline PTX without side effects, so that the compiler may schedule it freely.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float16, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

PAIR = 0x0001_0001  # a half in both
OR_OF_AND = 0xEA  # lop3: (a & b) | c
XOR_OF_AND = 0x6A  # lop3: (a & b) ^ c
LOW, HIGH = 0x1010, 0x3232  # selectors of prmt: one half of a word, twice
PAIRS = 4  # in a word


def pairs_of_int4(word: Int32, kind: Any) -> list[Int32]:
    """The four pairs of a word's integers, each or-ed into `base(kind)`."""
    base = 0x6400 if kind is Float16 else 0x4300
    return [
        _lop3(_shifted(word, -4 * i), 0x000F * PAIR, base * PAIR, OR_OF_AND) for i in range(PAIRS)
    ]


def tiny_pairs_of_int4(word: Int32) -> list[Int32]:
    """The four pairs of a word's integers, in units of the least subnormal number, every second
    pair in units of 16 of them."""
    low, high = 0x000F * PAIR, 0x00F0 * PAIR
    up = _shift_right(word, 8)
    return [word & low, word & high, up & low, up & high]


def least_power(kind: Any) -> int:
    """The power of two that is the least subnormal number."""
    return -24 if kind is Float16 else -133


def top_power(kind: Any) -> int:
    """The largest power of two."""
    return 15 if kind is Float16 else 127


def pair_of(power: int, kind: Any, sign: int = 1) -> Int32:
    """A pair of plus or minus a power of two."""
    bits, bias = (10, 15) if kind is Float16 else (7, 127)
    half = (power + bias) << bits | (0x8000 if sign < 0 else 0)
    return Int32(half * PAIR - (1 << 32 if half >= 0x8000 else 0))


def pairs_of_e2m1(word: Int32, kind: Any) -> list[Int32]:
    """The four pairs of a word's e2m1, times 2^-14 in fp16, 2^-126 in bf16."""
    if kind is Float16:
        return _pairs_of_nibbles(word)
    bits = 0x81C0 * PAIR - (1 << 32)  # of the sign, the exponent and the mantissa
    found = [x & Int32(bits) for x in (word << 6, word << 2, _turned_right(word, 4))]
    last = word & Int32(0x8180 * PAIR - (1 << 32))
    return [*found, _lop3(_shift_right(word, 8), 0x0040 * PAIR, last, OR_OF_AND)]


def _pairs_of_nibbles(word: Int32) -> list[Int32]:
    """The four pairs of a word's e2m1 in fp16, each from a nibble."""
    down = 3  # from the bits 12 to 14
    found = []
    for i in range(PAIRS):
        up = 12 - 4 * i
        sign = _shifted(word, up) & Int32(0x8000 * PAIR - (1 << 32))
        found.append(_lop3(_shifted(word, up - down), (0x7000 >> down) * PAIR, sign, OR_OF_AND))
    return found


def _shifted(word: Int32, by: int) -> Int32:
    """`word` shifted to the left by `by` bits, or to the right; halves run into each other."""
    if by == 0:
        return word
    return word << by if by > 0 else _shift_right(word, -by)


def turned(word: Int32, mask: int, turn: int) -> Int32:
    """The bits `mask` of a word, with those of `turn` inverted."""
    return _lop3(word, mask, turn, XOR_OF_AND)


def splat(word: Int32) -> tuple[Int32, Int32]:
    """The low half of a word as a pair, and its high half as a pair."""
    return _permuted(word, LOW), _permuted(word, HIGH)


def minus(a: Int32, b: Int32, kind: Any) -> Int32:
    """a - b of pairs, rounded to nearest."""
    return _words(f"sub.rn.{_suffix(kind)} $0, $1, $2;", a, b)


def times(a: Int32, b: Int32, kind: Any) -> Int32:
    """a * b of pairs, rounded to nearest."""
    return _words(f"mul.rn.{_suffix(kind)} $0, $1, $2;", a, b)


def fused(a: Int32, b: Int32, c: Int32, kind: Any) -> Int32:
    """a * b + c of pairs, rounded to nearest once."""
    return _words(f"fma.rn.{_suffix(kind)} $0, $1, $2, $3;", a, b, c)


def _suffix(kind: Any) -> str:
    return "f16x2" if kind is cutlass.Float16 else "bf16x2"


def _lop3(a: Int32, b: int, c: Int32 | int, table: int) -> Int32:
    return _words(f"lop3.b32 $0, $1, $2, $3, {table};", a, Int32(b), Int32(c))


def _shift_right(a: Int32, by: int) -> Int32:
    return _words(f"shr.b32 $0, $1, {by};", a)


def _turned_right(a: Int32, by: int) -> Int32:
    """The word rotated right by `by` bits."""
    return _words(f"shf.r.wrap.b32 $0, $1, $1, {by};", a)


def _permuted(a: Int32, selector: int) -> Int32:
    return _words(f"prmt.b32 $0, $1, $1, {selector};", a)


@dsl_user_op
def _words(ptx: str, *operands: Int32, loc=None, ip=None) -> Int32:
    """The result of an instruction of 32-bit registers."""
    values = [Int32(x).ir_value(loc=loc, ip=ip) for x in operands]
    constraints = ",".join(["=r", *["r"] * len(values)])
    return Int32(
        llvm.inline_asm(T.i32(), values, ptx, constraints, has_side_effects=False, loc=loc, ip=ip)
    )
