"""Loads from global memory that may be outside a matrix, predicated instead of branched around, so
that many can be in flight at once (PTX ISA, ld, predicated execution)."""

from __future__ import annotations

from cutlass import Boolean, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

KINDS = {1: "b32", 2: "v2.b32", 4: "v4.b32"}


@dsl_user_op
def load_words(
    at: Int64, count: int, valid: Boolean | None = None, *, loc=None, ip=None
) -> tuple[Int32, ...]:
    """`count` words, 1, 2 or 4, at an address that is a multiple of their bytes; 0 unless `valid`,
    where that is given."""
    out = ", ".join(f"${i}" for i in range(count))
    load = f"ld.global.{KINDS[count]} {out if count == 1 else f'{{{out}}}'}, [${count}];"
    zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(count))
    return _run(load, zeros, count, at, valid, loc, ip)


@dsl_user_op
def load_half(at: Int64, valid: Boolean | None = None, *, loc=None, ip=None) -> Int32:
    """The 16 bits at an address, in a word's low half; 0 unless `valid`, where that is given."""
    load = "ld.global.u16 $0, [$1];"
    return _run(load, "mov.b32 $0, 0;", 1, at, valid, loc, ip)[0]


def _run(
    load: str, zeros: str, count: int, at: Int64, valid: Boolean | None, loc: object, ip: object
) -> tuple[Int32, ...]:
    """Run `load`, whose results are $0 and on, before the address; after `zeros` if guarded."""
    values = [Int64(at).ir_value(loc=loc, ip=ip)]
    ptx = load
    if valid is not None:
        values.append(Int32(valid).ir_value(loc=loc, ip=ip))
        guard = f".reg .pred valid; setp.ne.s32 valid, ${count + 1}, 0;"
        ptx = f"{{ {guard} {zeros} @valid {load} }}"
    constraints = ",".join(["=&r"] * count + ["l", "r"][: len(values)])
    kind = T.i32()
    if count > 1:
        kind = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>")
    # NOTE: what orders kernels, griddepcontrol.wait, has side effects, too: loads stay after it
    found = llvm.inline_asm(kind, values, ptx, constraints, has_side_effects=True, loc=loc, ip=ip)
    if count == 1:
        return (Int32(found),)
    each = (ir.DenseI64ArrayAttr.get([i]) for i in range(count))
    return tuple(Int32(llvm.extractvalue(T.i32(), found, i, loc=loc, ip=ip)) for i in each)
