"""Turns: CTAs of a deterministic backward add to a part of a tile of dQ one after another.

A flag in global memory counts the key blocks that have added to the part. A warp waits until it is
its CTA's turn, and passes the turn on when its adds have landed.
"""

from __future__ import annotations

from cutlass import Int32, cute

from cutex.device.attention.block_info import BlockInfo
from cutex.kernels.attention.backward.spec import BackwardSpec
from cutex.kernels.attention.backward.tiles import Tile


def turn_of(config: BackwardSpec, info: BlockInfo, tile: Tile, m_block: Int32) -> Int32:
    """How many key blocks, or pairs of them, add to a block of queries before the CTA's."""
    ctas = config.key_ctas
    info = info._replace(tile_n=ctas * info.tile_n)
    blocks = info.n_blocks(m_block, tile.seq_q.length, tile.seq_k.length)
    if config.last_first:
        return blocks.end - 1 - tile.n_block // ctas
    return tile.n_block // ctas - blocks.first


@cute.jit
def await_turn(turns: cute.Tensor, tile: Int32, part: Int32, turn: Int32) -> None:
    """Wait until `turn` key blocks have added to the warp's part of the tile."""
    flag = turns[tile, None].iterator + part
    if cute.arch.lane_idx() == 0:
        now = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
        while now != turn:
            now = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
        cute.arch.fence_proxy("async.global")
    cute.arch.sync_warp()


@cute.jit
def pass_turn(turns: cute.Tensor, tile: Int32, part: Int32, turn: Int32) -> None:
    """Let the next key block add to the warp's part of the tile, once this one's adds have landed;
    nothing if `turn` is negative."""
    cute.arch.sync_warp()
    if (cute.arch.lane_idx() == 0) & (turn >= 0):
        cute.arch.cp_async_bulk_wait_group(0)
        cute.arch.fence_proxy("async.global")
        flag = turns[tile, None].iterator + part
        cute.arch.store(flag, turn + 1, sem="release", scope="gpu")
