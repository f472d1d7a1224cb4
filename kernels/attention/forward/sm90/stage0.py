"""Stage 0: the least that works. Two products by wgmma, a softmax between them, all in order.

Idea: O = softmax(scale * Q K^T) V never needs all scores at once. A CTA keeps 128 rows of Q and
takes the keys by 128: it computes S = Q K^T, raises each row's reference to the largest score so
far, scales what it has summed up down to it, turns S into P = exp(S - reference) and adds P V to O
(FlashAttention).

A CTA is two warpgroups of 64 rows each, which share K and V. One warp starts the TMA loads of a
block of K and V, all wait for them, run the first product, the softmax and the second product, and
only then may the next load overwrite the buffers. P goes to smem, from where wgmma reads it as it
reads Q. Blocks that no row sees are not loaded; all others are masked, needed or not.

A block of 128x128 (head_dim 128) is 64 KB of K and V, some 1400 cycles of L2 at 48 bytes a cycle
and 600 of latency; 8.4 MFLOP, 2048 cycles of wgmma; 16384 exponentials, 1024 cycles of MUFU at 16 a
cycle, among the 671 instructions of a warp's step, 1342 issue slots on each scheduler, which has
two warps. In order that adds up to 5400, of which the tensor cores work 38 %.

Measured: 314 TFLOPS with 16384 tokens, 277 causal with 4096.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import allocate_slots, contiguous_rows_layout, slots_layout
from cutex.device.atoms.wgmma import WARPGROUP, Wgmma, WgmmaProduct
from cutex.device.attention.block_info import Blocks
from cutex.device.attention.mask import Mask
from cutex.device.attention.softmax import LOG2_E, Softmax, rows_of
from cutex.device.epilogue.vector_store import store_vectors
from cutex.device.pipeline import Barrier, Ring, publish_barriers
from cutex.device.work_tile import WorkTile
from cutex.kernels.attention.forward.launch import Attention, Loads, Operands, Out, Slots
from cutex.kernels.attention.forward.sm90.config import WARPGROUP_ROWS

P_BARRIER = 1  # the first of one named barrier for each warpgroup; 0 is the whole CTA's


class Barriers(NamedTuple):
    q_loaded: Barrier
    loaded: Barrier  # K and V of a block


@cute.jit
def round_to_smem(acc: cute.Tensor, mma: Wgmma, sX: cute.Tensor, barrier: Int32) -> None:
    """Round a warpgroup's accumulator into sX (64, columns), which wgmma or TMA may read when this
    returns. All threads of the warpgroup call it; `barrier` is theirs."""
    thread, _, _ = cute.arch.thread_idx()
    to_smem = cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), sX.element_type)
    r2s = cute.make_tiled_copy_C(to_smem, mma.tiled())
    tRS_sX = r2s.get_slice(thread % WARPGROUP).partition_D(sX)  # (R2S, R2S_M, R2S_N)
    tRS_rX = cute.make_rmem_tensor(tRS_sX.shape, sX.element_type)
    flat = cute.make_layout(cute.size(acc))
    rX, rAcc = (cute.make_tensor(x.iterator, flat) for x in (tRS_rX, acc))
    rX.store(rAcc.load().to(sX.element_type))
    cute.copy(r2s, tRS_rX, tRS_sX)
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)


class SmemP(NamedTuple):
    """The probabilities of a warpgroup's rows in smem, as operand A of the second product."""

    qk_mma: Wgmma
    sP: cute.Tensor  # (64, bN)
    tCrA: cute.Tensor  # (MMA, MMA_M, MMA_K) descriptors
    barrier: Int32

    @cute.jit
    def write(self, acc: cute.Tensor) -> None:
        """Round the first product's accumulator, and write it to sP."""
        round_to_smem(acc, self.qk_mma, self.sP, self.barrier)


class Part(NamedTuple):
    """A warpgroup's 64 rows of a tile: their two products, and the softmax between them."""

    qk: WgmmaProduct  # Q K^T, into an accumulator of each block's own
    pv: WgmmaProduct  # O += P V
    p: SmemP
    mask: Mask
    softmax: Softmax
    factors: cute.Tensor  # (2) the factors of the rows of O

    @property
    def acc_o(self) -> cute.Tensor:
        """O, (MMA, 1, 1) fp32 registers."""
        return self.pv.acc

    @cute.jit
    def scale_o(self, when: Boolean) -> None:
        if when:
            rO = rows_of(self.acc_o)
            for r in cutlass.range_constexpr(2):
                for column in cutlass.range_constexpr(cute.size(rO, mode=[1])):
                    rO[r, column] *= self.factors[r]


