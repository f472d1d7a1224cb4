"""Sums over the rows of groups on Hopper: out[e] = A[:, rows of e] @ B[rows of e].

The general kernel's roles (kernels/gemm/sm90) on the tiles of a batch, each with its own number of
steps along K: those of its group's rows, or one step of zeros for an empty group, whose result is
zero. This is the gradient of a grouped GEMM's matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from cutex.device.atoms.multicast import AbOperands, Cluster, SharedRing
from cutex.device.atoms.tma import AbLoads, store_operand
from cutex.device.atoms.wgmma import WgmmaProduct
from cutex.device.epilogue.epilogue_ops import BoundOps
from cutex.device.epilogue.sm90.fused_store import fused_store
from cutex.device.pipeline import OrderedBarrier, publish_barriers
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.grouped.sm90.kernel import GroupedKernel
from cutex.kernels.gemm.grouped.sm90.memory import GroupMemory
from cutex.kernels.gemm.grouped.views import summed_operand, summed_rows
from cutex.kernels.gemm.signature import modes, tile_counts, transposed
from cutex.kernels.gemm.sm90.load import fill_ring
from cutex.kernels.gemm.sm90.mma import ORDER_BARRIER, MmaRole, Store, Walk, issue, mainloop
from cutex.schedulers.ragged import RaggedTiles
from cutex.schedulers.raster import Raster

Steps = Callable[[Int32], Int32]  # the steps along K of a group


@dataclass(frozen=True)
class SummedOperands(AbOperands):
    """A (M, K) and B (N, K), both contiguous in the other mode, through maps of
    `summed_operand`."""

    groups: Any = None  # RowGroups

    @cute.jit
    def loads(self, tile: WorkTile, cluster: cutlass.Constexpr[Cluster]) -> AbLoads:
        """The loads that this CTA starts for `tile`, along its group's rows."""
        span = self.groups.begins[tile.batch], self.groups.ends[tile.batch]
        a, b = summed_rows(self.a, *span), summed_rows(self.b, *span)
        return AbOperands(a, b, self.sA, self.sB, self.k_major).loads(tile, cluster)


@cute.jit
def cooperative(
    mma: WgmmaProduct,
    ab: SharedRing,
    walk: cutlass.Constexpr[Walk],
    steps: cutlass.Constexpr[Steps],
    store: cutlass.Constexpr[Store],
) -> None:
    """All warpgroups compute a tile of the walk, each its own rows, and store it."""
    take = ab.consumer()
    for index in cutlass.range(walk.start, walk.end, walk.step, unroll=1):
        tile = walk.tile_at(index)
        take = mainloop(mma, ab, take, steps(tile.batch))
        store(tile)


@cute.jit
def ping_pong(
    mma: WgmmaProduct,
    ab: SharedRing,
    walk: cutlass.Constexpr[Walk],
    steps: cutlass.Constexpr[Steps],
    store: cutlass.Constexpr[Store],
) -> None:
    """Two warpgroups alternate the tiles of the walk, as in the general kernel; each skips the
    steps of the other's tile."""
    order = OrderedBarrier(ORDER_BARRIER)
    mine = cute.arch.warp_idx() // 4
    take = ab.consumer()
    if mine == 1:
        order.signal(0)
        if walk.start < walk.end:
            take.skip(steps(walk.tile_at(walk.start).batch))
    first = walk.start + mine * walk.step
    for index in cutlass.range(first, walk.end, 2 * walk.step, unroll=1):
        tile = walk.tile_at(index)
        order.wait(mine)
        done, take = issue(mma, ab, take, steps(tile.batch))
        following = index + walk.step
        if following < walk.end:
            order.signal(1 - mine)
            take.skip(steps(walk.tile_at(following).batch))
        warpgroup.wait_group(0)
        ab.release(done)
        store(tile)


class GroupedSums(GroupedKernel):
    """The grouped kernel that sums over the rows of each group."""

    name = "sm90_gemm_grouped_sums"

    # ---- on the host

    @cute.jit
    def __call__(
        self, mA: cute.Tensor, mB: cute.Tensor, mOut: cute.Tensor, edges: cute.Tensor, stream
    ) -> None:
        """Launch with a (M, K), b (K, N), out (E, M, N), edges (E), and a stream."""
        c, general = self.tiles, self.general
        mB, mOut = transposed(mB), modes(mOut, columns_first=False)
        a = general.load_operand(summed_operand(mA), c.tile_m, c.cluster_n, False)
        b = general.load_operand(summed_operand(mB), c.tile_n, c.cluster_m, False)
        out = store_operand(mOut, general.epilogue_slots(mOut.element_type))
        launched = self.kernel(a, b, out, edges, cute.size(mA, mode=[1]))
        self.start(launched, general.scheduler.grid(tile_counts(c, mOut)), stream)

    # ---- on the device

    @cute.kernel
    def kernel(
        self,
        a: cpasync.TmaInfo,
        b: cpasync.TmaInfo,
        out: cpasync.TmaInfo,
        edges: cute.Tensor,
        rows: Int32,
    ) -> None:
        """Run the roles. `rows`: the rows of A and B, including those of no group."""
        c, general = self.tiles, self.general
        cluster = general.cluster
        most, kind = self.config.most_groups, out.atom.value_type
        memory = GroupMemory.allocate(SmemAllocator(), general, (a, b), kind, most)
        sA, sB, sC, groups, ab = memory
        tile_k = self.config.product.k_elements
        spans = RaggedTiles(Raster(), (tile_k, 1), (1, 1), groups)
        steps = partial(groups.steps, size=tile_k)
        walk = general.scheduler.walk(tile_counts(c, out.tma_tensor))
        warp = cute.arch.warp_idx()
        if warp == self.general.load_warps.first:
            cpasync.prefetch_descriptor(a.atom)
            cpasync.prefetch_descriptor(b.atom)
            cute.arch.griddepcontrol_wait()
            spans.fill(edges, rows, 1, self.config.padded)
        publish_barriers((ab,), cluster=cluster.size > 1, with_data=True)

        if warp >= self.general.load_warps.first:
            self.general.give_registers()
            if warp == self.general.load_warps.first:
                operands = SummedOperands(a, b, sA, sB, (False, False), groups=groups)
                load(operands, ab, cluster, walk, steps)
        else:
            self.general.take_registers()
            mma = self.product(sA, sB)
            m, n, _ = out.tma_tensor.shape
            ops = BoundOps((), (), (m, n), transposed=False)
            epilogue = fused_store(out, sC, c.epi_stages, True, ops, None)
            store = partial(MmaRole(self.config.product, c, general.scheduler).store, mma, epilogue)
            role = ping_pong if c.pingpong else cooperative
            role(mma, ab, walk, steps, store)
            epilogue.drain()


@cute.jit
def load(
    operands: cutlass.Constexpr[SummedOperands],
    ab: SharedRing,
    cluster: cutlass.Constexpr[Cluster],
    walk: cutlass.Constexpr[Walk],
    steps: cutlass.Constexpr[Steps],
) -> None:
    """The load role: one warp fills the ring with the steps of each tile of the walk."""
    cute.arch.griddepcontrol_launch_dependents()
    fill = ab.producer()
    for index in cutlass.range(walk.start, walk.end, walk.step, unroll=1):
        tile = walk.tile_at(index)
        fill = fill_ring(operands.loads(tile, cluster), ab, fill, 0, steps(tile.batch))
    ab.drain(fill)
