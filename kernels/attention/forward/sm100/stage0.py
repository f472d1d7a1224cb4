"""Stage 0: the least that works. S and O in tensor memory, two products by tcgen05.mma, a softmax
between them, all in order.

Idea: as on Hopper, O = softmax(scale * Q K^T) V never needs all scores at once (FlashAttention).
But accumulators are in tensor memory, 128 lanes of 512 columns, one row per lane: a thread has a
whole row of S, so that its largest score and its sum take no shuffles, and no registers hold O. A
thread loads what it needs of either, and stores what it changes.

A CTA is four warps and 128 rows of Q. For each block of 128 keys one warp starts the TMA loads of K
and V, waits, and starts Q K^T; all threads raise their row's reference to the largest score so far,
scale their row of O in tensor memory by what that changes, turn S into P = exp(S - reference), and
put P into smem, from where P V reads it.

A block (head_dim 128) has 8.4 MFLOP, 1024 cycles of tcgen05.mma, and 16384 exponentials, 1024
cycles of MUFU at 16 a cycle: in order the two alone allow half of the peak, and between them are
64 KB from L2, and O, which goes to registers and back every time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import allocate_slots, contiguous_rows_layout, slots_layout
from cutex.device.atoms.tmem import LANES, Tmem, fence_after_sync, fence_before_sync
from cutex.device.atoms.umma import Umma, UmmaProduct, commit
from cutex.device.attention.block_info import Blocks
from cutex.device.attention.mask import Mask
from cutex.device.attention.row_softmax import RowSoftmax
from cutex.device.attention.scores import ScoreOps
from cutex.device.attention.tmem_rows import PART, ScoreRow, columns_of, rounded, scale_columns
from cutex.device.pipeline import Barrier, Ring, publish_barriers
from cutex.device.work_tile import WorkTile
from cutex.kernels.attention.forward.launch import Attention, Loads, Operands, Out, Slots
from cutex.kernels.attention.forward.sm100.ladder import Sm100LadderConfig
from cutex.kernels.attention.forward.sm100.part import Part, Probabilities


class Barriers(NamedTuple):
    q_loaded: Barrier
    loaded: Barrier  # K and V of a block
    mma_done: Barrier


class SmemP(NamedTuple):
    """The probabilities of a Q tile in smem, as operand A of the second product."""

    sP: cute.Tensor  # (128, bN)
    tCrA: cute.Tensor  # (MMA, MMA_M, MMA_K) descriptors

    @property
    def dtype(self) -> type[cutlass.Numeric]:
        return self.sP.element_type

    @cute.jit
    def store(self, probabilities: cute.Tensor, part: cutlass.Constexpr[int]) -> None:
        """Store part `part` of this thread's row, (PART)."""
        thread, _, _ = cute.arch.thread_idx()
        row = self.sP[thread % LANES, None]
        cute.autovec_copy(probabilities, cute.local_tile(row, (PART,), (part,)))

    def fence(self) -> None:
        """Fence the stores, before the barrier after which the MMA reads them."""
        cute.arch.fence_view_async_shared()