class Stage0(Attention):
    """The kernel of stage 0: its barriers and its memory.

    barrier   arrives                           waits
    q_loaded  1: warp 0, and the bytes by TMA   all threads, before the first product
    loaded    1: warp 0, and the bytes by TMA   all threads, before a block's products
    (P)       all threads of a warpgroup        the same, before P V
    (CTA)     all threads                       all threads, before the next load

    smem      bytes (head_dim 128)
    sQ        tile_m * head_dim * 2             32768
    sK        tile_n * head_dim * 2             32768
    sV        tile_n * head_dim * 2             32768
    sP        tile_m * tile_n * 2               32768
    barriers  16
    """

    arch = "sm_90a"
    number = 0
    q_rows = WARPGROUP_ROWS

    @property
    def num_threads(self) -> int:
        return self.config.warpgroups * WARPGROUP

    def rescale_threshold(self, dtype: type[cutlass.Numeric]) -> float:
        """The powers of two by which scores may exceed their reference before O is scaled: -inf, so
        that it always is."""
        return -float("inf")

    def barriers(self, smem: SmemAllocator) -> Iterable[Barrier | Ring]:
        return Barriers(
            Barrier.allocate(smem, "q loaded", arrivals=1),
            Barrier.allocate(smem, "k and v loaded", arrivals=1),
        )

    @cute.kernel
    def kernel(self, operands: Operands, out: Out, scale: Float32) -> None:
        smem = SmemAllocator()
        slots = operands.allocate(smem)
        p = self.probabilities(smem, operands.dtype)
        barriers = self.barriers(smem)
        publish_barriers(barriers)

        tile = self.own_tile()
        part = self.part(operands, slots, p, tile, scale)
        blocks = self.n_blocks(operands, tile)
        self.mainloop(operands.loads(slots, tile), part, barriers, tile, blocks)
        self.store(part, out, tile)

    # ---- a tile and its parts

    @cute.jit
    def warpgroup(self) -> Int32:
        """The index of this thread's warpgroup."""
        thread, _, _ = cute.arch.thread_idx()
        return cute.arch.make_warp_uniform(thread // WARPGROUP)

    @cute.jit
    def rows(self, tile: WorkTile) -> tuple[Int32, Int32]:
        """The two rows of the head that this thread holds in an accumulator."""
        thread, _, _ = cute.arch.thread_idx()
        first = tile.m * self.config.tile_m + thread // 32 * 16 + thread % 32 // 4
        return first, first + 8

    @cute.jit
    def part(
        self, operands: Operands, slots: Slots, p, tile: WorkTile, scale: Float32, q_slot: Int32 = 0
    ) -> Part:
        c = self.config
        dtype = operands.dtype
        thread, _, _ = cute.arch.thread_idx()
        qk_mma, pv_mma = self.qk_mma(dtype), self.pv_mma(dtype)
        tSrK = qk_mma.b_slots(slots.sK)  # (MMA, MMA_N, MMA_K, SLOT)
        transposed = contiguous_rows_layout(dtype, c.head_dim, c.tile_n, c.num_stages)
        sVt = cute.make_tensor(slots.sV.iterator, transposed.outer)  # (D, bN, SLOT)
        tOrV = pv_mma.b_slots(sVt)  # (MMA, MMA_N, MMA_K, SLOT)
        tSrQ = qk_mma.a_slots(slots.sQ)  # (MMA, MMA_M, MMA_K, WG * SLOT)
        tSrQ = tSrQ[None, None, None, q_slot * c.warpgroups + self.warpgroup()]
        lengths = operands.seqlen_q, operands.seqlen_k
        mask = Mask(self.band, c.tile_n, *lengths, self.rows(tile), thread % 4)
        softmax = Softmax.start(scale * LOG2_E, self.rescale_threshold(dtype))
        softmax.reference.fill(-Float32.inf)
        softmax.sums.fill(0.0)
        acc_o = pv_mma.accumulator()
        acc_o.fill(0.0)
        factors = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        qk = WgmmaProduct(qk_mma, tSrQ, tSrK, None)
        pv = WgmmaProduct(pv_mma, p.tCrA, tOrV, acc_o)
        return Part(qk, pv, p, mask, softmax, factors)

    def qk_mma(self, dtype: type[cutlass.Numeric]) -> Wgmma:
        return Wgmma(self.config.tile_n, dtype)

    def pv_mma(self, dtype: type[cutlass.Numeric]) -> Wgmma:
        return Wgmma(self.config.head_dim, dtype, b_major=OperandMajorMode.MN)

    @cute.jit
    def probabilities(self, smem: SmemAllocator, dtype: type[cutlass.Numeric]) -> SmemP:
        c = self.config
        layout = slots_layout(dtype, WARPGROUP_ROWS, c.tile_n, c.warpgroups, swizzle=128)
        sP = allocate_slots(smem, dtype, layout)  # (64, bN, WG)
        mine = self.warpgroup()
        tCrA = self.pv_mma(dtype).a_slots(sP)[None, None, None, mine]
        return SmemP(self.qk_mma(dtype), sP[None, None, mine], tCrA, P_BARRIER + mine)

    # ---- over the keys

    @cute.jit
    def mainloop(
        self, loads: Loads, part: Part, barriers: Barriers, tile: WorkTile, blocks: Blocks
    ) -> None:
        c = self.config
        q_loaded, loaded = barriers
        warp = cute.arch.warp_idx()
        if warp == 0:
            with cute.arch.elect_one():
                q_loaded.arrive_expecting(c.q_bytes)
            self.load_q(loads, tile, q_loaded[0])
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
            acc_s = part.qk.mma.accumulator()
            part.qk.into(acc_s).issue(0, accumulate=False)
            warpgroup.wait_group(0)
            part.scale_o(self.exponentiate(part, acc_s, n_block, "masked"))
            part.p.write(acc_s)
            part.pv.issue(0, accumulate=True)
            warpgroup.wait_group(0)
            cute.arch.sync_threads()

    @cute.jit
    def exponentiate(
        self, part: Part, acc_s: cute.Tensor, n_block: Int32, kind: cutlass.Constexpr[str]
    ) -> Boolean:
        """Turn the scores of a block into exponentials; return whether O must be scaled.

        kind: "masked", or "clean" where no score is to be left out.
        """
        scores = rows_of(acc_s)
        if cutlass.const_expr(kind == "masked"):
            part.mask.apply(scores, n_block)
        return part.softmax.next(scores, part.factors)

    @cute.jit
    def load_q(self, loads: Loads, tile: WorkTile, full: cute.Pointer, slot: Int32 = 0) -> None:
        """Start the loads of a tile's rows, 64 for each warpgroup. A whole warp calls it."""
        wgs = self.config.warpgroups
        for wg in cutlass.range_constexpr(wgs):
            loads.q.load(tile.m * wgs + wg, slot * wgs + wg, full)

    # ---- out

    @cute.jit
    def store(self, part: Part, out: Out, tile: WorkTile) -> None:
        """Divide O by the sums, and store it and the LSE."""
        self.normalize(part, out, tile)
        thread, _, _ = cute.arch.thread_idx()
        acc_o = part.acc_o
        mO = out.mO[tile.batch, None, tile.head, None]  # (seqlen_q, D)
        rows_d = (WARPGROUP_ROWS, self.config.head_dim)
        block = (tile.m * self.config.warpgroups + self.warpgroup(), 0)
        thr_mma = part.pv.mma.tiled().get_slice(thread % WARPGROUP)
        tOgO = thr_mma.partition_C(cute.local_tile(mO, rows_d, block))  # (MMA, 1, 1)
        cO = cute.local_tile(cute.make_identity_tensor(mO.shape), rows_d, block)  # (64, D)
        tOcO = thr_mma.partition_C(cO)  # (MMA, 1, 1)
        tOrO = cute.make_rmem_tensor_like(acc_o, mO.element_type)
        tOrO.store(acc_o.load().to(mO.element_type))
        store_vectors(tOrO, tOgO, tOcO, mO.shape, width=2)

    @cute.jit
    def normalize(self, part: Part, out: Out, tile: WorkTile) -> Boolean:
        """Divide O by the sums, and store the LSE; return whether the sums are in the range that
        `Softmax.add` needs."""
        thread, _, _ = cute.arch.thread_idx()
        lse = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        in_range = part.softmax.finish((), part.factors, lse)
        part.scale_o(True)
        rows = self.rows(tile)
        for r in cutlass.range_constexpr(2):
            if thread % 4 == 0 and rows[r] < out.mLSE.shape[2]:
                out.mLSE[tile.batch, tile.head, rows[r]] = lse[r]
        return in_range
