"""Reductions in global memory without a result (PTX ISA, red and cp.reduce.async.bulk)."""

from __future__ import annotations

from cutlass import Float32, Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

Vector = tuple[Float32, Float32, Float32, Float32]


@dsl_user_op
def add_vector(to: cute.Pointer, x: Vector, *, loc=None, ip=None) -> None:
    """Add four numbers to the four at `to`, a multiple of 16 bytes, each atomically; other CTAs may
    add to the same."""
    values = [to.toint().ir_value(loc=loc, ip=ip)]
    values += [Float32(v).ir_value(loc=loc, ip=ip) for v in x]
    ptx = "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};"
    llvm.inline_asm(None, values, ptx, "l,f,f,f,f,~{memory}", has_side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def add_bulk(to: cute.Pointer, smem: cute.Pointer, num_bytes: int, *, loc=None, ip=None) -> None:
    """Start adding fp32 numbers in smem to those at `to`, each atomically: `num_bytes`, a multiple
    of 16, as are both addresses. One thread calls it, and commits it to a bulk group."""
    values = [to.toint().ir_value(loc=loc, ip=ip), smem.toint().ir_value(loc=loc, ip=ip)]
    values.append(Int32(num_bytes).ir_value(loc=loc, ip=ip))
    ptx = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;"
    llvm.inline_asm(None, values, ptx, "l,r,r,~{memory}", has_side_effects=True, loc=loc, ip=ip)
