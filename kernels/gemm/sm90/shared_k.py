"""The MMA roles of CTAs that share the K of a tile, and exchange their sums.

SplitK:  the CTAs of a cluster compute a share of one tile's K each, and send each other their sums.
StreamK: a CTA computes tiles and parts of tiles, and leaves sums for others in global memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync

from cutex.device.atoms.multicast import Cluster, SharedRing
from cutex.device.atoms.wgmma import WARPGROUP, WgmmaProduct
from cutex.device.pipeline import Barrier
from cutex.kernels.gemm.config import ceil_div
from cutex.kernels.gemm.signature import tile_counts
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm90.load import k_share
from cutex.kernels.gemm.sm90.mma import MmaRole, PartStore, RoleProduct, Walk
from cutex.schedulers.persistent import StaticWalk
from cutex.schedulers.stream_k import StreamedTiles, StreamedWalk

SUMS_BARRIER = 5  # a named barrier of all MMA warps of a CTA
VECTOR = 4  # fp32 sums in one access: 16 bytes

# ---- in one cluster, through smem
#
# Each CTA adds up and stores every split_k-th part of the tile. The others send it their sums of
# these parts by st.async, whose bytes count on a barrier of the receiver: no thread waits for
# another CTA's smem to answer, and no fence for the memory of the whole GPU, as a cluster barrier
# that releases memory has it. A thread has the same elements in every CTA, so what it receives is
# what the same thread of another CTA sent.


@dataclass(frozen=True)
class SplitK(MmaRole):
    """A CTA computes a share of one tile's K, sends the CTAs of the other shares its fp32 sums,
    adds up its own parts of the tile, in the same order in every run, and stores them. They are in
    one cluster, where those of one share may share loads, too.

    What is sent lies where the ring was, A's slots first; the cluster's wgmma are done by then.
    """

    cluster: Cluster
    sums: Barrier  # 1 arrival, and the bytes that the other CTAs send
    sA: cute.Tensor  # (bM, bK, SLOT), where the ring begins

    @cute.jit
    def run(self, product: RoleProduct) -> None:
        mma, ab, epilogue, num_k_tiles, mC = product
        walk = self.scheduler.walk(tile_counts(self.tiles, mC))
        parts = epilogue.parts(mma.acc)  # (V, PART)
        place = self.place(parts, cute.recast_ptr(self.sA.iterator, dtype=Float32))
        self.expect(parts, walk.split)
        count = k_share(self.tiles, num_k_tiles)
        self.compute(mma, ab, walk, count)
        self.exchange(mma, epilogue, place, walk)

    def exchange(
        self, mma: WgmmaProduct, epilogue: PartStore, place: cute.Tensor, walk: Walk
    ) -> None:
        """Send the other CTAs their sums, add up this CTA's parts, and store them."""
        # NOTE: relaxed: it says that this warp's wgmma have read the ring, and publishes no data
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
        self.send(epilogue.parts(mma.acc), place, walk.split)
        self.sums.wait(0)
        self.store_parts(mma, epilogue, place, walk)

    def compute(self, mma: WgmmaProduct, ab: SharedRing, walk: Walk, count: Int32) -> None:
        """Run the MMAs of this CTA's share of K, `count` K tiles."""
        self.accumulate(mma, ab, ab.consumer(), count)

    @property
    def num_senders(self) -> int:
        """The CTAs whose sums have places: all, as this CTA's own are read there, too."""
        return self.tiles.split_k

    def place(self, parts: cute.Tensor, first: cute.Pointer) -> cute.Tensor:
        """This thread's place (VECTOR, NumVectors, CTA, TURN) in smem for each sender's sums of
        each part that this CTA stores."""
        size, num_parts = cute.size(parts, mode=[0]), cute.size(parts, mode=[1])
        c, threads = self.tiles, self.num_threads
        thread, _, _ = cute.arch.thread_idx()
        step = size * threads
        senders = self.num_senders
        shape = VECTOR, size // VECTOR, senders, ceil_div(num_parts, c.split_k), threads
        stride = 1, VECTOR * threads, step, senders * step, VECTOR
        layout = cute.make_layout(shape, stride=stride)
        return cute.make_tensor(first.align(4 * VECTOR), layout)[None, None, None, None, thread]

    @cute.jit
    def expect(self, parts: cute.Tensor, split: Int32) -> None:
        """Arm the barrier for all bytes that the other CTAs send."""
        c = self.tiles
        size, num_parts = cute.size(parts, mode=[0]), cute.size(parts, mode=[1])
        mine = (num_parts + c.split_k - 1 - split) // c.split_k
        if cute.arch.warp_idx() == 0:
            with cute.arch.elect_one():
                part_bytes = 4 * size * self.num_threads * (c.split_k - 1)
                cute.arch.mbarrier_arrive_and_expect_tx(self.sums[0], mine * part_bytes)

    @cute.jit
    def send(self, parts: cute.Tensor, place: cute.Tensor, split: Int32) -> None:
        """Send each CTA the sums of its parts; this CTA's own go to their place in its own smem."""
        c = self.tiles
        for part in cutlass.range_constexpr(cute.size(parts, mode=[1])):
            receiver, turn = part % c.split_k, part // c.split_k
            there = place[None, None, split, turn]
            if receiver == split:
                cute.autovec_copy(thread_vectors(parts[None, part]), there)
            else:
                self.send_part(parts[None, part], there, receiver)

    @cute.jit
    def send_part(self, part: cute.Tensor, there: cute.Tensor, receiver: int) -> None:
        """Send a part's sums (V) to CTA `receiver` of those that share K, which has a place for
        them where this CTA has one `there`, (VECTOR, NumVectors)."""
        at = cute.arch.block_idx_in_cluster() % self.cluster.size if self.cluster.size > 1 else 0
        words = cute.recast_tensor(thread_vectors(part), Int32)  # (VECTOR, NumVectors)
        for i in cutlass.range_constexpr(cute.size(words, mode=[1])):
            vector = tuple(words[j, i] for j in range(VECTOR))
            rank = receiver * self.cluster.size + at
            cute.arch.store_async_dsmem(there[None, i].iterator, vector, self.sums[0], rank)

    @cute.jit
    def store_parts(
        self, mma: WgmmaProduct, epilogue: PartStore, place: cute.Tensor, walk: StaticWalk
    ) -> None:
        """Add up and store every split_k-th part of the tile, beginning with part `walk.split`."""
        c = self.tiles
        row, step, column = self.origin(walk.tile_at(walk.start))
        num_parts = cute.size(epilogue.parts(mma.acc), mode=[1])
        per_row = c.tile_n // c.epi_n
        for turn in cutlass.range_constexpr(cute.size(place, mode=[3])):
            part = turn * c.split_k + walk.split
            if part < num_parts:
                total = cute.make_rmem_tensor(place.shape[:2], Float32)  # (VECTOR, NumVectors)
                total.fill(0.0)
                for peer in cutlass.range_constexpr(c.split_k):
                    total.store(total.load() + place[None, None, peer, turn].load())
                if cutlass.const_expr(turn == 0 or c.epi_stages == 1):
                    epilogue.wait(0)
                where = row + part // per_row * step, column + part % per_row
                values = cute.make_tensor(total.iterator, cute.make_layout(cute.size(total)))
                epilogue.store_part(values, turn % c.epi_stages, *where)


