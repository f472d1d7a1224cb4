"""The MMA role of CTAs that share the K of one tile: they send each other their sums.

Each of these CTAs adds up and stores every split_k-th part of the tile. The others send it
their sums of these parts by st.async, whose bytes count on a barrier of the receiver: no thread
waits for another CTA's smem to answer, and no fence for the memory of the whole GPU, as a cluster
barrier that releases memory has it. A thread has the same elements in every CTA, so what it
receives is what the same thread of another CTA sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute

from cutex.device.atoms.multicast import Cluster, SharedRing
from cutex.device.atoms.wgmma import WgmmaProduct
from cutex.device.epilogue.sm90.fused_store import ElementStore, FusedStore
from cutex.device.epilogue.sm90.tma_store import WarpgroupStore
from cutex.device.pipeline import Barrier
from cutex.kernels.gemm.config import ceil_div
from cutex.kernels.gemm.signature import tile_counts
from cutex.kernels.gemm.sm90.load import k_share
from cutex.kernels.gemm.sm90.mma import VECTOR, MmaRole, thread_vectors
from cutex.kernels.gemm.sm90.roles import Walk, mainloop
from cutex.schedulers.persistent import StaticWalk

PartStore = FusedStore | ElementStore | WarpgroupStore


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
    def run(
        self,
        mma: WgmmaProduct,
        ab: SharedRing,
        epilogue: PartStore,
        num_k_tiles: Int32,
        mC: cute.Tensor,
    ) -> None:
        walk = self.scheduler.walk(tile_counts(self.tiles, mC))
        parts = epilogue.parts(mma.acc)  # (V, PART)
        place = self.place(parts, cute.recast_ptr(self.sA.iterator, dtype=Float32))
        self.expect(parts, walk.split)
        count = k_share(self.tiles, num_k_tiles)
        self.compute(mma, ab, walk, count)
        # NOTE: relaxed: it says that this warp's wgmma have read the ring, and publishes no data
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
        self.send(parts, place, walk.split)
        self.sums.wait(0)
        self.store_parts(mma, epilogue, place, walk)

    def compute(self, mma: WgmmaProduct, ab: SharedRing, walk: Walk, count: Int32) -> None:
        """Run the MMAs of this CTA's share of K, `count` K tiles."""
        mainloop(mma, ab, ab.consumer(), count, self.issue)

    def place(self, parts: cute.Tensor, first: cute.Pointer) -> cute.Tensor:
        """This thread's place (VECTOR, NumVectors, CTA, TURN) in smem for the sums of each CTA, of
        each part that this one stores."""
        size, num_parts = cute.size(parts, mode=[0]), cute.size(parts, mode=[1])
        c, threads = self.tiles, self.num_threads
        thread, _, _ = cute.arch.thread_idx()
        step = size * threads
        shape = VECTOR, size // VECTOR, c.split_k, ceil_div(num_parts, c.split_k), threads
        stride = 1, VECTOR * threads, step, c.split_k * step, VECTOR
        layout = cute.make_layout(shape, stride=stride)
        return cute.make_tensor(first.align(4 * VECTOR), layout)[None, None, None, None, thread]

    @cute.jit
    def expect(self, parts: cute.Tensor, split: Int32) -> None:
        """Arm the barrier for all that the other CTAs send this one."""
        c = self.tiles
        size, num_parts = cute.size(parts, mode=[0]), cute.size(parts, mode=[1])
        mine = (num_parts + c.split_k - 1 - split) // c.split_k
        if cute.arch.warp_idx() == 0:
            with cute.arch.elect_one():
                part_bytes = 4 * size * self.num_threads * (c.split_k - 1)
                cute.arch.mbarrier_arrive_and_expect_tx(self.sums[0], mine * part_bytes)

    @cute.jit
    def send(self, parts: cute.Tensor, place: cute.Tensor, split: Int32) -> None:
        """Send each CTA the sums of its parts; keep this one's in its own smem, where they have a
        place, too."""
        c = self.tiles
        at = cute.arch.block_idx_in_cluster() % self.cluster.size if self.cluster.size > 1 else 0
        for part in cutlass.range_constexpr(cute.size(parts, mode=[1])):
            receiver, turn = part % c.split_k, part // c.split_k
            values = thread_vectors(parts[None, part])  # (VECTOR, NumVectors)
            words = cute.recast_tensor(values, Int32)
            there = place[None, None, split, turn]
            if receiver == split:
                cute.autovec_copy(values, there)
            else:
                for i in cutlass.range_constexpr(cute.size(words, mode=[1])):
                    vector = tuple(words[j, i] for j in range(VECTOR))
                    to = there[None, i].iterator
                    rank = receiver * self.cluster.size + at
                    cute.arch.store_async_dsmem(to, vector, self.sums[0], rank)

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
