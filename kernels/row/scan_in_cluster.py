"""Running sums along few long rows, each of a cluster whose CTAs send each other what their parts
have."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.pipeline import Barrier, publish_barriers
from cutex.device.stream_order import may_overlap, wait_for_kernel_before
from cutex.kernels.quantize.elements import bits_of, float_of
from cutex.kernels.row.scan import Scan, ScanConfig


@dataclass(frozen=True)
class InClusterConfig(ScanConfig):
    """The scan of a row by a cluster. ctas: its CTAs, each with a part of the tile's length."""

    ctas: int = 1

    def why_not(self) -> str | None:
        if self.shared or self.tile.rows > 1 or self.ctas not in (2, 4, 8, 16):
            return f"ctas={self.ctas}: a row of a cluster of 2 to 16 CTAs, which have no other"
        return super().why_not()


@dataclass(frozen=True)
class Parts:
    """The values of the parts of a row, which the CTAs of a cluster send each other.

    barrier  arrives                                       waits
    full     1: thread 0 of this CTA, and 4 bytes of each  all threads
             CTA
    """

    values: cute.Tensor  # (CTA)
    full: Barrier

    @staticmethod
    def allocate(ctas: int) -> Parts:
        smem = SmemAllocator()
        values = smem.allocate_tensor(Int32, cute.make_layout(ctas), 16)
        return Parts(values, Barrier.allocate(smem, "full", 1))

    @cute.jit
    def send(self, own: Float32) -> None:
        """Send this CTA's value to all of its cluster, and wait for theirs. All threads call it."""
        ctas, thread = cute.size(self.values), Int32(cute.arch.thread_idx()[0])
        if thread == 0:
            self.full.arrive_expecting(4 * ctas)
        cute.arch.cluster_wait()
        if thread < ctas:
            to = self.values.iterator + Int32(cute.arch.block_idx_in_cluster())
            cute.arch.store_async_dsmem(to, bits_of(own), self.full[0], thread)
        self.full.wait(0)


class ScanInCluster(Scan):
    """The same: a cluster has a row, and each of its CTAs the part of its rank.

    smem            bytes
    totals          4 * warps * vectors
    values          4 * CTAs
    """

    title = "scan_in_cluster"
    archs = ("sm_90a", "sm_100a", "sm_120a")

    @cute.jit
    def __call__(self, mX: cute.Tensor, mY: cute.Tensor, parts, stream) -> None:
        ctas = self.config.ctas
        self.in_cluster(mX, mY).launch(
            grid=(cute.size(mX, mode=[0]) * ctas, 1, 1),
            block=(self.tile.num_threads, 1, 1),
            cluster=(ctas, 1, 1),
            use_pdl=may_overlap(),
            stream=stream,
        )

    @cute.kernel
    def in_cluster(self, mX: cute.Tensor, mY: cute.Tensor) -> None:
        c, tile = self.config, self.tile
        parts = Parts.allocate(c.ctas)
        publish_barriers((parts.full,), cluster=True, later=True)
        shape = cute.make_layout((tile.warps, tile.vectors, 1))
        totals = SmemAllocator().allocate_tensor(Float32, shape, 16)  # (WARP, NumV, ROW)
        row, rank = cute.arch.block_idx()[0] // c.ctas, Int32(cute.arch.block_idx_in_cluster())
        gX, gY = mX[row, None], mY[row, None]  # (N)
        columns = self.columns_of(gX, rank, Int32(c.ctas))
        wait_for_kernel_before()
        rX = columns.load(gX, c.fold.fill)  # (V, NumV)
        rS, before = self.within_vectors(rX, totals)  # (V, NumV), (NumV)
        cute.arch.sync_threads()
        parts.send(self.add_totals(before, totals))
        carry = self.start()
        for other in cutlass.range_constexpr(c.ctas):
            value = self.combine(carry, float_of(parts.values[other]))
            carry = cutlass.select_(other < rank, value, carry)
        self.add_carry(before, carry)
        columns.store(self.result(rS, before, mY), gY)

    @property
    def kernels(self):
        return {"in_cluster": type(self).in_cluster}
