"""Combine for MLA: the merge of parts, of MLA's units and with its LSE."""

from __future__ import annotations

from typing import ClassVar

from cutlass import Float32, Int32, cute

from cutex.kernels.attention.decode.out import Combine, Out
from cutex.kernels.attention.decode.shared import Rows
from cutex.kernels.attention.decode.signature import KernelArgs, Sizes
from cutex.kernels.attention.mla.signature import blocks_of_rows


def rows_of(args: KernelArgs, sizes: Sizes, batch: Int32, owner: Int32, tile_m: int) -> Rows:
    """The rows of a unit."""
    m_blocks = blocks_of_rows(sizes, tile_m)
    head = owner // m_blocks
    seq_q = sizes.queries(args, batch)
    return Rows(batch, owner - head * m_blocks, head, seq_q, sizes.pack, tile_m)


class MlaOut(Out):
    """Where results are written; LSE of rows without keys is +inf, as FlashMLA's."""

    @cute.jit
    def store_lse(self, lse: Float32, rows: Rows, row: Int32) -> None:
        Out.store_lse(self, Float32.inf if lse == -Float32.inf else lse, rows, row)


class MlaCombine(Combine):
    out: ClassVar[type[Out]] = MlaOut

    def rows(self, args: KernelArgs, sizes: Sizes, unit: Int32) -> Rows:
        batch = unit // sizes.heads
        return rows_of(args, sizes, batch, unit - batch * sizes.heads, self.config.tile_m)
