"""Stage 6: clusters. Neighbouring CTAs load what they share once.

Idea: two CTAs that work on the same rows of C read the same tiles of A, two in the same columns the
same tiles of B. In a cluster each loads half of a shared tile, and TMA multicast writes it into the
smem of both.

Changed since stage 5: the operands are loaded in parts (`AbOperands.loads` with a real cluster), a
slot is empty when the MMA warps of all its readers say so (`SharedRing`), and a CTA stays until its
neighbours have nothing left to send: the MMA role (`mainloop` in mma.py, as of all stages from
here on) releases its last slot too, and the load role waits for all slots to be empty.

Two CTAs of 128x256 side by side load 40 KB each instead of 48 for the same MMA.

Measured: 645 TFLOPS, 0.97 times stage 5: a loss. 48 KB in 1024 cycles are what L2 gives an SM
anyhow, and two CTAs that share slots wait for each other. It stays because stages 8 and 9 take
more through L2 (53 bytes a cycle with 128x192), where it costs nothing and at times gains.
"""

from __future__ import annotations

from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.atoms.multicast import AbOperands, Cluster, SharedRing, shared_operand
from cutex.device.atoms.tma import store_operand
from cutex.device.atoms.wgmma import WgmmaProduct
from cutex.device.epilogue.sm90.tma_store import WarpgroupStore
from cutex.kernels.gemm.sm90.load import fill_ring
from cutex.kernels.gemm.sm90.mma import mainloop
from cutex.kernels.gemm.sm90.stage5 import Stage5
from cutex.schedulers.one_tile import OneTilePerCta
from cutex.schedulers.raster import clusters


class Stage6(Stage5):
    """The kernel of stage 6: its barriers and its memory.

    barrier         arrives                                      waits
    ab.full[slot]   1: LOAD, and the bytes by TMA, whichever     MMA warps, before wgmma
                    CTA of the cluster loaded them
    ab.empty[slot]  1 an MMA warp of each CTA that this CTA's    LOAD, before it loads into the
                    loads write to                               smem of all of them, and at the end
    (warpgroup)     as in stage 5
    (cluster)       all threads                                  all, before the first load

    smem: as in stage 5.
    """

    number = 6

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.config.cluster_m, self.config.cluster_n)

    def grid(self, mC: cute.Tensor) -> tuple[Int32, Int32, int]:
        c = self.config
        m, n, _ = self.counts(mC)
        return clusters(m, c.cluster_m) * c.cluster_m, clusters(n, c.cluster_n) * c.cluster_n, 1

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream) -> None:
        c = self.config
        a = shared_operand(mA, self.slots(mA.element_type, c.tile_m), c.cluster_n)
        b = shared_operand(mB, self.slots(mB.element_type, c.tile_n), c.cluster_m)
        out = store_operand(mC, self.epilogue_slots(mC.element_type))
        self.kernel(a, b, out).launch(
            grid=self.grid(mC),
            block=(self.num_threads, 1, 1),
            cluster=(c.cluster_m, c.cluster_n, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    def ring(self, smem: SmemAllocator) -> SharedRing:
        c = self.config
        warps = 4 if c.pingpong else self.mma_warps.count
        return SharedRing.of_cluster(smem, "ab", c.num_stages, c.stage_bytes, warps, self.cluster)

    @cute.jit
    def load_tiles(self, ab_operands: AbOperands, ab: SharedRing, mC: cute.Tensor) -> None:
        loads = ab_operands.loads(OneTilePerCta.work_tile(), self.cluster)
        ab.drain(fill_ring(loads, ab, ab.producer(), 0, loads.num_k_tiles))

    @cute.jit
    def compute_tiles(
        self,
        mma: WgmmaProduct,
        ab: SharedRing,
        epilogue: WarpgroupStore,
        num_k_tiles: Int32,
        mC: cute.Tensor,
    ) -> None:
        mainloop(mma, ab, ab.consumer(), num_k_tiles)
        self.store(mma, epilogue, OneTilePerCta.work_tile())
