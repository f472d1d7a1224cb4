"""A and B and their scale factors, as the load role takes them.

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
from cutex.device.work_tile import WorkTile


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
