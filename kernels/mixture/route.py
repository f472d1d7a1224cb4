"""The rows of a mixture's experts: a stable sort of the entries of expert_ids by expert, in one
launch.

A counting sort. Each warp takes a contiguous share of the entries and counts, in its own row of a
table, how many belong to each expert. The counts of all earlier warps, and of all earlier experts,
give the row of a warp's first entry for each expert; then each warp assigns rows to its entries.
Nothing depends on the order in which threads run, so the result is deterministic.

Ids that are no expert's are sorted to the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from cutex.compile import Argument, Bound, Operand
from cutex.device.pipeline import sync_cluster
from cutex.kernels.mixture.combine import ARCHS
from cutex.schedulers.order import select
from cutex.schedulers.ragged import inclusive_scan

CTAS = 8  # one cluster
THREADS = 512
WARP = 32
WARPS = THREADS // WARP


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
        smem, buckets = SmemAllocator(), self.config.buckets
        table = smem.allocate_tensor(
            Int32, cute.make_layout((WARPS, buckets), stride=(buckets, 1)), byte_alignment=16
        )
        sums = smem.allocate_tensor(Int32, cute.make_layout(WARPS), byte_alignment=16)
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        for at in cutlass.range(thread, WARPS * buckets, THREADS, unroll=4):
            table[at // buckets, at % buckets] = 0
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.sync_threads()
        entries = Entries(self.config, ids, cute.size(offs))
        warp = cute.arch.warp_idx()
        share = cute.ceil_div(cute.size(ids), CTAS * THREADS)
        first = (cta * WARPS + warp) * share * WARP
        mine = table[warp, None]  # (buckets)

        for i in cutlass.range(share, unroll=1):
            bucket, alike, valid = entries.block(first + i * WARP)
            count(mine, bucket, alike, valid)
        cute.arch.sync_threads()
        self.first_rows(table, sums, offs, totals)
        cute.arch.sync_threads()
        tokens, order, places = lists
        for i in cutlass.range(share, unroll=1):
            bucket, alike, valid = entries.block(first + i * WARP)
            row = mine[bucket] + before(alike)
            count(mine, bucket, alike, valid)
            if valid:
                entry = first + i * WARP + cute.arch.lane_idx()
                places[entry], order[row] = row, entry
                tokens[row] = entry // self.config.per_token

    @cute.jit
    def first_rows(
        self, table: cute.Tensor, sums: cute.Tensor, offs: cute.Tensor, totals: cute.Tensor
    ) -> None:
        """Replace the counts in `table` by the rows of each warp's first entries, and write where
        the experts' rows end. All threads call it; each has some neighbouring buckets."""
        buckets, experts = self.config.buckets, cute.size(offs)
        each = -(-buckets // THREADS)
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        start = thread * each
        for b in cutlass.range_constexpr(each):
            bucket = start + b
            if bucket < buckets:
                total = Int32(0)
                for w in cutlass.range_constexpr(WARPS):
                    number = table[w, bucket]
                    table[w, bucket] = total
                    total += number
                totals[cta, bucket] = total
        sync_cluster()
        of_all = cute.make_rmem_tensor(each, Int32)  # (each)
        earlier = cute.make_rmem_tensor(each, Int32)  # (each), of the CTAs before
        whole = Int32(0)
        for b in cutlass.range_constexpr(each):
            of_all[b], earlier[b] = Int32(0), Int32(0)
            if start + b < buckets:
                for c in cutlass.range_constexpr(CTAS):
                    number = totals[c, start + b]
                    earlier[b] += select(Int32(c) < cta, number, 0)
                    of_all[b] += number
            whole += of_all[b]
        row = self.sum_before(whole, sums)
        for b in cutlass.range_constexpr(each):
            bucket = start + b
            if bucket < buckets:
                for w in cutlass.range_constexpr(WARPS):
                    table[w, bucket] += row + earlier[b]
            row += of_all[b]
            if cta == 0 and bucket < experts:
                offs[bucket] = row

    @cute.jit
    def sum_before(self, x: Int32, sums: cute.Tensor) -> Int32:
        """The sum of x over the threads before this one. All threads call it."""
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        upto = inclusive_scan(x, lane)
        if lane == WARP - 1:
            sums[warp] = upto
        cute.arch.sync_threads()
        total = upto - x
        for w in cutlass.range_constexpr(WARPS):
            total += select(Int32(w) < warp, sums[w], 0)
        return total


@dataclass(frozen=True)
class Entries:
    """The entries of expert_ids, in blocks of one per lane of a warp."""

    config: RouteConfig
    ids: cute.Tensor  # (R)
    experts: Int32

    @cute.jit
    def block(self, first: Int32) -> tuple[Int32, Int32, Any]:
        """For this lane's entry, `first` plus its lane: its bucket, the mask of the warp's lanes
        with the same bucket, and whether the entry exists. A whole warp calls it."""
        entry = first + cute.arch.lane_idx()
        count = cute.size(self.ids)
        expert = self.ids[cutlass.min(entry, count - 1)]
        valid = entry < count
        bucket = self.experts
        if expert >= 0 and expert < self.experts:
            bucket = Int32(expert)
        alike = Int32(cute.arch.vote_ballot_sync(valid))
        for bit in cutlass.range_constexpr((self.config.buckets - 1).bit_length()):
            has = (bucket >> bit) & 1
            same = Int32(cute.arch.vote_ballot_sync(has != 0))
            alike = alike & (same ^ (has - 1))
        return bucket, alike, valid


def before(alike: Int32) -> Int32:
    """How many of the lanes in `alike` precede this one."""
    lower = (Int32(1) << cute.arch.lane_idx()) - 1
    return Int32(cute.arch.popc(alike & lower))


@cute.jit
def count(table: cute.Tensor, bucket: Int32, alike: Int32, valid: Any) -> None:
    """Add the entries of a block to their buckets; one lane adds for all with the same bucket. A
    whole warp calls it, and may read `table` before and after."""
    cute.arch.sync_warp()
    if valid and before(alike) == 0:
        table[bucket] += Int32(cute.arch.popc(alike))
    cute.arch.sync_warp()
