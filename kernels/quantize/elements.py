"""Conversion of fp32 to small elements, rounded to nearest even and saturated, and scale factors.

Where the arch has no instruction for it, integer operations give the same bits. The reference is
cutex/problem/scaled/quantization.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from cutex.problem.scaled.formats import LARGEST, Format

NAN_BITS, INF_BITS, MAGNITUDE = 0x7FC00000, 0x7F800000, 0x7FFFFFFF
E8M0_NAN = 255
E4M3_LEAST = 2.0**-6
TAME = 2.0**60
CODED = 2.0**-14  # what coded_halves takes numbers times


class SmallFloat(NamedTuple):
    """The bits of a small float."""

    mantissa: int
    bias: int
    nan: int  # the code of a NaN


SHAPES = {
    "e4m3": SmallFloat(3, 7, 0x7F),
    "e5m2": SmallFloat(2, 15, 0x7F),
    "e2m1": SmallFloat(1, 1, 0x7),
}


# ---- fp32, exactly as IEEE 754 has it


@dsl_user_op
def bits_of(x: Float32, *, loc=None, ip=None) -> Int32:
    return Int32(llvm.bitcast(T.i32(), Float32(x).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def float_of(bits: Int32, *, loc=None, ip=None) -> Float32:
    return Float32(llvm.bitcast(T.f32(), Int32(bits).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def divide(x: Float32, y: Float32, *, loc=None, ip=None) -> Float32:
    """x / y rounded to nearest, denormals kept (PTX ISA, div.rn)."""
    return _f32("div.rn.f32 $0, $1, $2;", (x, y), loc, ip)


@dsl_user_op
def multiply(x: Float32, y: Float32, *, loc=None, ip=None) -> Float32:
    """x * y rounded to nearest, denormals kept, never fused with an addition."""
    return _f32("mul.rn.f32 $0, $1, $2;", (x, y), loc, ip)


@dsl_user_op
def fused(x: Float32, y: Float32, z: Float32, *, loc=None, ip=None) -> Float32:
    """x * y + z rounded once, to nearest, denormals kept."""
    return _f32("fma.rn.f32 $0, $1, $2, $3;", (x, y, z), loc, ip)


@dsl_user_op
def near_reciprocal(x: Float32, *, loc=None, ip=None) -> Float32:
    """1 / x, to one unit in the last place (PTX ISA, rcp.approx)."""
    return _f32("rcp.approx.ftz.f32 $0, $1;", (x,), loc, ip)


def quotient(x: Float32, y: Float32, inverse: Float32) -> Float32:
    """x / y rounded to nearest, where `inverse` is 1 / y and nothing is near the ends of fp32's
    range: after the second of two corrections a product is right (Markstein 1990)."""
    found = multiply(x, inverse)
    for _ in range(2):
        found = fused(fused(-y, found, x), inverse, found)
    return found


@dsl_user_op
def add(x: Float32, y: Float32, *, loc=None, ip=None) -> Float32:
    """x + y rounded to nearest, never fused with a product."""
    return _f32("add.rn.f32 $0, $1, $2;", (x, y), loc, ip)


def _f32(ptx: str, operands: tuple[Any, ...], loc: Any, ip: Any) -> Float32:
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in operands]
    constraints = ",".join(["=f", *["f"] * len(values)])
    return Float32(
        llvm.inline_asm(T.f32(), values, ptx, constraints, has_side_effects=False, loc=loc, ip=ip)
    )


@dsl_user_op
def larger_halves(x: Int32, y: Int32, kind: str, signed: bool, *, loc=None, ip=None) -> Int32:
    """The elementwise larger of two pairs of halves of 16 bits, of `kind` f16 or bf16, none of
    them negative; if `signed`, the larger magnitude, with a meaningless sign. A NaN wins (PTX ISA,
    max)."""
    by = ".xorsign.abs" if signed else ""
    return as_word(f"max.NaN{by}.{kind}x2 $0, $1, $2;", (x, y), loc, ip)


# ---- elements


@dataclass(frozen=True)
class Elements:
    """The conversion to one type of element; `native`: by the arch's instruction."""

    name: str
    native: bool

    @property
    def bits(self) -> int:
        return 4 if self.name == "e2m1" else 8

    def pack(self, values: list[Float32]) -> Int32:
        """The codes of as many values as fill a word, or of fewer, the first in the low bits."""
        if self.name == "e2m1" and not self.native:
            word = Int32(0)
            for i, value in enumerate(values):
                word = add_e2m1(value, word, i)
            return word
        pairs = [self.pair(*values[i : i + 2]) for i in range(0, len(values), 2)]
        word = pairs[0]
        for i, pair in enumerate(pairs[1:], 1):
            word = word | (pair << (2 * self.bits * i))
        return word

    def pair(self, low: Float32, high: Float32) -> Int32:
        """The codes of two values."""
        if self.native:
            return converted(self.name, high, low)
        return self.code(low) | (self.code(high) << self.bits)

    def code(self, x: Float32) -> Int32:
        """The code of x, of 8 bits, by integer operations."""
        shape = SHAPES[self.name]
        bits = bits_of(x)
        size = bits & MAGNITUDE
        drop = 23 - shape.mantissa
        # normal numbers: the exponent's bias changes, and half a unit is added, to the even code
        odd = (size >> drop) & 1
        rebias = (127 - shape.bias) << 23
        normal = (size - rebias + ((1 << (drop - 1)) - 1) + odd) >> drop
        # subnormal numbers: an addition to a number whose last place is theirs rounds them
        place = Float32(2.0 ** (24 - shape.bias - shape.mantissa))
        subnormal = bits_of(add(float_of(size), place)) - bits_of(place)
        code = cutlass.select_(size < ((128 - shape.bias) << 23), subnormal, normal)
        code = cutlass.select_(size >= as_bits(LARGEST[self.name]), largest_code(self.name), code)
        code = code | ((bits >> (32 - self.bits)) & (1 << (self.bits - 1)))
        return cutlass.select_(size > INF_BITS, Int32(shape.nan), code)


