"""The roles of the block-scaled kernel: A and B and their scale factors, as the general kernel's
load role takes them, and the MMA role.

Each CTA has the factors of its own rows of A, and those of all of B's that the MMA takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Int32, Uint8, cute
from cutlass.cute.nvgpu import cpasync, tcgen05

from cutex.device.atoms.scale_factors import ROWS, FactorTile
from cutex.device.atoms.tma import TileLoads, load_operand, matrix, tile_loads
from cutex.device.atoms.tmem import fence_after_sync
from cutex.device.atoms.umma import UmmaProduct
from cutex.device.pipeline import AccRing, PipelineState, Ring
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.scaled.sm100.config import ScaledTiles
from cutex.kernels.gemm.sm100.roles import k_share
from cutex.schedulers.dispatch import Dispatcher

# ---- loads


def load_elements(
    mX: cute.Tensor, smem_layout: cute.ComposedLayout, pair: bool, unpack: bool
) -> cpasync.TmaInfo:
    """The tensor map that loads tiles of `mX` (rows, K); with `unpack`, its elements of 4 bits into
    a byte each: 16 of them into the first 8 of 16 bytes, as kind::mxf8f6f4 reads them."""
    if not unpack:
        return load_operand(mX, smem_layout, pair)
    rows, k = cute.size(smem_layout, mode=[0]), cute.size(smem_layout, mode=[1])
    group = tcgen05.CtaGroup.TWO if pair else tcgen05.CtaGroup.ONE
    op = cpasync.CopyBulkTensorTileG2SOp(group)
    return cpasync.make_tiled_tma_atom(op, mX, smem_layout, (rows, k), internal_type=Uint8)


class ScaledLoads(NamedTuple):
    """The loads that one CTA's tile needs: of A, B, and the factors of both."""

    parts: tuple[TileLoads, ...]

    @property
    def num_k_tiles(self) -> Int32:
        return self.parts[0].num_k_tiles

    @cute.jit
    def load(self, k_tile: Int32, slot: Int32, full: cute.Pointer) -> None:
        """Start the loads of step `k_tile` into `slot`. A whole warp calls it."""
        for part in self.parts:
            part.load(k_tile, slot, full)


@dataclass(frozen=True)
class ScaledOperands:
    """The tensor maps of A, B and their factors, and the slots of this CTA."""

    maps: tuple[cpasync.TmaInfo, ...]  # A, B, factors of A, of B
    sA: cute.Tensor  # (bM / ctas, bK, SLOT)
    sB: cute.Tensor  # (bN / ctas, bK, SLOT)
    sFA: cute.Tensor  # (WORDS, STEPS, ROWS, SLOT)
    sFB: cute.Tensor  # (WORDS, STEPS, ROWS, SLOT)
    factors: tuple[FactorTile, FactorTile]
    tile_n: int
    ctas: int  # that share a tile

    def prefetch(self) -> None:
        """Prefetch the tensor maps."""
        for operand in self.maps:
            cpasync.prefetch_descriptor(operand.atom)

    @cute.jit
    def loads(self, tile: WorkTile) -> ScaledLoads:
        """The loads of this CTA's rows of A and B; `tile.m` counts tiles of one CTA, `tile.n` those
        of all that share it."""
        a, b, factors_a, factors_b = self.maps
        n_tile = tile.n
        if cutlass.const_expr(self.ctas > 1):
            n_tile = self.ctas * tile.n + cute.arch.block_idx_in_cluster() % self.ctas
        of_a, of_b = self.factors
        return ScaledLoads(
            (
                tile_loads(matrix(a, tile), self.sA, tile.m),
                tile_loads(matrix(b, tile), self.sB, n_tile),
                of_a.loads(factors_a, self.sFA, tile.m, tile.batch),
                of_b.loads(factors_b, self.sFB, tile.n * self.tile_n // ROWS, tile.batch),
            )
        )


# ---- MMA


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
