"""What the grouped kernels on Blackwell share: launch, walk, and the ends of a pair's work."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from cutex.arch import arch as arch_named
from cutex.compile import Argument
from cutex.device.atoms.tmem import Tmem, fence_after_sync
from cutex.device.pipeline import AccRing, PairRing, publish_barriers, sync_cluster
from cutex.kernels.gemm.grouped.config import GroupedConfig, SumsConfig
from cutex.kernels.gemm.sm100.config import Sm100Config
from cutex.kernels.gemm.sm100.general import Warp
from cutex.schedulers.clc import CTAS
from cutex.schedulers.ragged import RaggedTiles, RowGroups
from cutex.schedulers.raster import Raster, clusters


class GroupedKernel:
    """A pair of CTAs computes tiles of groups: in each CTA a load warp, an MMA warp, four that
    store, and one idle.

    barrier          arrives                                   waits
    ab.full[slot]    1: LOAD of the leader, and the bytes of   MMA of the leader
                     both CTAs by TMA
    ab.empty[slot]   1: the commit of its last MMA, in both    LOAD of its CTA
    acc.full[slot]   1: the commit of the last MMA of one      the epilogue warps of its CTA
                     accumulator of a tile, in both CTAs
    acc.empty[slot]  1 an epilogue warp of both CTAs: 8 at     MMA of the leader, before it
                     the leader's                              computes into it
    1   (sub-tile)   the epilogue warps, having written their  the same, before TMA stores the slot
                     rows of a slot of sC                      and before they write the next
    (cluster)        all threads, barriers being initialised   all threads
                     and the tables filled in
    (cluster)        all threads, their tiles being done       all threads, before tensor memory is
                                                               freed

    smem of a CTA    bytes                                     tmem   columns
    sA               tile_m / 2 * k_bytes * num_stages      acc    tile_n * num_acc
    sB               tile_n / 2 * k_bytes * num_stages
    sC               128 * epi_n * 2 * epi_stages; half after a gate
    groups           12 * most_groups + 4
    ab, acc          16 * num_stages, 16 * num_acc, and 4 for the address of tmem
    """

    arch = "sm_100a"
    name: str
    num_threads = Warp.END * 32

    def __init__(self, config: GroupedConfig | SumsConfig) -> None:
        if reason := config.why_not(arch_named(self.arch)):
            raise ValueError(reason)
        tiles = config.product.tiles
        assert isinstance(tiles, Sm100Config)  # why_not has refused every other
        self.config, self.tiles = config, tiles

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return self.config.arguments()

    def start(self, launched: Any, grid: Any, stream: Any) -> None:
        """Launch a kernel with its arguments."""
        launched.launch(
            grid=grid,
            block=(self.num_threads, 1, 1),
            cluster=(CTAS, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    def grid(self, mA: cute.Tensor, mB: cute.Tensor) -> tuple[int, int, Int32]:
        """The pairs for tiles of A (M, K) and B (N, K, E): at most as many as run at one time."""
        c = self.tiles
        at_once = (c.num_ctas or arch_named(self.arch).num_sms) // CTAS
        down = cute.size(mA, mode=[0]) // c.tile_m + cute.size(mB, mode=[2])
        across = clusters(cute.size(mB, mode=[0]), c.tile_n)
        return CTAS, 1, cutlass.min(max(1, at_once), down * across)

    def ragged(self, groups: RowGroups) -> Any:
        """The scheduler of the tiles of ragged groups.

        NOTE: a CTA's own rows are half a tile's, or with two accumulators a quarter of them each
        """
        c = self.tiles
        raster = Raster(c.raster_group, c.raster_along)
        return RaggedTiles(raster, (c.tile_m // CTAS, c.tile_n), (CTAS, 1), groups)

    @cute.jit
    def begin(
        self,
        rings: tuple[PairRing, AccRing],
        tmem: Tmem,
        tables: RaggedTiles,
        edges: cute.Tensor,
        sizes: tuple[Int32, Int32 | int],
    ) -> Any:
        """Fill in the tables of groups of (rows, columns), publish the barriers of both rings, and
        return the pointer to tensor memory."""
        rows, columns = sizes
        warp = cute.arch.warp_idx()
        if warp == Warp.MMA:
            tmem.acquire()
        if warp == Warp.LOAD:
            cute.arch.griddepcontrol_wait()
            tables.fill(edges, rows, columns, self.config.padded)
        publish_barriers(rings, cluster=True, with_data=True)
        return tmem.pointer()

    @cute.jit
    def end(self, tmem: Tmem, pointer: Any) -> None:
        """Free tensor memory when both CTAs' tiles are done."""
        sync_cluster()
        if cute.arch.warp_idx() == Warp.MMA:
            fence_after_sync()
            tmem.free(pointer)
