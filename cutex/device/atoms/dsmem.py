"""Copies from this CTA's smem to another's of its cluster (PTX ISA, cp.async.bulk)."""

from __future__ import annotations

from cutlass import Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def copy_to_cta(
    to: cute.Pointer,
    smem: cute.Pointer,
    num_bytes: int,
    barrier: cute.Pointer,
    rank: Int32,
    *,
    loc=None,
    ip=None,
) -> None:
    """Start a copy of `num_bytes`, a multiple of 16, to where CTA `rank` has `to`; the bytes arrive
    on its `barrier`. One thread calls it."""
    values = [x.toint().ir_value(loc=loc, ip=ip) for x in (to, smem, barrier)]
    values += [Int32(x).ir_value(loc=loc, ip=ip) for x in (num_bytes, rank)]
    ptx = (
        "{ .reg .b32 to, barrier; mapa.shared::cluster.u32 to, $0, $4; "
        "mapa.shared::cluster.u32 barrier, $2, $4; "
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        "[to], [$1], $3, [barrier]; }"
    )
    llvm.inline_asm(None, values, ptx, "r,r,r,r,r,~{memory}", has_side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def load_from_cta(smem: cute.Pointer, rank: Int32, *, loc=None, ip=None) -> Int32:
    """The word that CTA `rank` of the cluster has at `smem`."""
    values = [smem.toint().ir_value(loc=loc, ip=ip), Int32(rank).ir_value(loc=loc, ip=ip)]
    ptx = "{ .reg .b32 at; mapa.shared::cluster.u32 at, $1, $2; ld.shared::cluster.b32 $0, [at]; }"
    found = llvm.inline_asm(
        T.i32(), values, ptx, "=r,r,r,~{memory}", has_side_effects=True, loc=loc, ip=ip
    )
    return Int32(found)
