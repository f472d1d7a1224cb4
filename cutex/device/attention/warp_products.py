"""Products of one warp: 16 rows in registers times blocks in slots of smem, by mma.sync.

e4m3 is widened to fp16 in registers: ldmatrix loads pairs of elements as if they were one of 16
bits. For K these are four neighbours along the head dim, so a thread holds Q by fours, too; for V
two columns of two keys, whose products are two accumulators.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import cutlass
from cutlass import Float8E4M3FN, Float16, Float32, Int32, cute
from cutlass.cute.nvgpu import warp

ROWS = 16  # of one mma.sync
MMA_N, MMA_K = 8, 16
EVEN_ODD = 0x3120  # a selector of prmt: bytes 0, 2, 1, 3

Groups = tuple[cute.Tensor, ...]  # of each group of 16 rows


class WarpProduct(NamedTuple):
    """acc += A @ B[slot]^T of one warp: 16 rows of A in registers, B in slots of smem."""

    mma: cute.TiledMma
    load: cute.TiledCopy  # by ldmatrix
    source: cute.Tensor  # (CPY, CPY_N, CPY_K, SLOT)
    b: cute.Tensor  # (MMA, MMA_N, MMA_K) registers

    @classmethod
    def of(cls, sB: cute.Tensor, k_major: bool) -> Self:
        """The product with sB (bN, bK, SLOT), contiguous along K or along N."""
        dtype, lane = sB.element_type, cute.arch.lane_idx()
        # NOTE: two blocks of N at a time: one ldmatrix brings 8 rows of B four times
        mma = cute.make_tiled_mma(
            warp.MmaF16BF16Op(dtype, Float32, (ROWS, MMA_N, MMA_K)),
            permutation_mnk=(ROWS, 2 * MMA_N, MMA_K),
        )
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(not k_major, 4), dtype)
        load = cute.make_tiled_copy_B(atom, mma)
        source = load.get_slice(lane).partition_S(sB)
        tCsB = mma.get_slice(lane).partition_B(sB)  # (MMA, MMA_N, MMA_K, SLOT)
        return cls(mma, load, source, mma.make_fragment_B(tCsB[None, None, None, 0]))

    def accumulator(self, columns: int) -> cute.Tensor:
        """Registers for 16 rows, (MMA, 1, MMA_N)."""
        return self.mma.make_fragment_C(self.mma.partition_shape_C((ROWS, columns)))

    @property
    def k_blocks(self) -> int:
        return cute.size(self.b, mode=[2])

    def load_block(self, k_block: int, slot: Int32) -> cute.Tensor:
        """A block of K of B, (MMA, MMA_N), by ldmatrix."""
        to = self.load.get_slice(cute.arch.lane_idx()).retile(self.b)  # (CPY, CPY_N, CPY_K)
        cute.copy(self.load, self.source[None, None, k_block, slot], to[None, None, k_block])
        return self.b[None, None, k_block]

    @cute.jit
    def add(self, a: Groups, acc: Groups, slot: Int32) -> None:
        """acc += A @ B[slot]^T of each group, A as ((2, 2, 2), 1, MMA_K)."""
        for k_block in cutlass.range_constexpr(self.k_blocks):
            b = self.load_block(k_block, slot)
            for g in cutlass.range_constexpr(len(a)):
                cute.gemm(self.mma, acc[g], a[g][None, None, k_block], b, acc[g])


class NarrowKeys(WarpProduct):
    """S += Q @ K[slot]^T with K in e4m3, two of which are one element of B: a thread holds four
    neighbours of K, and must hold the same four of Q (FewRows.load_words)."""

    @cute.jit
    def add(self, a: Groups, acc: Groups, slot: Int32) -> None:
        for k_block in cutlass.range_constexpr(self.k_blocks):
            words = cute.recast_tensor(self.load_block(k_block, slot), Int32)
            tiles = cute.size(words) // 2
            b = cute.make_rmem_tensor(cute.make_layout(((2, 2), tiles, 2)), Float16)
            for n in cutlass.range_constexpr(tiles):
                for half in cutlass.range_constexpr(2):
                    wide = widened(words[2 * n + half])
                    for i in cutlass.range_constexpr(4):
                        b[(i % 2, i // 2), n, half] = wide[i]
            for half in cutlass.range_constexpr(2):
                for g in cutlass.range_constexpr(len(a)):
                    of_q = a[g][None, None, 2 * k_block + half]
                    cute.gemm(self.mma, acc[g], of_q, b[None, None, half], acc[g])


class NarrowValues(WarpProduct):
    """O += P @ V[slot] with V in e4m3, two columns of which are one element of B: the first half of
    O's tiles has the even columns, the second half the odd ones."""

    @cute.jit
    def add(self, a: Groups, acc: Groups, slot: Int32) -> None:
        for k_block in cutlass.range_constexpr(self.k_blocks):
            words = cute.recast_tensor(self.load_block(k_block, slot), Int32)
            tiles = cute.size(words) // 2
            b = cute.make_rmem_tensor(cute.make_layout(((2, 2), tiles, 2)), Float16)
            for n in cutlass.range_constexpr(tiles):
                for keys in cutlass.range_constexpr(2):
                    word = words[2 * n + keys]
                    wide = widened(Int32(cute.arch.prmt(word, word, EVEN_ODD)))
                    for i in cutlass.range_constexpr(4):
                        b[(i % 2, keys), n, i // 2] = wide[i]
            for odd in cutlass.range_constexpr(2):
                for g in cutlass.range_constexpr(len(a)):
                    of_columns = cute.make_tensor(
                        acc[g].iterator + odd * 4 * tiles, cute.make_layout(((2, 2), 1, tiles))
                    )
                    of_p = a[g][None, None, k_block]
                    cute.gemm(self.mma, of_columns, of_p, b[None, None, odd], of_columns)


@cute.jit
def widened(word: Int32) -> cute.Tensor:
    """Four e4m3 values as fp16."""
    held = cute.make_rmem_tensor(cute.make_layout(4), Float8E4M3FN)
    cute.recast_tensor(held, Int32)[0] = word
    wide = cute.make_rmem_tensor(cute.make_layout(4), Float16)
    wide.store(held.load().to(Float16))
    return wide