@dataclass(frozen=True)
class SplitKApart(SplitK):
    """A SplitK whose sums are sent to smem of their own, `sA` here: CTAs meet when they begin, and
    none waits until the others have read their rings. What a CTA adds itself stays in registers.

    The load warp, too, arrives at the cluster's barrier (`load_apart`).
    """

    @cute.jit
    def run(self, product: RoleProduct) -> None:
        cute.arch.cluster_arrive_relaxed()
        SplitK.run(self, product)

    @cute.jit
    def exchange(
        self, mma: WgmmaProduct, epilogue: PartStore, place: cute.Tensor, walk: Walk
    ) -> None:
        cute.arch.cluster_wait()  # its CTAs have initialised their barriers
        self.send(epilogue.parts(mma.acc), place, walk.split)
        self.sums.wait(0)
        self.store_parts(mma, epilogue, place, walk)

    @property
    def num_senders(self) -> int:
        return self.tiles.split_k - 1

    @cute.jit
    def send(self, parts: cute.Tensor, place: cute.Tensor, split: Int32) -> None:
        """Send each other CTA the sums of its parts, to this CTA's place among its senders."""
        for part in cutlass.range_constexpr(cute.size(parts, mode=[1])):
            receiver, turn = part % self.tiles.split_k, part // self.tiles.split_k
            if receiver != split:
                sender = split - Int32(split > receiver)
                self.send_part(parts[None, part], place[None, None, sender, turn], receiver)

    @cute.jit
    def store_parts(
        self, mma: WgmmaProduct, epilogue: PartStore, place: cute.Tensor, walk: StaticWalk
    ) -> None:
        """Add up and store every split_k-th part of the tile, beginning with part `walk.split`."""
        c, parts = self.tiles, epilogue.parts(mma.acc)
        row, step, column = self.origin(walk.tile_at(walk.start))
        per_row = c.tile_n // c.epi_n
        for part in cutlass.range_constexpr(cute.size(parts, mode=[1])):
            turn = part // c.split_k
            if walk.split == part % c.split_k:
                total = cute.make_rmem_tensor(place.shape[:2], Float32)  # (VECTOR, NumVectors)
                total.store(thread_vectors(parts[None, part]).load())
                for sender in cutlass.range_constexpr(self.num_senders):
                    total.store(total.load() + place[None, None, sender, turn].load())
                if cutlass.const_expr(turn == 0 or c.epi_stages == 1):
                    epilogue.wait(0)
                where = row + part // per_row * step, column + part % per_row
                values = cute.make_tensor(total.iterator, cute.make_layout(cute.size(total)))
                epilogue.store_part(values, turn % c.epi_stages, *where)


@cute.jit
def load_apart(load: cutlass.Constexpr[Callable[[], None]], apart: cutlass.Constexpr[bool]) -> None:
    """Run a load role's `load`, in a CTA whose MMA role is a SplitKApart if it is `apart`."""
    if cutlass.const_expr(apart):
        cute.arch.cluster_arrive_relaxed()
    load()
    if cutlass.const_expr(apart):
        cute.arch.cluster_wait()


# ---- through global memory
#
# A thread has the same elements of every tile, so a warp waits only for the warp of the same number
# in another CTA, and no CTA waits as a whole.


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
    def run(self, product: RoleProduct) -> None:
        mma, ab, epilogue, num_k_tiles, mC = product
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
        """Leave this warp's accumulators in its CTA's place in the workspace, and set its flag."""
        share = walk.share
        cute.copy(vector_copy(), thread_vectors(acc), self.place(acc, share))
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.store(self.flag(share), Int32(1), sem="release", scope="gpu")

    @cute.jit
    def add_others(self, acc: cute.Tensor, walk: StreamedWalk) -> None:
        """Add to the accumulators the sums that later shares computed of the rest of this tile, one
        after another, in the same order in every run.

        NOTE: through the smem of A. A tile that others share is the last of a share, so nothing
        more is loaded there; and the accumulators leave too few registers for the loads that hide
        L2's latency.
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
