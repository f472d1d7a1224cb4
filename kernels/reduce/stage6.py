"""Stage 6: eight CTAs add up in distributed smem, and count as one.

Each warp of a cluster writes its sum into the smem of every CTA of it (`RowReduction`, of which
this is one row), so that an eighth of the sums is written to memory, and an eighth of the atomic
adds meets at one address.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.last_arrival import is_last_arrival
from cutex.device.pipeline import publish_barriers
from cutex.device.row.reduction import RowReduction, add
from cutex.device.row.tile import RowTile
from cutex.kernels.reduce import WITH_CLUSTERS
from cutex.kernels.reduce.stage0 import WARP
from cutex.kernels.reduce.stage5 import Stage5


class Stage6(Stage5):
    archs = WITH_CLUSTERS

    @cute.jit
    def __call__(self, mX, mFirst, mCounter, mTotal, stream) -> None:
        size = self.config.cluster
        parts = cute.ceil_div(cute.size(mX), self.elements(mX))
        ctas = cutlass.min(cute.round_up(parts, size), self.config.ctas)
        self.once(mX, mFirst, mCounter, mTotal).launch(
            grid=(ctas, 1, 1), block=(self.config.threads, 1, 1), cluster=(size, 1, 1),
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def once(self, mX, mFirst, mCounter, mTotal) -> None:
        smem = SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout(WARP), 16)  # (WARP)
        is_last = smem.allocate_tensor(Int32, cute.make_layout(1), 4)
        row = RowReduction.allocate(smem, RowTile(1, self.config.threads, self.config.cluster))
        publish_barriers(row.barriers, cluster=True)
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        size, ctas = self.config.cluster, cute.arch.grid_dim()[0]
        clusters = ctas // size
        x = self.walked(mX, block, ctas, thread)
        (total,) = row((x,), add)
        leads = block % size == 0
        if thread == 0:
            is_last[0] = Int32(0)
            if leads:
                mFirst[block // size] = total
                is_last[0] = Int32(is_last_arrival(mCounter.iterator, clusters))
        cute.arch.sync_threads()
        if is_last[0] != 0:
            x = Float32(0)
            for other in cutlass.range(thread, clusters, self.config.threads):
                x += mFirst[other]
            total = self.total(x, sums, thread)
            if thread == 0:
                mTotal[0] = total

    kernels = {"once": once}  # noqa: RUF012
