"""Stage 7: cp.async fills one buffer while the other is multiplied.

Stage 6 waits for each tile from memory, and holds it in registers until it is written. cp.async
writes past the registers, and comes when it comes: the next tile is under way while this one is
multiplied, and one barrier a tile is left of two. It moves 16 bytes as they are, so K stays
innermost in smem, and a load brings 4 neighbours of K of one row: as many loads for as many FMAs.

Rows of 64 bytes begin in two places of the 128 bytes of all banks, so stage 4's swizzle comes back,
of 16 bytes instead of words: `Swizzle<2, 2, 3>` XORs a row's quarter with bits 1 and 2 of the row,
and the same quarter of 8 neighbouring rows is in 8 different places.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from cutex.device.atoms.async_copy import copy_async
from cutex.kernels.gemm.simt.config import VECTOR
from cutex.kernels.gemm.simt.stage5 import Lines, Stage5

ROW = 16  # elements of a row of a tile


class Stage7(Stage5):
    def tile_layout(self, rows: int) -> cute.ComposedLayout:
        c = self.config
        assert c.tile_k == ROW, f"tile_k={c.tile_k}: the swizzle is of rows of {ROW} elements"
        plain = cute.make_layout(
            (rows, c.tile_k, c.num_stages), stride=(c.tile_k, 1, rows * c.tile_k)
        )
        return cute.make_composed_layout(cute.make_swizzle(2, 2, 3), 0, plain)

    @property
    def width(self) -> int:
        """The elements of a copy."""
        return VECTOR if self.config.whole_k else 1

    @cute.jit
    def mainloop(self, mAB, sAB, corner, rAcc: cute.Tensor, thread: Int32) -> None:
        slots = self.config.num_stages
        k_tiles = cute.ceil_div(cute.size(mAB[0], mode=[1]), self.config.tile_k)
        sources = [self.sources(mAB[i], sAB[i], corner[i], thread) for i in range(2)]
        for k_tile in cutlass.range_constexpr(slots - 1):
            self.fill(mAB, sAB, sources, k_tile, k_tile, thread)
        slot, free = Int32(0), Int32(slots - 1)
        for k_tile in cutlass.range(k_tiles, unroll=1):
            cute.arch.cp_async_wait_group(slots - 2)
            cute.arch.sync_threads()  # the tile is there, and nobody reads the slot before any more
            self.fill(mAB, sAB, sources, k_tile + slots - 1, free, thread)
            self.multiply(sAB[0][None, None, slot], sAB[1][None, None, slot], rAcc, thread)
            free = slot
            slot = slot + 1 if slot < slots - 1 else Int32(0)

    def places(self, sX: cute.Tensor, thread: Int32) -> tuple[Lines, Int32]:
        """The rows of a tile that this thread copies from, and its first k."""
        lanes = self.config.tile_k // self.width  # along K
        step = self.num_threads // lanes
        steps = range(0, cute.size(sX, mode=[0]), step)
        return Lines(thread // lanes, tuple(steps)), thread % lanes * self.width

    def sources(self, mX: cute.Tensor, sX: cute.Tensor, row: Int32, thread: Int32) -> list:
        """The addresses of these in the first tile at `row` of mX; past the last row, its own,
        whose products are not stored."""
        lines, k = self.places(sX, thread)
        last = cute.size(mX, mode=[0]) - 1
        return [mX.iterator + cute.crd2idx((cutlass.min(row + at, last), k), mX.layout)
                for at in lines.all()]  # fmt: skip

    @cute.jit
    def fill(self, mAB, sAB, sources, k_tile, slot, thread: Int32) -> None:
        """Have the tiles of A and B copied into a slot, as one group; zeros past the last k."""
        size = self.width * Float32.width // 8
        for i in cutlass.range_constexpr(2):
            lines, k = self.places(sAB[i], thread)
            from_k = k_tile * self.config.tile_k
            read = Int32(size) if from_k + k < cute.size(mAB[i], mode=[1]) else Int32(0)
            to = self.addresses(sAB[i][None, None, slot], lines, k)
            for j in cutlass.range_constexpr(len(to)):
                copy_async(to[j], sources[i][j] + from_k, size, read)
        cute.arch.cp_async_commit_group()

    def addresses(self, sX: cute.Tensor, lines: Lines, k: Int32 | int) -> list[cute.Pointer]:
        """The addresses of sX[lines, k].

        NOTE: the swizzle of all is that of the first, since the steps leave bits 1 and 2 of a row
        as they are; so the others are a constant away, for which a load's address has room.
        """
        first = sX.iterator + cute.crd2idx((lines.first, k), sX.layout)
        return [first + step * self.config.tile_k for step in lines.steps]

    def multiply(self, sA: cute.Tensor, sB: cute.Tensor, rAcc: cute.Tensor, thread: Int32) -> None:
        for k in range(0, self.config.tile_k, VECTOR):
            b = [_vector(x) for x in self.addresses(sB, self.columns(thread), k)]
            for i, address in enumerate(self.addresses(sA, self.rows(thread), k)):
                a = _vector(address)
                for v in range(VECTOR):
                    for j in range(len(b)):
                        rAcc[i, j] = rAcc[i, j] + a[v] * b[j][v]


def _vector(address: cute.Pointer) -> cute.Tensor:
    """VECTOR neighbours, in registers: (VECTOR,)."""
    rX = cute.make_rmem_tensor(VECTOR, Float32)
    cute.autovec_copy(cute.make_tensor(address.align(16), cute.make_layout(VECTOR)), rX)
    return rX
