"""The rows of a mixture's experts: a stable sort of the entries of expert_ids by expert, in one
launch (counting.py).

Ids that are no expert's are sorted to the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from cutex.compile import Argument, Bound, Operand
from cutex.kernels.mixture.combine import ARCHS
from cutex.kernels.mixture.counting import (
    AHEAD,
    CTAS,
    THREADS,
    WARP,
    alike,
    before,
    clear,
    count,
    first_rows,
    share_of,
    tables,
)


@dataclass(frozen=True)
class RouteConfig:
    """The config: the experts of a token, and the numbers that an entry is sorted by, a multiple of
    32: those of experts, and one for ids that are none's."""

    per_token: int
    buckets: int


class Route:
    """A cluster sorts all entries.

    barrier    arrives                                        waits
    0 (CTA)    all threads: the table being zero, counted,    all
               the sums of warps written, rows known
    (cluster)  all threads: their CTA's counts being written  all

    smem       bytes
    table      4 * WARPS * buckets
    sums       4 * WARPS
    """

    archs = ARCHS
    dtypes = ("int32", "int64")

    def __init__(self, config: RouteConfig) -> None:
        self.config = config

    @property
    def name(self) -> str:
        return "mixture_route"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        """Ids (R) of `dtype`; offs (E), tokens, order and places (R), and totals (CTAS, buckets),
        which holds counts meanwhile."""
        buckets = self.config.buckets
        plain: dict[str, Any] = {"aligned": False, "whole": False}
        counts = Bound("ctas", CTAS, CTAS), Bound("buckets", buckets, buckets)
        lists = (Operand(name, ("r",), "int32", **plain) for name in ("tokens", "order", "places"))
        return (
            Operand("ids", ("r",), dtype, **plain),
            Operand("offs", ("e",), "int32", bounds=(Bound("e", 1, buckets - 1),), **plain),
            *lists,
            Operand("totals", ("ctas", "buckets"), "int32", bounds=counts, **plain),
        )

    @cute.jit
    def __call__(
        self,
        ids: cute.Tensor,
        offs: cute.Tensor,
        tokens: cute.Tensor,
        order: cute.Tensor,
        places: cute.Tensor,
        totals: cute.Tensor,
        stream,
    ) -> None:
        """Launch."""
        self.kernel(ids, offs, (tokens, order, places), totals).launch(
            grid=(CTAS, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(CTAS, 1, 1),
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        ids: cute.Tensor,
        offs: cute.Tensor,
        lists: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        totals: cute.Tensor,
    ) -> None:
        """Sort: count, add up, give rows."""
        table, sums = tables(self.config.buckets)
        clear(table)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.sync_threads()
        first, share = share_of(cute.size(ids))
        bits = (self.config.buckets - 1).bit_length()
        mine = table[cute.arch.warp_idx(), None]  # (buckets)

        for i in cutlass.range(0, share, AHEAD, unroll=1):
            found = self.entries(ids, cute.size(offs), first + i * WARP)
            for u in cutlass.range_constexpr(AHEAD):
                bucket, valid = found[u]
                if i + u < share:
                    count(mine, bucket, alike(bucket, valid, bits), valid)
        cute.arch.sync_threads()
        first_rows(table, sums, totals, offs)
        cute.arch.sync_threads()
        tokens, order, places = lists
        for i in cutlass.range(0, share, AHEAD, unroll=1):
            found = self.entries(ids, cute.size(offs), first + i * WARP)
            for u in cutlass.range_constexpr(AHEAD):
                bucket, valid = found[u]
                if i + u < share:
                    lanes = alike(bucket, valid, bits)
                    row = mine[bucket] + before(lanes)
                    count(mine, bucket, lanes, valid)
                    if valid:
                        entry = first + (i + u) * WARP + cute.arch.lane_idx()
                        places[entry], order[row] = row, entry
                        tokens[row] = entry // self.config.per_token

    def entries(self, ids: cute.Tensor, experts: Int32, first: Int32) -> list[tuple[Int32, Any]]:
        """Of this lane's AHEAD entries, `first` plus its lane and then WARP apart: the bucket, and
        whether there is one."""
        found = []
        for i in range(AHEAD):
            entry = first + i * WARP + cute.arch.lane_idx()
            expert = ids[cutlass.min(entry, cute.size(ids) - 1)]
            found.append((bucket_of(expert, experts), entry < cute.size(ids)))
        return found


@cute.jit
def bucket_of(expert: Any, experts: Int32) -> Int32:
    """The bucket of an expert's id, of either width; the last one's of an id that is none's."""
    bucket = experts
    if expert >= 0 and expert < experts:
        bucket = Int32(expert)
    return bucket
