"""New rows of keys and values, and their place in a cache: in pages, or in each sequence's entry.

The warp that loads a part of a cache may first write that part's new rows itself, if no other CTA
does: for few rows this is faster than a launch beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

BITS = 128  # of a vector
WARP = 32


@dataclass(frozen=True)
class CacheRows:
    """Where the rows of sequences are in a cache."""

    page_size: int  # 0: no pages
    page_table: Any  # (batch, pages) Int32
    entries: Any  # (batch) Int32: of the cache, if not each sequence has that of its number

    def place(self, batch: Int32, row: Int32) -> tuple[Int32, Int32]:
        """The entry, or page, of a sequence's row, and the row in it."""
        if self.page_size:
            return self.page_table[batch, row // self.page_size], row % self.page_size
        return batch if self.entries is None else Int32(self.entries[batch]), row


@cute.jit
def append_rows(
    new: tuple[cute.Tensor, cute.Tensor],
    caches: tuple[cute.Tensor, cute.Tensor],
    of_caches: CacheRows,
    unit: tuple[Int32, Int32],
    rows: tuple[Int32, Int32, Int32],
) -> None:
    """Write new rows of a `unit`, a sequence and a head, to the `caches` of keys and values, and
    fence them for TMA. `rows`: the first and the end of those to write, and the sequence's row that
    is `new`'s row 0. The whole warp that loads them calls it before."""
    (batch, head), (first, end, zero) = unit, rows
    (new_k, new_v), (to_k, to_v) = new, caches
    of_k, of_v = units_of_row(new_k), units_of_row(new_v)
    across = cutlass.max(of_k, of_v)
    for i in cutlass.range(cute.arch.lane_idx(), (end - first) * across, WARP, unroll=1):
        row, column = first + i // across, i % across
        entry, at = of_caches.place(batch, row)
        gK = vectors(new_k, batch, row - zero)[None, cutlass.min(column, of_k - 1), head]
        gV = vectors(new_v, batch, row - zero)[None, cutlass.min(column, of_v - 1), head]
        # NOTE: both are on their way before one is stored
        rK = cute.make_rmem_tensor(gK.layout, gK.element_type)
        rV = cute.make_rmem_tensor(gV.layout, gV.element_type)
        cute.autovec_copy(gK, rK)
        cute.autovec_copy(gV, rV)
        if column < of_k:
            cute.autovec_copy(rK, vectors(to_k, entry, at)[None, column, head])
        if column < of_v:
            cute.autovec_copy(rV, vectors(to_v, entry, at)[None, column, head])
    cute.arch.fence_proxy("async.global")
    cute.arch.sync_warp()


def vectors(mX: cute.Tensor, entry: Int32, row: Int32) -> cute.Tensor:
    """A row of all heads as (UNIT, units, heads); of packed rows `entry` does not count."""
    unit, of_heads = unit_of(mX), cute.rank(mX) - 2
    at = mX.stride[0] * Int64(row)
    if of_heads == 2:
        at = mX.stride[0] * Int64(entry) + mX.stride[1] * row
    units, heads = units_of_row(mX), cute.size(mX, mode=[of_heads])
    layout = cute.make_layout((unit, units, heads), stride=(1, unit, mX.stride[of_heads]))
    return cute.make_tensor((mX.iterator + at).align(16), layout)


def units_of_row(mX: cute.Tensor) -> Int32:
    """The vectors of a row of a head."""
    return cute.size(mX, mode=[cute.rank(mX) - 1]) // unit_of(mX)


def unit_of(mX: cute.Tensor) -> int:
    """The elements of a vector."""
    return BITS // mX.element_type.width