@dsl_user_op
def add_e2m1(x: Float32, word: Int32, place: int, *, loc=None, ip=None) -> Int32:
    """`word`, with the e2m1 code of x added in its nibble `place`.

    With 2^e the power of two below |x|, or 1 if |x| is less, codes are 2 e plus the number of steps
    of 2^(e-1) in |x|. The sum 2^e (2^22 + 3) + |x| is rounded to such steps: its low bits are that
    number plus 6, those from bit 22 on 2 (e + 149), together a multiple of 16 plus the code. A NaN
    becomes 6, the largest, and as a product it has no sign.
    """
    ptx = """{
        .reg .f32 size, sum; .reg .b32 bits, top;
        abs.f32 size, $1;
        min.f32 size, size, 0f40C00000;
        max.f32 sum, size, 0f3F800000;
        mov.b32 bits, sum;
        and.b32 bits, bits, 0x7F800000;
        mov.b32 sum, bits;
        fma.rn.f32 sum, sum, 0f4A800006, size;
        mov.b32 bits, sum;
        shr.u32 top, bits, 22;
        add.u32 bits, bits, top;
        mov.b32 top, $1;
        shr.u32 top, top, 28;
        lop3.b32 bits, bits, top, 7, 0xE4;
        mad.lo.u32 $0, bits, SHIFT, $2;
    }""".replace("SHIFT", str(1 << 4 * place))
    values = [Float32(x).ir_value(loc=loc, ip=ip), Int32(word).ir_value(loc=loc, ip=ip)]
    return Int32(
        llvm.inline_asm(T.i32(), values, ptx, "=r,f,r", has_side_effects=False, loc=loc, ip=ip)
    )


def halves_of(low: Float32, high: Float32) -> Int32:
    """Two numbers, exact as bf16, in one word."""
    return ((bits_of(low) >> 16) & 0xFFFF) | (bits_of(high) & ~0xFFFF)


@dsl_user_op
def scaled_halves(x: Int32, inverse: Int32, *, loc=None, ip=None) -> Int32:
    """The products of two bf16 with two powers of two."""
    ptx = """{
        .reg .b32 zero;
        mov.b32 zero, 0x80008000;
        fma.rn.bf16x2 $0, $1, $2, zero;
    }"""
    return as_word(ptx, (x, inverse), loc, ip)


