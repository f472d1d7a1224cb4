"""What the load and MMA roles do over all of K, and over all tiles: alike in stages 6 to 9."""

from __future__ import annotations

from collections.abc import Callable

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import warpgroup

from cutex.device.atoms.multicast import SharedRing
from cutex.device.atoms.tma import AbLoads
from cutex.device.atoms.wgmma import WgmmaProduct
from cutex.device.pipeline import OrderedBarrier, PipelineState
from cutex.device.work_tile import WorkTile
from cutex.schedulers.one_round import OneStep
from cutex.schedulers.persistent import StaticWalk

# named barriers: 0 is the CTA's, 1 to 3 are the warpgroups' own, 5 is Exchange's
ORDER_BARRIER = 3  # and 4: the order of two warpgroups in ping-pong

Walk = StaticWalk | OneStep
States = tuple[PipelineState, PipelineState]  # of the slot read last, and of the next
Issue = Callable[[WgmmaProduct, SharedRing, PipelineState, Int32], States]
Store = Callable[[WorkTile], None]  # stores this warpgroup's accumulators to its rows of a tile


@cute.jit
def fill_ring(
    loads: AbLoads, ab: SharedRing, fill: PipelineState, first: Int32 | int, end: Int32
) -> PipelineState:
    """Load K tiles `first` to `end`, from slot `fill` on; return the state after."""
    for k_tile in cutlass.range(first, end, unroll=1):
        loads.load(k_tile, fill.slot, ab.acquire(fill))
        fill.advance()
    return fill


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
    """The same where memory limits: an MMA is waited for at once if the next slot is not yet full,
    so that its own slot can be loaded meanwhile."""
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
) -> None:
    """Two warpgroups take every second tile of the walk each: one stores while the other's wgmma
    run.

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
        order.wait(mine)
        done, take = issue(mma, ab, take, num_k_tiles)
        if index + walk.step < walk.end:
            order.signal(1 - mine)
        warpgroup.wait_group(0)
        ab.release(done)
        take.skip(num_k_tiles)
        store(walk.tile_at(index))
