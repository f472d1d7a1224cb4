"""The operands of the kernel of 4-bit weights, a packed weight and x, and the load roles: the
general kernel's, with blocks of weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from cutex.device.atoms.multicast import AbOperands, Cluster
from cutex.device.atoms.tma import AbLoads
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.sm90.load import BYTES_AHEAD, LoadOneTile, LoadSegments, LoadTiles
from cutex.kernels.gemm.w4.fragments import WeightLoads
from cutex.kernels.gemm.w4.sm90.config import W4Config
from cutex.problem.w4.layout import STRIP


def block_share(tiles: W4Config, split: Int32 | int, blocks: Int32) -> tuple[Int32 | int, Int32]:
    """The first block of share `split` of K, and the number of its blocks.

    NOTE: none of a share lies behind the last block, which weights, unlike x, are not zeros behind.
    """
    if tiles.split_k == 1:
        return split * 0, blocks
    each = (blocks + (tiles.split_k - 1)) // tiles.split_k
    first = cutlass.min(split * each, blocks)
    return first, cutlass.min(each, blocks - first)


@dataclass(frozen=True)
class W4LoadTiles(LoadTiles):
    """The load role of a CTA that loops over tiles."""

    tiles: W4Config

    def share(self, split: Int32 | int, num_k_tiles: Int32) -> tuple[Int32 | int, Int32]:
        return block_share(self.tiles, split, num_k_tiles)

    @cute.jit
    def start(self, operands: W4Operands, mC: cute.Tensor) -> None:
        """Prefetch the first blocks of weight into L2, before the kernel before this one ends.

        NOTE: should that one still write them, it writes to L2, where the loads find them.
        """
        c = self.tiles
        cpasync.prefetch_descriptor(operands.b.atom)
        if cutlass.const_expr(not c.one_tile):
            cute.arch.griddepcontrol_launch_dependents()
        loads, first, count = self.begin(operands, mC)
        ahead = max(1, BYTES_AHEAD // c.weight_bytes)
        for k_tile in cutlass.range(first, first + cutlass.min(count, ahead), unroll=1):
            loads.a.prefetch(k_tile)


@dataclass(frozen=True)
class W4LoadSegments(LoadSegments):
    """The load role of a CTA that loops over segments of tiles."""

    tiles: W4Config

    start = W4LoadTiles.start


@dataclass(frozen=True)
class W4LoadOneTile(LoadOneTile):
    """The load role of a CTA with one tile, at a pace."""

    tiles: W4Config

    share = W4LoadTiles.share
    start = W4LoadTiles.start

    def step_bytes(self, mC: cute.Tensor) -> Int32:
        strips = (cute.size(mC, mode=[0]) + (STRIP - 1)) // STRIP
        return strips * (self.tiles.split_k * self.tiles.format.words * 4)


# ---- operands


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
    def loads(self, tile: WorkTile, cluster: cutlass.Constexpr[Cluster]) -> AbLoads:
        """The loads that this CTA starts for `tile`: its strips, and its part of x."""
        m, _ = cluster.place()
        x, sharers = self.x, cluster.size_m
        b = x.loads_of(1, x.b, x.sB, tile.n, m, sharers, cluster.column_mask())
        first = tile.m * cute.size(self.sW, mode=[1])
        return AbLoads(WeightLoads(self.mW, self.sW, first), b)
