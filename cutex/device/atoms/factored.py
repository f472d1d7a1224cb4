"""Operands A and B with scale factors that TMA loads beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from cutex.device.atoms.multicast import Cluster
from cutex.device.atoms.tma import AbLoads, load_operand, matrix, tile_loads
from cutex.device.work_tile import WorkTile

TMA_BYTES = 128  # that addresses in smem which TMA writes to are multiples of


def factors_layout(rows: int, num_slots: int) -> cute.ComposedLayout:
    """The smem layout (bRows, 1, SLOT) of one side's fp32 factors."""
    pitch = -(-4 * rows // TMA_BYTES) * TMA_BYTES // 4
    layout = cute.make_layout((rows, 1, num_slots), stride=(1, rows, pitch))
    return cute.make_composed_layout(cute.make_swizzle(0, 4, 3), 0, layout)


def factors_operand(mS: cute.Tensor, rows: int, num_slots: int, vector: bool) -> Any:
    """The factors mS of one side: a tensor map that loads those of a tile's rows, or, where 128
    rows share one, mS itself (RestRows, RestK), with L last in a batch."""
    return load_operand(mS, factors_layout(rows, num_slots)) if vector else mS


class FactoredLoads(NamedTuple):
    """The loads of A and B, and of the factors that TMA loads beside them, for one tile."""

    a: Any  # KLoads each
    b: Any
    factors: tuple[Any, ...]

    @property
    def num_k_tiles(self) -> Int32:
        return self.a.num_k_tiles

    @cute.jit
    def load(self, k_tile: Int32, slot: Int32, full: cute.Pointer) -> None:
        """Start all loads of K tile `k_tile` into `slot`. A whole warp calls it."""
        for loads in (*self.factors, self.a, self.b):
            loads.load(k_tile, slot, full)


@dataclass(frozen=True)
class WithFactors:
    """The operands A and B; what derives from it has their factors."""

    ab: Any  # AbOperands, or those of groups

    @property
    def a(self) -> Any:
        return self.ab.a

    @property
    def b(self) -> Any:
        return self.ab.b

    @property
    def num_k_tiles(self) -> Int32:
        return self.ab.num_k_tiles


@dataclass(frozen=True)
class FactoredOperands(WithFactors):
    """The operands A and B with the factors of both sides, and the slots that TMA loads into."""

    factors: tuple[Any, Any]  # of A's rows and B's: TmaInfo, or a tensor where 128 share one
    slots: tuple[Any, Any]  # (bRows, 1, SLOT) of each; None without a tensor map

    @cute.jit
    def loads(self, tile: WorkTile, cluster: cutlass.Constexpr[Cluster]) -> FactoredLoads:
        """The loads that this CTA starts for `tile`: its part of A and B, and all its factors."""
        ab: AbLoads = self.ab.loads(tile, cluster)
        factors = tuple(
            tile_loads(matrix(info, tile), slots, place)
            for info, slots, place in zip(self.factors, self.slots, (tile.m, tile.n), strict=True)
            if slots is not None
        )
        return FactoredLoads(ab.a, ab.b, factors)
