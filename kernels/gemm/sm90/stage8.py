"""Stage 8: ping-pong. One warpgroup stores its tile while the other computes.

Idea: in stage 7 both MMA warpgroups store at the same time, and the tensor cores wait. Let each
have tiles of its own, in turn: while one rounds and stores, the other's wgmma run. One warpgroup
keeps the tensor cores busy by itself, because the next group of wgmma is issued before the last is
done.

Changed since stage 7: the tile, 128x192 by one warpgroup (192 accumulators a thread, like 256x192
by two), and `compute_tiles`, which is `ping_pong` (mma.py): each warpgroup walks every second
tile, skips the other's part of the ring, and issues when the other has issued its last wgmma.

Measured: 717 TFLOPS, 1.06 times stage 7, and as much as a cooperative kernel could gain by
hiding its epilogue. At 4096x4096x4096 it loses (0.90): 704 tiles of 128x192 are 5.3 rounds of 132
SMs, that is six. Stage 9 chooses the tile for each problem.

NOTE: correctness needs the turn, too. A wait on a slot's barrier distinguishes only odd from even
phases, so a warpgroup may wait for a slot only when at most one phase is outstanding.
"""

from __future__ import annotations

from functools import partial

from cutlass import Int32, cute

from cutex.device.atoms.multicast import SharedRing
from cutex.device.atoms.wgmma import WgmmaProduct
from cutex.device.epilogue.sm90.tma_store import WarpgroupStore
from cutex.kernels.gemm.sm90.mma import ping_pong
from cutex.kernels.gemm.sm90.stage7 import Stage7


class Stage8(Stage7):
    """The kernel of stage 8: its barriers and its memory.

    barrier         arrives                                      waits
    ab.empty[slot]  1 a warp of the warpgroup whose tile it is,  LOAD
                    in each CTA that this CTA's loads write to
    (turn)          the warpgroup that has issued its tile       the other, before it issues its own
    others as in stage 6

    smem      bytes
    sA        tile_m * k_bytes * num_stages             81920
    sB        tile_n * k_bytes * num_stages             122880
    sC        64 * epi_n * 2 * epi_stages * warpgroups     16384
    ab        16 * num_stages                              80
    """

    number = 8

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
        ping_pong(mma, ab, num_k_tiles, walk, partial(self.store, mma, epilogue))
