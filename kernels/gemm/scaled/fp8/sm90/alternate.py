"""The MMA role of two warpgroups that compute one tile together, each every second block of K.

A small tile's wgmma take no longer than what stands between them: the wait for a slot, the wgmma's
own latency, and the additions of the block before. With a warpgroup for every second block these
hide under the other's wgmma. At the end each has sums of all rows, and leaves the other those of
every second part of the tile in the smem where the ring was (docs/facts/scaled.md#fp8-alternating).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute

from cutex.device.atoms.multicast import SharedRing
from cutex.device.atoms.wgmma import WARPGROUP, WgmmaProduct
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.scaled.fp8.sm90.promote import Promote, promoted
from cutex.kernels.gemm.signature import tile_counts
from cutex.kernels.gemm.sm90.exchange import SUMS_BARRIER, VECTOR, thread_vectors
from cutex.kernels.gemm.sm90.split_k import PartStore


@dataclass(frozen=True)
class PromoteAlternating(Promote):
    """Two warpgroups promote every second block of one tile each, and store every second part."""

    sA: cute.Tensor  # (bM, bK, SLOT), where the ring begins

    @cute.jit
    def run(
        self,
        mma: WgmmaProduct,
        ab: SharedRing,
        epilogue: PartStore,
        num_k_tiles: Int32,
        mC: cute.Tensor,
    ) -> None:
        walk = self.scheduler.walk(tile_counts(self.tiles, mC))
        cute.arch.griddepcontrol_wait()  # the kernel before may write shared factors
        tile = walk.tile_at(walk.start)
        promoted(mma, ab, ab.consumer(), self.factors_of(tile), 0, num_k_tiles)
        self.add_up(mma, epilogue, tile)

    def origin(self, tile: WorkTile) -> tuple[Int32, int, Int32]:
        """The first row of a tile, the step to the next 64, and the first column, all in parts of
        64 x epiN: each warpgroup has all rows."""
        c = self.tiles
        return tile.m * (c.tile_m // 64), 1, tile.n * (c.tile_n // self.config.epi_columns)

    @cute.jit
    def add_up(self, mma: WgmmaProduct, epilogue: PartStore, tile: WorkTile) -> None:
        """Leave the other warpgroup the sums of its parts, add its own to this one's, and store
        them."""
        mine = cute.arch.warp_idx() // 4
        parts = epilogue.parts(mma.acc)  # (V, PART)
        size, num_parts = cute.size(parts, mode=[0]), cute.size(parts, mode=[1])
        place = self.place(size, num_parts)
        # NOTE: then both have read the whole ring
        cute.arch.barrier(barrier_id=SUMS_BARRIER, number_of_threads=2 * WARPGROUP)
        for part in cutlass.range_constexpr(num_parts):
            if mine != part % 2:
                cute.autovec_copy(thread_vectors(parts[None, part]), place[None, None, part])
        cute.arch.barrier(barrier_id=SUMS_BARRIER, number_of_threads=2 * WARPGROUP)
        row, step, column = self.origin(tile)
        per_row = self.tiles.tile_n // self.config.epi_columns
        for part in cutlass.range_constexpr(num_parts):
            turn = part // 2
            if mine == part % 2:
                total = cute.make_rmem_tensor(place.shape[:2], Float32)  # (VECTOR, NumVectors)
                here = thread_vectors(parts[None, part])  # (VECTOR, NumVectors)
                total.store(here.load() + place[None, None, part].load())
                if cutlass.const_expr(turn == 0 or self.tiles.epi_stages == 1):
                    epilogue.wait(0)
                values = cute.make_tensor(total.iterator, cute.make_layout(size))
                slot = turn % self.tiles.epi_stages
                where = row + part // per_row * step, column + part % per_row
                epilogue.store_part(values, slot, *where)

    def place(self, size: int, num_parts: int) -> cute.Tensor:
        """This thread's place (VECTOR, NumVectors, PART) for sums, in the smem where the ring
        was."""
        thread, _, _ = cute.arch.thread_idx()
        first = cute.recast_ptr(self.sA.iterator, dtype=Float32).align(4 * VECTOR)
        shape = VECTOR, size // VECTOR, num_parts, WARPGROUP
        stride = 1, VECTOR * WARPGROUP, size * WARPGROUP, VECTOR
        layout = cute.make_layout(shape, stride=stride)
        return cute.make_tensor(first, layout)[None, None, None, thread % WARPGROUP]
