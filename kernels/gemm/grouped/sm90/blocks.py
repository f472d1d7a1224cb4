"""The grouped fp8 GEMM with fp32 scale factors of blocks on Hopper, promoted as DeepSeek-V3's.

out[rows of e] = ops((A * factors)[rows of e] @ (B * factors)[e]), where each row of A has a factor
for each 128 of K, and each 128x128 of a matrix of B one.

The roles of the grouped kernel (rows.py), whose loads and MMAs are those of the fp8 kernel
(kernels/gemm/scaled/fp8/sm90): factors of A's rows come by TMA from the group's first row on, as A
does; those of B are read from its matrix of all groups'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.factored import FactoredLoads, WithFactors, factors_layout
from cutex.device.atoms.mma import allocate_slots
from cutex.device.atoms.multicast import Cluster
from cutex.device.atoms.tma import AbLoads, TileLoads, load_operand, tile_loads
from cutex.device.atoms.wgmma import ROWS
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.grouped.fp8_config import PITCH, RowBlocksConfig
from cutex.kernels.gemm.grouped.sm90.kernel import GroupedKernel, grid
from cutex.kernels.gemm.grouped.sm90.memory import GroupMemory
from cutex.kernels.gemm.grouped.sm90.rows import GroupedOperands, GroupStore
from cutex.kernels.gemm.grouped.views import GroupOps, loaded_rows, store_operand
from cutex.kernels.gemm.scaled.fp8.sm90.promote import Promote, TileFactors
from cutex.kernels.gemm.signature import modes
from cutex.kernels.gemm.sm90.general import General
from cutex.schedulers.announced import AnnouncedTiles
from cutex.schedulers.ragged import RowGroups


class RowFactorLoads(NamedTuple):
    """The loads of the factors of one tile's rows, in parts."""

    parts: tuple[TileLoads, ...]

    @cute.jit
    def load(self, k_tile: Int32, slot: Int32, full: cute.Pointer) -> None:
        for i in cutlass.range_constexpr(len(self.parts)):
            self.parts[i].load(k_tile, slot * len(self.parts) + i, full)


@dataclass(frozen=True)
class RowFactors:
    """The factors of the rows of A, and their slots.

    A group begins anywhere, and TMA at each 16 bytes: a part of a tile's rows is loaded from up to
    3 rows before it on, with PITCH rows more.
    """

    tiles: RowBlocksConfig
    info: cpasync.TmaInfo  # of (M, RestK)
    sF: cute.Tensor  # (partRows + PITCH, 1, PART and SLOT)
    groups: RowGroups

    def loads(self, tile: WorkTile) -> RowFactorLoads:
        """The loads of the factors of a tile's rows."""
        c, begin = self.tiles, self.groups.begins[tile.group]
        first = begin - begin % PITCH + tile.m * c.tile_m
        parts = range(0, c.tile_m, c.part_rows)
        return RowFactorLoads(
            tuple(tile_loads(loaded_rows(self.info, first + i), self.sF, 0) for i in parts)
        )

    def of(self, tile: WorkTile) -> cute.Tensor:
        """The factors of a tile's rows in all slots, (bRows, 1, SLOT)."""
        c, (_, _, pitch) = self.tiles, self.sF.stride
        parts = c.tile_m // c.part_rows
        rows = cute.make_layout((c.part_rows, parts), stride=(1, pitch))
        layout = cute.make_layout(
            (rows.shape, 1, c.num_stages), stride=(rows.stride, 0, parts * pitch)
        )
        start = self.sF.iterator + self.groups.begins[tile.group] % PITCH
        return cute.make_tensor(start, layout)


@dataclass(frozen=True)
class FactoredRows(WithFactors):
    """A and B of groups, with the factors of A's rows."""

    factors: RowFactors

    @cute.jit
    def loads(self, tile: WorkTile, cluster: cutlass.Constexpr[Cluster]) -> FactoredLoads:
        """The loads that this CTA starts for `tile`: its part of A and B, and all its factors."""
        ab: AbLoads = self.ab.loads(tile, cluster)
        return FactoredLoads(ab.a, ab.b, (self.factors.loads(tile),))


class PromoteRows(Promote):
    """All warpgroups compute a tile of a group, promoting, and store it to the group's rows.

    A group's last tile may have few rows: of those past its first half no sums are computed.
    """

    ragged: ClassVar[bool] = True

    @property
    def groups(self) -> RowGroups:
        """The rows of each group."""
        return self.factors[0].groups  # of RowFactors

    def is_short(self, tile: WorkTile) -> cutlass.Boolean:
        c = self.tiles
        rows = self.groups.rows(tile.group) - tile.m * c.tile_m
        return rows <= ROWS * c.mma_warpgroups

    @property
    def skips(self) -> bool:
        tiles: Any = self.tiles  # RowBlocksConfig
        return tiles.skips

    def has_rows(self, tile: WorkTile) -> cutlass.Boolean:
        c, mine = self.tiles, cute.arch.warp_idx() // 4
        return self.groups.rows(tile.group) - tile.m * c.tile_m > ROWS * mine

    def store_of(self, epilogue: GroupStore, tile: WorkTile) -> Any:
        return epilogue.of(tile.group)

    def factors_of(self, tile: WorkTile) -> TileFactors:
        of_rows, mScale = self.factors  # mScale (E, RestN, RestK)
        mine = of_rows.info, mScale[tile.group, None, None]
        return TileFactors(self.tiles, mine, (of_rows.of(tile), None), tile)