@dsl_user_op
def coded_halves(low: Float32, high: Float32, limited: bool = True, *, loc=None, ip=None) -> Int32:
    """The e2m1 codes of two numbers given times CODED: each half has the sign in bit 15 and the
    rest of the code in bits 9 to 11; other bits are meaningless. Unless `limited`, both must be
    below 7 and not NaN.

    CODED maps the least normal number of e2m1 to that of fp16, so that an e2m1 is an fp16, normal
    or not, truncated to bits 9 and up. Numbers are truncated to fp16, and rounded to nearest from
    there: half a step is added, unless they are exactly half a step (or nothing) above an even
    code; the low halves of the fp32 values show whether truncation lost anything. A NaN becomes 6.

    NOTE: the half is added by a multiply-add, since the integer unit is the busiest.
    """
    ptx = """{
        .reg .b32 cut, up, rest, one, most;
        mov.b32 most, 0x0E000E00;
        mov.b32 rest, 0x02FF02FF;
        mov.b32 one, 0x00010001;
        cvt.rz.f16x2.f32 cut, $2, $1;
        LIMIT
        prmt.b32 up, $3, $4, 0x5410;
        lop3.b32 up, cut, rest, up, 0xEA;
        min.u16x2 up, up, one;
        mad.lo.u32 $0, up, 256, cut;
    }""".replace("LIMIT", "min.xorsign.abs.f16x2 cut, cut, most;" if limited else "")
    values = [x.ir_value(loc=loc, ip=ip) for x in (low, high, bits_of(low), bits_of(high))]
    return Int32(
        llvm.inline_asm(T.i32(), values, ptx, "=r,f,f,r,r", has_side_effects=False, loc=loc, ip=ip)
    )


@dsl_user_op
def e2m1_pair(x: Int32, *, loc=None, ip=None) -> Int32:
    """The e2m1 codes, without signs, of two bf16 below 8: of the low half in byte 0, of the high
    one in byte 2; other bytes are meaningless, and both codes if one is a NaN.

    Elements are spaced by 1/2 up to 2, by 1 up to 4, by 2 up to 6, so the code of |x| is the least
    of 2 |x|, |x| + 2, |x| / 2 + 4, rounded to even integers, and 7: computed as sums with 128,
    whose last place is 1. For |x| / 2 + 4, which would be 8 above 7, stands .298828125 |x| + 5:
    it is as much for all bf16 from 3 to 7, where the others are no less, and 7 up to 8.
    """
    ptx = """{
        .reg .b32 size, one, two, three;
        abs.bf16x2 size, $1;
        mov.b32 one, 0x43004300;
        mov.b32 two, 0x40004000;
        fma.rn.bf16x2 one, size, two, one;
        mov.b32 two, 0x43024302;
        mov.b32 three, 0x3F803F80;
        fma.rn.bf16x2 two, size, three, two;
        min.bf16x2 one, one, two;
        mov.b32 two, 0x43054305;
        mov.b32 three, 0x3E993E99;
        fma.rn.bf16x2 three, size, three, two;
        min.bf16x2 $0, one, three;
    }"""
    return as_word(ptx, (x,), loc, ip)


def as_word(ptx: str, operands: tuple[Any, ...], loc: Any, ip: Any) -> Int32:
    """The result of an instruction of 32-bit operands."""
    values = [Int32(x).ir_value(loc=loc, ip=ip) for x in operands]
    constraints = ",".join(["=r", *["r"] * len(values)])
    return Int32(
        llvm.inline_asm(T.i32(), values, ptx, constraints, has_side_effects=False, loc=loc, ip=ip)
    )


def take(first: Int32, second: Int32, places: int) -> Int32:
    """The bytes of two words that the hexadecimal digits of `places` name, the lowest last (PTX
    ISA, prmt)."""
    return Int32(cute.arch.prmt(first, second, places))


def row_codes(pairs: list[Int32]) -> Int32:
    """The word of a row's eight e2m1 codes, from four pairs of bf16."""
    codes = [e2m1_pair(pair) for pair in pairs]
    first, second = take(codes[0], codes[1], 0x6420), take(codes[2], codes[3], 0x6420)
    # NOTE: the digits above 7 fill a byte with the sign of a half
    first = first | (take(pairs[0], pairs[1], 0xFDB9) & 0x08080808)
    second = second | (take(pairs[2], pairs[3], 0xFDB9) & 0x08080808)
    return nibbles(take(first, second, 0x6420), take(first, second, 0x7531))


