"""mma.sync: each warp of a CTA multiplies its part of a tile, with operands that ldmatrix loads.

An mma.sync computes 16x8 sums of 16 products each. Of its sums a thread holds two neighbours of a
row, and two of the row 8 below (PTX ISA, "Matrix Fragments for mma.m16n8k16").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warp

from cutex.kernels.gemm.sm80.config import MMA_K, MMA_M, MMA_N, Sm80Config
from cutex.kernels.gemm.sm80.operand import SmemOperand


class WarpProduct(NamedTuple):
    """The product of a CTA's tiles of A and B, as this thread's warp computes it."""

    mma: cute.TiledMma
    loads: tuple[cute.TiledCopy, cute.TiledCopy]
    sources: tuple[cute.Tensor, cute.Tensor]  # of ldmatrix, (CPY, CPY_MN, CPY_K, SLOT)
    fragments: tuple[cute.Tensor, cute.Tensor]  # (MMA, MMA_MN, MMA_K)
    acc: cute.Tensor  # (MMA, MMA_M, MMA_N), fp32
    tCcC: cute.Tensor  # the coordinates of these in the tile

    @staticmethod
    def of(c: Sm80Config, a: SmemOperand, b: SmemOperand, thread: Int32) -> WarpProduct:
        dtype = a.read.element_type
        mma = cute.make_tiled_mma(
            warp.MmaF16BF16Op(dtype, Float32, (MMA_M, MMA_N, MMA_K)),
            (c.warps_m, c.warps_n, 1),
            # two blocks of N at a time: one ldmatrix brings 8 rows of B four times
            permutation_mnk=(c.warps_m * MMA_M, c.warps_n * MMA_N * 2, MMA_K),
        )
        thr_mma = mma.get_slice(thread)
        atoms = (
            cute.make_copy_atom(warp.LdMatrix8x8x16bOp(not x.layout.k_major, 4), dtype)
            for x in (a, b)
        )
        atom_a, atom_b = atoms
        loads = cute.make_tiled_copy_A(atom_a, mma), cute.make_tiled_copy_B(atom_b, mma)
        sources = tuple(
            load.get_slice(thread).partition_S(x.read)  # (CPY, CPY_MN, CPY_K, SLOT)
            for load, x in zip(loads, (a, b), strict=True)
        )
        tCsA = thr_mma.partition_A(a.read)  # (MMA, MMA_M, MMA_K, SLOT)
        tCsB = thr_mma.partition_B(b.read)  # (MMA, MMA_N, MMA_K, SLOT)
        fragments = (
            mma.make_fragment_A(tCsA[None, None, None, 0]),
            mma.make_fragment_B(tCsB[None, None, None, 0]),
        )
        tile = c.tile_m, c.tile_n
        acc = mma.make_fragment_C(mma.partition_shape_C(tile))  # (MMA, MMA_M, MMA_N)
        acc.fill(0.0)
        tCcC = thr_mma.partition_C(cute.make_identity_tensor(tile))  # (MMA, MMA_M, MMA_N)
        return WarpProduct(mma, loads, sources, fragments, acc, tCcC)

    @property
    def k_blocks(self) -> int:
        return cute.size(self.fragments[0], mode=[2])

    def load(self, k_block: int, slot: Int32 | int, thread: Int32) -> None:
        """Load one block of K of both operands, by ldmatrix."""
        for load, source, fragment in zip(self.loads, self.sources, self.fragments, strict=True):
            to = load.get_slice(thread).retile(fragment)  # (CPY, CPY_MN, CPY_K)
            cute.copy(load, source[None, None, k_block, slot], to[None, None, k_block])

    def multiply(self, k_block: int) -> None:
        a, b = (fragment[None, None, k_block] for fragment in self.fragments)
        cute.gemm(self.mma, self.acc, a, b, self.acc)

    def multiply_tile(
        self, slot: Int32 | int, thread: Int32, meanwhile: Callable[[], None]
    ) -> None:
        """Add the product of the tiles in `slot`; each block is loaded before the one ahead of it
        is multiplied, and `meanwhile` called after the first."""
        self.load(0, slot, thread)
        for k_block in range(self.k_blocks):
            if k_block + 1 < self.k_blocks:
                self.load(k_block + 1, slot, thread)
            self.multiply(k_block)
            if k_block == 0:
                meanwhile()
