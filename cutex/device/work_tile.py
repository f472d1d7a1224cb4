"""A work tile: the unit of work that a scheduler hands to a CTA."""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Int32, cute


class WorkTile(NamedTuple):
    """One CTA's tile of the result, in tiles, not elements; a mode that an operator lacks is 0.

    For attention, m counts blocks of queries, and head may count groups of packed heads.
    """

    m: Int32 | int
    n: Int32 | int = 0
    head: Int32 | int = 0  # attention's
    batch: Int32 | int = 0  # entry of a batch
    group: Int32 | int = 0  # of a grouped order, such as an expert of a mixture
    split: Int32 | int = 0  # number of this part of the reduction, of those that share the tile


def place_in_cluster(size_m: int, size_n: int, splits: int = 1) -> tuple[Int32, Int32]:
    """The (m, n) of this CTA in a cluster of (size_m, size_n, splits); its rank is m + n * size_m,
    and size_m * size_n more for each share of a tile's K before its own.

    NOTE: computed from the rank, which is a single register. The CTA's index in each mode of the
    cluster has no register, and costs divisions where every cycle counts: before the first load and
    after the last MMA.
    """
    if size_m * size_n == 1:
        return Int32(0), Int32(0)
    rank = cute.arch.block_idx_in_cluster()
    if splits > 1:
        rank = rank % (size_m * size_n)
    if size_n == 1:
        return rank, Int32(0)
    if size_m == 1:
        return Int32(0), rank
    return rank % size_m, rank // size_m
