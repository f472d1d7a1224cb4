"""Accumulator -> registers -> global memory, on Blackwell also by way of smem and TMA."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import CopyUniversalOp

from cutex.atoms import tmem
from cutex.atoms.mma import Umma, Wgmma
from cutex.atoms.tma import TileStores
from cutex.schedulers.one_tile import WorkTile

SUB_TILE_BARRIER = 1  # the named barrier of the four epilogue warps; 0 is the whole CTA's


@cute.jit
def store_vectors(
    rX: cute.Tensor, gX: cute.Tensor, cX: cute.Tensor, bounds: cute.Coord, width: cutlass.Constexpr
) -> None:
    """Store rX to gX, `width` elements at a time, where cX, the global coordinate, is in bounds.

    All three are alike in shape; consecutive elements lie in a row, and a vector that starts in
    bounds must end in bounds.
    """
    vectors = cute.make_layout((width, cute.size(rX) // width))
    rX = cute.composition(rX, vectors)  # (V, NumV)
    gX = cute.composition(gX, vectors)  # (V, NumV)
    cX = cute.composition(cX, vectors)  # (V, NumV)
    store = cute.make_copy_atom(
        CopyUniversalOp(), gX.element_type, num_bits_per_copy=width * gX.element_type.width
    )
    for v in cutlass.range(cute.size(rX, mode=[1]), unroll_full=True):
        if cute.elem_less(cX[0, v], bounds):
            cute.copy(store, rX[None, v], gX[None, v])


@cute.jit
def store_registers(mma: Wgmma, mC: cute.Tensor, tile: WorkTile, thread: Int32) -> None:
    """Round this thread's accumulators and store them to its tile of mC (M, N).

    A wgmma accumulator holds 2 neighbours of a row in one thread, 4 bytes; 4 threads fill a row of
    8 columns.
    """
    thr_mma = mma.tiled_mma.get_slice(thread)
    tile_mn = (mma.tiled_mma.get_tile_size(0), mma.tiled_mma.get_tile_size(1))
    gC = cute.local_tile(mC, tile_mn, (tile.m, tile.n))  # (bM, bN)
    cC = cute.local_tile(cute.make_identity_tensor(mC.shape), tile_mn, (tile.m, tile.n))
    tCgC = thr_mma.partition_C(gC)  # (MMA, MMA_M, MMA_N)
    tCcC = thr_mma.partition_C(cC)  # (MMA, MMA_M, MMA_N)
    tCrC = cute.make_rmem_tensor_like(mma.tCrAcc, mC.element_type)
    tCrC.store(mma.tCrAcc.load().to(mC.element_type))
    store_vectors(tCrC, tCgC, tCcC, mC.shape, width=2)


@cute.jit
def store_tmem(mma: Umma, mC: cute.Tensor, tile: WorkTile, thread: Int32) -> None:
    """Load the accumulator, round it and store it to its tile of mC (M, N). 128 threads, 0 to 127.

    Each thread holds a whole row, so it stores 16 bytes at a time.
    """
    tAcc = mma.tCtAcc[(None, None), 0, 0]  # (bM, bN)
    tile_mn = tAcc.shape
    gC = cute.local_tile(mC, tile_mn, (tile.m, tile.n))  # (bM, bN)
    cC = cute.local_tile(cute.make_identity_tensor(mC.shape), tile_mn, (tile.m, tile.n))
    part = (tmem.LANES, tmem.load_columns(tile_mn[1]))
    tAcc, gC, cC = (cute.flat_divide(x, part)[None, None, 0, None] for x in (tAcc, gC, cC))
    load = tmem.make_load(tAcc[None, None, 0])
    thr_load = load.get_slice(thread)
    tTR_tAcc = thr_load.partition_S(tAcc)  # (T2R, T2R_M, T2R_N, NumParts)
    tTR_gC = thr_load.partition_D(gC)  # (T2R, T2R_M, T2R_N, NumParts)
    tTR_cC = thr_load.partition_D(cC)  # (T2R, T2R_M, T2R_N, NumParts)
    for i in cutlass.range_constexpr(cute.size(tTR_gC, mode=[3])):
        tTR_rAcc = cute.make_rmem_tensor(tTR_gC[None, None, None, 0].shape, cutlass.Float32)
        cute.copy(load, tTR_tAcc[None, None, None, i], tTR_rAcc)
        cute.arch.fence_view_async_tmem_load()
        tTR_rC = cute.make_rmem_tensor_like(tTR_rAcc, mC.element_type)
        tTR_rC.store(tTR_rAcc.load().to(mC.element_type))
        out, coord = tTR_gC[None, None, None, i], tTR_cC[None, None, None, i]
        store_vectors(tTR_rC, out, coord, mC.shape, width=128 // mC.element_type.width)


class SubTiles(NamedTuple):
    """One epilogue thread's row of C on its way out, a sub-tile of columns at a time:
    tensor memory -> registers -> a slot of smem -> TMA. Threads 0 to 127, each one row.

    NOTE: one barrier a sub-tile orders both ways. Behind it lie all warps' writes of this slot,
    fenced for TMA to read; and warp 0, which starts the stores, goes through it only when the
    store before last has read the slot that comes next.
    """

    copy: cute.TiledCopy
    tTR_tAcc: cute.Tensor  # (T2R, T2R_M, T2R_N, NumParts)
    tTR_sC: cute.Tensor  # (T2R, T2R_M, T2R_N, SLOT)

    @property
    def num_parts(self) -> int:
        return cute.size(self.tTR_tAcc, mode=[3])

    @cute.jit
    def load(self, part: cutlass.Constexpr[int]) -> cute.Tensor:
        """Sub-tile `part` of the accumulator, in registers when this returns."""
        tTR_rAcc = cute.make_rmem_tensor(self.tTR_sC[None, None, None, 0].shape, cutlass.Float32)
        cute.copy(self.copy, self.tTR_tAcc[None, None, None, part], tTR_rAcc)
        cute.arch.fence_view_async_tmem_load()
        return tTR_rAcc

    @cute.jit
    def store(
        self, tTR_rAcc: cute.Tensor, stores: TileStores, column_tile: Int32, slot: Int32
    ) -> Int32:
        """Round a sub-tile, put it into `slot` and start its store; returns the next slot."""
        tTR_sC = self.tTR_sC[None, None, None, slot]
        tTR_rC = cute.make_rmem_tensor_like(tTR_rAcc, tTR_sC.element_type)
        tTR_rC.store(tTR_rAcc.load().to(tTR_sC.element_type))
        cute.autovec_copy(tTR_rC, tTR_sC)
        cute.arch.fence_view_async_shared()
        num_slots = cute.size(self.tTR_sC, mode=[3])
        warp = cute.arch.warp_idx()
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(num_slots - 2, read=True)
        cute.arch.barrier(barrier_id=SUB_TILE_BARRIER, number_of_threads=tmem.LANES)
        if warp == 0:
            stores.store(slot, column_tile)
        return (slot + 1) % num_slots


@cute.jit
def drain_stores() -> None:
    """Wait until TMA has read every slot that warp 0 stores from: smem may then go."""
    if cute.arch.warp_idx() == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def sub_tiles(tAcc: cute.Tensor, sC: cute.Tensor, thread: Int32) -> SubTiles:
    """`thread`'s part of tAcc (bM, bN) in tensor memory and of sC (bM, epiN, SLOT)."""
    part = (cute.size(sC, mode=[0]), cute.size(sC, mode=[1]))
    tAcc = cute.flat_divide(tAcc, part)[None, None, 0, None]  # (bM, epiN, NumParts)
    load = tmem.make_load(tAcc[None, None, 0])
    thr_load = load.get_slice(thread)
    return SubTiles(load, thr_load.partition_S(tAcc), thr_load.partition_D(sC))
