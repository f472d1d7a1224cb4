"""Convert: dQ in 16 bits from its fp32 sums, times the scale.

A tile of the sums is stored as the accumulators of the warpgroup that added them lie in its
registers: 16 rows of a warp after the other, of which each unit of 8 columns has 4 numbers of each
of 32 threads. A thread here reads the same; of every four units the four threads of a row exchange
their columns, so that each has 8 of one unit to write.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from cutex.device.atoms.quad import transpose_in_quad
from cutex.device.attention.seqlen_info import SeqlenInfo
from cutex.kernels.attention.backward.preprocess import row_block, row_sizes, rows_of
from cutex.kernels.attention.backward.signature import KernelArgs, RowTiles, Tensors, queries
from cutex.kernels.attention.backward.spec import BackwardSpec

THREADS = 128
WIDE = 8  # columns of a unit
MOST = 16  # units that a thread has in registers at one time


class Convert:
    """The kernel: a CTA for each tile of a head's queries."""

    def __init__(self, config: BackwardSpec) -> None:
        self.config = config

    @cute.jit
    def launch(self, tensors: Tensors, args: KernelArgs, stream) -> None:
        batch, longest, tiles = row_sizes(self.config, tensors.dq, args)
        num_m_blocks = cute.ceil_div(longest, self.config.tile_m)
        self.kernel(tensors.dq_sums, tensors.dq, args, tiles, Int32(num_m_blocks)).launch(
            grid=(num_m_blocks * tiles.heads * batch, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mSums, mdQ, args: KernelArgs, tiles: RowTiles, num_m_blocks: Int32) -> None:
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        m_block, head, batch = row_block(num_m_blocks, tiles.heads)
        seqlen = queries(args, cute.size(mdQ, mode=[0 if c.varlen_q else 1])).of(batch)
        if m_block * c.tile_m < seqlen.length:
            sums = mSums[tiles.tile(c, head, batch, seqlen) + m_block, None]  # (bM * D)
            gdQ = rows_of(mdQ, c.varlen_q, head, batch)  # (seqlen, D)
            self.tile(thread, sums, gdQ, seqlen, m_block, args.scale)

    @cute.jit
    def tile(
        self,
        thread: Int32,
        sums: cute.Tensor,
        gdQ: cute.Tensor,
        seqlen: SeqlenInfo,
        m_block: Int32,
        scale: Float32,
    ) -> None:
        """Convert a tile of the sums: a warp the 16 rows of one that added them. All of them, or
        half, are on their way at one time."""
        c = self.config
        warp, lane = thread // 32, thread % 32
        units = c.head_dim // WIDE
        at_once = units if units <= MOST else units // 2
        vectors = cute.logical_divide(sums, cute.make_layout(4))  # (4, NumV)
        row = m_block * c.tile_m + warp * 16 + lane // 4
        for part in cutlass.range_constexpr(units // at_once):
            numbers = cute.make_rmem_tensor(cute.make_layout((4, at_once)), Float32)
            for j in cutlass.range_constexpr(at_once):
                at = (warp * units + part * at_once + j) * 32 + lane
                cute.autovec_copy(vectors[None, at], numbers[None, j])
            for four in cutlass.range_constexpr(at_once // 4):
                unit = part * at_once + 4 * four + lane % 4
                for r in cutlass.range_constexpr(2):
                    rounded = cute.make_rmem_tensor(WIDE, gdQ.element_type)
                    for i in cutlass.range_constexpr(WIDE):
                        number = numbers[2 * r + i % 2, 4 * four + i // 2]
                        rounded[i] = (number * scale).to(gdQ.element_type)
                    transpose_in_quad(cute.recast_tensor(rounded, Int32))
                    self.store(rounded, gdQ, seqlen, row + 8 * r, unit)

    @cute.jit
    def write(
        self,
        numbers: cute.Tensor,
        r: cutlass.Constexpr[int],
        gdQ: cute.Tensor,
        seqlen: SeqlenInfo,
        row: Int32,
        unit: Int32,
        scale: Float32,
    ) -> None:
        """Round and write 8 columns of a row."""
        rounded = cute.make_rmem_tensor(WIDE, gdQ.element_type)
        for c in cutlass.range_constexpr(WIDE):
            rounded[c] = (numbers[c % 2, r, c // 2] * scale).to(gdQ.element_type)
        self.store(rounded, gdQ, seqlen, row, unit)

    @cute.jit
    def store(
        self, rounded: cute.Tensor, gdQ: cute.Tensor, seqlen: SeqlenInfo, row: Int32, unit: Int32
    ) -> None:
        """Write 8 columns of a row, if the sequence has it, and dQ has them."""
        at = seqlen.offset + row if self.config.varlen_q else row
        if (row < seqlen.length) & (unit * WIDE < cute.size(gdQ, mode=[1])):
            to = cute.logical_divide(gdQ[at, None], cute.make_layout(WIDE))
            cute.autovec_copy(rounded, to[None, unit])
