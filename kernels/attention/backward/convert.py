"""Convert: dQ in 16 bits from its fp32 sums, times the scale.

A tile of the sums is stored as the accumulators of the warpgroup that added them lie in its
registers: 16 rows of a warp after the other, of which each unit of 8 columns has 4 numbers of each
of 32 threads. A thread here reads the 64 bytes of four neighbouring threads, which are 8 columns of
two rows.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from cutex.device.attention.seqlen_info import SeqlenInfo
from cutex.kernels.attention.backward.preprocess import row_block, row_sizes, rows_of
from cutex.kernels.attention.backward.signature import Passed, RowTiles, Tensors, queries
from cutex.kernels.attention.backward.spec import BackwardSpec

THREADS = 128
WIDE = 8  # columns of a unit


class Convert:
    """The kernel: a CTA for each tile of a head's queries."""

    def __init__(self, config: BackwardSpec) -> None:
        self.config = config

    @cute.jit
    def launch(self, tensors: Tensors, passed: Passed, stream) -> None:
        batch, longest, tiles = row_sizes(self.config, tensors.dq, passed)
        num_m_blocks = cute.ceil_div(longest, self.config.tile_m)
        self.kernel(tensors.dq_sums, tensors.dq, passed, tiles, Int32(num_m_blocks)).launch(
            grid=(num_m_blocks * tiles.heads * batch, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mSums, mdQ, passed: Passed, tiles: RowTiles, num_m_blocks: Int32) -> None:
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        m_block, head, batch = row_block(num_m_blocks, tiles.heads)
        seqlen = queries(passed, cute.size(mdQ, mode=[0 if c.varlen_q else 1])).of(batch)
        if m_block * c.tile_m < seqlen.length:
            sums = mSums[tiles.tile(c, head, batch, seqlen) + m_block, None]  # (bM * D)
            gdQ = rows_of(mdQ, c.varlen_q, head, batch)  # (seqlen, D)
            self.tile(thread, sums, gdQ, seqlen, m_block, passed.scale)

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
        """Convert a tile of the sums."""
        c = self.config
        units = c.head_dim // WIDE
        for i in cutlass.range_constexpr(c.tile_m * c.head_dim // (4 * 4 * THREADS)):
            item = i * THREADS + thread
            unit, four = item % units, item // units  # 8 columns; four threads, of two rows
            numbers = self.read(sums, unit, four)
            row = m_block * c.tile_m + four // 8 * 16 + four % 8
            self.write(numbers, 0, gdQ, seqlen, row, unit, scale)
            self.write(numbers, 1, gdQ, seqlen, row + 8, unit, scale)

    @cute.jit
    def read(self, sums: cute.Tensor, unit: Int32, four: Int32) -> cute.Tensor:
        """Two rows (column, row, thread) of 8 columns, of unit `unit` of a tile: what the threads 4
        * `four` and the three after it added."""
        numbers = cute.make_rmem_tensor(cute.make_layout((2, 2, 4)), Float32)
        vectors = cute.logical_divide(sums, cute.make_layout(4))  # (4, NumV)
        flat = cute.make_tensor(numbers.iterator, cute.make_layout((4, 4)))
        for t in cutlass.range_constexpr(4):
            at = (four // 8 * (self.config.head_dim // WIDE) + unit) * 32 + four % 8 * 4 + t
            cute.autovec_copy(vectors[None, at], flat[None, t])
        return numbers

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
        """Write 8 columns of a row, if the sequence has it, and dQ has them."""
        at = seqlen.offset + row if self.config.varlen_q else row
        rounded = cute.make_rmem_tensor(WIDE, gdQ.element_type)
        for c in cutlass.range_constexpr(WIDE):
            rounded[c] = (numbers[c % 2, r, c // 2] * scale).to(gdQ.element_type)
        if (row < seqlen.length) & (unit * WIDE < cute.size(gdQ, mode=[1])):
            to = cute.logical_divide(gdQ[at, None], cute.make_layout(WIDE))
            cute.autovec_copy(rounded, to[None, unit])