def announced_tiles(smem: SmemAllocator, general: General) -> AnnouncedTiles:
    """Allocate the slots of the tiles of groups that a warp of its own looks up."""
    return AnnouncedTiles.allocate(smem, ("m", "n", "group"), general.mma_warps.count + 1)


class GroupedBlocks(GroupedKernel):
    """The grouped kernel that promotes: of smem it has besides

    smem            bytes
    sFA             640 for each 128 of tile_m, or 384 for 64, times num_stages
    """

    name = "sm90_gemm_grouped_blocks"
    dtypes = ("e4m3",)

    # ---- on the host

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mScaleA: cute.Tensor,
        mScaleB: cute.Tensor,
        mOut: cute.Tensor,
        edges: cute.Tensor,
        *rest,
    ) -> None:
        """Launch with a (M, K), b (E, K, N), their factors (M, K / 128) and (E, N / 128, K / 128),
        out (M, N), edges (E), the operations' arguments, and a stream."""
        *passed, stream = rest
        mB = modes(mB, columns_first=True)
        maps, factors = self.maps_of(mA, mB, (mScaleA, mScaleB), mOut)
        launched = self.kernel(maps, factors, mOut, edges, tuple(passed))
        self.start(launched, grid(self.tiles, mA, mB), stream)

    def maps_of(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        scales: tuple[cute.Tensor, cute.Tensor],
        mOut: cute.Tensor,
    ) -> tuple[tuple[cpasync.TmaInfo, ...], tuple[Any, Any]]:
        """The tensor maps of A (M, K), B (N, K, E) and out, and the factors of both sides: the map
        of A's, and B's as they are."""
        c: Any = self.tiles  # RowBlocksConfig
        general = self.general
        a = general.load_operand(mA, c.tile_m, c.cluster_n, True)
        b = general.load_operand(mB, c.tile_n, c.cluster_m, True)
        slots = factors_layout(c.part_rows + PITCH, c.num_stages * (c.tile_m // c.part_rows))
        out = store_operand(mOut, general.epilogue_slots(mOut.element_type))
        return (a, b, out), (load_operand(scales[0], slots), scales[1])

    # ---- on the device

    @cute.kernel
    def kernel(
        self,
        maps: tuple[cpasync.TmaInfo, ...],
        factors: tuple[Any, Any],
        mOut: cute.Tensor,
        edges: cute.Tensor,
        passed: tuple[Any, ...],
    ) -> None:
        """Run the roles on A, B and out, and the factors of both sides."""
        c: Any = self.tiles  # RowBlocksConfig
        a, b, _ = maps
        smem = SmemAllocator()
        memory, of_rows = self.memory_of(smem, maps, factors)
        sA, sB, _, groups, _ = memory
        operands = FactoredRows(GroupedOperands(a, b, sA, sB, groups=groups), of_rows)
        tiles = self.announced_tiles(smem)
        both = (of_rows, factors[1]), (None, None)
        product, scheduler = self.config.product, self.ragged(groups)
        role = PromoteRows(product, c, scheduler, *both, announced=tiles)
        store = self.store_of(maps, memory, passed)
        self.run(memory, operands, role, store, edges, product.product(mOut), tiles)

    def memory_of(
        self,
        smem: SmemAllocator,
        maps: tuple[cpasync.TmaInfo, ...],
        factors: tuple[Any, Any],
    ) -> tuple[GroupMemory, RowFactors]:
        """Allocate a CTA's memory, that of the factors of A's rows included."""
        a, b, out = maps
        memory = GroupMemory.allocate(
            smem, self.general, (a, b), out.atom.value_type, self.config.most_groups
        )
        sF = allocate_slots(smem, Float32, factors[0].smem_layout)  # (partRows + PITCH, 1, SLOT)
        tiles: Any = self.tiles  # RowBlocksConfig
        return memory, RowFactors(tiles, factors[0], sF, memory.groups)

    def announced_tiles(self, smem: SmemAllocator) -> AnnouncedTiles:
        return announced_tiles(smem, self.general)

    def store_of(
        self, maps: tuple[cpasync.TmaInfo, ...], memory: GroupMemory, passed: tuple[Any, ...]
    ) -> GroupStore:
        """The store of accumulators to the rows of groups."""
        c, (_, b, out) = self.tiles, maps
        ops = GroupOps(self.config.product.ops, passed, cute.size(b.tma_tensor, mode=[0]))
        at_once = c.warpgroup_rows == ROWS
        return GroupStore(out, memory.sC, c.epi_stages, memory.groups, ops, at_once=at_once)
