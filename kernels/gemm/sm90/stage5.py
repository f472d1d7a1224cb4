"""Stage 5: the result is stored through smem and TMA.

Idea: a wgmma accumulator holds 2 neighbours of a row in a thread, so stage 4's stores write 4 bytes
a thread, 16 bytes of a row at a time, half an L2 sector. stmatrix turns fragments into rows of
smem, four 8x8 matrices with one instruction, and TMA writes boxes of 64 rows by 128 bytes, whole
lines, checks the bounds itself, and runs while the next box is rounded.

Changed since stage 4: C is a TMA operand with slots in smem, of each warpgroup its own, so that the
two need not wait for each other; `compute` ends in `WarpgroupStore`. The kernel splits into the
roles `load_tiles` and `compute_tiles`, which the stages after this one replace.

The slots take 32 KB, which four slots of A and B just leave.

Measured: 667 TFLOPS, 1.10 times stage 4. More at small K: 1.10 times at 4096x4096x4096.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import allocate_slots, rows_layout
from cutex.device.atoms.multicast import AbOperands, Cluster
from cutex.device.atoms.tma import load_operand, store_operand
from cutex.device.atoms.wgmma import Wgmma, WgmmaProduct, wgmma
from cutex.device.epilogue.sm90.tma_store import WarpgroupStore, warpgroup_store
from cutex.device.pipeline import Ring, publish_barriers
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.sm90.stage4 import Stage4
from cutex.schedulers.one_tile import OneTilePerCta


class Stage5(Stage4):
    """The kernel of stage 5: its barriers and its memory.

    barrier         arrives                           waits
    (warpgroup)     its threads, having written       the same, before TMA stores a slot
                    a slot                            and before they write the next
    others as in stage 3

    smem      bytes
    sA        tile_m * k_bytes * num_stages             65536
    sB        tile_n * k_bytes * num_stages             131072
    sC        64 * epi_n * 2 * epi_stages * warpgroups     32768
    ab        16 * num_stages                              64
    """

    number = 5

    @property
    def cluster(self) -> Cluster:
        return Cluster(1, 1)

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream) -> None:
        c = self.config
        a = load_operand(mA, self.slots(mA.element_type, c.tile_m))
        b = load_operand(mB, self.slots(mB.element_type, c.tile_n))
        out = store_operand(mC, self.epilogue_slots(mC.element_type))
        grid = OneTilePerCta.grid(self.counts(mC))
        self.kernel(a, b, out).launch(
            grid=grid, block=(self.num_threads, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    def epilogue_slots(self, dtype: type[cutlass.Numeric]) -> cute.ComposedLayout:
        """The smem layout (64, epiN, SLOT) of parts of C, each warpgroup's slots together."""
        c = self.config
        return rows_layout(dtype, 64, c.epi_n, c.epi_stages * c.mma_warpgroups)

    def ring(self, smem: SmemAllocator) -> Ring:
        c = self.config
        return Ring.allocate(smem, "ab", c.num_stages, c.stage_bytes, self.mma_warps.count)

    @cute.kernel
    def kernel(self, a: cpasync.TmaInfo, b: cpasync.TmaInfo, out: cpasync.TmaInfo) -> None:
        c = self.config
        dtype = out.atom.value_type
        smem = SmemAllocator()
        sA = allocate_slots(smem, dtype, a.smem_layout)  # (bM, bK, SLOT)
        sB = allocate_slots(smem, dtype, b.smem_layout)  # (bN, bK, SLOT)
        sC = allocate_slots(smem, dtype, out.smem_layout)  # (64, epiN, SLOT)
        ab = self.ring(smem)
        ab_operands = AbOperands(a, b, sA, sB)
        warp = cute.arch.warp_idx()
        publish_barriers((ab,), cluster=self.cluster.size > 1)

        if warp >= self.load_warps.first:
            self.give_registers()
            if warp == self.load_warps.first:
                self.load_tiles(ab_operands, ab, out.tma_tensor)
        else:
            self.take_registers()
            warpgroups = 1 if c.pingpong else c.mma_warpgroups
            mma = wgmma(Wgmma(c.tile_n, dtype, warpgroups=warpgroups), sA, sB)
            epilogue = warpgroup_store(out, sC, c.epi_stages)
            num_k_tiles = cute.ceil_div(cute.size(a.tma_tensor, mode=[1]), c.k_of(16))
            self.compute_tiles(mma, ab, epilogue, num_k_tiles, out.tma_tensor)
            epilogue.drain()

    @cute.jit
    def load_tiles(self, ab_operands: AbOperands, ab: Ring, mC: cute.Tensor) -> None:
        self.load(ab_operands.loads(OneTilePerCta.work_tile(), self.cluster), ab)

    @cute.jit
    def compute_tiles(
        self,
        mma: WgmmaProduct,
        ab: Ring,
        epilogue: WarpgroupStore,
        num_k_tiles: Int32,
        mC: cute.Tensor,
    ) -> None:
        self.mma(mma, ab, num_k_tiles)
        self.store(mma, epilogue, OneTilePerCta.work_tile())

    @cute.jit
    def store(self, mma: WgmmaProduct, epilogue: WarpgroupStore, tile: WorkTile) -> None:
        row, step, column = self.origin(tile)
        epilogue.store(mma.acc, row, step, column)

    def origin(self, tile: WorkTile) -> tuple[Int32, int, Int32]:
        """The first row of this warpgroup in a tile, the step to its next row, and the first
        column, all in parts of C, 64 x epiN."""
        c = self.config
        step = 1 if c.pingpong else c.mma_warpgroups
        first = cute.arch.warp_idx() // 4 % step
        return tile.m * (c.tile_m // 64) + first, step, tile.n * (c.tile_n // c.epi_n)
