"""Bulk copies of memory between gmem and smem, as long as a kernel finds them to be."""

from __future__ import annotations

from cutlass import Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def load_bulk(
    smem: cute.Pointer, gmem: cute.Pointer, num_bytes: Int32, barrier: cute.Pointer,
    *, loc=None, ip=None,
) -> None:  # fmt: skip
    """Start a copy of `num_bytes`, a multiple of 16, as are both addresses; the bytes arrive on
    `barrier`. One thread calls it."""
    values = [x.toint().ir_value(loc=loc, ip=ip) for x in (smem, gmem, barrier)]
    values.append(Int32(num_bytes).ir_value(loc=loc, ip=ip))
    ptx = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $3, [$2];"
    llvm.inline_asm(None, values, ptx, "r,l,r,r,~{memory}", has_side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def store_bulk(
    gmem: cute.Pointer, smem: cute.Pointer, num_bytes: Int32, *, loc=None, ip=None
) -> None:
    """Start a copy of `num_bytes`, a multiple of 16, as are both addresses. One thread calls it,
    and commits it to a bulk group."""
    values = [x.toint().ir_value(loc=loc, ip=ip) for x in (gmem, smem)]
    values.append(Int32(num_bytes).ir_value(loc=loc, ip=ip))
    ptx = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;"
    llvm.inline_asm(None, values, ptx, "l,r,r,~{memory}", has_side_effects=True, loc=loc, ip=ip)
