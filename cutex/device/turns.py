"""CTAs add to a part of a tile in global memory one after another, so that the sums have a fixed
order.

A semaphore in global memory counts the CTAs that have added to the part. A warp waits until its
CTA's turn, and passes the turn on once its adds have landed.
"""

from __future__ import annotations

from cutlass import Int32, cute


@cute.jit
def await_turn(turns: cute.Tensor, tile: Int32, part: Int32, turn: Int32) -> None:
    """Wait until `turn` CTAs have added to part `part` of the tile. A whole warp calls it."""
    flag = turns[tile, None].iterator + part
    if cute.arch.lane_idx() == 0:
        now = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
        while now != turn:
            now = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
        cute.arch.fence_proxy("async.global")
    cute.arch.sync_warp()


@cute.jit
def pass_turn(turns: cute.Tensor, tile: Int32, part: Int32, turn: Int32) -> None:
    """Let the next CTA add to part `part` of the tile once this warp's adds have landed; does
    nothing if `turn` is negative."""
    cute.arch.sync_warp()
    if (cute.arch.lane_idx() == 0) & (turn >= 0):
        cute.arch.cp_async_bulk_wait_group(0)
        cute.arch.fence_proxy("async.global")
        flag = turns[tile, None].iterator + part
        cute.arch.store(flag, turn + 1, sem="release", scope="gpu")
