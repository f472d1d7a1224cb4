"""The MMA roles of the general kernel: warpgroups that run wgmma and store the result.

Cooperative: all work on one tile, and store it together.
PingPong:    each has tiles of its own, and stores while the other computes.

Those of CTAs that share the K of a tile are in shared_k.py. The mainloop is that of operands in the
ring; or a kernel's own, where threads make operand A in registers (w4/, unaligned/).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import warpgroup

from cutex.device.atoms.mma import MAJORS
from cutex.device.atoms.multicast import SharedRing
from cutex.device.atoms.wgmma import WARPGROUP, Wgmma, WgmmaProduct
from cutex.device.epilogue.sm90.fused_store import ElementStore, FusedStore
from cutex.device.epilogue.sm90.tma_store import WarpgroupStore, WarpStore
from cutex.device.pipeline import OrderedBarrier, PipelineState
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.signature import GeneralConfig, tile_counts
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm90.load import Scheduler
from cutex.schedulers.one_round import OneStep
from cutex.schedulers.persistent import StaticWalk

PartStore = FusedStore | ElementStore | WarpgroupStore
EpilogueStore = PartStore | WarpStore

# named barriers: 0 is the CTA's, 1 to 3 are the warpgroups' own, 5 is shared_k.py's
ORDER_BARRIER = 3  # and 4: the order of two warpgroups in ping-pong

# K tiles up to which a tile's MMAs take no longer than what is added to it, from memory: among more
# loads it comes too early (docs/facts/gemm.md#added-early)
SOON_DONE = 40

Walk = StaticWalk | OneStep
States = tuple[PipelineState, PipelineState]  # of the slot read last, and of the next
Issue = Callable[[WgmmaProduct, SharedRing, PipelineState, Int32], States]
Store = Callable[[WorkTile], None]  # stores this warpgroup's accumulators to its rows of a tile


@cute.jit
def issue(mma: WgmmaProduct, ab: SharedRing, take: PipelineState, num_k_tiles: Int32) -> States:
    """Start all MMAs and release all slots but the last; return the states of that slot and of the
    next. An MMA is waited for when the next is issued."""
    done = PipelineState(take.num_slots, take.slot, take.phase)
    ab.wait_full(take)
    mma.issue(take.slot, accumulate=False)
    take.advance()
    for _ in cutlass.range(1, num_k_tiles, unroll=1):
        ab.wait_full(take)
        mma.issue(take.slot, accumulate=True)
        take.advance()
        warpgroup.wait_group(1)
        ab.release(done)
        done.advance()
    return done, take


@cute.jit
def issue_as_filled(
    mma: WgmmaProduct, ab: SharedRing, take: PipelineState, num_k_tiles: Int32
) -> States:
    """Like `issue`, where memory limits: an MMA is waited for at once if the next slot is not full
    yet, so that its own slot can be reloaded meanwhile."""
    done = PipelineState(take.num_slots, take.slot, take.phase)
    ab.wait_full(take)
    mma.issue(take.slot, accumulate=False)
    take.advance()
    for _ in cutlass.range(1, num_k_tiles, unroll=1):
        full = ab.is_full(take)
        if not full:
            warpgroup.wait_group(0)
            ab.release(done)
            ab.wait_full(take)
        mma.issue(take.slot, accumulate=True)
        take.advance()
        if full:
            warpgroup.wait_group(1)
            ab.release(done)
        done.advance()
    return done, take


@cute.jit
def mainloop(
    mma: WgmmaProduct,
    ab: SharedRing,
    take: PipelineState,
    num_k_tiles: Int32,
    issue: cutlass.Constexpr[Issue] = issue,
) -> PipelineState:
    """Run the MMAs over all of K, from slot `take` on; return the state after. On return the
    accumulators are complete, and all slots are released."""
    done, take = issue(mma, ab, take, num_k_tiles)
    warpgroup.wait_group(0)
    ab.release(done)
    return take


@cute.jit
def ping_pong(
    mma: WgmmaProduct,
    ab: SharedRing,
    num_k_tiles: Int32,
    walk: cutlass.Constexpr[Walk],
    store: cutlass.Constexpr[Store],
    expect: cutlass.Constexpr[Store | None] = None,
) -> None:
    """Two warpgroups alternate the tiles of the walk: one stores while the other's wgmma run.
    `expect`: what comes before a tile's MMAs.

    NOTE: a warpgroup issues only when the other has issued its tile. Correctness needs this, too: a
    wait distinguishes only odd from even phases of a slot, so at most one phase may be outstanding.
    """
    order = OrderedBarrier(ORDER_BARRIER)
    mine = cute.arch.warp_idx() // 4
    take = ab.consumer()
    if mine == 1:
        order.signal(0)
        take.skip(num_k_tiles)
    first = walk.start + mine * walk.step
    for index in cutlass.range(first, walk.end, 2 * walk.step, unroll=1):
        if cutlass.const_expr(expect is not None):
            expect(walk.tile_at(index))
        order.wait(mine)
        done, take = issue(mma, ab, take, num_k_tiles)
        if index + walk.step < walk.end:
            order.signal(1 - mine)
        warpgroup.wait_group(0)
        ab.release(done)
        take.skip(num_k_tiles)
        store(walk.tile_at(index))


class Mainloop(Protocol):
    """A kernel's own mainloop, with operand A in registers."""

    def run(
        self, mma: WgmmaProduct, ab: SharedRing, take: PipelineState, count: Int32
    ) -> PipelineState:
        """mma.acc = A @ B^T over `count` K tiles from slot `take` on; return the state after. All
        slots are released."""


