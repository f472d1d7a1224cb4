"""The grouped GEMM on Hopper: out[rows of e] = ops(A[rows of e] @ B[e]).

The general kernel's roles (kernels/gemm/sm90) on the tiles of ragged groups (schedulers/ragged.py),
whose ends are known on the device alone.

- One warp of a CTA reads the ends and fills in the tables of groups; then all roles walk the same
  tiles, each at its own pace.
- One tensor map loads A, one B (E, K, N), one stores out (views.py): none is made for a group.
- Rows of no group are neither read nor written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.arch import arch as arch_named
from cutex.compile import Argument
from cutex.device.atoms.mma import MAJORS
from cutex.device.atoms.multicast import AbOperands, Cluster
from cutex.device.atoms.tma import AbLoads
from cutex.device.atoms.wgmma import Wgmma, WgmmaProduct, wgmma
from cutex.device.epilogue.sm90.fused_store import FusedStore, fused_store
from cutex.device.pipeline import publish_barriers
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.grouped.config import GroupedConfig
from cutex.kernels.gemm.grouped.sm90.memory import GroupMemory
from cutex.kernels.gemm.grouped.views import GroupOps, loaded_rows, store_operand, stored_rows
from cutex.kernels.gemm.signature import modes
from cutex.kernels.gemm.sm90 import mma as roles
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm90.general import General
from cutex.kernels.gemm.sm90.load import LoadTiles
from cutex.schedulers.ragged import RaggedTiles, RowGroups
from cutex.schedulers.raster import Raster, clusters


@dataclass(frozen=True)
class GroupedOperands(AbOperands):
    """A (M, K), and B (N, K, E)."""

    groups: Any = None  # RowGroups

    @cute.jit
    def loads(self, tile: WorkTile, cluster: cutlass.Constexpr[Cluster]) -> AbLoads:
        """The loads that this CTA starts for `tile`, of its group's rows and matrix."""
        a = loaded_rows(self.a, self.groups.begins[tile.group])
        operands = AbOperands(a, self.b, self.sA, self.sB, self.k_major)
        return operands.loads(tile._replace(batch=tile.group), cluster)


@dataclass(frozen=True)
class GroupStore:
    """The store of accumulators to the rows of groups."""

    out: cpasync.TmaInfo  # of store_operand
    sC: cute.Tensor  # (64, epiN, SLOT)
    num_slots: int
    groups: RowGroups
    ops: GroupOps

    def of(self, group: Any) -> FusedStore:
        """The store to one group's rows."""
        groups = self.groups
        out = stored_rows(self.out, groups.begins[group], groups.ends[group])
        ops = self.ops.of(groups, group)
        return replace(fused_store(out, self.sC, self.num_slots, True, ops, None), batch=group)


class OfGroups(roles.MmaRole):
    """What an MMA role does otherwise: it stores to the rows of a tile's group."""

    def store(self, mma: WgmmaProduct, epilogue: Any, tile: WorkTile) -> None:
        super().store(mma, epilogue.of(tile.group), tile)


class Cooperative(OfGroups, roles.Cooperative):
    """All warpgroups compute a tile, each its own rows, and store it."""


class PingPong(OfGroups, roles.PingPong):
    """Two warpgroups take every second tile each: one stores while the other's wgmma run."""


class GroupedRows:
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
    sA, sB          tile_m * tile_k * 2 * num_stages, tile_n * tile_k * 2 * num_stages
    sC              64 * epi_n * 2 * epi_stages * warpgroups; half behind a gate
    groups          12 * most_groups + 4
    ab              16 * num_stages
    """

    arch = "sm_90a"
    dtypes = "bf16", "fp16", "e4m3"

    def __init__(self, config: GroupedConfig) -> None:
        if reason := config.why_not(arch_named(self.arch)):
            raise ValueError(reason)
        assert isinstance(config.product.tiles, Sm90Config)  # why_not has refused every other
        self.config, self.tiles = config, config.product.tiles
        if self.tiles.one_tile or self.tiles.stream_k or self.tiles.box_rows:
            raise ValueError(f"{self.tiles}: {self.name} loops over whole tiles")
        self.general = General(config.product)  # whose warps, registers and maps it has

    @property
    def name(self) -> str:
        return "sm90_gemm_grouped_rows"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return self.config.arguments()

    # ---- on the host

    @cute.jit
    def __call__(
        self, mA: cute.Tensor, mB: cute.Tensor, mOut: cute.Tensor, edges: cute.Tensor, *rest
    ) -> None:
        """Launch with a (M, K), b (E, K, N), out (M, N), edges (E), the operations' arguments, and
        a stream."""
        c, general = self.tiles, self.general
        *passed, stream = rest
        mA, mB = modes(mA, columns_first=False), modes(mB, columns_first=True)
        k_major = self.config.product.k_major
        a = general.load_operand(mA, c.tile_m, c.cluster_n, k_major[0])
        b = general.load_operand(mB, c.tile_n, c.cluster_m, k_major[1])
        out = store_operand(mOut, general.epilogue_slots(mOut.element_type))
        self.kernel(a, b, out, mOut, edges, tuple(passed)).launch(
            grid=grid(c, mA, mB),
            block=(general.num_threads, 1, 1),
            cluster=(c.cluster_m, c.cluster_n, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    # ---- on the device

    @cute.kernel
    def kernel(
        self,
        a: cpasync.TmaInfo,
        b: cpasync.TmaInfo,
        out: cpasync.TmaInfo,
        mOut: cute.Tensor,
        edges: cute.Tensor,
        passed: tuple[Any, ...],
    ) -> None:
        """Run the roles."""
        c, product, general = self.tiles, self.config.product, self.general
        kinds, cluster = (a.atom.value_type, b.atom.value_type), general.cluster
        most = self.config.most_groups
        sA, sB, sC, groups, ab = GroupMemory.allocate(SmemAllocator(), general, (a, b, out), most)
        raster = Raster(c.raster_group, c.raster_along)
        shape = (c.tile_m, c.tile_n), (c.cluster_m, c.cluster_n)
        scheduler: Any = RaggedTiles(raster, *shape, groups)
        operands = GroupedOperands(a, b, sA, sB, product.k_major, groups=groups)
        mProduct = product.product(mOut)
        rows, columns = (cute.size(mProduct, mode=[i]) for i in range(2))
        n = cute.size(b.tma_tensor, mode=[0])
        load = LoadTiles(c, cluster, scheduler)
        warp = cute.arch.warp_idx()
        if warp == self.general.load_warps.first:
            load.start(operands, mProduct)
            cute.arch.griddepcontrol_wait()
            scheduler.fill(edges, rows, columns, self.config.padded)
        publish_barriers((ab,), cluster=cluster.size > 1, with_data=True)

        if warp >= self.general.load_warps.first:
            self.general.give_registers()
            if warp == self.general.load_warps.first:
                load.run(operands, ab, mProduct)
        else:
            self.general.take_registers()
            warpgroups = 1 if c.pingpong else c.mma_warpgroups
            a_major, b_major = (MAJORS[k_major] for k_major in product.k_major)
            mma = wgmma(Wgmma(c.tile_n, *kinds, a_major, b_major, warpgroups), sA, sB)
            ops = GroupOps(product.ops, passed, n)
            store = GroupStore(out, sC, c.epi_stages, groups, ops)
            role = PingPong if c.pingpong else Cooperative
            role(product, c, scheduler).run(mma, ab, store, operands.num_k_tiles, mProduct)
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
