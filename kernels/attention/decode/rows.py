"""The packed rows of a unit, where they are in Q, O and LSE, and how Q reaches smem."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, cute

from cutex.device.attention.seqlen_info import SeqlenInfo

UNIT = 8  # columns: 16 bytes, of which every head dim has a whole number
WORDS = 4  # of 32 bits in a unit
THREADS = 128  # that load Q


@dataclass(frozen=True)
class Rows:
    """The rows of a unit: row r of a sequence is query r // pack of head r % pack."""

    batch: Int32
    m_block: Int32
    head: Int32  # owner of units
    seq_q: SeqlenInfo
    pack: Int32
    tile_m: int

    @property
    def count(self) -> Int32:
        """The rows that exist."""
        return cutlass.min(self.seq_q.length * self.pack - self.m_block * self.tile_m, self.tile_m)

    def query(self, row: Int32) -> Int32:
        return (self.m_block * self.tile_m + row) // self.pack

    def head_of(self, row: Int32) -> Int32:
        return self.head * self.pack + (self.m_block * self.tile_m + row) % self.pack

    def words(self, mX: cute.Tensor, row: Int32) -> cute.Tensor:
        """A row of Q or O in words of 32 bits."""
        query, head = self.query(row), self.head_of(row)
        if cute.rank(mX) == 3:
            at = mX.stride[0] * (self.seq_q.offset64() + query) + mX.stride[1] * head
        else:
            at = mX.stride[0] * Int64(self.batch) + mX.stride[1] * query + mX.stride[2] * head
        words = cute.recast_ptr((mX.iterator + at).align(16), dtype=Int32)
        columns = cute.size(mX, mode=[cute.rank(mX) - 1])
        return cute.make_tensor(words, cute.make_layout(columns // 2))


def units_of(mX: cute.Tensor) -> Int32:
    """The units of columns of Q or O."""
    return cute.size(mX, mode=[cute.rank(mX) - 1]) // UNIT


@cute.jit
def load_to_smem(mQ: cute.Tensor, rows: Rows, sQ: cute.Tensor) -> None:
    """Load Q into sQ (bM, D) by 128 threads, zeros where there are no rows or columns, and fence
    it for the tensor cores."""
    tile_m, columns = cute.size(sQ, mode=[0]), cute.size(sQ, mode=[1])
    across = columns // UNIT
    thread, _, _ = cute.arch.thread_idx()
    units = units_of(mQ)
    for i in cutlass.range_constexpr(tile_m * across // THREADS):
        index = thread + i * THREADS
        row, unit = index // across, index % across
        gQ = rows.words(mQ, cutlass.min(row, rows.count - 1)).iterator
        gQ = (gQ + cutlass.min(unit, units - 1) * WORDS).align(16)
        held = cute.make_rmem_tensor(cute.make_layout(WORDS), Int32)
        held.store(cute.make_tensor(gQ, cute.make_layout(WORDS)).load())
        for j in cutlass.range_constexpr(WORDS):
            held[j] = held[j] if (row < rows.count) & (unit < units) else Int32(0)
        to = cute.local_tile(sQ[row, None], (UNIT,), (unit,))  # (bUnit)
        cute.autovec_copy(cute.recast_tensor(held, sQ.element_type), to)
    cute.arch.fence_view_async_shared()
