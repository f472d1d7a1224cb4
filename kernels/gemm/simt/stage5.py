"""Stage 5: a thread computes 8x8 of C from 16 words of smem at a time.

Stage 4 loads two words from smem for each FMA, and smem hands out a fourth of what the FMA pipes
take. Here a thread keeps 8 words of A and 8 of B in registers and multiplies each with each: 64
FMAs for 16 loads, and a CTA of 128x128 loads a fourth of stage 4's bytes from memory.

Tiles are in smem with K outermost, so that lanes, whose rows are neighbours, read neighbours. When
they are written, the lanes of a warp have 8 neighbours of K of 4 rows: 4 words of padding move each
k by 4 banks, so these are 32 banks. Padding moves a k by a constant, for which the address of a
load has room; a swizzle would cost an instruction for each k.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.kernels.gemm.simt.config import VECTOR
from cutex.kernels.gemm.simt.stage2 import Stage2

K_LANES = 8  # lanes along K: a sector
REGISTERS = 65536  # of an SM
SIDE = 16  # threads along a side of the tile


class Lines(NamedTuple):
    """The rows (or columns) of a tile that a thread computes: `first`, and these steps on."""

    first: Int32
    steps: tuple[int, ...]

    def all(self) -> list[Int32]:
        return [self.first + step for step in self.steps]


class Stage5(Stage2):
    @property
    def ctas_per_sm(self) -> int:
        """As many as leave each thread twice the registers of its sums."""
        c = self.config
        return REGISTERS // (self.num_threads * 2 * c.thread_m * c.thread_n)

    def tile_layout(self, rows: int) -> cute.Layout:
        """The smem layout (bRows, bK, SLOT) of the tiles of A or B."""
        c, pitch = self.config, rows + VECTOR
        return cute.make_layout((rows, c.tile_k, c.num_stages), stride=(1, pitch, pitch * c.tile_k))

    @cute.kernel
    def kernel(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor) -> None:
        c, smem = self.config, SmemAllocator()
        sA = smem.allocate_tensor(Float32, self.tile_layout(c.tile_m), 128)  # (bM, bK, SLOT)
        sB = smem.allocate_tensor(Float32, self.tile_layout(c.tile_n), 128)  # (bN, bK, SLOT)
        thread, (block_m, block_n, _) = cute.arch.thread_idx()[0], cute.arch.block_idx()
        corner = block_m * c.tile_m, block_n * c.tile_n
        rAcc = cute.make_rmem_tensor((c.thread_m, c.thread_n), Float32)  # (tM, tN)
        rAcc.fill(0)
        self.mainloop((mA, mB), (sA, sB), corner, rAcc, thread)
        self.store(mC, rAcc, corner, thread)

    @cute.jit
    def mainloop(self, mAB, sAB, corner, rAcc: cute.Tensor, thread: Int32) -> None:
        k_tiles = cute.ceil_div(cute.size(mAB[0], mode=[1]), self.config.tile_k)
        for k_tile in cutlass.range(k_tiles, unroll=1):
            for i in cutlass.range_constexpr(2):
                self.load(mAB[i], sAB[i][None, None, 0], corner[i], k_tile, thread)
            cute.arch.sync_threads()
            self.multiply(sAB[0][None, None, 0], sAB[1][None, None, 0], rAcc, thread)
            cute.arch.sync_threads()

    @cute.jit
    def load(self, mX: cute.Tensor, sX: cute.Tensor, row: Int32, k_tile: Int32, thread: Int32):
        """Copy the tile at `row` of mX into sX (bRows, bK)."""
        k, first = thread % K_LANES, thread // K_LANES
        step = self.num_threads // K_LANES
        for i in cutlass.range_constexpr(cute.size(sX, mode=[0]) // step):
            at = first + i * step
            sX[at, k] = self.loaded(mX, row + at, k_tile * K_LANES + k)

    def rows(self, thread: Int32) -> Lines:
        return Lines(thread // SIDE, tuple(SIDE * i for i in range(self.config.thread_m)))

    def columns(self, thread: Int32) -> Lines:
        return Lines(thread % SIDE, tuple(SIDE * i for i in range(self.config.thread_n)))

    def multiply(self, sA: cute.Tensor, sB: cute.Tensor, rAcc: cute.Tensor, thread: Int32) -> None:
        """rAcc += sA @ sB^T."""
        for k in range(self.config.tile_k):
            a, b = self.words(sA, self.rows(thread), k), self.words(sB, self.columns(thread), k)
            for i, x in enumerate(a):
                for j, y in enumerate(b):
                    rAcc[i, j] = rAcc[i, j] + x * y

    def words(self, sX: cute.Tensor, lines: Lines, k: int) -> list[Float32]:
        """sX[lines, k] in registers."""
        return [sX[row, k] for row in lines.all()]

    @cute.jit
    def store(self, mC: cute.Tensor, rAcc: cute.Tensor, corner, thread: Int32) -> None:
        rows, columns = self.rows(thread).all(), self.columns(thread).all()
        for i in cutlass.range_constexpr(len(rows)):
            for j in cutlass.range_constexpr(len(columns)):
                m, n = corner[0] + rows[i], corner[1] + columns[j]
                if m < cute.size(mC, mode=[0]) and n < cute.size(mC, mode=[1]):
                    mC[m, n] = rAcc[i, j]
