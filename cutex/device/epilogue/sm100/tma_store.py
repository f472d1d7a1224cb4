"""Stores of an accumulator in tensor memory through shared memory, by TMA.

Four epilogue warps, one row per thread, take a sub-tile of columns at a time: tensor memory ->
registers -> a slot of smem -> TMA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from cutex.device.atoms import tmem
from cutex.device.atoms.tma import TileStores, tile_stores
from cutex.device.work_tile import WorkTile

SUB_TILE_BARRIER = 1  # the named barrier of the four epilogue warps; 0 is the whole CTA's


class SubTiles(NamedTuple):
    """One row of an accumulator, as one of the epilogue threads 0 to 127 reads it, a sub-tile of
    columns at a time.

    NOTE: one barrier per sub-tile orders both directions. After it, all warps' writes to this slot
    are complete, and fenced for TMA to read; and warp 0, which starts the stores, arrives only when
    the store before last has read the slot that comes next.
    """

    copy: cute.TiledCopy
    tTR_tAcc: cute.Tensor  # (T2R, T2R_M, T2R_N, NumParts)
    tTR_cAcc: cute.Tensor  # (T2R, T2R_M, T2R_N) coordinates in a sub-tile
    tTR_sC: Any  # (T2R, T2R_M, T2R_N, SLOT); None where C is stored from registers

    @property
    def num_parts(self) -> int:
        return cute.size(self.tTR_tAcc, mode=[3])

    @cute.jit
    def load(self, part: cutlass.Constexpr[int]) -> cute.Tensor:
        """Sub-tile `part` of the accumulator, in registers when this returns."""
        tTR_rAcc = self.start_load(part)
        self.wait_loads()
        return tTR_rAcc

    @cute.jit
    def start_load(self, part: cutlass.Constexpr[int]) -> cute.Tensor:
        """Start the load of sub-tile `part`; the registers returned hold it after `wait_loads`."""
        tTR_rAcc = cute.make_rmem_tensor(
            self.tTR_cAcc.shape, cutlass.Float32
        )  # (T2R, T2R_M, T2R_N)
        self.start_load_into(tTR_rAcc, part)
        return tTR_rAcc

    @cute.jit
    def start_load_into(self, tTR_rAcc: cute.Tensor, part: Int32) -> None:
        cute.copy(self.copy, self.tTR_tAcc[None, None, None, part], tTR_rAcc)

    def wait_loads(self) -> None:
        cute.arch.fence_view_async_tmem_load()

    @cute.jit
    def store(
        self,
        tTR_rAcc: cute.Tensor,
        stores: TileStores,
        part: cutlass.Constexpr[int],
        column_tile: Int32,
    ) -> None:
        """Round sub-tile `part`, of any shape, write it to its slot and start its store to
        `column_tile`."""
        num_slots = cute.size(self.tTR_sC, mode=[3])
        pending = stores_until_reuse((part + 1) % self.num_parts, self.num_parts, num_slots) - 2
        self.store_slot(tTR_rAcc, stores, part % num_slots, column_tile, pending)

    @cute.jit
    def store_next(
        self, tTR_rAcc: cute.Tensor, stores: TileStores, part: Int32, column_tile: Int32
    ) -> None:
        """Store sub-tile `part` in a loop over all parts of a tile that is not unrolled."""
        num_slots = cute.size(self.tTR_sC, mode=[3])
        counts = [stores_until_reuse(p, self.num_parts, num_slots) for p in range(self.num_parts)]
        self.store_slot(tTR_rAcc, stores, part % num_slots, column_tile, min(counts) - 2)

    @cute.jit
    def store_slot(
        self,
        tTR_rAcc: cute.Tensor,
        stores: TileStores,
        slot: Int32,
        column_tile: Int32,
        pending: cutlass.Constexpr[int],
    ) -> None:
        """Store through `slot`; the last `pending` stores started before may still read their
        slots."""
        tTR_sC = self.tTR_sC[None, None, None, slot]  # (T2R, T2R_M, T2R_N)
        tTR_rC = cute.make_rmem_tensor(tTR_sC.shape, tTR_sC.element_type)  # (T2R, T2R_M, T2R_N)
        flat = cute.make_layout(cute.size(tTR_rC))
        rounded = cute.make_tensor(tTR_rAcc.iterator, flat).load().to(tTR_sC.element_type)
        cute.make_tensor(tTR_rC.iterator, flat).store(rounded)
        cute.autovec_copy(tTR_rC, tTR_sC)
        cute.arch.fence_view_async_shared()
        warp = cute.arch.warp_idx()
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(pending, read=True)
        cute.arch.barrier(barrier_id=SUB_TILE_BARRIER, number_of_threads=tmem.LANES)
        if warp == 0:
            stores.store(slot, column_tile)


def stores_until_reuse(part: int, num_parts: int, num_slots: int) -> int:
    """The number of stores from the last use of its slot to the store of `part`, over consecutive
    tiles."""
    if part >= num_slots:
        return num_slots
    last_use = part + (num_parts - 1 - part) // num_slots * num_slots  # in the tile before
    return part + num_parts - last_use


@cute.jit
def drain_stores() -> None:
    """Wait until TMA has read every slot that warp 0 stores from, so that the smem may be
    released."""
    if cute.arch.warp_idx() == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def sub_tiles(
    tAcc: cute.Tensor,
    sC: cute.Tensor | None,
    thread: Int32,
    columns: cutlass.Constexpr[int] = 0,
) -> SubTiles:
    """The sub-tiles of `thread`: its row of tAcc (128, bN) in tensor memory and of sC (128, epiN,
    SLOT). In tAcc they are `columns` wide, by default epiN."""
    if cutlass.const_expr(columns == 0):
        columns = cute.size(sC, mode=[1])
    part = (tmem.LANES, columns)
    parts = cute.flat_divide(tAcc, part)[None, None, 0, None]  # (128, columns, NumParts)
    load = tmem.make_load(parts[None, None, 0])
    thr_load = load.get_slice(thread)
    tTR_cAcc = thr_load.partition_D(cute.make_identity_tensor(part))  # (T2R, T2R_M, T2R_N)
    tTR_sC = None
    if cutlass.const_expr(sC is not None):
        slot = (tmem.LANES, cute.size(sC, mode=[1]))
        narrow = cute.flat_divide(tAcc, slot)  # (128, epiN, 1, NumParts)
        row = tmem.make_load(narrow[None, None, 0, 0]).get_slice(thread)
        tTR_sC = row.partition_D(sC)  # (T2R, T2R_M, T2R_N, SLOT)
    return SubTiles(load, thr_load.partition_S(parts), tTR_cAcc, tTR_sC)


class TileStore(NamedTuple):
    """The store of one tile's accumulator: its sub-tiles, and their destination in C."""

    parts: SubTiles
    stores: TileStores
    first_column: Int32  # the tile's first column, in sub-tiles

    @cute.jit
    def store(self, tTR_rAcc: cute.Tensor, part: cutlass.Constexpr[int]) -> None:
        """Store sub-tile `part`; a tile's sub-tiles are stored in order."""
        self.parts.store(tTR_rAcc, self.stores, part, self.first_column + part)


@dataclass(frozen=True)
class EpilogueStore:
    """The store of accumulators to C: a tensor map, and slots of smem."""

    out: cpasync.TmaInfo
    sC: cute.Tensor  # (128, epiN, SLOT)

    @cute.jit
    def tile(self, tAcc: cute.Tensor, tile: WorkTile) -> TileStore:
        """The store of tAcc (128, bN) to this CTA's rows of `tile`."""
        thread, _, _ = cute.arch.thread_idx()
        parts = sub_tiles(tAcc, self.sC, thread)
        stores = tile_stores(self.out, self.sC, tile.m)
        return TileStore(parts, stores, tile.n * parts.num_parts)
