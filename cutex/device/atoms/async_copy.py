"""cp.async: a thread's copy from global to shared memory, past its registers (any arch from sm_80).

Copies belong to the group that the thread commits next (`cute.arch.cp_async_commit_group`), and are
there once `cute.arch.cp_async_wait_group` lets it go on; other threads see them after a barrier.
"""

from __future__ import annotations

from cutlass import Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def copy_async(
    to: cute.Pointer, source: cute.Pointer, size: int, read: Int32, *, loc=None, ip=None
) -> None:
    """Copy `size` bytes, 4, 8 or 16, of which only the first `read` come from memory and the rest
    are zeros (PTX ISA 9.7.9.25.3.1). Copies of 16 bytes leave out L1."""
    level = "cg" if size == 16 else "ca"
    ptx = f"cp.async.{level}.shared.global [$0], [$1], {size}, $2;"
    values = [
        to.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        source.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        Int32(read).ir_value(loc=loc, ip=ip),
    ]
    llvm.inline_asm(None, values, ptx, "r,l,r,~{memory}", has_side_effects=True, loc=loc, ip=ip)
