"""The operands of the kernel of 4-bit weights: a packed weight, and x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from cutex.device.atoms.multicast import AbOperands, Cluster
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.w4.fragments import WeightLoads


class W4Loads(NamedTuple):
    """The loads of the weight and of x, for one tile."""

    a: WeightLoads
    b: Any  # KLoads

    @property
    def num_k_tiles(self) -> Int32:
        return self.a.num_k_tiles

    @cute.jit
    def load(self, k_tile: Int32, slot: Int32, full: cute.Pointer) -> None:
        """Start all loads of K tile `k_tile` into `slot`. A whole warp calls it."""
        self.a.load(k_tile, slot, full)
        self.b.load(k_tile, slot, full)


@dataclass(frozen=True)
class W4Operands:
    """The weight with its slots, and x as the general kernel's second operand."""

    mW: cute.Tensor  # (STRIP, RestK, WORDS)
    sW: cute.Tensor  # (WORDS, STRIP, SLOT)
    x: AbOperands  # of which only b is there

    @property
    def b(self) -> Any:
        return self.x.b

    @property
    def num_k_tiles(self) -> Int32:
        return cute.size(self.mW, mode=[1])

    @cute.jit
    def loads(self, tile: WorkTile, cluster: cutlass.Constexpr[Cluster]) -> W4Loads:
        """The loads that this CTA starts for `tile`: its strips, and its part of x."""
        m, _ = cluster.place()
        x, sharers = self.x, cluster.size_m
        b = x.loads_of(1, x.b, x.sB, tile.n, m, sharers, cluster.column_mask())
        first = tile.m * cute.size(self.sW, mode=[1])
        return W4Loads(WeightLoads(self.mW, self.sW, first), b)
