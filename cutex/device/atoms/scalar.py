"""Scalar instructions that the compiler may move: exponentials and logarithms of base 2, tanh.

NOTE: cute.arch.exp2 is marked as having side effects, which pins it where it was written; an online
softmax is fast only if its exponentials can be scheduled between other instructions.
"""

from __future__ import annotations

from cutlass import Float32, Int32
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


def _unary(ptx: str, x: Float32, loc, ip) -> Float32:
    value = Float32(x).ir_value(loc=loc, ip=ip)
    found = llvm.inline_asm(T.f32(), [value], ptx, "=f,f", has_side_effects=False, loc=loc, ip=ip)
    return Float32(found)


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
    """`word`, computed where this is written: before the wgmma.fence that follows, say, which the
    compiler would else move a conversion across."""
    value = Int32(word).ir_value(loc=loc, ip=ip)
    ptx = "mov.b32 $0, $1;"
    return Int32(
        llvm.inline_asm(T.i32(), [value], ptx, "=r,r", has_side_effects=True, loc=loc, ip=ip)
    )
