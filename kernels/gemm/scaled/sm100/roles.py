"""The MMA role of the block-scaled kernel. Its load role is the general kernel's, given
ScaledOperands."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from cutex.device.atoms.scale_factors import ROWS
from cutex.device.atoms.tmem import fence_after_sync
from cutex.device.atoms.umma import UmmaProduct
from cutex.device.pipeline import AccRing, PipelineState, Ring
from cutex.kernels.gemm.scaled.sm100.config import ScaledTiles
from cutex.kernels.gemm.sm100.roles import k_share
from cutex.schedulers.dispatch import Dispatcher


@dataclass(frozen=True)
class ScaledMma:
    """The MMA role: for each step of K, one warp copies its factors to tensor memory and starts its
    MMAs, which the tensor core runs in this order.

    NOTE: nothing beyond K is multiplied. What TMA fills in there is 0, but factors that only pad a
    chunk may be anything, and 0 times a NaN is NaN.
    """

    tiles: ScaledTiles

    @cute.jit
    def run(
        self,
        mma: UmmaProduct,
        ab: Ring,
        acc: AccRing,
        k: Int32,
        dispatch: cutlass.Constexpr[Dispatcher],
    ) -> None:
        c = self.tiles
        take, fill = ab.consumer(), acc.producer()
        factors, pair = mma.factors, mma.mma.pair
        assert factors is not None
        num_k_tiles = k_share(c, cute.ceil_div(k, c.k_elements))
        ticket = dispatch.first()
        while ticket.valid:
            tile = dispatch.tile(ticket)
            full = acc.acquire(fill)
            fence_after_sync()
            of_tile = factors.of_columns(tile.n * c.tile_n % ROWS)
            into = mma.into(self.filled(fill))._replace(factors=of_tile)
            left = k - tile.split * num_k_tiles * c.k_elements
            whole = cutlass.max(0, cutlass.min(num_k_tiles, left // c.k_elements))
            for k_tile in cutlass.range(whole, unroll=1):
                ab.wait_full(take)
                factors.copy(take.slot, pair)
                into.issue(take.slot, accumulate=k_tile > 0)
                mma.commit(ab.empty[take.slot])
                take.advance()
            for k_tile in cutlass.range(whole, num_k_tiles, unroll=1):
                # NOTE: a share of K may be wholly beyond its end; its sum is then 0, of one MMA
                rest = cutlass.max(1, left - k_tile * c.k_elements)
                ab.wait_full(take)
                factors.copy(take.slot, pair)
                into.issue_first(take.slot, k_tile > 0, cute.ceil_div(rest, mma.mma.k))
                mma.commit(ab.empty[take.slot])
                take.advance()
            mma.commit(full)
            fill.advance()
            ticket = dispatch.next(ticket)

    def filled(self, fill: PipelineState) -> Int32:
        """The accumulator that is filled next."""
        return fill.phase ^ 1 if self.tiles.overlap else fill.slot
