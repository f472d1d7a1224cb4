"""Preprocess: what the backward needs to know of each row before it begins.

delta = rowsum(dO * O) - dLSE, by which the softmax's gradient is dS = P * (dP - delta), and LSE in
powers of two. A gradient of LSE needs no more than that, since dLSE/dS = P. Rows without keys and
the padding of tiles get LSE = inf, so that their P is 0. It also zeroes the fp32 sums of dQ.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from cutex.device.attention.seqlen_info import SeqlenInfo
from cutex.device.attention.softmax import LOG2_E
from cutex.kernels.attention.backward.signature import Passed, RowTiles, Tensors, queries
from cutex.kernels.attention.backward.spec import BackwardSpec

THREADS = 128
LANES = 8  # threads that read one row together
VECTOR = 8  # elements of 16 bits in one load


class QueryTile(NamedTuple):
    """The queries of one head of one sequence that a CTA takes."""

    number: Int32  # among all tiles of the workspace
    head: Int32
    batch: Int32
    seqlen: SeqlenInfo
    m_block: Int32


class Preprocess:
    """The kernel: a CTA for each tile of a head's queries."""

    def __init__(self, config: BackwardSpec) -> None:
        self.config = config

    @cute.jit
    def launch(self, tensors: Tensors, passed: Passed, stream) -> None:
        batch, longest, tiles = row_sizes(self.config, tensors.q, passed)
        num_m_blocks = cute.ceil_div(longest, self.config.tile_m)
        self.kernel(tensors, passed, tiles, Int32(num_m_blocks)).launch(
            grid=(num_m_blocks * tiles.heads * batch, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, tensors: Tensors, passed: Passed, tiles: RowTiles, num_m_blocks: Int32
    ) -> None:
        c = self.config
        m_block, head, batch = row_block(num_m_blocks, tiles.heads)
        seqlen = queries(passed, cute.size(tensors.o, mode=[0 if c.varlen_q else 1])).of(batch)
        if m_block * c.tile_m < seqlen.length:
            number = tiles.tile(c, head, batch, seqlen) + m_block
            self.tile(tensors, passed, QueryTile(number, head, batch, seqlen, m_block))

    @cute.jit
    def tile(self, tensors: Tensors, passed: Passed, tile: QueryTile) -> None:
        """Do all for the queries of a tile."""
        self.clear(tensors.dq_sums[tile.number, None], 0, 1)
        self.clear_turns(passed, tile.number)
        for i in cutlass.range_constexpr(self.rounds):
            self.rows(i, tensors, passed, tile)

    @cute.jit
    def clear_turns(self, passed: Passed, tile: Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        if cutlass.const_expr(self.config.deterministic):  # noqa: SIM102 - known when tracing
            if thread < self.config.turns:
                passed.turns[tile, thread] = Int32(0)

    @property
    def rounds(self) -> int:
        """The rounds of a tile's rows that a CTA's threads take together."""
        return self.config.tile_m * LANES // THREADS

    @cute.jit
    def rows(
        self, i: cutlass.Constexpr[int], tensors: Tensors, passed: Passed, tile: QueryTile
    ) -> None:
        """Write LSE and delta of round i of the rows of a tile."""
        thread, _, _ = cute.arch.thread_idx()
        _, head, batch, seqlen, m_block = tile
        stats = tensors.stats[tile.number, None]  # (2 * bM)
        mO, mdO = (rows_of(x, self.config.varlen_q, head, batch) for x in (tensors.o, tensors.do))
        place = i * (THREADS // LANES) + thread // LANES
        row = m_block * self.config.tile_m + place
        delta, lse = Float32(0.0), Float32.inf
        if row < seqlen.length:
            delta = self.product(mO, mdO, seqlen, row)
        for offset in (1, 2, 4):
            delta += cute.arch.shuffle_sync_bfly(delta, offset=offset)
        if row < seqlen.length:
            lse, dlse = self.of_row(tensors.lse, passed, head, batch, seqlen, row)
            delta -= dlse
        if thread % LANES == 0:
            self.keep(stats, place, lse, delta, passed)

    @cute.jit
    def keep(
        self, stats: cute.Tensor, place: Int32, lse: Float32, delta: Float32, passed: Passed
    ) -> None:
        """Write what the main kernel needs to know of a row."""
        stats[place] = lse
        stats[self.config.tile_m + place] = delta

    @cute.jit
    def clear(
        self,
        sums: cute.Tensor,
        part: cutlass.Constexpr[int],
        parts: cutlass.Constexpr[int],
    ) -> None:
        """Set part `part` of `parts` of a tile's sums to 0."""
        thread, _, _ = cute.arch.thread_idx()
        vectors = cute.logical_divide(sums, cute.make_layout(4))  # (4, NumV)
        zeros = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        zeros.fill(0.0)
        count = self.config.tile_m * self.config.head_dim // 4 // THREADS // parts
        for i in cutlass.range_constexpr(part * count, (part + 1) * count):
            cute.autovec_copy(zeros, vectors[None, i * THREADS + thread])

    @cute.jit
    def product(self, mO, mdO, seqlen: SeqlenInfo, row: Int32) -> Float32:
        """This thread's part of the sum of O * dO over a row."""
        thread, _, _ = cute.arch.thread_idx()
        at = seqlen.offset + row if self.config.varlen_q else row
        gO, gdO = (cute.logical_divide(x[at, None], cute.make_layout(VECTOR)) for x in (mO, mdO))
        total = Float32(0.0)
        for i in cutlass.range_constexpr(-(-self.config.head_dim_v // (VECTOR * LANES))):
            v = i * LANES + thread % LANES
            if v < cute.size(gO, mode=[1]):
                rO, rdO = (cute.make_rmem_tensor(VECTOR, mO.element_type) for _ in range(2))
                cute.autovec_copy(gO[None, v], rO)
                cute.autovec_copy(gdO[None, v], rdO)
                for j in cutlass.range_constexpr(VECTOR):
                    total += rO[j].to(Float32) * rdO[j].to(Float32)
        return total

    @cute.jit
    def of_row(self, mLSE, passed: Passed, head, batch, seqlen: SeqlenInfo, row: Int32):
        """LSE of a row in powers of two, and the gradient of LSE; inf and 0 for a row without
        keys."""
        c = self.config
        at = (head, seqlen.offset + row) if c.varlen_q else (batch, head, row)
        lse, dlse = mLSE[at], Float32(0.0)
        empty = lse == -Float32.inf
        if cutlass.const_expr(c.dlse):
            dlse = Float32(0.0) if empty else passed.dlse[at]
        return (Float32.inf if empty else lse * LOG2_E), dlse


def row_sizes(config: BackwardSpec, mX: cute.Tensor, passed: Passed):
    """The number of sequences, the most rows that one has, and the tiles of mX, which is laid out
    like q."""
    c = config
    at = 0 if c.varlen_q else 1
    rows, heads = cute.size(mX, mode=[at]), Int32(cute.size(mX, mode=[at + 1]))
    batch = cute.size(mX, mode=[0])
    if c.varlen_q:
        batch = cute.size(passed.cu_seqlens_q, mode=[0]) - 1
    longest = passed.max_seqlen_q if c.varlen_q else rows
    tiles = RowTiles.of(c, heads, Int32(rows), Int32(batch))
    return Int32(batch), longest, tiles


@cute.jit
def row_block(num_m_blocks: Int32, heads: Int32) -> tuple[Int32, Int32, Int32]:
    """The block of queries, the head and the batch entry of this CTA."""
    index, _, _ = cute.arch.block_idx()
    unit = index // num_m_blocks
    return index - unit * num_m_blocks, unit % heads, unit // heads


def rows_of(mX: cute.Tensor, packed: bool, head: Int32, batch: Int32) -> cute.Tensor:
    """The rows (seqlen, D) of one head: of one batch entry or, packed, of all sequences."""
    return mX[None, head, None] if packed else mX[batch, None, head, None]
