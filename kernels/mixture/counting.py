"""A stable sort by counting, of entries that a cluster's warps share: what its kernels are made of.

Each warp has a contiguous share of the entries and counts, in its own row of a table, how many
belong to each bucket. The counts of all earlier warps, and of all earlier buckets, give the row of
a warp's first entry of each bucket; then each warp gives rows to its entries. Nothing depends on
the order in which threads run, so the result is deterministic.

Barriers are those of the CTA and of the cluster; the kernels' own maps name them.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.pipeline import sync_cluster
from cutex.schedulers.order import select
from cutex.schedulers.ragged import inclusive_scan

CTAS = 8  # one cluster
THREADS = 512
WARP = 32
WARPS = THREADS // WARP
AHEAD = 4  # entries of a lane that are read before the first is counted


def tables(buckets: int) -> tuple[cute.Tensor, cute.Tensor]:
    """In smem: the counts of warps (WARPS, buckets), and a word for each warp."""
    smem = SmemAllocator()
    table = smem.allocate_tensor(
        Int32, cute.make_layout((WARPS, buckets), stride=(buckets, 1)), byte_alignment=16
    )
    return table, smem.allocate_tensor(Int32, cute.make_layout(WARPS), byte_alignment=16)


@cute.jit
def clear(table: cute.Tensor) -> None:
    """Write zeros to a CTA's table. All threads call it."""
    thread, _, _ = cute.arch.thread_idx()
    buckets = cute.size(table, mode=[1])
    for at in cutlass.range(thread, WARPS * buckets, THREADS, unroll=4):
        table[at // buckets, at % buckets] = 0


def share_of(entries: Int32) -> tuple[Int32, Int32]:
    """This warp's first entry, and the blocks of WARP entries that each warp has."""
    share = cute.ceil_div(entries, CTAS * THREADS)
    cta, _, _ = cute.arch.block_idx()
    return (cta * WARPS + cute.arch.warp_idx()) * share * WARP, share


@cute.jit
def alike(bucket: Int32, valid: Any, bits: cutlass.Constexpr[int]) -> Int32:
    """The mask of the warp's lanes with the same bucket, of so many bits, as this one. A whole warp
    calls it."""
    lanes = Int32(cute.arch.vote_ballot_sync(valid))
    for bit in cutlass.range_constexpr(bits):
        has = (bucket >> bit) & 1
        same = Int32(cute.arch.vote_ballot_sync(has != 0))
        lanes = lanes & (same ^ (has - 1))
    return lanes


def before(lanes: Int32) -> Int32:
    """How many of these lanes precede this one."""
    lower = (Int32(1) << cute.arch.lane_idx()) - 1
    return Int32(cute.arch.popc(lanes & lower))


@cute.jit
def count(table: cute.Tensor, bucket: Int32, lanes: Int32, valid: Any) -> None:
    """Add the entries of a block to their buckets; one lane adds for all `lanes` with the same
    bucket. A whole warp calls it, and may read `table` before and after."""
    cute.arch.sync_warp()
    if valid and before(lanes) == 0:
        table[bucket] += Int32(cute.arch.popc(lanes))
    cute.arch.sync_warp()


@cute.jit
def first_rows(
    table: cute.Tensor, sums: cute.Tensor, totals: cute.Tensor, offs: Any = None
) -> None:
    """Replace the counts in `table` by the rows of each warp's first entries, and write to offs (E)
    where the first E buckets' rows end. All threads call it; each has some neighbouring buckets.
    `totals` (CTAS, buckets), of the cluster, holds counts meanwhile."""
    buckets: Any = cute.size(table, mode=[1])
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
    row = sum_before(whole, sums)
    for b in cutlass.range_constexpr(each):
        bucket = start + b
        if bucket < buckets:
            for w in cutlass.range_constexpr(WARPS):
                table[w, bucket] += row + earlier[b]
        row += of_all[b]
        if cutlass.const_expr(offs is not None):  # noqa: SIM102 - known when tracing
            if cta == 0 and bucket < cute.size(offs):
                offs[bucket] = row


@cute.jit
def sum_before(x: Int32, sums: cute.Tensor) -> Int32:
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
