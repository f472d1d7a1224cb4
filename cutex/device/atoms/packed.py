"""Instructions on two fp32 at a time (sm_100a): half the issue slots of single ones, and 2^x by
them.

NOTE: PTX of our own, without side effects, which the compiler may schedule among everything else.
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
    """2^x of both without MUFU, within 3e-6 of it: 2^whole * 2^fraction, the first by adding to the
    exponent, the second by a polynomial (Cody and Waite).

    For x < -127 it is 2^-127, for x > 127 2^127; of NaN, anything.
    """
    low = tuple(_clamp(v) for v in x)
    both = (ROUND, ROUND)
    shifted = add2_down(low, both)
    fraction = add2(low, mul2(add2(shifted, (-ROUND, -ROUND)), (-1.0, -1.0)))
    value = (COEFFICIENTS[-1],) * 2
    for c in (*reversed(COEFFICIENTS[:-1]), 1.0):
        value = fma2(value, fraction, (c, c))
    return _scale(value[0], shifted[0]), _scale(value[1], shifted[1])


@dsl_user_op
def _clamp(x: Float32, *, loc=None, ip=None) -> Float32:
    ptx = "{ .reg .f32 c; max.f32 c, $1, 0fC2FE0000; min.f32 $0, c, 0f42FE0000; }"  # -127, 127
    value = Float32(x).ir_value(loc=loc, ip=ip)
    return Float32(
        llvm.inline_asm(T.f32(), [value], ptx, "=f,f", has_side_effects=False, loc=loc, ip=ip)
    )


@dsl_user_op
def _scale(x: Float32, shifted: Float32, *, loc=None, ip=None) -> Float32:
    """x times two to the whole number in the low bits of `shifted`."""
    ptx = (
        "{ .reg .b32 e, m; mov.b32 e, $2; mov.b32 m, $1; "
        "shl.b32 e, e, 23; add.s32 m, m, e; mov.b32 $0, m; }"
    )
    values = [Float32(v).ir_value(loc=loc, ip=ip) for v in (x, shifted)]
    return Float32(
        llvm.inline_asm(T.f32(), values, ptx, "=f,f,f", has_side_effects=False, loc=loc, ip=ip)
    )
