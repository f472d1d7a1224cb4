"""Packed fp32 instructions of sm_100a, two values each (half the issue slots of scalar ones), and
2^x built from them.

NOTE: inline PTX without side effects, so that the compiler may schedule it freely.
"""

from __future__ import annotations

from cutlass import Float32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

Pair = tuple[Float32, Float32]

ROUND = 1.5 * 2.0**23  # added to a number, it leaves the whole part in the lowest bits
# 2^f = 1 + f (C[0] + f (C[1] + ...)), within 2.9e-6 of it for 0 <= f <= 1
COEFFICIENTS = (0.69304515, 0.24127856, 0.05224537, 0.01342515)


@dsl_user_op
def fma2(a: Pair, b: Pair, c: Pair, *, loc=None, ip=None) -> Pair:
    """a * b + c, rounded once (PTX ISA, fma.f32x2)."""
    return _packed("fma.rn.f32x2", (a, b, c), loc, ip)


@dsl_user_op
def add2(a: Pair, b: Pair, *, loc=None, ip=None) -> Pair:
    """a + b (PTX ISA, add.f32x2)."""
    return _packed("add.rn.f32x2", (a, b), loc, ip)


@dsl_user_op
def mul2(a: Pair, b: Pair, *, loc=None, ip=None) -> Pair:
    """a * b (PTX ISA, mul.f32x2)."""
    return _packed("mul.rn.f32x2", (a, b), loc, ip)


@dsl_user_op
def sub2(a: Pair, b: Pair, *, loc=None, ip=None) -> Pair:
    """a - b, as a multiply-add: there is no packed subtraction."""
    return _packed("fma.rn.f32x2", (b, (-1.0, -1.0), a), loc, ip)


@dsl_user_op
def add2_down(a: Pair, b: Pair, *, loc=None, ip=None) -> Pair:
    """a + b, rounded towards minus infinity."""
    return _packed("add.rm.f32x2", (a, b), loc, ip)


def _packed(instruction: str, operands: tuple[Pair, ...], loc, ip) -> Pair:
    values = [Float32(x).ir_value(loc=loc, ip=ip) for pair in operands for x in pair]
    names = [f"x{i}" for i in range(len(operands))]
    moves = "".join(
        f"mov.b64 {name}, {{${2 * i + 2}, ${2 * i + 3}}}; " for i, name in enumerate(names)
    )
    ptx = (
        f"{{ .reg .b64 d, {', '.join(names)}; {moves}"
        f"{instruction} d, {', '.join(names)}; mov.b64 {{$0, $1}}, d; }}"
    )
    both = ir.Type.parse("!llvm.struct<(f32, f32)>")
    constraints = ",".join(["=f", "=f"] + ["f"] * len(values))
    found = llvm.inline_asm(both, values, ptx, constraints, has_side_effects=False, loc=loc, ip=ip)
    first, second = (
        llvm.extractvalue(T.f32(), found, ir.DenseI64ArrayAttr.get([i]), loc=loc, ip=ip)
        for i in range(2)
    )
    return Float32(first), Float32(second)


def exp2_by_fma(x: Pair) -> Pair:
    """Return 2^x of both values, computed without MUFU.

    2^x = 2^whole * 2^fraction (Cody and Waite): the first factor is an addition to the exponent,
    the second a polynomial; the relative error is below 3e-6. For x <= -127 the result is 0; for x
    >= 128 or NaN it is undefined.
    """
    x = at_least(x[0], -127.0), at_least(x[1], -127.0)
    shifted = add2_down(x, (ROUND, ROUND))
    fraction = sub2(x, add2(shifted, (-ROUND, -ROUND)))
    value = (COEFFICIENTS[-1],) * 2
    for c in (*reversed(COEFFICIENTS[:-1]), 1.0):
        value = fma2(value, fraction, (c, c))
    return _scale(value[0], shifted[0]), _scale(value[1], shifted[1])


@dsl_user_op
def at_least(x: Float32, y: Float32 | float, *, loc=None, ip=None) -> Float32:
    """The larger of x and y; NaN if one is (PTX ISA, max.NaN)."""
    values = [Float32(v).ir_value(loc=loc, ip=ip) for v in (x, y)]
    ptx = "max.NaN.f32 $0, $1, $2;"
    return Float32(
        llvm.inline_asm(T.f32(), values, ptx, "=f,f,f", has_side_effects=False, loc=loc, ip=ip)
    )


@dsl_user_op
def largest(x: Float32, y: Float32, z: Float32, *, loc=None, ip=None) -> Float32:
    """The largest of three, by one instruction; NaN if one of them is."""
    values = [Float32(v).ir_value(loc=loc, ip=ip) for v in (x, y, z)]
    ptx = "max.NaN.f32 $0, $1, $2, $3;"
    return Float32(
        llvm.inline_asm(T.f32(), values, ptx, "=f,f,f,f", has_side_effects=False, loc=loc, ip=ip)
    )


@dsl_user_op
def _scale(x: Float32, shifted: Float32, *, loc=None, ip=None) -> Float32:
    """x times 2^n, where n is the integer in the low bits of `shifted`."""
    ptx = (
        "{ .reg .b32 e, m; mov.b32 e, $2; mov.b32 m, $1; "
        "shl.b32 e, e, 23; add.s32 m, m, e; mov.b32 $0, m; }"
    )
    values = [Float32(v).ir_value(loc=loc, ip=ip) for v in (x, shifted)]
    return Float32(
        llvm.inline_asm(T.f32(), values, ptx, "=f,f,f", has_side_effects=False, loc=loc, ip=ip)
    )
