"""The epilogue role: four warps that scale the rows of O and store them by TMA, while the other
roles work on the next tile."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync

from cutex.device.atoms.tma import TileStores
from cutex.device.atoms.tmem import LANES, fence_after_sync, fence_before_sync
from cutex.device.attention.rows import Rows
from cutex.device.attention.seqlen_info import SeqlenInfo
from cutex.device.epilogue.sm100.tma_store import SubTiles, drain_stores, sub_tiles
from cutex.device.pipeline import PipelineState
from cutex.device.work_tile import WorkTile
from cutex.kernels.attention.forward.sm100.config import O_PART, Sm100ForwardConfig
from cutex.kernels.attention.forward.sm100.tiles import Shared
from cutex.kernels.attention.work_ring import END


@dataclass(frozen=True)
class Epilogue:
    """The epilogue role, warps 0 to 3; thread t has row t of each Q tile."""

    shared: Shared
    o: cpasync.TmaInfo

    @property
    def config(self) -> Sm100ForwardConfig:
        return self.shared.config

    @cute.jit
    def run(self) -> None:
        c, shared, tiles = self.config, self.shared, self.shared.work
        cpasync.prefetch_descriptor(self.o.atom)
        take = tiles.q.consumer()
        turn = PipelineState(1, Int32(0), Int32(0))
        tiles.q.wait_full(take)
        mode = tiles.mode(take.slot)
        while mode != END:
            work = tiles.work(take.slot)
            seq_q, seqlen_k = tiles.lengths(take.slot)
            for t in cutlass.range(c.q_tiles, unroll=1):
                shared.barriers.scaled.wait(take.phase, t * c.work_slots + take.slot)
                factor = shared.factors[cute.arch.thread_idx()[0], t, take.slot]
                shared.barriers.o_full.wait(turn.phase, t)
                fence_after_sync()
                _, count = shared.blocks(work, t, seq_q.length, seqlen_k)
                stores = self.stores(work, seq_q, t)
                self.store(stores, t, factor, count > 0)
            tiles.q.release(take)
            turn.advance()
            take.advance()
            tiles.q.wait_full(take)
            mode = tiles.mode(take.slot)
        drain_stores()

    @cute.jit
    def store(self, stores: TileStores, t: Int32, factor: Float32, any_keys: Boolean) -> None:
        """Scale and store O of one Q tile."""
        parts = self.parts(t)
        for part in cutlass.range_constexpr(parts.num_parts):
            values = cute.make_rmem_tensor(parts.tTR_cAcc.shape, Float32)
            values.fill(0.0)
            if any_keys:
                parts.start_load_into(values, part)
                parts.wait_loads()
                for i in cutlass.range_constexpr(cute.size(values)):
                    values[i] *= factor
            if cutlass.const_expr(part == parts.num_parts - 1):
                fence_before_sync()
                self.shared.signal(self.shared.barriers.o_empty, t)
            parts.store(values, stores, part, part)

    @cute.jit
    def parts(self, t: Int32) -> SubTiles:
        """This thread's row of O of a Q tile, in parts of O_PART columns."""
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        layout = cute.make_layout((LANES, c.head_dim_v), stride=(1 << 16, 1))
        column = c.o_column + t * c.head_dim_v
        return sub_tiles(
            cute.make_tensor(self.shared.tmem + column, layout), self.shared.sO, thread
        )

    @cute.jit
    def stores(self, work: WorkTile, seq_q: SeqlenInfo, t: Int32) -> TileStores:
        """The stores of one Q tile's columns, which leave out rows past the end of the sequence."""
        c, sO = self.config, self.shared.sO
        rows = Rows(self.o, c.pack, c.ragged_q)
        block = self.shared.row_block(work, t)
        at = ((0, block), None) if c.pack > 1 else (block, None)
        mO = rows.of(work.head, work.batch, seq_q)
        gO = cute.local_tile(mO, rows.tiler(LANES, O_PART), at)  # (128, O_PART, Rest)
        bSG_sO, bSG_gO = cpasync.tma_partition(
            self.o.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(sO, 0, 2),
            cute.group_modes(gO, 0, 2),
        )  # (TMA, SLOT), (TMA, Rest)
        return TileStores(self.o.atom, bSG_sO, bSG_gO)
