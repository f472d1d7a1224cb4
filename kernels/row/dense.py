"""Which of a CTA's dense rows, which come as one run of memory, a thread has."""

from __future__ import annotations

from cutlass import Int32, cute

from cutex.device.row.tile import WARP, RowTile


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