class RoleProduct(NamedTuple):
    """The product whose tiles a role computes and stores."""

    mma: WgmmaProduct
    ab: SharedRing
    epilogue: Any  # an EpilogueStore, of those that the role takes
    num_k_tiles: Int32
    mC: cute.Tensor


@dataclass(frozen=True)
class MmaRole:
    """An MMA role: the mainloop of a tile, and the store of its accumulators."""

    config: GeneralConfig
    tiles: Sm90Config
    scheduler: Scheduler
    own: Mainloop | None = field(default=None, kw_only=True)  # None: that of operands in the ring

    @property
    def num_threads(self) -> int:
        """The number of threads that run wgmma."""
        return self.tiles.mma_warpgroups * WARPGROUP

    def run(self, product: RoleProduct) -> None:
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
        if self.own is not None:
            return self.own.run(mma, ab, take, num_k_tiles)
        return mainloop(mma, ab, take, num_k_tiles, self.issue)

    def store(self, mma: WgmmaProduct, epilogue: EpilogueStore, tile: WorkTile) -> None:
        """Store this warpgroup's accumulators to its rows of `tile`."""
        row, step, column = self.origin(tile)
        if isinstance(epilogue, FusedStore | ElementStore):
            epilogue = replace(epilogue, batch=tile.batch)
        epilogue.store(mma.acc, row, step, column)

    def expect(self, mma: WgmmaProduct, epilogue: EpilogueStore, num_k_tiles: Int32) -> Any:
        """What has L2 load, before a tile's few MMAs, what the store of it adds, a function of the
        tile; None if nothing is loaded by TMA."""
        if not isinstance(epilogue, FusedStore) or epilogue.loads is None:
            return None

        def expect(tile: WorkTile) -> None:
            row, step, column = self.origin(tile)
            batched = replace(epilogue, batch=tile.batch)
            batched.expect(mma.acc, row, step, column, num_k_tiles <= SOON_DONE)

        return expect

    def origin(self, tile: WorkTile) -> tuple[Int32, int, Int32]:
        """The first row of this warpgroup in a tile, the step to its next row, and the first
        column, all in parts of 64 x epiN."""
        c = self.tiles
        step = c.row_warpgroups
        first = cute.arch.warp_idx() // 4 % step
        columns = c.tile_n // self.config.epi_columns
        return tile.m * (c.tile_m // 64) + first, step, tile.n * columns


@dataclass(frozen=True)
class Cooperative(MmaRole):
    """All warpgroups compute a tile, each its own rows, and store it."""

    @cute.jit
    def run(self, product: RoleProduct) -> None:
        mma, ab, epilogue, num_k_tiles, mC = product
        walk = self.scheduler.walk(tile_counts(self.tiles, mC))
        take, expect = ab.consumer(), self.expect(mma, epilogue, num_k_tiles)
        for index in cutlass.range(walk.start, walk.end, walk.step, unroll=1):
            if cutlass.const_expr(expect is not None):
                expect(walk.tile_at(index))
            take = self.accumulate(mma, ab, take, num_k_tiles)
            self.store(mma, epilogue, walk.tile_at(index))


@dataclass(frozen=True)
class PingPong(MmaRole):
    """Two warpgroups alternate tiles: one stores while the other's wgmma run."""

    @cute.jit
    def run(self, product: RoleProduct) -> None:
        mma, ab, epilogue, num_k_tiles, mC = product
        walk = self.scheduler.walk(tile_counts(self.tiles, mC))
        store, expect = partial(self.store, mma, epilogue), self.expect(mma, epilogue, num_k_tiles)
        ping_pong(mma, ab, num_k_tiles, walk, store, expect)


def register_product(tiles: Sm90Config, sB: cute.Tensor, k_major: bool = True) -> WgmmaProduct:
    """This warpgroup's part of A @ B^T, B contiguous along K or not; operand A is given later."""
    c, kind = tiles, sB.element_type
    mma = Wgmma(c.tile_n, kind, b_major=MAJORS[k_major], warpgroups=c.row_warpgroups)
    return WgmmaProduct(mma, None, mma.b_slots(sB), mma.accumulator(c.tile_m, c.tile_n))