def column_codes(rows: list[Int32]) -> tuple[Int32, Int32]:
    """The words of two columns' eight e2m1 codes, from eight pairs of bf16, one row each."""
    codes = [e2m1_pair(row) for row in rows]

    def both(i: int) -> Int32:
        """The codes of rows `i` and `i + 2`, a byte each, with the signs that fill bytes."""
        signs = take(rows[i], rows[i + 2], 0xFBD9) & 0x08080808
        return take(codes[i], codes[i + 2], 0x6240) | signs

    even, odd = ([both(i) for i in (first, first + 4)] for first in (0, 1))
    # NOTE: a NaN of one column must not be carried into the other's bytes
    upper, lower = (nibbles_apart(*rows) for rows in zip(even, odd, strict=True))
    return take(upper, lower, 0x5410), take(upper, lower, 0x7632)


def row_of_coded(pairs: list[Int32]) -> Int32:
    """The word of a row's eight codes, from four pairs of them (coded_halves)."""
    first, second = take(pairs[0], pairs[1], 0x7531), take(pairs[2], pairs[3], 0x7531)
    return coded_nibbles(take(first, second, 0x6420), take(first, second, 0x7531))


def columns_of_coded(rows: list[Int32]) -> tuple[Int32, Int32]:
    """The words of two columns' eight codes, from eight pairs of them, one row each."""
    even, odd = (
        [take(rows[i], rows[i + 2], 0x7351) for i in (first, first + 4)] for first in (0, 1)
    )
    upper, lower = (coded_nibbles(*both) for both in zip(even, odd, strict=True))
    return take(upper, lower, 0x5410), take(upper, lower, 0x7632)


@dsl_user_op
def coded_nibbles(low: Int32, high: Int32, *, loc=None, ip=None) -> Int32:
    """The codes in the upper bytes of the halves of two words (sign in bit 7, the rest in bits 1 to
    3), in one word."""
    ptx = """{
        .reg .b32 a, b, c, mask;
        shr.u32 a, $1, 1;
        shr.u32 b, $1, 4;
        mov.b32 mask, 0x07070707;
        lop3.b32 a, a, b, mask, 0xE4;
        shl.b32 c, $2, 3;
        mov.b32 mask, 0x70707070;
        lop3.b32 c, c, $2, mask, 0xE4;
        mov.b32 mask, 0x0F0F0F0F;
        lop3.b32 $0, a, c, mask, 0xE4;
    }"""
    return as_word(ptx, (low, high), loc, ip)


@dsl_user_op
def nibbles_apart(low: Int32, high: Int32, *, loc=None, ip=None) -> Int32:
    """The same as `nibbles`, of bytes whose upper bits may be anything: they are left out."""
    ptx = """{
        .reg .b32 upper, mask;
        mul.lo.u32 upper, $2, 16;
        mov.b32 mask, 0x0F0F0F0F;
        lop3.b32 $0, $1, upper, mask, 0xE4;
    }"""
    return as_word(ptx, (low, high), loc, ip)


def nibbles(low: Int32, high: Int32) -> Int32:
    """The codes in the bytes of two words, of four bits each, in one word."""
    return low + high * 16


def as_bits(value: float) -> int:
    """The bits of a Python number as fp32."""
    import struct

    return int.from_bytes(struct.pack("<f", value), "little")


def largest_code(name: str) -> Int32:
    shape = SHAPES[name]
    drop = 23 - shape.mantissa
    return Int32((as_bits(LARGEST[name]) - ((127 - shape.bias) << 23)) >> drop)


@dsl_user_op
def converted(name: str, high: Float32, low: Float32, *, loc=None, ip=None) -> Int32:
    """The codes of two values by the instruction, low in the low bits (PTX ISA, cvt
    .satfinite)."""
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in (high, low)]
    narrow = "b8" if name == "e2m1" else "b16"
    widen = "cvt.u32.u8 $0, c;" if name == "e2m1" else "cvt.u32.u16 $0, c;"
    ptx = f"{{ .reg .{narrow} c; cvt.rn.satfinite.{name}x2.f32 c, $1, $2; {widen} }}"
    return Int32(
        llvm.inline_asm(T.i32(), values, ptx, "=r,f,f", has_side_effects=False, loc=loc, ip=ip)
    )


