"""A work tile: the unit of work that a scheduler hands to a CTA."""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Int32, cute


class WorkTile(NamedTuple):
    """One CTA's tile of the result, in tiles, not elements; a mode that an operator lacks is 0.

    Of attention m counts blocks of queries, and a head may be a group of packed ones.
    """

    m: Int32 | int
    n: Int32 | int = 0
    head: Int32 | int = 0  # attention's
    batch: Int32 | int = 0  # entry of a batch
    split: Int32 | int = 0  # which part of the reduction, of those that share this tile


def place_in_cluster(size_m: int, size_n: int) -> tuple[Int32, Int32]:
    """(m, n) of this CTA in a cluster of (size_m, size_n); its rank is m + n * size_m.

    NOTE: from the rank, which is one register to read. A CTA's index in each mode of its cluster is
    none, and costs divisions where every cycle shows: before the first load, after the last MMA.
    """
    if size_m * size_n == 1:
        return Int32(0), Int32(0)
    rank = cute.arch.block_idx_in_cluster()
    if size_n == 1:
        return rank, Int32(0)
    if size_m == 1:
        return Int32(0), rank
    return rank % size_m, rank // size_m
