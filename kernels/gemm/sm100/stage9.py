"""Stage 9: the tile, the order and the side that is cut are chosen for each problem.

Idea: no tile is best everywhere, so let the kernel take every one that the hardware has room for,
and choose by the problem (kernels/gemm/choose.py).

- tile_m = 512: a pair computes two accumulators that share B. A CTA loads 48 KB for 1024 cycles of
  MMA instead of 64: 171 FLOP a byte instead of 128, a quarter less through L2. All of tensor memory
  is one tile, so only half of the epilogue hides: the accumulators are given back one by one.
- tile_m = 256, two accumulators, tile_n from 64 to 256 by 32: stage 8's overlap, and a width that
  fills the last wave. 512x8192x5376 takes 64 tiles of 256x256, 64 of 74 pairs; or 74 of 256x224.
- swap_ab: where M is small, compute C^T = B A^T: the 256 rows of a tile come from N.

Changed since stage 8: `mma` and `epilogue` loop over the accumulators of a tile, and the first step
of K stands before the loop; C may leave transposed, and leaves L2 first, for A and B to stay; and
the kernel starts while the one before it ends (griddepcontrol): barriers and tensor memory are
ready when its results are.

Public figures: 512x256 gives about 1.1 times at 4096 and above (ThunderKittens), wave fit 1.15
times where it applies, the early start up to 1.16 times on the smallest problems.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from cutex.atoms.mma import Umma, slots_layout
from cutex.atoms.tma import EVICT_FIRST, load_operand, store_operand, tile_stores
from cutex.atoms.tmem import fence_after_sync, fence_before_sync
from cutex.epilogue import drain_stores, sub_tiles
from cutex.kernels.gemm.sm100.stage8 import Stage8
from cutex.pipeline import AccRing, Ring
from cutex.schedulers.clc import CTAS


class Stage9(Stage8):
    """Barriers as in stage 8; acc.full and acc.empty are those of one of a tile's accumulators.

    smem of a CTA   bytes, tile_m = 512                             tmem   columns
    sA              tile_m / 2 * tile_k * 2 * num_stages  131072    acc    tile_n * num_acc   512
    sB              tile_n / 2 * tile_k * 2 * num_stages  65536
    sC              128 * epi_n * 2 * epi_stages          32768
    barriers        as in stage 8
    """

    number = 9

    @property
    def num_blocks(self) -> int:
        """Accumulators of a tile, of 256 rows each."""
        return self.config.tile_m // 256

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream) -> None:
        c = self.config
        if cutlass.const_expr(c.swap_ab):
            mA, mB = mB, mA
            mC = cute.make_tensor(mC.iterator, cute.select(mC.layout, mode=[1, 0]))
        a = load_operand(mA, self.slots(mA.element_type, c.tile_m // 2), pair=True)
        b = load_operand(mB, self.slots(mB.element_type, c.tile_n // 2), pair=True)
        out = store_operand(mC, self.epilogue_slots(mC.element_type))
        m, n = self.clusters(mC)
        self.kernel(a, b, out).launch(
            grid=(CTAS * m * n, 1, 1),
            block=(self.num_threads, 1, 1),
            cluster=(CTAS, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    def epilogue_slots(self, dtype: type[cutlass.Numeric]) -> cute.ComposedLayout:
        """Sub-tiles of C, or of C^T, whose columns are then contiguous: (128, epiN, SLOT)."""
        c = self.config
        if not c.swap_ab:
            return slots_layout(dtype, 128, c.epi_n, c.epi_stages, swizzle=c.epi_n * 2)
        columns = cute.make_layout((128, c.epi_n, c.epi_stages), stride=(1, 128, 128 * c.epi_n))
        return cute.make_composed_layout(cute.make_swizzle(0, 4, 3), 0, columns)

    @cute.jit
    def load(
        self,
        a: cpasync.TmaInfo,
        b: cpasync.TmaInfo,
        sA: cute.Tensor,
        sB: cute.Tensor,
        ab: Ring,
        queue: cutlass.Constexpr[Any],
    ) -> None:
        cute.arch.griddepcontrol_wait()
        Stage8.load(self, a, b, sA, sB, ab, queue)
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def mma(
        self,
        mma: Umma,
        ab: Ring,
        acc: AccRing,
        num_k_tiles: Int32,
        queue: cutlass.Constexpr[Any],
    ) -> None:
        take, fill = ab.consumer(), acc.producer()
        ticket = queue.first()
        while ticket.valid:
            first = fill.slot
            ab.wait_full(take)
            for block in cutlass.range_constexpr(self.num_blocks):
                acc.acquire(fill)
                fence_after_sync()
                mma.into(first + block, block).issue(take.slot, accumulate=False)
                fill.advance()
            mma.commit(ab.empty[take.slot])
            take.advance()
            for _ in cutlass.range(1, num_k_tiles, unroll=1):
                ab.wait_full(take)
                for block in cutlass.range_constexpr(self.num_blocks):
                    mma.into(first + block, block).issue(take.slot, accumulate=True)
                mma.commit(ab.empty[take.slot])
                take.advance()
            for block in cutlass.range_constexpr(self.num_blocks):
                mma.commit(acc.full[first + block])
            ticket = queue.next(ticket)

    @cute.jit
    def epilogue(
        self,
        tCtAcc: cute.Tensor,
        out: cpasync.TmaInfo,
        sC: cute.Tensor,
        acc: AccRing,
        queue: cutlass.Constexpr[Any],
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        take = acc.consumer()
        cute.arch.griddepcontrol_wait()
        ticket = queue.first()
        while ticket.valid:
            tile = queue.tile(ticket)
            for block in cutlass.range_constexpr(self.num_blocks):
                stores = tile_stores(out, sC, tile.m * self.num_blocks + block, EVICT_FIRST)
                parts = sub_tiles(tCtAcc[(None, None), 0, 0, take.slot], sC, thread)
                acc.wait_full(take)
                fence_after_sync()
                for part in cutlass.range_constexpr(parts.num_parts):
                    tTR_rAcc = parts.load(part)
                    if cutlass.const_expr(part == parts.num_parts - 1):
                        fence_before_sync()
                        acc.release(take)
                    parts.store(tTR_rAcc, stores, part, tile.n * parts.num_parts + part)
                take.advance()
            ticket = queue.next(ticket)
        drain_stores()
