"""Reductions in global memory without a result (PTX ISA, red and cp.reduce.async.bulk)."""

from __future__ import annotations

from cutlass import BFloat16, Float16, Float32, Int16, Int32, Numeric, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

Vector = tuple[Float32, Float32, Float32, Float32]
PACKED = {BFloat16: "bf16", Float16: "f16"}  # what 32-bit words hold two of


@dsl_user_op
def add_vector(to: cute.Pointer, x: Vector, *, loc=None, ip=None) -> None:
    """Add four numbers to the four at `to`, a multiple of 16 bytes, each atomically; other CTAs may
    add to the same."""
    values = [to.toint().ir_value(loc=loc, ip=ip)]
    values += [Float32(v).ir_value(loc=loc, ip=ip) for v in x]
    ptx = "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};"
    llvm.inline_asm(None, values, ptx, "l,f,f,f,f,~{memory}", has_side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def add_words(
    to: cute.Pointer, x: tuple[Int32, ...], kind: type[Numeric], *, loc=None, ip=None
) -> None:
    """Add eight numbers of 16 bits, two in each of four words, to those at `to`, a multiple of 16
    bytes, each atomically and rounded."""
    values = [to.toint().ir_value(loc=loc, ip=ip)]
    values += [Int32(v).ir_value(loc=loc, ip=ip) for v in x]
    ptx = f"red.relaxed.gpu.global.add.noftz.v4.{PACKED[kind]}x2 [$0], {{$1, $2, $3, $4}};"
    llvm.inline_asm(None, values, ptx, "l,r,r,r,r,~{memory}", has_side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def add_one(to: cute.Pointer, x: Numeric, *, loc=None, ip=None) -> None:
    """Add a number of fp32 or of 16 bits to the one at `to`, atomically."""
    kind = type(x)
    bits, constraint, of = (x, "f", "f32")
    if kind in PACKED:
        bits, constraint, of = x.bitcast(Int16), "h", f"noftz.{PACKED[kind]}"
    values = [to.toint().ir_value(loc=loc, ip=ip), bits.ir_value(loc=loc, ip=ip)]
    ptx = f"red.relaxed.gpu.global.add.{of} [$0], $1;"
    how = f"l,{constraint},~{{memory}}"
    llvm.inline_asm(None, values, ptx, how, has_side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def add_bulk(to: cute.Pointer, smem: cute.Pointer, num_bytes: int, *, loc=None, ip=None) -> None:
    """Start adding fp32 numbers in smem to those at `to`, each atomically: `num_bytes`, a multiple
    of 16, as are both addresses. One thread calls it, and commits it to a bulk group."""
    values = [to.toint().ir_value(loc=loc, ip=ip), smem.toint().ir_value(loc=loc, ip=ip)]
    values.append(Int32(num_bytes).ir_value(loc=loc, ip=ip))
    ptx = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;"
    llvm.inline_asm(None, values, ptx, "l,r,r,~{memory}", has_side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def store_bulk(to: cute.Pointer, smem: cute.Pointer, num_bytes: int, *, loc=None, ip=None) -> None:
    """Start copying `num_bytes` of smem to `to`, in the place of what is there; as `add_bulk`."""
    values = [to.toint().ir_value(loc=loc, ip=ip), smem.toint().ir_value(loc=loc, ip=ip)]
    values.append(Int32(num_bytes).ir_value(loc=loc, ip=ip))
    ptx = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;"
    llvm.inline_asm(None, values, ptx, "l,r,r,~{memory}", has_side_effects=True, loc=loc, ip=ip)