class Stage0(Attention):
    """The kernel of stage 0: its barriers and its memory.

    barrier   arrives                                  waits
    q_loaded  1: warp 0, and the bytes by TMA          all threads, before the first product
    loaded    1: warp 0, and the bytes by TMA          all threads, before a block's products
    mma_done  1: the commit of a product               all threads, before they use its result
    (CTA)     all threads, P being there, O scaled     all threads, before P V
    (CTA)     all threads, having seen P V done        all threads, before the next load
    (CTA)     all threads, their rows being stored     all threads, before tensor memory is freed

    smem      bytes (head_dim 128)              tmem   columns
    sQ        tile_m * head_dim * 2    32768    S      tile_n      128
    sK        tile_n * head_dim * 2    32768    O      head_dim    128
    sV        tile_n * head_dim * 2    32768
    sP        tile_m * tile_n * 2      32768
    barriers  24, and 4 for the address of tmem
    """

    arch = "sm_100a"
    number = 0
    q_rows = LANES
    config: Sm100LadderConfig

    @property
    def num_threads(self) -> int:
        return LANES

    @property
    def rescale_threshold(self) -> float:
        """The powers of two by which scores may exceed their reference before O is scaled: -inf, so
        that it always is."""
        return -float("inf")

    def barriers(self, smem: SmemAllocator) -> Iterable[Barrier | Ring]:
        return Barriers(
            Barrier.allocate(smem, "q loaded", arrivals=1),
            Barrier.allocate(smem, "k and v loaded", arrivals=1),
            Barrier.allocate(smem, "mma done", arrivals=1),
        )

    @cute.kernel
    def kernel(self, operands: Operands, out: Out, scale: Float32) -> None:
        smem = SmemAllocator()
        slots = operands.allocate(smem)
        sP = self.p_slots(smem, operands.dtype)
        barriers = self.barriers(smem)
        tmem = Tmem.allocate(smem, columns=self.config.columns)
        warp = cute.arch.warp_idx()
        if warp == 0:
            tmem.acquire()
        publish_barriers(barriers)
        pointer = tmem.pointer()

        tile = self.own_tile()
        blocks = self.n_blocks(operands, tile)
        self.work(operands, slots, sP, barriers, out, pointer, tile, blocks, scale)
        fence_before_sync()
        cute.arch.sync_threads()
        if warp == 0:
            fence_after_sync()
            tmem.free(pointer)

    @cute.jit
    def work(
        self, operands, slots: Slots, sP, barriers, out: Out, pointer, tile: WorkTile, blocks, scale
    ) -> None:
        """Compute this CTA's tile, between the allocation of tensor memory and its release."""
        part = self.part(operands, slots, sP, tile, 0, pointer, scale)
        self.mainloop(operands.loads(slots, tile), part, barriers, tile, blocks)
        self.store(part, out, tile, 0, blocks)

    # ---- a tile and its parts

    @cute.jit
    def query(self, tile: WorkTile, t: Int32 | int) -> Int32:
        """The row of the head that this thread has in Q tile t."""
        thread, _, _ = cute.arch.thread_idx()
        return (tile.m * self.config.q_tiles + t) * LANES + thread % LANES

    @cute.jit
    def part(
        self,
        operands: Operands,
        slots: Slots,
        sP,
        tile: WorkTile,
        t: Int32 | int,
        tmem,
        scale: Float32,
    ) -> Part:
        """The Part of Q tile t."""
        c, dtype = self.config, operands.dtype
        qk_mma = Umma(LANES, c.tile_n, dtype)
        pv_mma = Umma(LANES, c.head_dim, dtype, b_major=OperandMajorMode.MN)
        transposed = contiguous_rows_layout(dtype, c.head_dim, c.tile_n, c.num_stages)
        sVt = cute.make_tensor(slots.sV.iterator, transposed.outer)  # (D, bN, SLOT)
        s_column, o_column = t * c.tile_n, c.o_column + t * c.head_dim
        tSrQ = qk_mma.a_slots(slots.sQ)[None, None, None, t]  # (MMA, MMA_M, MMA_K)
        lengths = operands.seqlen_q, operands.seqlen_k
        mask = Mask(self.band, c.tile_n, *lengths, (self.query(tile, t),))
        ops = ScoreOps(mask, scale, None, None, None, tile.batch, (tile.head,))
        softmax = RowSoftmax.start(scale, self.rescale_threshold)
        acc_s, acc_o = qk_mma.accumulator(tmem), pv_mma.accumulator(tmem)
        return Part(
            UmmaProduct(qk_mma, tSrQ, qk_mma.b_slots(slots.sK), acc_s),
            UmmaProduct(pv_mma, None, pv_mma.b_slots(sVt), acc_o),
            self.probabilities(pv_mma, sP, tmem, s_column, dtype),
            s_column,
            o_column,
            ScoreRow(tmem, c.tile_n, softmax, ops),
            cute.make_rmem_tensor(cute.make_layout(1), Float32),
        )

    def p_slots(self, smem: SmemAllocator, dtype: type[cutlass.Numeric]) -> cute.Tensor:
        """The smem slots of P, (128, bN, SLOT)."""
        return allocate_slots(smem, dtype, slots_layout(dtype, LANES, self.config.tile_n, 1, 128))

    def probabilities(self, pv_mma: Umma, sP, tmem, column, dtype) -> Probabilities:
        tCrA = pv_mma.a_slots(sP)[None, None, None, 0]  # (MMA, MMA_M, MMA_K)
        return SmemP(sP[None, None, 0], tCrA)

    # ---- over the keys

    @cute.jit
    def mainloop(
        self, loads: Loads, part: Part, barriers: Barriers, tile: WorkTile, blocks: Blocks
    ) -> None:
        c = self.config
        q_loaded, loaded, mma_done = barriers
        warp = cute.arch.warp_idx()
        if warp == 0:
            with cute.arch.elect_one():
                q_loaded.arrive_expecting(c.q_bytes)
            loads.q.load(tile.m, 0, q_loaded[0])
        q_loaded.wait(0)
        phase = Int32(0)
        for i in cutlass.range(blocks.end - blocks.first, unroll=1):
            n_block = blocks.end - 1 - i
            if warp == 0:
                with cute.arch.elect_one():
                    loaded.arrive_expecting(2 * c.k_bytes)
                loads.k.load(n_block, 0, loaded[0])
                loads.v.load(n_block, 0, loaded[0])
            loaded.wait(phase)
            phase ^= 1
            if warp == 0:
                part.start_scores(Int32(0))
                commit(mma_done[0], pair=False)
            mma_done.wait(0)
            fence_after_sync()
            self.exponentiate(part, n_block, i == 0, "masked")
            part.p.fence()
            fence_before_sync()
            cute.arch.sync_threads()
            if warp == 0:
                fence_after_sync()
                part.start_outputs(Int32(0), i > 0)
                commit(mma_done[0], pair=False)
            mma_done.wait(1)
            fence_after_sync()
            cute.arch.sync_threads()

    @cute.jit
    def exponentiate(
        self, part: Part, n_block: Int32, is_first: Boolean, kind: cutlass.Constexpr[str]
    ) -> None:
        """Turn the scores of a block into probabilities, and scale O where the reference moves.

        kind: "masked", or "clean" where no score is to be left out.
        """
        row = part.row
        found = row.search(part.s_column, n_block, kind == "masked")
        moved = row.softmax.raise_reference(found[0], part.factors)
        if moved and not is_first:
            scale_columns(row.tmem, part.o_column, self.config.head_dim, part.factors[0])
        row.exponentials(part.s_column, found, part.p.dtype, part.p.store)

    # ---- out

    @cute.jit
    def store(self, part: Part, out: Out, tile: WorkTile, t: Int32 | int, blocks: Blocks) -> None:
        """Divide O by the sums, and store it and the LSE, one row per thread."""
        c, factors = self.config, part.factors
        lse = cute.make_rmem_tensor(cute.make_layout(1), Float32)
        part.row.softmax.finish((), factors, lse)
        query = self.query(tile, t)
        parts = columns_of(part.row.tmem, part.o_column, c.head_dim)
        for i in cutlass.range_constexpr(parts.num_parts):
            values = cute.make_rmem_tensor(parts.tTR_cAcc.shape, Float32)
            values.fill(0.0)
            if blocks.end > blocks.first:
                parts.start_load_into(values, i)
                parts.wait_loads()
            for k in cutlass.range_constexpr(PART):
                values[k] *= factors[0]
            if query < out.mO.shape[1]:
                row = out.mO[tile.batch, query, tile.head, None]  # (D)
                x = rounded(values, out.mO.element_type)
                cute.autovec_copy(x, cute.local_tile(row, (PART,), (i,)))
        if query < out.mO.shape[1]:
            out.mLSE[tile.batch, tile.head, query] = lse[0]
