"""Stage 7: persistent CTAs, which walk the tiles in an order that suits L2.

Idea: with one tile per CTA, an SM that ends a tile waits for a new CTA, its barriers and its first
loads before it computes again. A CTA that stays keeps its ring going: while the MMA warps still
store a tile, the load warp already fills the slots for the next. And the order of the tiles can be
chosen: in bands of `raster_group` clusters, so that the tiles in work at one time form a block
about as high as it is wide, and share the most of A and B in L2 (schedulers/raster.py).

Changed since stage 6: the grid, and both roles loop over the tiles.

Measured: 679 TFLOPS, 1.05 times stage 6. Bands of 4, 8 and 16, along M or N, differ by less than
1 %: all of them keep what a wave reads within L2.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from cutex.arch import arch as arch_named
from cutex.device.atoms.multicast import AbOperands, SharedRing
from cutex.device.atoms.wgmma import WgmmaProduct
from cutex.device.epilogue.sm90.tma_store import WarpgroupStore
from cutex.kernels.gemm.sm90.load import fill_ring
from cutex.kernels.gemm.sm90.mma import mainloop
from cutex.kernels.gemm.sm90.stage6 import Stage6
from cutex.schedulers.persistent import StaticPersistent
from cutex.schedulers.raster import Raster


class Stage7(Stage6):
    """Barriers and smem: as in stage 6."""

    number = 7

    @property
    def tiles(self) -> StaticPersistent:
        c = self.config
        return StaticPersistent(
            Raster(c.raster_group, c.raster_along),
            cluster=(c.cluster_m, c.cluster_n),
            num_ctas=c.num_ctas or arch_named(self.arch).num_sms,
        )

    def grid(self, mC: cute.Tensor) -> tuple[int, int, Int32]:
        return self.tiles.grid(self.counts(mC))

    @cute.jit
    def load_tiles(self, ab_operands: AbOperands, ab: SharedRing, mC: cute.Tensor) -> None:
        walk = self.tiles.walk(self.counts(mC))
        fill = ab.producer()
        for index in cutlass.range(walk.start, walk.end, walk.step, unroll=1):
            loads = ab_operands.loads(walk.tile_at(index), self.cluster)
            fill = fill_ring(loads, ab, fill, 0, loads.num_k_tiles)
        ab.drain(fill)

    @cute.jit
    def compute_tiles(
        self,
        mma: WgmmaProduct,
        ab: SharedRing,
        epilogue: WarpgroupStore,
        num_k_tiles: Int32,
        mC: cute.Tensor,
    ) -> None:
        walk = self.tiles.walk(self.counts(mC))
        take = ab.consumer()
        for index in cutlass.range(walk.start, walk.end, walk.step, unroll=1):
            take = mainloop(mma, ab, take, num_k_tiles)
            self.store(mma, epilogue, walk.tile_at(index))
