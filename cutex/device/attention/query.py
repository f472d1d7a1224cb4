"""Q as operand A of S = Q K^T: the first columns of a tile in registers, the others in smem.

A wgmma with A in registers reads half as much smem where S has 64 columns, but the registers must
be loaded before a tile's first wgmma.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp

from cutex.device.atoms.scalar import pinned
from cutex.device.atoms.wgmma import ROWS, WARPGROUP, OperandA, Wgmma, WgmmaProduct


@dataclass(frozen=True)
class Query:
    """The Q tiles of a warpgroup, 64 rows in each slot."""

    sQ: cute.Tensor  # (64, D, WG * SLOT)
    qk: WgmmaProduct  # of the Q that `of_slot` returns
    registers: cute.Tensor | None  # ((2, 2, 2), 1, MMA_K), for the columns that are kept there
    smem: cute.Tensor | None  # (MMA, MMA_M, MMA_K, WG * SLOT) descriptors; None: all in registers

    @staticmethod
    def of(sQ: cute.Tensor, sK: cute.Tensor, in_registers: int) -> Query:
        """The Query for K in sK (bN, D, SLOT), with `in_registers` columns of Q kept in
        registers."""
        dtype, keys, columns = sQ.element_type, cute.size(sK, mode=[0]), cute.size(sQ, mode=[1])
        mma = Wgmma(keys, dtype)
        qk = WgmmaProduct(mma, None, mma.b_slots(sK), None)
        registers = mma.a_registers(in_registers) if in_registers else None
        return Query(sQ, qk, registers, None if in_registers == columns else mma.a_slots(sQ))

    def of_slot(self, slot: Int32) -> OperandA:
        """Operand A for the tile in `slot`; its registers are loaded when this returns."""
        smem = None if self.smem is None else self.smem[None, None, None, slot]
        if self.registers is None:
            return smem
        self.load(self.registers, self.sQ[None, None, slot])
        return self.registers if smem is None else (self.registers, smem)

    def load(self, registers: cute.Tensor, sQ: cute.Tensor) -> None:
        """Load the first columns of sQ (64, D) into `registers`, as many as they hold."""
        tiled_mma = self.qk.mma.tiled(warpgroup.OperandSource.RMEM)
        columns = cute.size(registers) * WARPGROUP // ROWS
        # (64, columns)
        kept = sQ if self.smem is None else cute.local_tile(sQ, (ROWS, columns), (0, 0))
        # NOTE: addresses that no tile changes would be kept, where no registers are left for them
        thread = pinned(cute.arch.thread_idx()[0])
        load = cute.make_copy_atom(LdMatrix8x8x16bOp(False, 4), sQ.element_type)
        s2r = cute.make_tiled_copy_A(load, tiled_mma).get_slice(thread % WARPGROUP)
        cute.copy(s2r, s2r.partition_S(kept), s2r.retile(registers))
