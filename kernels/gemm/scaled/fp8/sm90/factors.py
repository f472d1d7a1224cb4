"""The scale factors of a tile, and the addition of one block's sums, scaled by them.

A row of the product, or a column, has a factor of its own for each 128 of K (1x128), which TMA
loads into the slot of its operand; or 128 of them share one (128x128), which threads load from
global memory when the slot is full, under the MMAs of their block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from cutex.device.atoms.multicast import AbOperands, Cluster
from cutex.device.atoms.tma import AbLoads, load_operand, matrix, tile_loads
from cutex.device.atoms.wgmma import ROWS
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.scaled.fp8.config import BLOCK, FACTORS_ALIGN, Fp8Config

LANES = 32  # blocks of K whose shared factors a warp holds


def factors_layout(rows: int, num_slots: int) -> cute.ComposedLayout:
    """The smem layout (bRows, 1, SLOT) of one side's factors."""
    pitch = -(-rows // FACTORS_ALIGN) * FACTORS_ALIGN
    layout = cute.make_layout((rows, 1, num_slots), stride=(1, rows, pitch))
    return cute.make_composed_layout(cute.make_swizzle(0, 4, 3), 0, layout)


def factors_operand(mS: cute.Tensor, rows: int, num_slots: int, vector: bool) -> Any:
    """The factors mS of one side: a tensor map that loads those of a tile's rows, or mS itself
    (RestRows, RestK), in a batch with L behind, where 128 rows share one."""
    return load_operand(mS, factors_layout(rows, num_slots)) if vector else mS


class FactoredLoads(NamedTuple):
    """The loads of A and B, and of the factors that TMA loads beside them, for one tile."""

    a: Any  # KLoads each
    b: Any
    factors: tuple[Any, ...]

    @property
    def num_k_tiles(self) -> Int32:
        return self.a.num_k_tiles

    @cute.jit
    def load(self, k_tile: Int32, slot: Int32, full: cute.Pointer) -> None:
        """Start all loads of K tile `k_tile` into `slot`. A whole warp calls it."""
        for loads in (*self.factors, self.a, self.b):
            loads.load(k_tile, slot, full)


@dataclass(frozen=True)
class FactoredOperands:
    """The operands A and B with the factors of both sides, and the slots that TMA loads into."""

    ab: AbOperands
    factors: tuple[Any, Any]  # of A's rows and B's: TmaInfo, or a tensor where 128 share one
    slots: tuple[Any, Any]  # (bRows, 1, SLOT) of each; None without a tensor map

    @property
    def a(self) -> Any:
        return self.ab.a

    @property
    def b(self) -> Any:
        return self.ab.b

    @property
    def num_k_tiles(self) -> Int32:
        return self.ab.num_k_tiles

    @cute.jit
    def loads(self, tile: WorkTile, cluster: cutlass.Constexpr[Cluster]) -> FactoredLoads:
        """The loads that this CTA starts for `tile`: its part of A and B, and all its factors."""
        ab: AbLoads = self.ab.loads(tile, cluster)
        factors = tuple(
            tile_loads(matrix(info, tile), slots, place)
            for info, slots, place in zip(self.factors, self.slots, (tile.m, tile.n), strict=True)
            if slots is not None
        )
        return FactoredLoads(ab.a, ab.b, factors)


class ThreadFactors(NamedTuple):
    """The factors of 64 rows of a tile and of its columns, for one block of K, in registers."""

    rows: tuple[Any, Any]  # of this thread's two rows, 8 apart
    columns: tuple[Any, ...]  # of each group of columns: one for all, or this thread's two of 8
    group: int  # eights of columns that share an entry of `columns`

    def of(self, eight: int) -> list[list[Any]]:
        """The factors of this thread's 2 rows by 2 columns in the eight columns `eight`."""
        column = self.columns[eight // self.group]
        pair = column if isinstance(column, tuple) else (column, column)
        return [[row * c if row is not None else c for c in pair] for row in self.rows]

    @cute.jit
    def add(self, total: cute.Tensor, part: cute.Tensor) -> None:
        """total += part * factors; both are 64 rows of a wgmma's accumulators.

        A thread holds 2 neighbours in each of 2 rows, 8 apart, for every 8 columns (PTX ISA, wgmma,
        "Register Fragments").
        """
        for eight in cutlass.range_constexpr(cute.size(part) // 4):
            if cutlass.const_expr(eight % self.group == 0):
                factors = self.of(eight)
            for i in cutlass.range_constexpr(2):
                for j in cutlass.range_constexpr(2):
                    at = 4 * eight + 2 * i + j
                    total[at] = total[at] + part[at] * factors[i][j]


@dataclass(frozen=True)
class TileFactors:
    """The factors of one tile: those in slots of smem, and those in global memory.

    Of the latter, a lane holds those of one of LANES blocks of K; they are loaded LANES blocks
    ahead, so that no MMA waits for an address or for memory.
    """

    tiles: Fp8Config
    factors: tuple[Any, Any]
    slots: tuple[Any, Any]
    tile: WorkTile

    @property
    def waves(self) -> int:
        """The number of times 64 rows of each warpgroup."""
        return self.tiles.warpgroup_rows // ROWS

    def turn(self) -> Int32 | int:
        """The first block of K that this warpgroup computes."""
        return cute.arch.warp_idx() // 4 if self.tiles.alternating else 0

    def first_row(self, wave: int) -> Int32:
        """The first row of this warpgroup's `wave`-th 64 rows in the tile."""
        if self.tiles.alternating:
            return Int32(wave * ROWS)
        return (wave * self.tiles.mma_warpgroups + cute.arch.warp_idx() // 4) * ROWS

    def shared(self) -> list[tuple[int, Int32]]:
        """The side and a row of each factor that 128 rows share: of each wave, or of each group of
        columns."""
        c, found = self.tiles, []
        if self.slots[0] is None:
            of_tile = self.tile.m * c.tile_m
            found += [(0, of_tile + self.first_row(wave)) for wave in range(self.waves)]
        if self.slots[1] is None:
            of_tile = self.tile.n * c.tile_n
            found += [(1, of_tile + column) for column in range(0, c.tile_n, c.column_group)]
        return found

    def load_shared(self, k_tile: Int32) -> list[Float32]:
        """Of each factor of `shared` that of block `k_tile` + lane.

        NOTE: a tile may extend past the last row, and a share of K past the last block, where the
        operands are zeros.
        """
        found = []
        for side, row in self.shared():
            mS = self.factors[side]  # (RestRows, RestK), or with L behind
            if cute.rank(mS) == 3:
                mS = mS[None, None, cutlass.min(self.tile.batch, cute.size(mS, mode=[2]) - 1)]
            last, last_k = (cute.size(mS, mode=[i]) - 1 for i in range(2))
            block = cutlass.min(k_tile + cute.arch.lane_idx(), last_k)
            found.append(mS[cutlass.min(row // BLOCK, last), block])
        return found

    def rows(self, slot: Int32, wave: int) -> tuple[Any, Any]:
        """The factors of this thread's two rows in `slot`; None where 128 rows share one."""
        if self.slots[0] is None:
            return None, None
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        row = self.first_row(wave) + 16 * (warp % 4) + lane // 4
        return self.slots[0][row, 0, slot], self.slots[0][row + 8, 0, slot]

    def of_block(
        self, slot: Int32, held: cute.Tensor | None, lane: Int32, wave: int, rows: tuple[Any, Any]
    ) -> ThreadFactors:
        """The factors of the block in `slot`, whose shared ones are in `held` of `lane`."""
        c, first = self.tiles, 0
        if rows[0] is None:
            assert held is not None  # since factors of rows are shared
            one = cute.arch.shuffle_sync(held[wave], lane)
            rows, first = (one, one), self.waves
        if self.slots[1] is not None:
            column = 2 * (cute.arch.lane_idx() % 4)
            of_columns = tuple(
                tuple(self.slots[1][8 * eight + column + j, 0, slot] for j in range(2))
                for eight in range(c.tile_n // 8)
            )
            return ThreadFactors(rows, of_columns, 1)
        assert held is not None  # since factors of columns are shared
        groups = range(c.tile_n // c.column_group)
        of_groups = tuple(cute.arch.shuffle_sync(held[first + group], lane) for group in groups)
        return ThreadFactors(rows, of_groups, c.column_group // 8)
