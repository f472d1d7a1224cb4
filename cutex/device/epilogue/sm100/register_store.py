"""Stores of an accumulator in tensor memory through registers, one row per thread."""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from cutex.device.atoms import tmem
from cutex.device.atoms.umma import UmmaProduct
from cutex.device.epilogue.vector_store import store_vectors
from cutex.device.work_tile import WorkTile


@cute.jit
def store_accumulator(mma: UmmaProduct, mOut: cute.Tensor, tile: WorkTile, thread: Int32) -> None:
    """Load the accumulator, round it and store it to its tile of mOut (M, N). Threads 0 to 127 call
    it.

    Each thread holds a whole row, so it stores 16 bytes at a time.
    """
    tAcc = mma.acc[(None, None), 0, 0]  # (bM, bN)
    tile_mn = tAcc.shape
    gC = cute.local_tile(mOut, tile_mn, (tile.m, tile.n))  # (bM, bN)
    cC = cute.make_identity_tensor(mOut.shape)
    cC = cute.local_tile(cC, tile_mn, (tile.m, tile.n))  # (bM, bN)
    part = (tmem.LANES, tmem.load_columns(tile_mn[1]))
    tAcc, gC, cC = (
        cute.flat_divide(x, part)[None, None, 0, None] for x in (tAcc, gC, cC)
    )  # (128, columns, NumParts)
    load = tmem.make_load(tAcc[None, None, 0])
    thr_load = load.get_slice(thread)
    tTR_tAcc = thr_load.partition_S(tAcc)  # (T2R, T2R_M, T2R_N, NumParts)
    tTR_gC = thr_load.partition_D(gC)  # (T2R, T2R_M, T2R_N, NumParts)
    tTR_cC = thr_load.partition_D(cC)  # (T2R, T2R_M, T2R_N, NumParts)
    for i in cutlass.range_constexpr(cute.size(tTR_gC, mode=[3])):
        shape = tTR_gC[None, None, None, 0].shape
        tTR_rAcc = cute.make_rmem_tensor(shape, cutlass.Float32)  # (T2R, T2R_M, T2R_N)
        cute.copy(load, tTR_tAcc[None, None, None, i], tTR_rAcc)
        cute.arch.fence_view_async_tmem_load()
        tTR_rC = cute.make_rmem_tensor_like(tTR_rAcc, mOut.element_type)
        tTR_rC.store(tTR_rAcc.load().to(mOut.element_type))
        out, coord = tTR_gC[None, None, None, i], tTR_cC[None, None, None, i]
        store_vectors(tTR_rC, out, coord, mOut.shape, width=128 // mOut.element_type.width)
