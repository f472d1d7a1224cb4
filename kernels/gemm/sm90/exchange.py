"""The exchange of sums between CTAs that share the K of a tile, through global memory.

A thread has the same elements of every tile, so a warp waits only for the warp of the same number
in another CTA, and no CTA waits as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync

from cutex.device.atoms.wgmma import WARPGROUP
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.schedulers.stream_k import StreamedWalk

SUMS_BARRIER = 5  # a named barrier of all MMA warps of a CTA
VECTOR = 4  # fp32 sums in one access: 16 bytes


@dataclass(frozen=True)
class Exchange:
    """The exchange of partial sums: each CTA writes those of at most one tile, for the CTA of the
    same rank in another cluster."""

    tiles: Sm90Config
    sA: cute.Tensor  # (bM, bK, SLOT), the ring of A
    sums: cute.Tensor  # fp32: one tile for each CTA
    flags: cute.Tensor  # Int32, one for each MMA warp of each CTA; 0 before and after a launch

    @cute.jit
    def leave(self, acc: cute.Tensor, walk: StreamedWalk) -> None:
        """Write this warp's accumulators to its CTA's place in the workspace, and set its flag."""
        share = walk.share
        cute.copy(vector_copy(), thread_vectors(acc), self.place(acc, share))
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.store(self.flag(share), Int32(1), sem="release", scope="gpu")

    @cute.jit
    def add_others(self, acc: cute.Tensor, walk: StreamedWalk) -> None:
        """Add to the accumulators the sums that later shares computed of the rest of this tile, one
        after the other, in the same order in every run.

        NOTE: through the smem of A. A tile that others have a part of is the last of a share, so
        nothing more is loaded there; and the accumulators leave too few registers for the loads
        that hide L2's latency.
        """
        self.wait_for_others(walk)
        cute.arch.barrier(barrier_id=SUMS_BARRIER, number_of_threads=self.num_threads)
        total = thread_vectors(acc)  # (VECTOR, NumVectors)
        count = cute.size(total, mode=[1])
        depth = self.depth(count)
        first = cute.recast_ptr(self.sA.iterator, dtype=Float32)
        held = of_thread(first, depth, self.num_threads)  # (VECTOR, DEPTH)
        past_l1 = cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL)
        copy = cute.make_copy_atom(past_l1, Float32, num_bits_per_copy=32 * VECTOR)
        share, tile = walk.share + 1, walk.end.tile
        theirs = self.place(acc, share)
        for i in cutlass.range_constexpr(depth):
            cute.copy(copy, theirs[None, i], held[None, i])
            cute.arch.cp_async_commit_group()
        more = True
        while more:
            theirs = self.place(acc, share)
            share += 1
            after = self.place(acc, share)
            more = walk.shares.cut(share).tile == tile
            for i in cutlass.range_constexpr(count):
                cute.arch.cp_async_wait_group(depth - 1)
                part = total[None, i]
                part.store(part.load() + held[None, i % depth].load())
                if cutlass.const_expr(i + depth < count):
                    cute.copy(copy, theirs[None, i + depth], held[None, i % depth])
                elif more:
                    cute.copy(copy, after[None, i + depth - count], held[None, i % depth])
                cute.arch.cp_async_commit_group()

    @cute.jit
    def wait_for_others(self, walk: StreamedWalk) -> None:
        """Wait until this warp's sums of the rest of its tile are written, one lane per share, and
        reset their flags to 0."""
        share = walk.share + 1 + cute.arch.lane_idx()
        while walk.shares.cut(share).tile == walk.end.tile:
            flag = self.flag(share)
            left = Int32(0)
            while left == 0:
                left = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
            cute.arch.store(flag, Int32(0), sem="relaxed", scope="gpu")
            share += 32
        cute.arch.sync_warp()

    @property
    def num_threads(self) -> int:
        """The number of threads that run wgmma."""
        return self.tiles.mma_warpgroups * WARPGROUP

    def depth(self, count: int) -> int:
        """The vectors of each thread, out of `count`, that are loaded at a time: a divisor of
        `count`, so that each has one place in the ring's A."""
        room = self.tiles.a_bytes // (4 * VECTOR * self.num_threads)
        return max(n for n in range(1, room + 1) if count % n == 0)

    def cta(self, share: Int32) -> Int32:
        """The index of the CTA of `share` that has this one's rank in its cluster."""
        size = self.tiles.cluster_m * self.tiles.cluster_n
        rank = cute.arch.block_idx_in_cluster() if size > 1 else Int32(0)
        return share * size + rank

    def flag(self, share: Int32) -> cute.Pointer:
        """The flag of this warp in the CTA of `share`."""
        warps = self.num_threads // 32
        return self.flags.iterator + (self.cta(share) * warps + cute.arch.warp_idx())

    def place(self, acc: cute.Tensor, share: Int32) -> cute.Tensor:
        """The memory (VECTOR, NumVectors) of this thread's accumulators in the CTA of `share`."""
        elements = self.tiles.tile_m * self.tiles.tile_n
        first = self.sums.iterator + self.cta(share) * elements
        return of_thread(first.align(4 * VECTOR), cute.size(acc) // VECTOR, self.num_threads)


def of_thread(first: cute.Pointer, count: int, threads: int) -> cute.Tensor:
    """This thread's vectors (VECTOR, NumVectors) in the memory from `first` on; those of all
    threads are adjacent."""
    thread, _, _ = cute.arch.thread_idx()
    layout = cute.make_layout(
        (VECTOR, count, threads), stride=(1, VECTOR * threads, VECTOR)
    )  # (VECTOR, NumVectors, THREAD)
    return cute.make_tensor(first, layout)[None, None, thread]


def vector_copy() -> cute.CopyAtom:
    """The copy atom of one vector."""
    return cute.make_copy_atom(CopyUniversalOp(), Float32, num_bits_per_copy=32 * VECTOR)


def thread_vectors(acc: cute.Tensor) -> cute.Tensor:
    """A thread's accumulators as (VECTOR, NumVectors)."""
    return cute.make_tensor(acc.iterator, cute.make_layout((VECTOR, cute.size(acc) // VECTOR)))
