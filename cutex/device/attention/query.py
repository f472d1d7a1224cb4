"""Q as operand A of S = Q K^T: the first columns of a tile in registers, the others in smem.

A wgmma whose A lies in registers reads half as much smem where S has 64 columns, but the registers
are loaded before a tile's first one.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32, cute
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp

from cutex.device.atoms.mma import WARPGROUP
from cutex.device.attention.products import (
    ROWS,
    MixedProduct,
    Operand,
    Product,
    a_from_smem,
    a_registers,
    make_mma,
    product,
)


@dataclass(frozen=True)
class Query:
    """The Q of a warpgroup's tiles, 64 rows in each slot."""

    sQ: cute.Tensor  # (64, D, WG * SLOT)
    qk: Product | MixedProduct
    registers: cute.Tensor | None  # ((2, 2, 2), 1, MMA_K), of the columns that are kept there
    smem: cute.Tensor | None  # (MMA, MMA_M, MMA_K, WG * SLOT) descriptors, unless all are

    @staticmethod
    def of(sQ: cute.Tensor, sK: cute.Tensor, in_registers: int) -> Query:
        """With K in sK (bN, D, SLOT), and `in_registers` columns of Q kept there."""
        dtype, keys, columns = sQ.element_type, cute.size(sK, mode=[0]), cute.size(sQ, mode=[1])
        rs, ss = (product(make_mma(1, keys, dtype, kept, False), sK) for kept in (True, False))
        registers = a_registers(in_registers, dtype) if in_registers else None
        if in_registers == columns:
            return Query(sQ, rs, registers, None)
        qk = MixedProduct(rs, ss) if in_registers else ss
        return Query(sQ, qk, registers, a_from_smem(ss.tiled_mma, sQ))

    def of_slot(self, slot: Int32) -> Operand:
        """Operand A for the tile in `slot`, whose registers are loaded when this returns."""
        smem = None if self.smem is None else self.smem[None, None, None, slot]
        if self.registers is None:
            return smem
        self.load(self.registers, self.sQ[None, None, slot])
        return self.registers if smem is None else (self.registers, smem)

    def load(self, registers: cute.Tensor, sQ: cute.Tensor) -> None:
        """The first columns of sQ (64, D), as many as there are `registers` for, into these."""
        tiled_mma = (self.qk.rs if isinstance(self.qk, MixedProduct) else self.qk).tiled_mma
        columns = cute.size(registers) * WARPGROUP // ROWS
        kept = sQ if self.smem is None else cute.local_tile(sQ, (ROWS, columns), (0, 0))
        thread, _, _ = cute.arch.thread_idx()
        load = cute.make_copy_atom(LdMatrix8x8x16bOp(False, 4), sQ.element_type)
        s2r = cute.make_tiled_copy_A(load, tiled_mma).get_slice(thread % WARPGROUP)
        cute.copy(s2r, s2r.partition_S(kept), s2r.retile(registers))
