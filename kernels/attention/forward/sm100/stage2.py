"""Stage 2: warp roles, and rings of smem slots for K and V.

Idea: one warp loads, one starts the MMAs, four do the softmax, and each waits only for what it
needs. Loads run ahead through a ring for K and one for V, and a row that is not done holds up
neither the load nor the MMA warp.

Changed since stage 1: `work` sends each warp to its role; `load`, `mma` and `softmax` are what
stage 1's `mainloop` was. S, P and O have barriers of their own.

A block's wait for its 64 KB, some 2000 cycles, is gone. Product, softmax, product are still one
after the other: 1024 cycles of tensor cores, as many of MUFU, and the handing over of S and P.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.atoms.tmem import fence_after_sync, fence_before_sync
from cutex.device.atoms.umma import commit
from cutex.device.attention.block_info import Blocks
from cutex.device.pipeline import Barrier, Ring, Warps
from cutex.device.work_tile import WorkTile
from cutex.kernels.attention.forward.launch import Loads, Out, Slots
from cutex.kernels.attention.forward.sm100.part import Part
from cutex.kernels.attention.forward.sm100.stage1 import Stage1


@dataclass(frozen=True)
class Barriers:
    q_loaded: Barrier
    k: Ring
    v: Ring
    s_full: Barrier  # one for each Q tile, as those that follow
    p_full: Barrier
    o_full: Barrier

    def __iter__(self) -> Iterator[Barrier | Ring]:
        return iter((self.q_loaded, self.k, self.v, self.s_full, self.p_full, self.o_full))


class Stage2(Stage1):
    """The kernel of stage 2: its barriers and its memory.

    barrier          arrives                                   waits
    q_loaded         1: LOAD, and the bytes by TMA             MMA, before the first Q K^T
    k.full, v.full   1: LOAD, and the bytes by TMA             MMA
    k.empty, v.empty 1: the commit of the MMA that reads       LOAD
    s_full           1: the commit of Q K^T                    SOFTMAX
    p_full           1 a SOFTMAX warp: P is there, O scaled    MMA, before P V
    o_full           1: the commit of the last P V             SOFTMAX, before it stores O
    (CTA)            all threads, their roles being done       all threads, before tensor memory is
                                                               freed

    smem      bytes (head_dim 128)                            tmem: as in stage 1
    sQ        tile_m * head_dim * 2                 32768
    sK        tile_n * head_dim * 2 * num_stages    65536
    sV        tile_n * head_dim * 2 * num_stages    65536
    barriers  96, and 4 for the address of tmem
    """

    number = 2
    min_stages = 2

    @property
    def softmax_warps(self) -> Warps:
        """The softmax warps, four for each Q tile."""
        return Warps(0, 4 * self.config.q_tiles)

    @property
    def mma_warp(self) -> Warps:
        return Warps(self.softmax_warps.end, 1)

    @property
    def load_warp(self) -> Warps:
        return Warps(self.mma_warp.end, 1)

    @property
    def num_threads(self) -> int:
        return 32 * self.load_warp.end

    def barriers(self, smem: SmemAllocator) -> Barriers:
        c = self.config
        return Barriers(
            Barrier.allocate(smem, "q loaded", arrivals=1),
            Ring.allocate(smem, "k", c.num_stages, c.k_bytes, consumers=1),
            Ring.allocate(smem, "v", c.num_stages, c.k_bytes, consumers=1),
            Barrier.allocate(smem, "s full", arrivals=1, slots=c.q_tiles),
            Barrier.allocate(smem, "p full", arrivals=4, slots=c.q_tiles),
            Barrier.allocate(smem, "o full", arrivals=1, slots=c.q_tiles),
        )

    @cute.jit
    def work(
        self, operands, slots: Slots, sP, barriers, out: Out, pointer, tile: WorkTile, blocks, scale
    ) -> None:
        warp = cute.arch.warp_idx()
        if warp == self.load_warp.first:
            self.load(operands.loads(slots, tile), barriers, tile, blocks)
        elif warp == self.mma_warp.first:
            parts = [
                self.part(operands, slots, sP, tile, t, pointer, scale)
                for t in range(self.config.q_tiles)
            ]
            self.mma(parts, barriers, blocks)
        else:
            t = self.q_tile()
            part = self.part(operands, slots, sP, tile, t, pointer, scale)
            self.softmax(part, barriers, blocks, t)
            if blocks.end > blocks.first:
                barriers.o_full.wait(0, t)
            fence_after_sync()
            self.store(part, out, tile, t, blocks)

    @cute.jit
    def q_tile(self) -> Int32:
        """The Q tile whose rows this softmax warp has."""
        return cute.arch.warp_idx() // 4

    @cute.jit
    def load(self, loads: Loads, barriers: Barriers, tile: WorkTile, blocks: Blocks) -> None:
        c = self.config
        k, v = barriers.k.producer(), barriers.v.producer()
        with cute.arch.elect_one():
            barriers.q_loaded.arrive_expecting(c.q_bytes)
        for t in cutlass.range_constexpr(c.q_tiles):
            loads.q.load(tile.m * c.q_tiles + t, t, barriers.q_loaded[0])
        for i in cutlass.range(blocks.end - blocks.first, unroll=1):
            n_block = blocks.end - 1 - i
            loads.k.load(n_block, k.slot, barriers.k.acquire(k))
            k.advance()
            loads.v.load(n_block, v.slot, barriers.v.acquire(v))
            v.advance()
        barriers.q_loaded.wait(0)

    @cute.jit
    def mma(self, parts: list[Part], barriers: Barriers, blocks: Blocks) -> None:
        part, b = parts[0], barriers
        take = b.k.consumer()  # K and V turn alike
        phase = Int32(0)
        b.q_loaded.wait(0)
        for i in cutlass.range(blocks.end - blocks.first, unroll=1):
            b.k.wait_full(take)
            part.start_scores(take.slot)
            commit(b.s_full[0], pair=False)
            commit(b.k.empty[take.slot], pair=False)
            b.p_full.wait(phase)
            b.v.wait_full(take)
            fence_after_sync()
            part.start_outputs(take.slot, i > 0)
            commit(b.v.empty[take.slot], pair=False)
            take.advance()
            phase ^= 1
        commit(b.o_full[0], pair=False)

    @cute.jit
    def softmax(self, part: Part, barriers: Barriers, blocks: Blocks, t: Int32) -> None:
        """Compute P of all blocks.

        NOTE: a commit covers all MMAs started before, so when S of a block is complete, P V of the
        block before is, too, and O may be scaled.
        """
        phase = Int32(0)
        for i in cutlass.range(blocks.end - blocks.first, unroll=1):
            phase = self.step(part, barriers, t, phase, blocks.end - 1 - i, i == 0, "masked")

    @cute.jit
    def step(
        self,
        part: Part,
        barriers: Barriers,
        t: Int32,
        phase: Int32,
        n_block: Int32,
        is_first,
        kind: cutlass.Constexpr[str],
    ) -> Int32:
        """Compute P of one block; return the next block's phase."""
        barriers.s_full.wait(phase, t)
        fence_after_sync()
        self.exponentiate(part, n_block, is_first, kind)
        part.p.fence()
        fence_before_sync()
        with cute.arch.elect_one():
            barriers.p_full.arrive(t)
        return phase ^ 1
