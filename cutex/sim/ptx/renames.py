"""Accumulators of wgmma under other names.

Compilers know nothing of the time at which a wgmma has written its registers: where paths meet, a
``mov`` that renames an accumulator may stand before the ``wgmma.wait_group``. ptxas gives both
names one register, or waits; so the copy holds the result as soon as the accumulator does, and is
in flight until then.
"""

from __future__ import annotations

from cutex.sim.ptx.once import once
from cutex.sim.ptx.operands import Reg, Vector
from cutex.sim.ptx.program import Instruction, Program


def rename(ins: Instruction) -> tuple[int, int] | None:
    """The 32-bit registers (to, from) of a ``mov`` between two; None for another instruction."""
    if ins.name != "mov" or len(ins.operands) != 2:
        return None
    to, of = ins.operands
    if isinstance(to, Reg) and isinstance(of, Reg) and to.bank == of.bank == 32:
        return to.index, of.index
    return None


@once
def accumulators(program: Program) -> frozenset[int]:
    """The registers in which wgmmas add up, and those that copy them by ``mov``."""
    found: set[int] = set()
    for ins in program.code:
        if ins.op.startswith("wgmma.mma_async") and isinstance(ins.operands[0], Vector):
            found |= {r.index for r in ins.operands[0].items if isinstance(r, Reg)}
    pairs = [pair for pair in map(rename, program.code) if pair is not None] if found else []
    before = -1
    while before < len(found):
        before = len(found)
        found |= {to for to, of in pairs if of in found}
    return frozenset(found)
