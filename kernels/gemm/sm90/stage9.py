"""Stage 9: chosen per problem.

Idea: no tile is the best for all. One kernel takes what the stages before have built, cooperative
or ping-pong, any tile, cluster and order, and a config for each problem (kernels/gemm/choose.py
proposes, cutex/autotune.py confirms). Seven things are new, and small problems need them:

- `swap_ab`: wgmma computes at least 64 rows, so with M = 16 three quarters of it were for nothing.
  C^T = B A^T has N rows and M columns, which may be as few as 16. stmatrix transposes on the way
  out, so C is written as before.
- `split_k`: where there are fewer tiles than SMs, a cluster of CTAs shares the K of one tile. Each
  leaves its fp32 sums in its own smem, and each adds up an equal part of the tile from all of them,
  through distributed shared memory and always in the same order: no workspace, no second kernel,
  and the same bits in every run.
- `spread`: where the tiles nearly fill the SMs once, as many as there are SMs, which overlap
  (schedulers/spread.py). `column`: where all columns lie in one cluster, a tile for each, and no
  raster to look it up in (schedulers/one_column.py). With one tile a CTA nothing hides its way out,
  so up to 32 columns each warp stores its own rows, and waits for no other warp and for no TMA
  (`WarpStores`).
- Swapped, two CTAs may share a tile of the weights (`cluster_n`), each with half of the columns: L2
  is asked for 2 MB for each, not 3, at M = 128.
- The next kernel in the stream may start its CTAs when this one's end (programmatic dependent
  launch). Such a CTA asks at once, before its barriers, for the first 32 KB of what it streams, so
  that memory has work while one kernel ends and the other is not allowed to begin.
- With one tile a CTA, none loads faster than memory could serve all (schedulers/pace.py): SMs that
  get their answers sooner would go ahead, and what two ask of B at one time comes from L2 but once.
  Up to 32 columns each cluster asks for another K tile of B into L2, once its first loads are on
  their way. With more, a slot whose MMA is done may be loaded before the next slot is full.

Measured, times stage 8: 1.00 at 8192x8192x4096, where the choice is stage 8's own tile, 1.15 at
4096x4096x4096 (128x128), 1.5 at 2048x2048x2048, 2.5 with M = 16, 1.7 with M = 128. Beside the best
of cuBLAS and quack: 1.02 in the mean of seven large problems, 0.995 to 1.047; for few rows see
docs/facts.md. The pace gives 1.01 to 1.02 of it, 1.05 with N = 7168. Of the 31 us with M = 16,
N = K = 8192, memory is idle for 2, between one kernel's last load and the next one's first.

Tried, and left out: evicting the streamed operand from L2 first looks like 5 % at small M, but with
12 copies of the operands in turn instead of 2 it is nothing: it leaves parts of the copy before
last in L2, which the timing then finds. Starting CTAs at different places of K loses up to 10 %,
within windows of 8 K tiles 3 %: their requests of B are no longer merged on the way to L2.
Asking L2 for more than 32 KB ahead loses: it delays the CTAs that have yet to end. Two CTAs an SM,
the second waiting in the next kernel, gain nothing: of what its wait costs, the launch is no part.
Loading the weights before that wait, which only weights that nobody writes would allow, gains 1 %
more with M = 16 and nothing with M = 64 and 128.
"""

from __future__ import annotations

from dataclasses import replace

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync, warpgroup

from cutex.arch import arch as arch_named
from cutex.device.atoms.mma import Wgmma, transposed_slots_layout
from cutex.device.atoms.multicast import AbOperands, SharedRing, shared_operand
from cutex.device.atoms.tma import AbLoads, store_operand
from cutex.device.epilogue.stores import WarpgroupStores, WarpStores, warp_stores, warpgroup_stores
from cutex.device.pipeline import PipelineState, sync_cluster
from cutex.kernels.gemm.config import ELEMENT
from cutex.kernels.gemm.sm90.stage7 import Stage7
from cutex.kernels.gemm.sm90.stage8 import Stage8
from cutex.schedulers.one_column import OneColumn
from cutex.schedulers.pace import Pace, now, wait_until
from cutex.schedulers.persistent import StaticPersistent, Walk
from cutex.schedulers.spread import Spread

