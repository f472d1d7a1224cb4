"""The packed rows of a unit: where they are in Q and O, and the loads of Q to smem."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from cutex.device.attention.row_store import UNIT, WORDS
from cutex.device.attention.seqlen_info import SeqlenInfo

THREADS = 128  # that load Q
UNDER_WAY = 16  # units that a thread loads before it waits for the first


@dataclass(frozen=True)
class UnitRows:
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
def load_to_smem(mQ: cute.Tensor, rows: UnitRows, sQ: cute.Tensor) -> None:
    """Load Q into sQ (bM, D) by 128 threads, zeros where there are no rows or columns, and fence
    it for the tensor cores."""
    tile_m, columns = cute.size(sQ, mode=[0]), cute.size(sQ, mode=[1])
    across = columns // UNIT
    count = tile_m * across // THREADS
    for first in cutlass.range_constexpr(0, count, UNDER_WAY):
        mine = range(first, min(first + UNDER_WAY, count))
        held = cute.make_rmem_tensor(cute.make_layout((WORDS, len(mine))), Int32)
        for i in cutlass.range_constexpr(len(mine)):
            held[None, i].store(_words_of_q(mQ, rows, mine[i], across).load())
        for i in cutlass.range_constexpr(len(mine)):
            row, unit, exists = _unit_of_q(mQ, rows, mine[i], across)
            for j in cutlass.range_constexpr(WORDS):
                held[j, i] = held[j, i] if exists else Int32(0)
            to = cute.local_tile(sQ[row, None], (UNIT,), (unit,))  # (bUnit)
            cute.autovec_copy(cute.recast_tensor(held[None, i], sQ.element_type), to)
    cute.arch.fence_view_async_shared()


@cute.jit
def _unit_of_q(
    mQ: cute.Tensor, rows: UnitRows, number: cutlass.Constexpr[int], across: cutlass.Constexpr[int]
) -> tuple[Int32, Int32, Boolean]:
    """The row and the unit of columns that is this thread's load number `number`, and whether they
    exist."""
    thread, _, _ = cute.arch.thread_idx()
    index = thread + number * THREADS
    row, unit = index // across, index % across
    return row, unit, (row < rows.count) & (unit < units_of(mQ))


@cute.jit
def _words_of_q(
    mQ: cute.Tensor, rows: UnitRows, number: cutlass.Constexpr[int], across: cutlass.Constexpr[int]
) -> cute.Tensor:
    """The words of that unit in Q, or of one that exists."""
    row, unit, _ = _unit_of_q(mQ, rows, number, across)
    of_row = rows.words(mQ, cutlass.min(row, rows.count - 1)).iterator
    at = (of_row + cutlass.min(unit, units_of(mQ) - 1) * WORDS).align(16)
    return cute.make_tensor(at, cute.make_layout(WORDS))
