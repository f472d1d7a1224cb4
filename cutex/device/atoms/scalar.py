"""Scalar instructions that the compiler may move: exponentials and logarithms of base 2, tanh.

NOTE: cute.arch.exp2 is marked as having side effects, which pins it where it was written; an online
softmax lives from its exponentials being scheduled among everything else.
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


@dsl_user_op
def exp2_fma(x: Float32, *, loc=None, ip=None) -> Float32:
    """2^x on FMA units, with a relative error of 7.5e-5, for x below 128; 0 below -126.

    x is split by Cody and Waite into an integer, which adding 1.5 * 2^23 rounds to and leaves in
    the low bits, and f in [-1/2, 1/2], whose power is a cubic of least relative error; the integer
    is added to its exponent.
    """
    ptx = """{
        .reg .f32 t, n, f, p; .reg .b32 e;
        max.ftz.f32 t, $1, 0fC2FC0000;
        add.rn.ftz.f32 n, t, 0f4B400000;
        mov.b32 e, n;
        sub.rn.ftz.f32 n, n, 0f4B400000;
        sub.rn.ftz.f32 f, t, n;
        fma.rn.ftz.f32 p, f, 0f3D61FBB0, 0f3E786F0E;
        fma.rn.ftz.f32 p, p, f, 0f3F31798D;
        fma.rn.ftz.f32 p, p, f, 0f3F7FFB49;
        shl.b32 e, e, 23;
        { .reg .b32 q; mov.b32 q, p; add.s32 q, q, e; mov.b32 $0, q; }
    }"""
    return _unary(ptx, x, loc, ip)


def _unary(ptx: str, x: Float32, loc, ip) -> Float32:
    value = Float32(x).ir_value(loc=loc, ip=ip)
    found = llvm.inline_asm(T.f32(), [value], ptx, "=f,f", has_side_effects=False, loc=loc, ip=ip)
    return Float32(found)


@dsl_user_op
def low_bits(count: Int32, *, loc=None, ip=None) -> Int32:
    """A word whose `count` lowest bits are 1, from 32 on all (PTX ISA: shl clamps)."""
    value = Int32(count).ir_value(loc=loc, ip=ip)
    ptx = "{ .reg .b32 ones; shl.b32 ones, -1, $1; not.b32 $0, ones; }"
    return Int32(
        llvm.inline_asm(T.i32(), [value], ptx, "=r,r", has_side_effects=False, loc=loc, ip=ip)
    )
