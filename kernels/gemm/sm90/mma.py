"""The MMA roles of the general kernel: warpgroups that run wgmma and store the result.

Cooperative: all work on one tile, and store it together.
PingPong:    each has tiles of its own, and stores while the other computes.
SplitK:      all work on a share of one tile's K, and the CTAs of a cluster exchange their sums
             (split_k.py).
StreamK:     all work on a tile or a part of its K; CTAs exchange their sums in global memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync

from cutex.device.atoms.multicast import SharedRing
from cutex.device.atoms.wgmma import WARPGROUP, WgmmaProduct
from cutex.device.epilogue.sm90.fused_store import ElementStore, FusedStore
from cutex.device.epilogue.sm90.tma_store import WarpgroupStore, WarpStore
from cutex.device.pipeline import PipelineState
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.signature import GeneralConfig, tile_counts
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm90.load import Scheduler
from cutex.kernels.gemm.sm90.roles import (
    Issue,
    issue,
    issue_as_filled,
    mainloop,
    ping_pong,
)
from cutex.schedulers.stream_k import StreamedTiles, StreamedWalk

PartStore = FusedStore | ElementStore | WarpgroupStore
EpilogueStore = PartStore | WarpStore


@dataclass(frozen=True)
class MmaRole:
    """An MMA role: the mainloop of a tile, and the store of its accumulators."""

    config: GeneralConfig
    tiles: Sm90Config
    scheduler: Scheduler

    @property
    def num_threads(self) -> int:
        """The number of threads that run wgmma."""
        return self.tiles.mma_warpgroups * WARPGROUP

    def run(
        self,
        mma: WgmmaProduct,
        ab: SharedRing,
        epilogue: EpilogueStore,
        num_k_tiles: Int32,
        mC: cute.Tensor,
    ) -> None:
        """Compute and store this CTA's tiles of mC."""
        raise NotImplementedError

    @property
    def issue(self) -> Issue:
        """How MMAs are started and waited for."""
        c = self.tiles
        return issue_as_filled if c.one_tile and not c.few_columns else issue

    def accumulate(
        self, mma: WgmmaProduct, ab: SharedRing, take: PipelineState, num_k_tiles: Int32
    ) -> PipelineState:
        """The sums of so many K tiles from slot `take` on, in mma.acc; return the state after. All
        slots are released."""
        return mainloop(mma, ab, take, num_k_tiles, self.issue)

    def store(self, mma: WgmmaProduct, epilogue: EpilogueStore, tile: WorkTile) -> None:
        """Store this warpgroup's accumulators to its rows of `tile`."""
        row, step, column = self.origin(tile)
        if isinstance(epilogue, FusedStore | ElementStore):
            epilogue = replace(epilogue, batch=tile.batch)
        epilogue.store(mma.acc, row, step, column)

    def origin(self, tile: WorkTile) -> tuple[Int32, int, Int32]:
        """The first row of this warpgroup in a tile, the step to its next row, and the first
        column, all in parts of 64 x epiN."""
        c = self.tiles
        step = 1 if c.pingpong else c.mma_warpgroups
        first = cute.arch.warp_idx() // 4 % step
        columns = c.tile_n // self.config.epi_columns
        return tile.m * (c.tile_m // 64) + first, step, tile.n * columns


@dataclass(frozen=True)
class Cooperative(MmaRole):
    """All warpgroups compute a tile, each its own rows, and store it."""

    @cute.jit
    def run(
        self,
        mma: WgmmaProduct,
        ab: SharedRing,
        epilogue: EpilogueStore,
        num_k_tiles: Int32,
        mC: cute.Tensor,
    ) -> None:
        walk = self.scheduler.walk(tile_counts(self.tiles, mC))
        take = ab.consumer()
        for index in cutlass.range(walk.start, walk.end, walk.step, unroll=1):
            take = self.accumulate(mma, ab, take, num_k_tiles)
            self.store(mma, epilogue, walk.tile_at(index))


@dataclass(frozen=True)
class PingPong(MmaRole):
    """Two warpgroups take every second tile each: one stores while the other's wgmma run."""

    @cute.jit
    def run(
        self,
        mma: WgmmaProduct,
        ab: SharedRing,
        epilogue: EpilogueStore,
        num_k_tiles: Int32,
        mC: cute.Tensor,
    ) -> None:
        walk = self.scheduler.walk(tile_counts(self.tiles, mC))
        ping_pong(mma, ab, num_k_tiles, walk, partial(self.store, mma, epilogue))


@dataclass(frozen=True)
class StreamK(MmaRole):
    """All warpgroups compute one segment of a tile's K at a time. The CTA that has the tile's first
    K tiles adds up the sums that other CTAs wrote of the rest, and stores it.

    NOTE: a kernel earlier in the stream may still use the same memory for sums and flags. Before an
    MMA warp touches them, it has waited for a slot of the ring that was filled after
    griddepcontrol.wait.
    """

    scheduler: StreamedTiles
    exchange: Exchange

    @cute.jit
    def run(
        self,
        mma: WgmmaProduct,
        ab: SharedRing,
        epilogue: EpilogueStore,
        num_k_tiles: Int32,
        mC: cute.Tensor,
    ) -> None:
        walk = self.scheduler.streamed_walk(tile_counts(self.tiles, mC), num_k_tiles)
        take = ab.consumer()
        for turn in cutlass.range(walk.turns, unroll=1):
            segment = walk.segment(turn)
            take = self.accumulate(mma, ab, take, segment.count)
            if segment.first > 0:
                self.exchange.leave(mma.acc, walk)
            else:
                if segment.count < num_k_tiles:
                    self.exchange.add_others(mma.acc, walk)
                self.store(mma, epilogue, walk.tile(segment))


# ---- exchange
#
# The exchange of sums between CTAs that share the K of a tile, through global memory.
#
# A thread has the same elements of every tile, so a warp waits only for the warp of the same number
# in another CTA, and no CTA waits as a whole.


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
