"""Stage 2: a ring of smem slots, so that loads run ahead of the MMA.

Idea: while the MMA reads one slot, TMA fills the others. A slot has two barriers, `full` and
`empty`, and the hardware itself signals both: TMA when the bytes are there, tcgen05.commit when
every MMA that reads them is complete. Warp 0 starts MMA k, then refills the slot of MMA k-1.

Changed since stage 1: `barriers` and `mainloop`.

The tensor core no longer waits for memory latency, only for bandwidth, and for the one warp that
issues everything in turn. Expect 1.4 to 2 times stage 1.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass.memory import SmemAllocator

from cutex.device.atoms.tma import AbLoads
from cutex.device.atoms.umma import UmmaProduct
from cutex.device.pipeline import Barrier, Ring
from cutex.kernels.gemm.sm100.stage1 import Stage1


class Barriers(NamedTuple):
    ab: Ring
    acc_full: Barrier


class Stage2(Stage1):
    """The kernel of stage 2: its barriers and its memory.

    barrier         arrives                           waits
    ab.full[slot]   1: warp 0, and the bytes by TMA   warp 0, before the MMA
    ab.empty[slot]  1: the commit of its MMA          warp 0, before it loads
    acc_full        1: the commit of the last MMA     warp 0, before the epilogue
    (CTA)           as in stage 0

    smem      bytes                                       tmem   columns
    sA        tile_m * k_bytes * num_stages  65536     acc    tile_n    256
    sB        tile_n * k_bytes * num_stages  131072
    barriers  16 * num_stages + 8, and 4 for the address of tmem
    """

    number = 2
    min_stages = 2  # with one, there is no slot to load while the MMA reads the other

    def barriers(self, smem: SmemAllocator) -> Barriers:
        c = self.config
        return Barriers(
            ab=Ring.allocate(smem, "ab", c.num_stages, c.stage_bytes, consumers=1),
            acc_full=Barrier.allocate(smem, "acc full", arrivals=1),
        )

    @cute.jit
    def mainloop(self, loads: AbLoads, mma: UmmaProduct, barriers: Barriers) -> None:
        """Compute the accumulator, which is complete when this returns. Warp 0 alone calls it."""
        ab, acc_full = barriers.ab, barriers.acc_full
        num_k_tiles = loads.num_k_tiles
        fill, take = ab.producer(), ab.consumer()
        for k_tile in cutlass.range(cutlass.min(ab.num_slots, num_k_tiles), unroll=1):
            loads.load(k_tile, fill.slot, ab.acquire(fill))
            fill.advance()
        for k_tile in cutlass.range(num_k_tiles, unroll=1):
            ab.wait_full(take)
            mma.issue(take.slot, accumulate=k_tile > 0)
            mma.commit(ab.empty[take.slot])
            take.advance()
            refill = k_tile - 1 + ab.num_slots  # into the slot of the MMA before
            if k_tile > 0 and refill < num_k_tiles:
                loads.load(refill, fill.slot, ab.acquire(fill))
                fill.advance()
        mma.commit(acc_full[0])
        acc_full.wait(0)