# ---- scale factors


class Factor(NamedTuple):
    """A block's scale factor: its code (or its bits where it is fp32), and the factor for its
    elements."""

    code: Int32
    inverse: Float32

    def of_e2m1(self, word: Int32) -> Int32:
        """`word` of eight e2m1 codes, all the largest one if this factor, an E8M0, is a NaN."""
        return cutlass.select_(self.code == E8M0_NAN, Int32(0x77777777), word)


def factor_of(
    format: Format, largest: Int32, rounding: str, native: bool, tensor_scale: Any
) -> Factor:
    """The factor of a block whose largest magnitude has the bits `largest`."""
    if format.scale == "e8m0":
        return _e8m0(format, largest, rounding)
    if format.scale == "e4m3":
        own = tensor_scale
        return _e4m3(largest, own if isinstance(own, TensorScale) else TensorScale.of(own), native)
    scale = divide(at_least(float_of(largest), format.least), Float32(format.largest))
    return Factor(bits_of(scale), divide(Float32(1.0), scale))


def _e8m0(format: Format, largest: Int32, rounding: str) -> Factor:
    if rounding == "floor":
        code = (largest >> 23) - ((as_bits(format.largest) >> 23) - 127)
    else:
        reciprocal = float_of(Int32(as_bits(1.0 / format.largest)))
        bits = bits_of(multiply(float_of(largest), reciprocal))
        fraction = bits & 0x7FFFFF
        # of subnormal numbers, code 0 is 2^-127
        above = cutlass.select_((bits >> 23) == 0, Int32(0x400000), Int32(0))
        code = (bits >> 23) + cutlass.select_(fraction > above, Int32(1), Int32(0))
    code = cutlass.max(code, 0)
    code = cutlass.select_(largest >= INF_BITS, Int32(E8M0_NAN), code)
    power = 254 - code
    inverse = cutlass.select_(power == 0, Int32(0x400000), power << 23)
    return Factor(code, float_of(cutlass.select_(code == E8M0_NAN, Int32(NAN_BITS), inverse)))


class TensorScale(NamedTuple):
    """NVFP4's factor of a whole tensor."""

    value: Float32
    inverse: Float32  # 1 / value
    tame: Any  # whether quotients with it are far from the ends of fp32's range

    @staticmethod
    def of(value: Float32) -> TensorScale:
        bits = bits_of(value)
        tame = (bits >= as_bits(1 / TAME)) & (bits <= as_bits(TAME))
        return TensorScale(value, divide(Float32(1.0), value), tame)


@cute.jit
def _e4m3(largest: Int32, own: TensorScale, native: cutlass.Constexpr[bool]) -> Factor:
    size, sixth = float_of(largest), Float32(6.0)
    relative, code, inverse = Float32(0.0), Int32(0), Float32(0.0)
    tame = (largest == 0) | ((largest >= as_bits(1 / TAME)) & (largest <= as_bits(TAME)))
    if own.tame & tame:
        relative = quotient(quotient(size, sixth, Float32(1.0 / 6.0)), own.value, own.inverse)
        code = _code_of_e4m3(relative, native)
        value = of_e4m3(code)
        # NOTE: one step of Newton's rounds 1 / value rightly, which has four bits at most
        near = near_reciprocal(value)
        near = fused(fused(-value, near, Float32(1.0)), near, near)
        inverse = quotient(own.inverse, value, near)
    else:
        relative = divide(divide(size, sixth), own.value)
        code = _code_of_e4m3(relative, native)
        inverse = divide(own.inverse, of_e4m3(code))
    return Factor(code, inverse)


def _code_of_e4m3(relative: Float32, native: bool) -> Int32:
    """The code of a factor, which is at least the least normal number."""
    return Elements("e4m3", native).pair(at_least(relative, E4M3_LEAST), Float32(0.0)) & 0xFF


def of_e4m3(code: Int32) -> Float32:
    """The value of a code of e4m3 that is at least 2^-6, its least normal number, or a NaN."""
    bits = (code + ((127 - 7) << 3)) << 20
    return float_of(cutlass.select_(code == 0x7F, Int32(NAN_BITS), bits))


def at_least(x: Float32, least: float) -> Float32:
    """The larger one; a NaN stays one."""
    return cute.arch.fmax(x, Float32(least), nan=True)
