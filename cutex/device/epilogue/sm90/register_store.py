"""Stores of a wgmma's accumulators from registers."""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from cutex.device.atoms.wgmma import WgmmaProduct
from cutex.device.epilogue.vector_store import store_vectors
from cutex.device.work_tile import WorkTile


@cute.jit
def store_accumulators(
    mma: WgmmaProduct, mOut: cute.Tensor, tile: WorkTile, tile_mn: cutlass.Constexpr, thread: Int32
) -> None:
    """Round this thread's accumulators and store them to its tile, (bM, bN), of mOut (M, N).

    A wgmma accumulator holds 2 neighbours of a row in one thread, 4 bytes; 4 threads fill a row of
    8 columns.
    """
    thr_mma = mma.mma.tiled().get_slice(thread)
    gC = cute.local_tile(mOut, tile_mn, (tile.m, tile.n))  # (bM, bN)
    cC = cute.make_identity_tensor(mOut.shape)
    cC = cute.local_tile(cC, tile_mn, (tile.m, tile.n))  # (bM, bN)
    tCgC = thr_mma.partition_C(gC)  # (MMA, MMA_M, MMA_N)
    tCcC = thr_mma.partition_C(cC)  # (MMA, MMA_M, MMA_N)
    tCrC = cute.make_rmem_tensor_like(mma.acc, mOut.element_type)
    tCrC.store(mma.acc.load().to(mOut.element_type))
    store_vectors(tCrC, tCgC, tCcC, mOut.shape, width=2)
