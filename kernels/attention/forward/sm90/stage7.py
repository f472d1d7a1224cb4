"""Stage 7: persistent CTAs, which take the longest tiles first.

Idea: with a tile for each CTA, an SM that ends one stores O, waits for a new CTA, its barriers, its
Q and its first K before it computes again. A CTA that stays has the next tile's Q, K and V on their
way while it still computes, and TMA stores O while the next tile begins. And the order of the tiles
can be chosen (order.py): causal tiles differ in length, so the longest go first and
the short ones fill the gaps at the end. A CTA asks a counter for its next tile when it has loaded
the one before; one that is late gets fewer.

Changed since stage 6: `load_tiles` and `compute_tiles` loop over the tiles; Q has a ring of two
slots, each of which says which tile it is of (work_ring.py); O has a buffer of its own, which TMA
stores from.

128 rows of 1024 keys are 16384 cycles of wgmma; start and end, some 3000, are in the open in stage
6 and hidden here. Of 16384 keys they are 1 %. Causal, CTAs end within a short tile of each other
instead of within a long one.

Measured: 667 TFLOPS with 16384 tokens, 582 causal with 4096: 1.02 and 1.15 times stage 6. With 1024
tokens 1.27 and 1.31 times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.arch import arch as arch_named
from cutex.compile import Operand, Scalar
from cutex.device.atoms.mma import allocate_slots
from cutex.device.atoms.tma import TileStores
from cutex.device.atoms.wgmma import WARPGROUP
from cutex.device.attention.block_info import Blocks
from cutex.device.pipeline import PipelineState, Ring, publish_barriers
from cutex.device.work_tile import WorkTile
from cutex.kernels.attention.forward.launch import Operands, Slots, partition
from cutex.kernels.attention.forward.sm90.config import WARPGROUP_ROWS
from cutex.kernels.attention.forward.sm90.stage0 import Part, round_to_smem
from cutex.kernels.attention.forward.sm90.stage1 import RegisterP
from cutex.kernels.attention.forward.sm90.stage4 import RingStates
from cutex.kernels.attention.forward.sm90.stage6 import Stage6
from cutex.kernels.attention.order import AttentionOrder
from cutex.kernels.attention.work_ring import END, NORMAL, WorkRing
from cutex.schedulers.counter import Counter
from cutex.schedulers.dispatch import SelfDispatch

O_BARRIER = 3  # the first of one named barrier for each warpgroup; those below are the turns'


class Out(NamedTuple):
    """The tensors that the kernel writes."""

    o: cpasync.TmaInfo  # (seqlen_q, D, heads, batch)
    mLSE: cute.Tensor  # (batch, heads, seqlen_q) fp32


@dataclass(frozen=True)
class Barriers:
    work: WorkRing
    k: Ring
    v: Ring

    def __iter__(self) -> Iterator[Ring]:
        return iter((self.work.q, self.k, self.v))


class Fills(NamedTuple):
    """The load warp's states in each ring."""

    q: PipelineState
    k: PipelineState
    v: PipelineState


