"""OutStore: O of the Hopper forward, rounded to 16 bits, through smem and by TMA, and its LSE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp

from cutex.device.atoms.wgmma import WARPGROUP, Wgmma
from cutex.device.attention.row_store import row_stores
from cutex.device.attention.rows import Rows
from cutex.device.attention.seqlen_info import store_lse
from cutex.kernels.attention.forward.sm90.config import Sm90ForwardConfig
from cutex.kernels.attention.forward.sm90.shared import OwnRows

STORE_BARRIER = 1  # the first of one named barrier for each warpgroup


@dataclass(frozen=True)
class OutStore:
    config: Sm90ForwardConfig
    o: Rows  # of O, with its TMA operand
    sO: cute.Tensor  # (64, DV / o_parts, SLOT)
    mLSE: Any  # (batch, heads, seqlen_q) or (heads, total_q); None if it is not wanted

    @cute.jit
    def store(self, acc_o: cute.Tensor, own: OwnRows, slot: Int32) -> None:
        """Round O, write it to `slot`, one part of its columns at a time, and start the stores,
        which leave out rows past the end.

        NOTE: the two stores of a tile that is computed again have one address; the second waits
        until the first has been written, not only read.
        """
        c, sO = self.config, self.sO
        thread, _, _ = cute.arch.thread_idx()
        wg = cute.arch.make_warp_uniform(thread // WARPGROUP)
        stores = cute.arch.warp_idx() % 4 == 0
        columns = c.head_dim_v // c.o_parts
        to_smem = cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), sO.element_type)
        r2s = cute.make_tiled_copy_C(to_smem, Wgmma(columns, sO.element_type).tiled())
        thr_r2s = r2s.get_slice(thread % WARPGROUP)
        tRS_sO = thr_r2s.partition_D(sO[None, None, slot])  # (R2S, R2S_M, R2S_N)
        tRS_rO = cute.make_rmem_tensor(tRS_sO.shape, sO.element_type)  # as tRS_sO
        units = cute.size(acc_o) // 8 // c.o_parts  # of 8 registers, in a part
        narrow = cute.make_tensor(tRS_rO.iterator, cute.make_layout((8, units)))
        wide = cute.make_tensor(acc_o.iterator, cute.make_layout((8, units, c.o_parts)))
        for part in cutlass.range_constexpr(c.o_parts):
            if stores:
                cute.arch.cp_async_bulk_wait_group(0, read=part > 0 or not c.speculates)
            cute.arch.barrier(barrier_id=STORE_BARRIER + wg, number_of_threads=WARPGROUP)
            for unit in cutlass.range_constexpr(units):
                narrow[None, unit].store(wide[None, unit, part].load().to(sO.element_type))
            cute.copy(r2s, tRS_rO, tRS_sO)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=STORE_BARRIER + wg, number_of_threads=WARPGROUP)
            if stores:
                of = own.work.head, own.work.batch, own.seq_q
                row_stores(self.o, sO, of, part).store(slot, own.m_block)

    @cute.jit
    def wait(self) -> None:
        """Wait until TMA has read the smem that this warpgroup stores from."""
        if cute.arch.warp_idx() % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store_lse(self, lse: cute.Tensor, own: OwnRows) -> None:
        """Store the LSE of a row by one of the four threads that hold it."""
        pack, mLSE = self.config.pack, self.mLSE
        thread, _, _ = cute.arch.thread_idx()
        for r in cutlass.range_constexpr(2):
            query, head = own.rows[r] // pack, own.work.head * pack + own.rows[r] % pack
            if thread % 4 == 0 and query < own.seq_q.length:
                store_lse(mLSE, lse[r], own.work.batch, head, own.seq_q, query)
