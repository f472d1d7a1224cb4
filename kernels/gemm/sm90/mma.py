"""The MMA roles of the general kernel: warpgroups that run wgmma and store the result.

Cooperative: all work on one tile, and store it together.
PingPong:    each has tiles of its own, and stores while the other computes.
SplitK:      all work on a share of one tile's K, and the CTAs of a cluster exchange their sums
             (split_k.py).
StreamK:     all work on a tile or a part of its K; CTAs exchange their sums in global memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import cutlass
from cutlass import Int32, cute

from cutex.device.atoms.multicast import SharedRing
from cutex.device.atoms.wgmma import WARPGROUP, WgmmaProduct
from cutex.device.epilogue.sm90.fused_store import ElementStore, FusedStore
from cutex.device.epilogue.sm90.tma_store import WarpgroupStore, WarpStore
from cutex.device.pipeline import PipelineState
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.signature import GeneralConfig, tile_counts
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm90.exchange import Exchange
from cutex.kernels.gemm.sm90.load import Scheduler
from cutex.kernels.gemm.sm90.roles import (
    Issue,
    issue,
    issue_as_filled,
    mainloop,
    ping_pong,
)
from cutex.schedulers.stream_k import StreamedTiles

PartStore = FusedStore | ElementStore | WarpgroupStore
EpilogueStore = PartStore | WarpStore


@dataclass(frozen=True)
class MmaRole:
    """An MMA role: the mainloop of a tile, and the store of its accumulators."""

    config: GeneralConfig
    tiles: Sm90Config
    scheduler: Scheduler

    @property
    def num_threads(self) -> int:
        """The number of threads that run wgmma."""
        return self.tiles.mma_warpgroups * WARPGROUP

    def run(
        self,
        mma: WgmmaProduct,
        ab: SharedRing,
        epilogue: EpilogueStore,
        num_k_tiles: Int32,
        mC: cute.Tensor,
    ) -> None:
        """Compute and store this CTA's tiles of mC."""
        raise NotImplementedError

    @property
    def issue(self) -> Issue:
        """How MMAs are started and waited for."""
        c = self.tiles
        return issue_as_filled if c.one_tile and not c.few_columns else issue

    def accumulate(
        self, mma: WgmmaProduct, ab: SharedRing, take: PipelineState, num_k_tiles: Int32
    ) -> PipelineState:
        """The sums of so many K tiles from slot `take` on, in mma.acc; return the state after. All
        slots are released."""
        return mainloop(mma, ab, take, num_k_tiles, self.issue)

    def store(self, mma: WgmmaProduct, epilogue: EpilogueStore, tile: WorkTile) -> None:
        """Store this warpgroup's accumulators to its rows of `tile`."""
        row, step, column = self.origin(tile)
        if isinstance(epilogue, FusedStore | ElementStore):
            epilogue = replace(epilogue, batch=tile.batch)
        epilogue.store(mma.acc, row, step, column)

    def origin(self, tile: WorkTile) -> tuple[Int32, int, Int32]:
        """The first row of this warpgroup in a tile, the step to its next row, and the first
        column, all in parts of 64 x epiN."""
        c = self.tiles
        step = 1 if c.pingpong else c.mma_warpgroups
        first = cute.arch.warp_idx() // 4 % step
        columns = c.tile_n // self.config.epi_columns
        return tile.m * (c.tile_m // 64) + first, step, tile.n * columns


@dataclass(frozen=True)
class Cooperative(MmaRole):
    """All warpgroups compute a tile, each its own rows, and store it."""

    @cute.jit
    def run(
        self,
        mma: WgmmaProduct,
        ab: SharedRing,
        epilogue: EpilogueStore,
        num_k_tiles: Int32,
        mC: cute.Tensor,
    ) -> None:
        walk = self.scheduler.walk(tile_counts(self.tiles, mC))
        take = ab.consumer()
        for index in cutlass.range(walk.start, walk.end, walk.step, unroll=1):
            take = self.accumulate(mma, ab, take, num_k_tiles)
            self.store(mma, epilogue, walk.tile_at(index))


@dataclass(frozen=True)
class PingPong(MmaRole):
    """Two warpgroups take every second tile each: one stores while the other's wgmma run."""

    @cute.jit
    def run(
        self,
        mma: WgmmaProduct,
        ab: SharedRing,
        epilogue: EpilogueStore,
        num_k_tiles: Int32,
        mC: cute.Tensor,
    ) -> None:
        walk = self.scheduler.walk(tile_counts(self.tiles, mC))
        ping_pong(mma, ab, num_k_tiles, walk, partial(self.store, mma, epilogue))


@dataclass(frozen=True)
class StreamK(MmaRole):
    """All warpgroups compute one segment of a tile's K at a time. The CTA that has the tile's first
    K tiles adds up the sums that other CTAs wrote of the rest, and stores it.

    NOTE: a kernel earlier in the stream may still use the same memory for sums and flags. Before an
    MMA warp touches them, it has waited for a slot of the ring that was filled after
    griddepcontrol.wait.
    """

    scheduler: StreamedTiles
    exchange: Exchange

    @cute.jit
    def run(
        self,
        mma: WgmmaProduct,
        ab: SharedRing,
        epilogue: EpilogueStore,
        num_k_tiles: Int32,
        mC: cute.Tensor,
    ) -> None:
        walk = self.scheduler.streamed_walk(tile_counts(self.tiles, mC), num_k_tiles)
        take = ab.consumer()
        for turn in cutlass.range(walk.turns, unroll=1):
            segment = walk.segment(turn)
            take = self.accumulate(mma, ab, take, segment.count)
            if segment.first > 0:
                self.exchange.leave(mma.acc, walk)
            else:
                if segment.count < num_k_tiles:
                    self.exchange.add_others(mma.acc, walk)
                self.store(mma, epilogue, walk.tile(segment))
