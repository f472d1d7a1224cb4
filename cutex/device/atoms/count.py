"""A count in gmem that threads draw numbers from."""

from __future__ import annotations

from cutlass import Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def next_number(count: cute.Pointer, *, loc=None, ip=None) -> Int32:
    """The count before this call, which adds 1 to it. Lane 0 of a warp alone calls it.

    NOTE: of lanes that add what is the same for all, ptxas makes one addition, and has them wait
    for its result at once. It does not know that the lane is 0.
    """
    values = [count.toint().ir_value(loc=loc, ip=ip)]
    ptx = (
        "{ .reg .b32 one; mov.u32 one, %laneid; add.u32 one, one, 1; "
        "atom.relaxed.gpu.global.add.u32 $0, [$1], one; }"
    )
    found = llvm.inline_asm(
        T.i32(), values, ptx, "=r,l,~{memory}", has_side_effects=True, loc=loc, ip=ip
    )
    return Int32(found)
