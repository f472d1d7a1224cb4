"""Dense rows, all those of a CTA as one run of memory, and which of them a thread has."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.row import in_smem
from cutex.device.row.columns import Columns
from cutex.device.row.tile import VECTOR_BYTES, WARP, RowTile


class DenseRun(NamedTuple):
    """The rows of a CTA, one behind the other in gmem, on their way to smem (cp.async, one group):
    by whole vectors of gmem, so that there are two partial ends for all of them together."""

    first: Int32  # the CTA's first row
    count: Int32  # how many it has
    columns: Columns  # this thread's vectors of the run
    smem: cute.Tensor  # from the gmem vector in which the run begins

    @staticmethod
    def fetch(tile: RowTile, turns: int, mX: cute.Tensor) -> DenseRun:
        """The run of this CTA's rows of the dense mX (M, N): `turns` times those of the tile, whose
        vectors are those of all of them."""
        chunk = replace(tile, rows=1, threads=tile.num_threads)
        slots = cute.make_layout(chunk.threads * chunk.vectors * chunk.width)
        sX = SmemAllocator().allocate_tensor(mX.element_type, slots, VECTOR_BYTES)
        first = Int32(cute.arch.block_idx()[0] * (tile.rows * turns))
        rows, n = (Int32(cute.size(mX, mode=[i])) for i in range(2))
        count = cutlass.min(rows - first, tile.rows * turns)
        gX = run(mX, first, count)  # (count * N)
        columns = Columns.of(chunk, gX)
        between = (first > 0) & (first + count < rows) & (n >= chunk.width)
        in_smem.fetch(columns, gX, sX, between)
        return DenseRun(first, count, columns, sX)

    @property
    def begin(self) -> Int32:
        """The place in smem of the first row's first element."""
        return Int32(cute.arch.thread_idx()[0] * self.columns.tile.width) - self.columns.first

    def wait(self) -> None:
        """Wait until all rows have come, for all threads of the CTA."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

    def store(self, mY: cute.Tensor) -> None:
        """Write what is in smem to the same rows of the dense mY (M, N)."""
        in_smem.store(self.columns, self.smem, run(mY, self.first, self.count))


def run(mX: cute.Tensor, first: Int32, count: Int32) -> cute.Tensor:
    """`count` rows of the dense mX (M, N), from the first on, as one (count * N)."""
    return cute.make_tensor(
        mX[first, None].iterator, cute.make_layout(count * Int32(cute.size(mX, mode=[1])))
    )


def place(tile: RowTile, turns: int, apart: bool, turn: int) -> Int32:
    """The row of a CTA's that this thread has in a turn: the next one for the next threads.

    apart: rows of one warp are as far apart as those of one place of all others together, so that
    rows that begin in banks side by side are not read at one time
    (docs/facts/rows.md#rows-losses-few)."""
    thread = Int32(cute.arch.thread_idx()[0])
    if not apart:
        return thread // tile.threads + turn * tile.rows
    each = tile.num_threads // WARP * turns  # rows from one of a warp to its next
    return thread % WARP // tile.threads * each + thread // WARP * turns + turn