class Stage7(Stage6):
    """The kernel of stage 7: its barriers and its memory.

    barrier         arrives                                    waits
    q.full[slot]    1: LOAD, and the bytes by TMA; or LOAD     COMPUTE, before the tile's first
                    alone, when there is no tile left          product
    q.empty[slot]   1 a COMPUTE warp, its last Q K^T being     LOAD
                    done
    (O)             all threads of a warpgroup: when TMA has   the same, before O is written, and
                    read the O before, and when O is there     before it is stored
    others as in stage 6

    smem      bytes (head_dim 128)
    sQ        tile_m * head_dim * 2 * q_stages        65536
    sK        tile_n * head_dim * 2 * num_stages      65536
    sV        tile_n * head_dim * 2 * num_stages      65536
    sO        tile_m * head_dim * 2                   32768
    work      (16 + 4 * warps) * q_stages             96
    q, k, v   16 * slots, each                        96

    registers: as in stage 6.
    """

    number = 7

    def operands(self, dtype: str) -> tuple[Operand | Scalar, ...]:
        """The arguments of the stages before and, before scale, counter (2) int32, which is 0
        before and after a launch."""
        *tensors, scale = super().operands(dtype)
        counter = Operand("counter", ("words",), "int32", aligned=False, whole=False)
        return (*tensors, counter, scale)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        counter: cute.Tensor,
        scale: Float32,
        stream,
    ) -> None:
        c = self.config
        operands = self.load_operands(mQ, mK, mV)
        o_slots = self.slots(mO.element_type, WARPGROUP_ROWS, c.warpgroups)
        out = Out(self.tma(cpasync.CopyBulkTensorTileS2GOp(), mO, o_slots), mLSE)
        num_ctas = c.num_ctas or arch_named(self.arch).num_sms
        grid = cutlass.min(Int32(num_ctas), self.order(operands).total)
        self.kernel(operands, out, counter, scale).launch(
            grid=(grid, 1, 1),
            block=(self.num_threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    def order(self, operands: Operands) -> AttentionOrder:
        c = self.config
        _, _, heads, batch = operands.q.tma_tensor.shape
        return AttentionOrder(
            num_m_blocks=cute.ceil_div(operands.seqlen_q, c.tile_m),
            heads=Int32(heads),
            batch=Int32(batch),
            longest_first=c.causal,
            rows_k=operands.seqlen_k,
            heads_per_kv=operands.heads_per_kv,
            l2_rows=arch_named(self.arch).l2_bytes // (2 * c.k_bytes) * c.tile_n,
        )

    def barriers(self, smem: SmemAllocator) -> Barriers:  # type: ignore[override] # own roles'
        c = self.config
        work = WorkRing.allocate(smem, c.q_stages, c.q_bytes, self.compute_warps.count)
        below = super().barriers(smem)
        return Barriers(work, below.k, below.v)

    @cute.kernel
    def kernel(self, operands: Operands, out: Out, counter: cute.Tensor, scale: Float32) -> None:
        smem = SmemAllocator()
        slots = operands.allocate(smem)
        sO = allocate_slots(smem, operands.dtype, out.o.smem_layout)  # (64, D, WG)
        barriers = self.barriers(smem)
        publish_barriers(barriers)

        warp = cute.arch.warp_idx()
        if warp >= self.load_warps.first:
            cute.arch.setmaxregister_decrease(self.registers.load)
            if warp == self.load_warps.first:
                self.load_tiles(operands, slots, barriers, counter)
        else:
            cute.arch.setmaxregister_increase(self.registers.compute)
            p = self.probabilities(smem, operands.dtype)
            self.compute_tiles(operands, slots, p, barriers, out, sO, scale)

    # ---- LOAD

    @cute.jit
    def load_tiles(
        self, operands: Operands, slots: Slots, barriers: Barriers, counter: cute.Tensor
    ) -> None:
        work = barriers.work
        fills = Fills(work.q.producer(), barriers.k.producer(), barriers.v.producer())
        dispatch = SelfDispatch(self.order(operands), Counter(counter))
        ticket = dispatch.first()
        while ticket.valid:
            tile = dispatch.tile(ticket)
            work.q.empty.wait(fills.q.phase, fills.q.slot)
            fills = self.load_tile(operands, slots, barriers, fills, tile, NORMAL)
            ticket = dispatch.next(ticket)
        work.q.empty.wait(fills.q.phase, fills.q.slot)
        work.end(fills.q)

    @cute.jit
    def load_tile(
        self,
        operands: Operands,
        slots: Slots,
        barriers: Barriers,
        fills: Fills,
        tile: WorkTile,
        mode: Int32,
    ) -> Fills:
        """Load Q into an empty slot, and K and V as their slots become empty; return the states
        after."""
        q, k, v = fills
        loads = operands.loads(slots, tile)
        blocks = self.n_blocks(operands, tile)
        self.load_q(loads, tile, barriers.work.announce(q, mode, tile), q.slot)
        q.advance()
        for i in cutlass.range(blocks.end - blocks.first, unroll=1):
            n_block = blocks.end - 1 - i
            k = self.load_block(loads.k, barriers.k, k, n_block)
            v = self.load_block(loads.v, barriers.v, v, n_block)
        return Fills(q, k, v)

    # ---- COMPUTE

    @cute.jit
    def compute_tiles(
        self,
        operands: Operands,
        slots: Slots,
        p: RegisterP,
        barriers: Barriers,
        out: Out,
        sO: cute.Tensor,
        scale: Float32,
    ) -> None:
        work = barriers.work
        take, at = work.q.consumer(), RingStates(barriers.k.consumer(), barriers.v.consumer())
        self.first_turn()
        work.q.wait_full(take)
        mode = work.mode(take.slot)
        while mode != END:
            tile = work.work(take.slot)
            part = self.part(operands, slots, p, tile, scale, take.slot)
            at = self.compute_tile(
                part, barriers, at, take, out, tile, self.n_blocks(operands, tile)
            )
            self.store(part, out, sO, tile)
            take.advance()
            work.q.wait_full(take)
            mode = work.mode(take.slot)
        self.wait_stores()

    @cute.jit
    def compute_tile(
        self,
        part: Part,
        barriers: Barriers,
        at: RingStates,
        take: PipelineState,
        out: Out,
        tile: WorkTile,
        blocks: Blocks,
    ) -> RingStates:
        """Compute a tile: O in registers, the LSE in memory. Release its slot of Q."""
        if blocks.end > blocks.first:
            at = self.attend(part, barriers, at, blocks)
        barriers.work.q.release(take)
        self.normalize(part, out, tile)
        return at

    @cute.jit
    def store(self, part: Part, out: Out, sO: cute.Tensor, tile: WorkTile) -> None:
        """Start the store of O, which leaves out rows past the end."""
        mine = self.warpgroup()
        self.wait_stores()
        cute.arch.barrier(barrier_id=O_BARRIER + mine, number_of_threads=WARPGROUP)
        mma, sO_mine = part.pv.mma, sO[None, None, mine]  # (64, D)
        round_to_smem(part.acc_o, mma, sO_mine, O_BARRIER + mine)
        if cute.arch.warp_idx() % 4 == 0:
            bSG_sO, bSG_gO = partition(
                out.o, sO, tile.head, tile.batch
            )  # (TMA, SLOT), (TMA, RestRows)
            block = tile.m * self.config.warpgroups + mine
            TileStores(out.o.atom, bSG_sO, bSG_gO).store(mine, block)

    @cute.jit
    def wait_stores(self) -> None:
        """Wait until TMA has read the smem that this warpgroup's first warp stores from."""
        if cute.arch.warp_idx() % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
