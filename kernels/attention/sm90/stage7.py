"""Stage 7: persistent CTAs, which take the longest tiles first.

Idea: with one tile per CTA an SM that ends a tile stores O, waits for a new CTA, its barriers, its Q
and its first K before it computes again. A CTA that stays has the next tile's Q, K and V in flight
while it still computes, and TMA stores O while the next tile begins. And who hands out the
tiles can choose the order: causal tiles differ in length, so the longest go first and the short ones
fill up the end. Each CTA asks a counter for its next tile, as soon as it has loaded the last.

Changed since stage 6: `load` and `compute` loop over the tiles; Q has a ring of two slots and says
which tile it is of; O has a buffer of its own, which TMA stores from.

128 rows of 1024 keys take 16384 cycles of wgmma; their start and end, some 3000, are in the open in
stage 6 and hidden here. Of 16384 keys it is 1 %. Causal, the longest of 132 CTAs takes 1.0 to 1.1
times the mean instead of up to twice.

Measured:
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
from cutex.device.atoms.mma import WARPGROUP, allocate_slots
from cutex.device.atoms.tma import TileStores
from cutex.device.pipeline import Barrier, PipelineState, Ring, publish_barriers
from cutex.kernels.attention.ladder import WARPGROUP_ROWS
from cutex.kernels.attention.launch import Operands, Slots, Tile, partition
from cutex.kernels.attention.sm90.stage0 import Part, round_to_smem
from cutex.kernels.attention.sm90.stage4 import Places
from cutex.kernels.attention.sm90.stage6 import Stage6

O_BARRIER = 3  # the first of one named barrier for each warpgroup; those below are the turns'
NO_TILE = -1


class Out(NamedTuple):
    """What the kernel writes."""

    o: cpasync.TmaInfo  # (seqlen_q, D, heads, batch)
    mLSE: cute.Tensor  # (batch, heads, seqlen_q) fp32


class Tiles(NamedTuple):
    """All tiles, and which is the next."""

    m_blocks: Int32
    heads: Int32
    batch: Int32
    counter: cute.Tensor  # (2) int32, 0 before and after: how many tiles were asked for

    @property
    def count(self) -> Int32:
        return self.m_blocks * self.heads * self.batch

    @cute.jit
    def tile(self, index: Int32) -> Tile:
        """Of every head the last rows first, for of causal ones they see the most keys."""
        heads = self.heads * self.batch
        head = index % heads
        return Tile(self.m_blocks - 1 - index // heads, head % self.heads, head // self.heads)

    @cute.jit
    def next(self, grid: Int32) -> Int32:
        """The index of the next tile, or one that is too large. A whole warp."""
        asked = Int32(0)
        if cute.arch.lane_idx() == 0:
            asked = cute.arch.atomic_add(
                self.counter.iterator, Int32(1), sem="relaxed", scope="gpu"
            )
            if asked == self.count - 1:  # each tile is asked for after once: this was the last
                self.counter[0] = Int32(0)
        return grid + cute.arch.shuffle_sync(asked, 0)


@dataclass(frozen=True)
class Barriers:
    q: Ring
    k: Ring
    v: Ring

    def __iter__(self) -> Iterator[Barrier | Ring]:
        return iter((self.q, self.k, self.v))


class Shared(NamedTuple):
    """What lies in smem, beside the barriers."""

    slots: Slots
    sO: cute.Tensor  # (64, D, WG)
    sTile: cute.Tensor  # (SLOT of Q) the tile's index


class Stage7(Stage6):
    """
    barrier         arrives                                    waits
    q.full[slot]    1: LOAD, and the bytes by TMA; or LOAD     COMPUTE, before the tile's first
                    without bytes, when there is no tile left  product
    q.empty[slot]   1 a COMPUTE warp, its last Q K^T being     LOAD
                    done
    (O)             all threads of a warpgroup, when TMA has   the same, before O is written, and
                    read its last O, and when O is there       before it is stored
    others as in stage 6

    smem      bytes (head_dim 128)
    sQ        tile_m * head_dim * 2 * q_stages        65536
    sK        tile_n * head_dim * 2 * num_stages      65536
    sV        tile_n * head_dim * 2 * num_stages      65536
    sO        tile_m * head_dim * 2                   32768
    sTile     4 * q_stages                            8
    q, k, v   16 * slots, each                        96

    registers: as in stage 6.
    """

    number = 7

    def operands(self, dtype: str) -> tuple[Operand | Scalar, ...]:
        """And, before scale, counter (2) int32: 0 before and after."""
        *tensors, scale = super().operands(dtype)
        counter = Operand("counter", ("two",), "int32", aligned=False, whole=False)
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
        batch, seqlen_q, heads, _ = mO.shape
        tiles = Tiles(cute.ceil_div(seqlen_q, c.tile_m), Int32(heads), Int32(batch), counter)
        num_ctas = c.num_ctas or arch_named(self.arch).num_sms
        self.kernel(operands, out, tiles, scale).launch(
            grid=(cutlass.min(Int32(num_ctas), tiles.count), 1, 1),
            block=(self.num_threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    def barriers(self, smem: SmemAllocator) -> Barriers:
        c = self.config
        q = Ring.allocate(smem, "q", c.q_stages, c.q_bytes, self.compute_warps.count)
        _, k, v = super().barriers(smem)
        return Barriers(q, k, v)

    @cute.kernel
    def kernel(self, operands: Operands, out: Out, tiles: Tiles, scale: Float32) -> None:
        q_stages = self.config.q_stages
        smem = SmemAllocator()
        slots = operands.allocate(smem)
        sO = allocate_slots(smem, operands.dtype, out.o.smem_layout)  # (64, D, WG)
        indices = smem.allocate_array(Int32, q_stages)
        sTile = cute.make_tensor(indices, cute.make_layout(q_stages))
        shared = Shared(slots, sO, sTile)
        barriers = self.barriers(smem)
        publish_barriers(barriers)

        warp = cute.arch.warp_idx()
        if warp >= self.load_warps.first:
            cute.arch.setmaxregister_decrease(self.registers.load)
            if warp == self.load_warps.first:
                self.load_tiles(operands, shared, barriers, tiles)
        else:
            cute.arch.setmaxregister_increase(self.registers.compute)
            p = self.probabilities(smem, operands.dtype)
            self.compute_tiles(operands, out, shared, p, barriers, tiles, scale)

    @cute.jit
    def load_tiles(
        self, operands: Operands, shared: Shared, barriers: Barriers, tiles: Tiles
    ) -> None:
        q, k, v = barriers
        q_fill, k_fill, v_fill = q.producer(), k.producer(), v.producer()
        grid, _, _ = cute.arch.grid_dim()
        index, _, _ = cute.arch.block_idx()
        while index < tiles.count:
            tile = tiles.tile(index)
            loads = operands.loads(shared.slots, tile)
            blocks = self.n_blocks(operands, tile)
            self.announce(index, shared.sTile, q, q_fill, self.config.q_bytes)
            self.load_q(loads, tile, q.full[q_fill.slot], q_fill.slot)
            q_fill.advance()
            for i in cutlass.range(blocks.end - blocks.first, unroll=1):
                n_block = blocks.end - 1 - i
                k_fill = self.load_block(loads.k, k, k_fill, n_block)
                v_fill = self.load_block(loads.v, v, v_fill, n_block)
            index = tiles.next(grid)
        self.announce(Int32(NO_TILE), shared.sTile, q, q_fill, 0)

    @cute.jit
    def announce(
        self,
        index: Int32,
        sTile: cute.Tensor,
        q: Ring,
        fill: PipelineState,
        num_bytes: cutlass.Constexpr[int],
    ) -> None:
        """Say which tile comes next, and how many bytes of Q with it. A whole warp."""
        q.empty.wait(fill.phase, fill.slot)
        with cute.arch.elect_one():
            sTile[fill.slot] = index
            if cutlass.const_expr(num_bytes > 0):
                q.full.arrive_expecting(num_bytes, fill.slot)
            else:
                q.full.arrive(fill.slot)

    @cute.jit
    def compute_tiles(
        self,
        operands: Operands,
        out: Out,
        shared: Shared,
        p,
        barriers: Barriers,
        tiles: Tiles,
        scale: Float32,
    ) -> None:
        q = barriers.q
        q_take = q.consumer()
        at = Places(barriers.k.consumer(), barriers.v.consumer())
        self.first_turn()
        q.wait_full(q_take)
        index = shared.sTile[q_take.slot]
        while index != NO_TILE:
            tile = tiles.tile(index)
            blocks = self.n_blocks(operands, tile)
            part = self.part(operands, shared.slots, p, tile, scale, q_take.slot)
            if blocks.end > blocks.first:
                at = self.attend(part, barriers, at, blocks)
            q.release(q_take)
            q_take.advance()
            self.store(part, out, shared.sO, tile)
            q.wait_full(q_take)
            index = shared.sTile[q_take.slot]
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store(self, part: Part, out: Out, sO: cute.Tensor, tile: Tile) -> None:
        """Divide O by the sums, and store it and the LSE."""
        self.normalize(part, out, tile)
        thread, _, _ = cute.arch.thread_idx()
        mine = self.warpgroup()
        stores = thread % WARPGROUP < 32
        if stores:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=O_BARRIER + mine, number_of_threads=WARPGROUP)
        part_o = sO[None, None, mine]  # (64, D)
        round_to_smem(part.acc_o, part.pv.tiled_mma, part_o, O_BARRIER + mine)
        if stores:
            bSG_sO, bSG_gO = partition(out.o, sO, tile.head, tile.batch)
            block = tile.m_block * self.config.warpgroups + mine
            TileStores(out.o.atom, bSG_sO, bSG_gO).store(mine, block)
