"""Compute: the warpgroup of the decode kernel that has the queries, and computes O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode

from cutex.device.atoms.mma import contiguous_rows_layout
from cutex.device.atoms.wgmma import WARPGROUP, Wgmma, WgmmaProduct
from cutex.device.attention.guarded_softmax import GuardedSoftmax
from cutex.device.attention.mask import Mask
from cutex.device.attention.scores import ScoreOps
from cutex.device.attention.seqlen_info import SeqlenInfo
from cutex.device.attention.softmax import rows_of
from cutex.kernels.attention.decode.config import ROWS
from cutex.kernels.attention.decode.partials import VECTOR, WARP, Partials, with_sink
from cutex.kernels.attention.decode.sm90.shared import Shared
from cutex.kernels.attention.decode.splits import Piece
from cutex.kernels.attention.forward.sm90.block_loop import BlockLoop

BARRIER = 1  # a named barrier of the warpgroup
UNIT = 8  # columns: 16 bytes, of which every head dim has a whole number


@dataclass(frozen=True)
class Rows:
    """The packed rows of a unit: row r of a sequence is query r // pack of head r % pack."""

    batch: Int32
    m_block: Int32
    head: Int32  # of K and V
    seq_q: SeqlenInfo
    pack: Int32

    @property
    def count(self) -> Int32:
        """The rows that exist."""
        return cutlass.min(self.seq_q.length * self.pack - self.m_block * ROWS, ROWS)

    def query(self, row: Int32) -> Int32:
        return (self.m_block * ROWS + row) // self.pack

    def head_of(self, row: Int32) -> Int32:
        return self.head * self.pack + (self.m_block * ROWS + row) % self.pack

    def words(self, mX: cute.Tensor, row: Int32) -> cute.Tensor:
        """A row of Q or O in words of 32 bits."""
        query, head = self.query(row), self.head_of(row)
        if cute.rank(mX) == 3:
            at = mX.stride[0] * (self.seq_q.offset64() + query) + mX.stride[1] * head
        else:
            at = mX.stride[0] * Int64(self.batch) + mX.stride[1] * query + mX.stride[2] * head
        words = cute.recast_ptr((mX.iterator + at).align(16), dtype=Int32)
        return cute.make_tensor(
            words, cute.make_layout(cute.size(mX, mode=[cute.rank(mX) - 1]) // 2)
        )


@dataclass(frozen=True)
class Compute:
    mQ: cute.Tensor
    mO: cute.Tensor
    partials: Partials
    shared: Shared

    @cute.jit
    def run(self) -> None:
        """Compute this CTA's parts one after the other."""
        s, c = self.shared, self.shared.config
        dtype = s.sK.element_type
        qk_mma = Wgmma(c.tile_n, dtype)
        registers = None if c.q_in_smem else qk_mma.a_registers(c.head_dim)
        a = qk_mma.a_slots(s.sQ)[None, None, None, 0] if c.q_in_smem else registers
        qk = WgmmaProduct(qk_mma, a, qk_mma.b_slots(s.sK), None)
        transposed = contiguous_rows_layout(dtype, c.head_dim_v, c.tile_n, c.num_stages)
        sVt = cute.make_tensor(s.sV.iterator, transposed.outer)  # (DV, bN, SLOT)
        pv_mma = Wgmma(c.head_dim_v, dtype, b_major=OperandMajorMode.MN)
        pv = WgmmaProduct(
            pv_mma, pv_mma.a_registers(c.tile_n), pv_mma.b_slots(sVt), pv_mma.accumulator()
        )
        factors = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        lse = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        splits, place, end = s.begin()
        state = s.k.consumer(), s.v.consumer()
        at = splits.begin
        while at < end:
            place = s.place(at, place)
            piece = splits.piece(at, place)
            at = piece.after
            if piece.end > piece.first:
                rows = self.rows(piece)
                blocks = s.of_piece(piece)
                self.load_q(registers, rows)
                score_ops = self.score_ops(rows)
                slack = min(c.slack, 4.0) if dtype is cutlass.Float16 else c.slack
                softmax = GuardedSoftmax.of(score_ops.scale_log2(), slack, False)
                if blocks.end > blocks.first:
                    loop = BlockLoop(
                        qk, None, pv, s.k, s.v, score_ops, softmax, factors, None, Int32(0), 1,
                        False,
                    )  # fmt: skip
                    state = loop.run(blocks, None, state, Boolean(False), None)
                    state = loop.last(state)
                    softmax.finish((), factors, lse)
                    loop.scale_output()
                else:
                    pv.acc.fill(0.0)
                    lse.fill(-Float32.inf)
                self.store(rows_of(pv.acc), lse, rows, piece)

    def rows(self, piece: Piece) -> Rows:
        s = self.shared
        batch, m_block = s.entry(piece.entry)
        seq_q = s.sizes.queries(s.passed, batch)
        return Rows(batch, m_block, piece.head, seq_q, s.sizes.pack)

    @staticmethod
    def thread_rows() -> tuple[Int32, Int32]:
        """The two rows of a block that this thread holds."""
        thread, _, _ = cute.arch.thread_idx()
        row = thread // 32 * 16 + thread % 32 // 4
        return row, row + 8

    def score_ops(self, rows: Rows) -> ScoreOps:
        s = self.shared
        thread, _, _ = cute.arch.thread_idx()
        mine = self.thread_rows()
        queries, heads = (tuple(f(row) for row in mine) for f in (rows.query, rows.head_of))
        keys = s.sizes.keys(s.passed, rows.batch)
        mask = Mask(s.info.band, s.info.tile_n, rows.seq_q.length, keys, queries, thread % 4)
        return ScoreOps(mask, s.passed.scale, s.passed.softcap, None, None, rows.batch, heads)

    # ---- Q

    @cute.jit
    def load_q(self, registers: Any, rows: Rows) -> None:
        """Load Q, zeros where there are no rows or columns: into registers as operand A, or into
        smem."""
        if cutlass.const_expr(registers is None):
            self.load_q_to_smem(rows)
        else:
            thread, _, _ = cute.arch.thread_idx()
            words = cute.recast_tensor(registers, Int32)  # ((1, 2, 2), 1, MMA_K)
            units = cute.size(self.mQ, mode=[cute.rank(self.mQ) - 1]) // UNIT
            mine = self.thread_rows()
            for r in cutlass.range_constexpr(2):
                exists = mine[r] < rows.count
                gQ = rows.words(self.mQ, cutlass.min(mine[r], rows.count - 1))
                for unit in cutlass.range_constexpr(self.shared.config.head_dim // UNIT):
                    word = gQ[cutlass.min(unit, units - 1) * 4 + thread % 4]
                    kept = word if exists & (unit < units) else Int32(0)
                    words[(0, r, unit % 2), 0, unit // 2] = kept

    @cute.jit
    def load_q_to_smem(self, rows: Rows) -> None:
        """NOTE: the barrier before the stores: wgmma of the part before may still read there."""
        head_dim, sQ = self.shared.config.head_dim, self.shared.sQ
        assert sQ is not None
        thread, _, _ = cute.arch.thread_idx()
        units = cute.size(self.mQ, mode=[cute.rank(self.mQ) - 1]) // UNIT
        self.sync()
        for i in cutlass.range_constexpr(ROWS * head_dim // UNIT // WARPGROUP):
            index = thread + i * WARPGROUP
            row, unit = index // (head_dim // UNIT), index % (head_dim // UNIT)
            gQ = rows.words(self.mQ, cutlass.min(row, rows.count - 1))
            gQ = cute.make_tensor(
                (gQ.iterator + cutlass.min(unit, units - 1) * 4).align(16), cute.make_layout(4)
            )
            held = cute.make_rmem_tensor(cute.make_layout(4), Int32)
            held.store(gQ.load())
            for j in cutlass.range_constexpr(4):
                held[j] = held[j] if (row < rows.count) & (unit < units) else Int32(0)
            to = cute.local_tile(sQ[row, None, 0], (UNIT,), (unit,))
            cute.autovec_copy(cute.recast_tensor(held, sQ.element_type), to)
        cute.arch.fence_view_async_shared()
        self.sync()

    @staticmethod
    def sync() -> None:
        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=WARPGROUP)

    # ---- O

    @cute.jit
    def store(self, acc: cute.Tensor, lse: cute.Tensor, rows: Rows, piece: Piece) -> None:
        """Store a unit that is whole; else store a part, and merge all parts if it is the last."""
        last = self.shared.last
        if piece.parts == 1:
            self.store_whole(acc, lse, rows)
        else:
            self.store_part(acc, lse, rows, piece)
            self.sync()
            thread, _, _ = cute.arch.thread_idx()
            if thread == 0:
                unit = piece.entry * self.shared.sizes.heads + piece.head
                last[0] = Int32(self.partials.arrive(unit, piece.parts))
            self.sync()
            if last[0] != 0:
                self.merge(rows, piece)

    @cute.jit
    def store_whole(self, acc: cute.Tensor, lse: cute.Tensor, rows: Rows) -> None:
        thread, _, _ = cute.arch.thread_idx()
        dtype, mine = self.mO.element_type, self.thread_rows()
        units = cute.size(self.mO, mode=[cute.rank(self.mO) - 1]) // UNIT
        pair = cute.make_rmem_tensor(cute.make_layout(2), dtype)
        for r in cutlass.range_constexpr(2):
            if mine[r] < rows.count:
                of_row, factor = self.finish_row(lse[r], rows, mine[r])
                gO = rows.words(self.mO, mine[r])
                for unit in cutlass.range_constexpr(self.shared.config.head_dim_v // UNIT):
                    for i in cutlass.range_constexpr(2):
                        pair[i] = dtype(acc[r, 2 * unit + i] * factor)
                    if unit < units:
                        gO[unit * 4 + thread % 4] = cute.recast_tensor(pair, Int32)[0]
                if thread % 4 == 0:
                    self.store_lse(of_row, rows, mine[r])

    @cute.jit
    def finish_row(self, lse: Float32, rows: Rows, row: Int32) -> tuple[Float32, Float32]:
        """The LSE of a row with its sink, and the factor that its O still lacks."""
        factor = Float32(1.0)
        if cutlass.const_expr(self.shared.config.sink):
            lse, factor = with_sink(lse, self.shared.passed.sink[rows.head_of(row)])
        return lse, factor

    @cute.jit
    def store_lse(self, lse: Float32, rows: Rows, row: Int32) -> None:
        c, mLSE = self.shared.config, self.shared.passed.lse
        if cutlass.const_expr(c.lse):
            query, head = rows.query(row), rows.head_of(row)
            if cutlass.const_expr(c.varlen_q):
                mLSE[head, rows.seq_q.offset + query] = lse
            else:
                mLSE[rows.batch, head, query] = lse

    @cute.jit
    def store_part(self, acc: cute.Tensor, lse: cute.Tensor, rows: Rows, piece: Piece) -> None:
        thread, _, _ = cute.arch.thread_idx()
        mine, slot = self.thread_rows(), piece.slot_of(piece.part)
        for r in cutlass.range_constexpr(2):
            if mine[r] < rows.count:
                pairs = cute.make_tensor(
                    self.partials.o_row(slot, mine[r]).iterator,
                    cute.make_layout((2, self.shared.config.head_dim_v // 2)),
                )
                pair = cute.make_rmem_tensor(cute.make_layout(2), Float32)
                for unit in cutlass.range_constexpr(self.shared.config.head_dim_v // UNIT):
                    for i in cutlass.range_constexpr(2):
                        pair[i] = acc[r, 2 * unit + i]
                    pairs[None, unit * 4 + thread % 4].store(pair.load())
                of_part = self.partials.lse(slot)
                if thread % 4 == 0:
                    of_part[mine[r]] = lse[r]

    @cute.jit
    def merge(self, rows: Rows, piece: Piece) -> None:
        """Merge all parts of a unit, a warp each row, and store O and LSE."""
        dtype, columns = self.mO.element_type, self.shared.config.head_dim_v
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        vectors = cute.size(self.mO, mode=[cute.rank(self.mO) - 1]) // VECTOR
        count = -(-columns // (VECTOR * WARP))
        o = cute.make_rmem_tensor(cute.make_layout((VECTOR, count)), Float32)
        narrow = cute.make_rmem_tensor(cute.make_layout(VECTOR), dtype)
        for row in cutlass.range(warp, rows.count, WARPGROUP // WARP, unroll=1):
            lse = self.partials.merge(piece, row, o)
            of_row, factor = self.finish_row(lse, rows, row)
            gO = rows.words(self.mO, row)
            for i in cutlass.range_constexpr(count):
                vector = lane + i * WARP
                narrow.store((o[None, i].load() * factor).to(dtype))
                if vector < vectors:
                    for j in cutlass.range_constexpr(2):
                        gO[2 * vector + j] = cute.recast_tensor(narrow, Int32)[j]
            if lane == 0:
                self.store_lse(of_row, rows, row)
