"""Scalar instructions that the compiler may move, but for one: exponentials, logarithms, roots,
tanh, sums.

NOTE: cute.arch.exp2 is marked as having side effects, which pins it where it was written; an online
softmax is fast only if its exponentials can be scheduled between other instructions.
"""

from __future__ import annotations

from cutlass import BFloat16, Float16, Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def exp2(x: Float32, *, loc=None, ip=None) -> Float32:
    """2^x as MUFU computes it: within 2 ulp, 0 for -inf, denormals flushed (PTX ISA, ex2)."""
    return _unary("ex2.approx.ftz.f32 $0, $1;", x, loc, ip)


@dsl_user_op
def log2(x: Float32, *, loc=None, ip=None) -> Float32:
    """log2(x) as MUFU computes it, -inf for 0 (PTX ISA, lg2)."""
    return _unary("lg2.approx.ftz.f32 $0, $1;", x, loc, ip)


@dsl_user_op
def tanh(x: Float32, *, loc=None, ip=None) -> Float32:
    """tanh(x) with a relative error of 2^-11 (PTX ISA, tanh)."""
    return _unary("tanh.approx.f32 $0, $1;", x, loc, ip)


@dsl_user_op
def reciprocal(x: Float32, *, loc=None, ip=None) -> Float32:
    """1/x within 1 ulp, inf for 0 (PTX ISA, rcp)."""
    return _unary("rcp.approx.ftz.f32 $0, $1;", x, loc, ip)


@dsl_user_op
def sqrt(x: Float32, *, loc=None, ip=None) -> Float32:
    """The square root of x with a relative error of 2^-23 (PTX ISA, sqrt.approx)."""
    return _unary("sqrt.approx.ftz.f32 $0, $1;", x, loc, ip)


def _unary(ptx: str, x: Float32, loc, ip) -> Float32:
    value = Float32(x).ir_value(loc=loc, ip=ip)
    found = llvm.inline_asm(T.f32(), [value], ptx, "=f,f", has_side_effects=False, loc=loc, ip=ip)
    return Float32(found)


@dsl_user_op
def fma(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """a * b + c, rounded once (PTX ISA, fma)."""
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)]
    ptx = "fma.rn.f32 $0, $1, $2, $3;"
    return Float32(
        llvm.inline_asm(T.f32(), values, ptx, "=f,f,f,f", has_side_effects=False, loc=loc, ip=ip)
    )


@dsl_user_op
def pinned_sum(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """a + b, computed where it is written.

    NOTE: LLVM sinks an addition to where its sum is next used, behind the next wgmma, too, which
    then finds the registers of an addend still in use: ptxas waits for each wgmma at once.
    """
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    return Float32(
        llvm.inline_asm(
            T.f32(), values, "add.f32 $0, $1, $2;", "=f,f,f", has_side_effects=True, loc=loc, ip=ip
        )
    )


@dsl_user_op
def largest_of(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """The maximum of three non-negative floats, compared as integers: one instruction on Hopper,
    whose float maximum takes two (PTX ISA, max)."""
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)]
    ptx = (
        "{ .reg .b32 a, b, c; mov.b32 a, $1; mov.b32 b, $2; mov.b32 c, $3;"
        " max.s32 a, a, b; max.s32 a, a, c; mov.b32 $0, a; }"
    )
    return Float32(
        llvm.inline_asm(T.f32(), values, ptx, "=f,f,f,f", has_side_effects=False, loc=loc, ip=ip)
    )


@dsl_user_op
def largest_negative_of(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """The maximum of three negative floats: the least of them as unsigned integers. Any
    non-negative one wins. One instruction on Hopper (PTX ISA, min)."""
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)]
    ptx = (
        "{ .reg .b32 a, b, c; mov.b32 a, $1; mov.b32 b, $2; mov.b32 c, $3;"
        " min.u32 a, a, b; min.u32 a, a, c; mov.b32 $0, a; }"
    )
    return Float32(
        llvm.inline_asm(T.f32(), values, ptx, "=f,f,f,f", has_side_effects=False, loc=loc, ip=ip)
    )


@dsl_user_op
def power_below(x: Float32, *, loc=None, ip=None) -> Float32:
    """The largest k with 2^k <= x, for a normal positive x; 128 for infinity (IEEE 754)."""
    value = Float32(x).ir_value(loc=loc, ip=ip)
    ptx = (
        "{ .reg .b32 a; mov.b32 a, $1; shr.u32 a, a, 23; sub.s32 a, a, 127; cvt.rn.f32.s32 $0, a; }"
    )
    return Float32(
        llvm.inline_asm(T.f32(), [value], ptx, "=f,f", has_side_effects=False, loc=loc, ip=ip)
    )


