"""What the grouped kernels on Hopper share: a CTA's memory, walk and warps."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from cutex.arch import arch as arch_named
from cutex.compile import Argument
from cutex.device.atoms.mma import MAJORS
from cutex.device.atoms.wgmma import Wgmma, wgmma
from cutex.device.pipeline import publish_barriers
from cutex.kernels.gemm.grouped.config import GroupedConfig, SumsConfig
from cutex.kernels.gemm.grouped.sm90.memory import GroupMemory
from cutex.kernels.gemm.signature import tile_counts
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm90.general import General
from cutex.kernels.gemm.sm90.load import LoadAnnounced, LoadTiles
from cutex.kernels.gemm.sm90.mma import MmaRole, RoleProduct
from cutex.schedulers.announced import AnnouncedTiles
from cutex.schedulers.ragged import RaggedTiles, RowGroups
from cutex.schedulers.raster import Raster, clusters


class GroupedKernel:
    """A CTA computes tiles of groups: a load warp, and up to three warpgroups that run wgmma.

    barrier         arrives                                      waits
    ab.full[slot]   1: LOAD, and the bytes by TMA, whichever     MMA warps, before wgmma
                    CTA of the cluster loaded them
    ab.empty[slot]  1 an MMA warp that reads this CTA's loads,   LOAD, before it loads into the
                    in its own CTA and in those that share them; smem of all of them, and at the end
                    with ping-pong, of the warpgroup at work
    0   (CTA)       all threads, barriers being initialised and  all; with a cluster, its barrier
                    the tables filled in
    1-3 (warpgroup) its threads, having written a slot of sC     the same, before TMA stores it and
                                                                 before they write the next
    3-4 (order)     with ping-pong: the warpgroup that has       the other, before it issues its own
                    issued its tile

    smem            bytes
    sA, sB          tile_m * k_bytes * num_stages, tile_n * k_bytes * num_stages
    sC              64 * epi_n * 2 * epi_stages * warpgroups; half after a gate
    groups          12 * most_groups + 4
    ab              16 * num_stages
    """

    arch = "sm_90a"
    name: str
    load_role = LoadTiles

    def __init__(self, config: GroupedConfig | SumsConfig) -> None:
        if reason := config.why_not(arch_named(self.arch)):
            raise ValueError(reason)
        tiles = config.product.tiles
        assert isinstance(tiles, Sm90Config)  # why_not has refused every other
        self.config, self.tiles = config, tiles
        if tiles.one_tile or tiles.stream_k or tiles.box_rows or tiles.k_shares > 1:
            raise ValueError(f"{tiles}: {self.name} loops over whole tiles")
        self.general = General(config.product)  # whose warps, registers and maps it has

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return self.config.arguments()

    def start(self, launched: Any, grid: Any, stream: Any) -> None:
        """Launch a kernel with its arguments."""
        c = self.tiles
        launched.launch(
            grid=grid,
            block=(self.general.num_threads, 1, 1),
            cluster=c.cluster,
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    def ragged(self, groups: RowGroups) -> Any:
        """The scheduler of the tiles of ragged groups."""
        c = self.tiles
        shape = (c.tile_m, c.tile_n), (c.cluster_m, c.cluster_n)
        return RaggedTiles(Raster(c.raster_group, c.raster_along), *shape, groups)

    def product(self, sA: cute.Tensor, sB: cute.Tensor) -> Any:
        """This warpgroup's part of a tile: a WgmmaProduct, or what the MMA role uses in its
        place."""
        c = self.tiles
        warpgroups = 1 if c.pingpong else c.mma_warpgroups
        a_major, b_major = (MAJORS[k_major] for k_major in self.config.product.k_major)
        kinds = sA.element_type, sB.element_type
        return wgmma(Wgmma(c.tile_n, *kinds, a_major, b_major, warpgroups), sA, sB)

    def announced_tiles(self, smem: SmemAllocator) -> AnnouncedTiles | None:
        """Allocate the slots of the tiles that a warp of its own looks up; None: each role does."""
        return None

    def announced_load(self, scheduler: Any, announced: Any) -> LoadAnnounced:
        """The load role of AnnouncedTiles."""
        return LoadAnnounced(self.tiles, self.general.cluster, scheduler, announced)

    def announce(self, announced: Any, walk: Any) -> None:
        """Announce the tiles of a walk. One warp calls it."""
        announced.announce(walk)

    def sizes(self, mProduct: cute.Tensor) -> tuple[Int32, Int32]:
        """The rows of all groups, and the columns of a matrix."""
        return cute.size(mProduct, mode=[0]), cute.size(mProduct, mode=[1])

    @cute.jit
    def run(
        self,
        memory: GroupMemory,
        operands: Any,
        role: cutlass.Constexpr[MmaRole],
        store: Any,
        edges: cute.Tensor,
        mProduct: cute.Tensor,
        announced: Any = None,
    ) -> None:
        """Fill in the tables, then load the tiles of all groups, and compute and store them.

        `announced`: the AnnouncedTiles that a warp of its own looks up; None: each role does.
        """
        general, ab = self.general, memory.ab
        scheduler: Any = role.scheduler  # of `ragged`
        rows, columns = self.sizes(mProduct)
        load: Any = self.load_role(self.tiles, general.cluster, scheduler)
        barriers: Any = (ab,)
        if cutlass.const_expr(announced is not None):
            load = self.announced_load(scheduler, announced)
            barriers = ab, *announced.barriers
        warp = cute.arch.warp_idx()
        if warp == self.general.load_warps.first:
            load.start(operands, mProduct)
            cute.arch.griddepcontrol_wait()
            only = getattr(self.config, "only", None)  # sums have all groups
            scheduler.fill(edges, rows, columns, self.config.padded, only)
        publish_barriers(barriers, cluster=general.cluster.size > 1, with_data=True)

        if warp >= self.general.load_warps.first:
            self.general.give_registers()
            if warp == self.general.load_warps.first:
                load.run(operands, ab, mProduct)
            if cutlass.const_expr(announced is not None):  # noqa: SIM102 - known when tracing
                if warp == self.general.load_warps.first + 1:
                    walk = scheduler.walk(tile_counts(self.tiles, mProduct))
                    self.announce(announced, walk)
        else:
            self.general.take_registers()
            mma = self.product(memory.sA, memory.sB)
            role.run(RoleProduct(mma, ab, store, operands.num_k_tiles, mProduct))
            drain_stores()


def grid(tiles: Sm90Config, mA: cute.Tensor, mB: cute.Tensor) -> tuple[int, int, Int32]:
    """The clusters of tiles of A (M, K) and B (N, K, E): at most as many as run at one time."""
    across, down = tiles.cluster_m, tiles.cluster_n
    at_once = (tiles.num_ctas or arch_named(tiles.arch).num_sms) // (across * down)
    rows = cute.size(mA, mode=[0]) // (tiles.tile_m * across) + cute.size(mB, mode=[2])
    columns = clusters(cute.size(mB, mode=[0]), tiles.tile_n * down)
    return across, down, cutlass.min(max(1, at_once), rows * columns)


@cute.jit
def drain_stores() -> None:
    """Wait until TMA has read every slot of this warp's stores, so that the smem may be
    released."""
    cute.arch.cp_async_bulk_wait_group(0, read=True)