SUMS_BARRIER = 5  # all MMA warps of a CTA: 1 to 4 are the warpgroups' own and their turns
# of A, that each CTA asks for before its kernel may begin: more delays the one that still runs
BYTES_AHEAD = 32 * 1024
# up to which warps store sooner than TMA, though they write 32 bytes where it writes 128, memory is
# all that limits, and no MMA is worth looking ahead for
FEW_COLUMNS = 32
VECTOR = 4  # fp32 sums that move at a time: 16 bytes


class Stage9(Stage8):
    """
    barrier     arrives                                       waits
    (sums)      the MMA warps, their wgmma being done         the same, before sums overwrite A
    (cluster)   the MMA warps of all CTAs, having left their  the same, before they add up
                sums; and again when they have read them      the same, before the smem may go
    others as in stages 7 and 8

    smem: as in stages 7 and 8; with split_k the sums, tile_m * tile_n * 4, lie over the ring's A.
    """

    number = 9

    @property
    def tiles(self) -> StaticPersistent | OneColumn | Spread:
        c, tiles = self.config, super().tiles
        if c.spread:
            return Spread(tiles.num_ctas)
        if c.column:
            return OneColumn(c.tile_m, (c.cluster_m, c.cluster_n))
        return replace(tiles, split_k=c.split_k)

    def place(self, a: cpasync.TmaInfo, out: cpasync.TmaInfo) -> tuple[cpasync.TmaInfo, ...]:
        """With `spread`, from the first row of this CTA's tile on."""
        if not self.config.spread:
            return a, out
        first = self.tiles.first_row(out.tma_tensor)
        return tuple(
            cpasync.TmaInfo(x.atom, cute.domain_offset((first, 0), x.tma_tensor), x.smem_layout)
            for x in (a, out)
        )

    def stores(
        self, out: cpasync.TmaInfo, sC: cute.Tensor, mC: cute.Tensor
    ) -> WarpgroupStores | WarpStores:
        c = self.config
        if c.swap_ab and self.one_tile and self.few_columns:
            first_row = self.tiles.first_row(mC) if c.spread else Int32(0)
            return warp_stores(mC, sC, c.epi_stages, first_row)
        return warpgroup_stores(out, sC, c.epi_stages, transpose=c.swap_ab)

    def epilogue_slots(self, dtype: type[cutlass.Numeric]) -> cute.ComposedLayout:
        c = self.config
        if not c.swap_ab:
            return super().epilogue_slots(dtype)
        return transposed_slots_layout(dtype, 64, c.epi_n, c.epi_stages * c.mma_warpgroups)

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream) -> None:
        c = self.config
        if cutlass.const_expr(c.swap_ab):
            mA, mB = mB, mA
            mC = cute.make_tensor(mC.iterator, cute.select(mC.layout, mode=[1, 0]))  # (N, M)
        a = shared_operand(mA, self.slots(mA.element_type, c.tile_m), c.cluster_n)
        b = shared_operand(mB, self.slots(mB.element_type, c.tile_n), c.cluster_m)
        out = store_operand(mC, self.epilogue_slots(mC.element_type))
        self.kernel(a, b, out, mC).launch(
            grid=self.grid(mC),
            block=(self.num_threads, 1, 1),
            cluster=(c.cluster_m, c.cluster_n, c.split_k),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    @cute.jit
    def load_ahead(self, ab_operands: AbOperands, mC: cute.Tensor) -> None:
        """Let the next kernel start its CTAs, and ask for this tile's first A, as far as it can be
        done while the kernel before this one still runs.

        NOTE: should that kernel yet write A, then into L2, where the loads look.
        """
        cpasync.prefetch_descriptor(ab_operands.a.atom)
        cpasync.prefetch_descriptor(ab_operands.b.atom)
        if cutlass.const_expr(self.streams_a):
            cute.arch.griddepcontrol_launch_dependents()
            walk = self.tiles.walk(mC)
            loads = ab_operands.loads(walk.tile(walk.first), self.cluster)
            count = self.share(loads.num_k_tiles)
            first = walk.share * count
            for k_tile in cutlass.range(
                first, first + cutlass.min(count, self.tiles_ahead), unroll=1
            ):
                cute.prefetch(loads.a.atom, loads.a.gmem[None, k_tile])

    @property
    def streams_a(self) -> bool:
        """Whether A is what takes the time: tiles of few columns."""
        return self.config.swap_ab or self.one_tile

    @property
    def one_tile(self) -> bool:
        """Whether each cluster has one, whose place is its index."""
        return self.config.column or self.config.spread

    @property
    def few_columns(self) -> bool:
        return self.config.tile_n <= FEW_COLUMNS

    @property
    def cluster_columns(self) -> int:
        return self.config.tile_n * self.config.cluster_n

    @property
    def tiles_ahead(self) -> int:
        c = self.config
        return max(1, BYTES_AHEAD // (c.tile_m // c.cluster_n * c.tile_k * ELEMENT))

    @cute.jit
    def load_tiles(self, ab_operands: AbOperands, ab: SharedRing, mC: cute.Tensor) -> None:
        walk = self.tiles.walk(mC)
        cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(not self.streams_a):
            cute.arch.griddepcontrol_launch_dependents()
        fill = ab.producer()
        if cutlass.const_expr(self.one_tile):
            loads = ab_operands.loads(walk.tile(walk.first), self.cluster)
            fill = self.load_at_pace(loads, ab, fill, mC)
        else:
            for index in cutlass.range(walk.first, walk.end, walk.step, unroll=1):
                loads = ab_operands.loads(walk.tile(index), self.cluster)
                count = self.share(loads.num_k_tiles)
                first = walk.share * count
                # NOTE: a share may reach past K, where TMA fills in zeros
                fill = self.fill(loads, ab, fill, first, first + count)
        ab.drain(fill)

    @cute.jit
    def load_at_pace(
        self, loads: AbLoads, ab: SharedRing, fill: PipelineState, mC: cute.Tensor
    ) -> PipelineState:
        """Load all of K: a ring of it at once, the rest no sooner than memory can bring it to all
        CTAs alike (schedulers/pace.py)."""
        c = self.config
        start = now()
        ring = cutlass.min(loads.num_k_tiles, c.num_stages)
        fill = self.fill(loads, ab, fill, end=ring)
        if cutlass.const_expr(self.cluster_columns <= FEW_COLUMNS):
            self.ask_for_b(loads)
        step_bytes = cute.size(mC, mode=[0]) * (c.tile_k * ELEMENT)
        step = self.pace.step_ns(step_bytes, loads.num_k_tiles)
        due = start + self.pace.lead_ns(step, c.num_stages)
        for k_tile in cutlass.range(ring, loads.num_k_tiles, unroll=1):
            full = ab.acquire(fill)
            if step > 0:
                wait_until(due)
                due += step
            loads.load(k_tile, fill.slot, full)
            fill.advance()
        return fill

    @cute.jit
    def ask_for_b(self, loads: AbLoads) -> None:
        """Ask for this cluster's share of B into L2, before all load it: a K tile."""
        _, _, share = cute.arch.block_idx()
        if share < loads.num_k_tiles:
            cute.prefetch(loads.b.atom, loads.b.gmem[None, share])

    @property
    def pace(self) -> Pace:
        """Measured: with more columns L2 and the tensor cores take their part of the time."""
        share = 0.93 if self.cluster_columns <= FEW_COLUMNS else 0.89
        return Pace.of(arch_named(self.arch), share)

    def share(self, num_k_tiles: Int32) -> Int32:
        """K tiles of one of the split_k CTAs."""
        return (num_k_tiles + (self.config.split_k - 1)) // self.config.split_k

    @cute.jit
    def compute_tiles(
        self, mma: Wgmma, ab: SharedRing, stores: WarpgroupStores, num_k_tiles: Int32, mC
    ) -> None:
        c = self.config
        if cutlass.const_expr(c.split_k > 1):
            self.compute_share(mma, ab, stores, self.share(num_k_tiles), mC)
        elif cutlass.const_expr(c.pingpong):
            Stage8.compute_tiles(self, mma, ab, stores, num_k_tiles, mC)
        else:
            Stage7.compute_tiles(self, mma, ab, stores, num_k_tiles, mC)

    @cute.jit
    def issue(
        self, mma: Wgmma, ab: SharedRing, take: PipelineState, num_k_tiles: Int32
    ) -> tuple[PipelineState, PipelineState]:
        """As in stage 6; but where memory limits, a slot is not kept until the next is full.

        An MMA is followed by another, if that one's slot is full, so that the tensor cores go on;
        if it is not, there is time to wait for the MMA, and its slot can be loaded meanwhile.
        """
        if cutlass.const_expr(not self.one_tile or self.few_columns):
            return Stage8.issue(self, mma, ab, take, num_k_tiles)
        done = PipelineState(take.num_slots, take.slot, take.phase)
        ab.wait_full(take)
        mma.issue(take.slot, accumulate=False)
        take.advance()
        for _ in cutlass.range(1, num_k_tiles, unroll=1):
            full = ab.is_full(take)
            if not full:
                warpgroup.wait_group(0)
                ab.release(done)
                ab.wait_full(take)
            mma.issue(take.slot, accumulate=True)
            take.advance()
            if full:
                warpgroup.wait_group(1)
                ab.release(done)
            done.advance()
        return done, take

    @cute.jit
    def compute_share(
        self, mma: Wgmma, ab: SharedRing, stores: WarpgroupStores, num_k_tiles: Int32, mC
    ) -> None:
        """A share of the K of one tile, and a share of its sums."""
        walk = self.tiles.walk(mC)
        self.mainloop(mma, ab, ab.consumer(), num_k_tiles)
        threads = self.mma_warps.threads
        cute.arch.barrier(barrier_id=SUMS_BARRIER, number_of_threads=threads)
        first = cute.recast_ptr(mma.sA.iterator, dtype=Float32)
        self.leave_sums(mma, stores, first, walk)
        sync_cluster()
        self.store_share(mma, stores, first, walk)
        sync_cluster()

    def sums(self, mma: Wgmma, first: cute.Pointer) -> cute.Tensor:
        """Where this thread leaves its accumulators, in the smem from `first` on: (VECTOR,
        NumVectors), the vectors of all threads side by side."""
        thread, _, _ = cute.arch.thread_idx()
        threads, count = self.mma_warps.threads, cute.size(mma.tCrAcc) // VECTOR
        layout = cute.make_layout(
            (VECTOR, count, threads), stride=(1, VECTOR * threads, VECTOR)
        )  # (VECTOR, NumVectors, THREAD)
        return cute.make_tensor(first, layout)[None, None, thread]

    @cute.jit
    def leave_sums(
        self, mma: Wgmma, stores: WarpgroupStores, first: cute.Pointer, walk: Walk
    ) -> None:
        """Put into smem what the other CTAs of the cluster add up."""
        parts = self.vectors(stores.parts(mma.tCrAcc))  # (VECTOR, NumVectors, PART)
        sums = cute.logical_divide(
            self.sums(mma, first), (None, cute.size(parts, mode=[1]))
        )  # (VECTOR, (NumVectors, PART))
        for part in cutlass.range_constexpr(cute.size(parts, mode=[2])):
            if part % self.config.split_k != walk.share:
                cute.autovec_copy(parts[None, None, part], sums[None, (None, part)])

    def vectors(self, parts: cute.Tensor) -> cute.Tensor:
        """(V, PART) as (VECTOR, NumVectors, PART)."""
        size, count = cute.size(parts, mode=[0]), cute.size(parts, mode=[1])
        return cute.make_tensor(parts.iterator, cute.make_layout((VECTOR, size // VECTOR, count)))

    @cute.jit
    def store_share(
        self, mma: Wgmma, stores: WarpgroupStores, first: cute.Pointer, walk: Walk
    ) -> None:
        """Add up and store every split_k-th part of the tile, beginning with this CTA's share."""
        c = self.config
        row, step, column = self.origin(walk.tile(walk.first))
        parts = self.vectors(stores.parts(mma.tCrAcc))  # (VECTOR, NumVectors, PART)
        vectors = cute.size(parts, mode=[1])
        per_row = c.tile_n // c.epi_n
        vector = cute.make_copy_atom(CopyUniversalOp(), Float32, num_bits_per_copy=32 * VECTOR)
        for part in cutlass.range_constexpr(cute.size(parts, mode=[2])):
            if part % c.split_k == walk.share:
                total = cute.make_rmem_tensor((VECTOR, vectors), Float32)
                total.fill(0.0)
                for peer in cutlass.range_constexpr(c.split_k):
                    values = cute.make_rmem_tensor_like(total)
                    if peer == part % c.split_k:  # this CTA
                        values.store(parts[None, None, part].load())
                    else:
                        theirs = self.sums(mma, cute.arch.map_dsmem_ptr(first, peer))
                        theirs = cute.logical_divide(theirs, (None, vectors))[None, (None, part)]
                        cute.copy(vector, theirs, values)
                    total.store(total.load() + values.load())
                stores.wait(0)
                flat = cute.make_tensor(total.iterator, cute.make_layout(cute.size(total)))
                stores.store_part(flat, 0, row + part // per_row * step, column + part % per_row)