@dsl_user_op
def nearest_whole(x: Float32, *, loc=None, ip=None) -> Float32:
    """The integer nearest to x, for x between -2^22 and 2^22: by adding 1.5 * 2^23 and subtracting
    it again, which has a shorter latency than a conversion."""
    ptx = "add.rn.f32 $0, $1, 0f4B400000; add.rn.f32 $0, $0, 0fCB400000;"
    return _unary(ptx, x, loc, ip)


@dsl_user_op
def bf16_twice(x: Float32, *, loc=None, ip=None) -> Int32:
    """x, rounded to bf16, in both halves of a word (PTX ISA, cvt)."""
    value = Float32(x).ir_value(loc=loc, ip=ip)
    ptx = "cvt.rn.bf16x2.f32 $0, $1, $1;"
    return Int32(
        llvm.inline_asm(T.i32(), [value], ptx, "=r,f", has_side_effects=False, loc=loc, ip=ip)
    )


@dsl_user_op
def product_of_bf16(a: Int32, b: Int32, *, loc=None, ip=None) -> Int32:
    """The products of the bf16 numbers in two words (PTX ISA, half precision fma)."""
    values = [Int32(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    ptx = "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }"
    return Int32(
        llvm.inline_asm(T.i32(), values, ptx, "=r,r,r", has_side_effects=False, loc=loc, ip=ip)
    )


@dsl_user_op
def product_plus(
    a: Int32, b: Int32, c: Int32, is_fp16: bool = False, *, loc=None, ip=None
) -> Int32:
    """a * b + c of the two bf16, or fp16, numbers in each word (PTX ISA, half precision fma)."""
    values = [Int32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)]
    ptx = f"fma.rn.{'f16x2' if is_fp16 else 'bf16x2'} $0, $1, $2, $3;"
    return Int32(
        llvm.inline_asm(T.i32(), values, ptx, "=r,r,r,r", has_side_effects=False, loc=loc, ip=ip)
    )


@dsl_user_op
def largest_halves(a: Int32, b: Int32, *, loc=None, ip=None) -> Int32:
    """The larger of the low halves of two words, and of the high ones, as numbers of 16 bits
    without a sign; of bf16 or fp16 that have none, the larger numbers (PTX ISA: max.u16x2)."""
    values = [Int32(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    ptx = "max.u16x2 $0, $1, $2;"
    return Int32(
        llvm.inline_asm(T.i32(), values, ptx, "=r,r,r", has_side_effects=False, loc=loc, ip=ip)
    )


@dsl_user_op
def low_bits(count: Int32, *, loc=None, ip=None) -> Int32:
    """A word whose `count` lowest bits are 1; all bits from 32 on (PTX ISA: shl clamps)."""
    value = Int32(count).ir_value(loc=loc, ip=ip)
    ptx = "{ .reg .b32 ones; shl.b32 ones, -1, $1; not.b32 $0, ones; }"
    return Int32(
        llvm.inline_asm(T.i32(), [value], ptx, "=r,r", has_side_effects=False, loc=loc, ip=ip)
    )


@dsl_user_op
def pinned(word: Int32, *, loc=None, ip=None) -> Int32:
    """`word`, computed at this place: for instance before the wgmma.fence that follows, across
    which the compiler could otherwise move a conversion."""
    value = Int32(word).ir_value(loc=loc, ip=ip)
    ptx = "mov.b32 $0, $1;"
    return Int32(
        llvm.inline_asm(T.i32(), [value], ptx, "=r,r", has_side_effects=True, loc=loc, ip=ip)
    )


@dsl_user_op
def hidden_zero(*, loc=None, ip=None) -> Float32:
    """A 0 that the compiler cannot prove to be one, for clearing accumulators. With a constant it
    duplicates the code behind a loop, for a loop that never runs, and hoists the copy above the
    wait for its wgmmas."""
    ptx = "mov.b32 $0, 0;"
    return Float32(llvm.inline_asm(T.f32(), [], ptx, "=f", has_side_effects=True, loc=loc, ip=ip))


@dsl_user_op
def larger_pair(
    a: Int32, b: Int32, dtype: type[Float16] | type[BFloat16], *, loc=None, ip=None
) -> Int32:
    """The larger of the low halves of two words, and of the high ones; a number where only the
    other is NaN (PTX ISA, max)."""
    values = [Int32(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    ptx = f"max.{'bf16x2' if dtype is BFloat16 else 'f16x2'} $0, $1, $2;"
    return Int32(
        llvm.inline_asm(T.i32(), values, ptx, "=r,r,r", has_side_effects=False, loc=loc, ip=ip)
    )
