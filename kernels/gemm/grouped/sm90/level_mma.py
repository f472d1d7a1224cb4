"""The MMA roles for tiles of equal width within a group: two warpgroups, with a mainloop for each
width.

Cooperative: both work on one tile, and store it together.
PingPong:    each has tiles of its own, and stores while the other computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from cutex.device.atoms.mma import MAJORS
from cutex.device.atoms.multicast import SharedRing
from cutex.device.atoms.wgmma import Wgmma, WgmmaProduct
from cutex.device.pipeline import OrderedBarrier, PipelineState
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.signature import tile_counts
from cutex.kernels.gemm.sm90.general import General
from cutex.kernels.gemm.sm90.mma import ORDER_BARRIER, MmaRole, RoleProduct, issue
from cutex.schedulers.level import Widths


class LevelProducts(NamedTuple):
    """A warpgroup's accumulators, as wide as the widest tile, and the products in their first
    columns."""

    acc: cute.Tensor  # (MMA, MMA_M, 1)
    products: tuple[WgmmaProduct, ...]  # of each width, without accumulators

    @staticmethod
    def of(general: General, widths: Widths, sA: cute.Tensor, sB: cute.Tensor) -> LevelProducts:
        """The products of slots of sA (bM, bK, SLOT) and sB (bN, bK, SLOT)."""
        a_major, b_major = (MAJORS[k_major] for k_major in general.config.k_major)
        of_kind = sA.element_type, sB.element_type, a_major, b_major
        warpgroups = general.tiles.row_warpgroups
        whole = Wgmma(widths.most, *of_kind, warpgroups)
        a, products = whole.a_slots(sA), []
        for width in widths.all:
            mma = Wgmma(width, *of_kind, warpgroups)
            rows = cute.local_tile(sB, (width, *sB.shape[1:]), (0, 0, 0))  # (width, bK, SLOT)
            products.append(WgmmaProduct(mma, a, mma.b_slots(rows), None))
        acc = whole.accumulator(cute.size(sA, mode=[0]), widths.most)
        return LevelProducts(acc, tuple(products))


class Turn(NamedTuple):
    """One tile of a warpgroup: its width, and, if warpgroups alternate, which may start once it has
    been issued, if any."""

    width: Int32
    order: OrderedBarrier | None = None
    other: Any = None  # Int32
    more: Any = None  # Boolean


@dataclass(frozen=True)
class LevelRole(MmaRole):
    """A role whose tiles have the widths of their groups."""

    level: Any = None  # LevelGroups

    def width_of(self, tile: WorkTile) -> Int32:
        """The width of a tile."""
        return cute.arch.make_warp_uniform(self.level.width(tile))

    def store(self, mma: Any, epilogue: Any, tile: WorkTile) -> None:
        """Store this warpgroup's accumulators to its part of a tile."""
        row, step, _ = self.origin(tile)
        epilogue.of(tile).store(mma.acc, row, step, Int32(0))


@dataclass(frozen=True)
class Cooperative(LevelRole):
    """Two warpgroups compute a tile, each its own rows, and store it.

    A tile is twice as large as in turn, and fewer bytes go from L2 to an SM: energy, which tells
    at the power limit where stores are short beside sums
    (docs/facts/grouped.md#grouped-level-together).
    """

    @cute.jit
    def run(self, product: RoleProduct) -> None:
        mma, ab, epilogue, num_k_tiles, mC = product
        level: Any = mma  # LevelProducts
        walk = self.scheduler.walk(tile_counts(self.tiles, mC))
        take = ab.consumer()
        for index in cutlass.range(walk.start, walk.end, walk.step, unroll=1):
            tile = walk.tile_at(index)
            turn = Turn(self.width_of(tile))
            level.acc.fill(0.0)
            take = accumulate(level.acc, level.products, turn, ab, take, num_k_tiles)
            self.store(level, epilogue, tile)


@dataclass(frozen=True)
class PingPong(LevelRole):
    """Two warpgroups alternate tiles: one stores while the other's wgmma run (as in sm90/mma.py,
    whose NOTE applies here, too)."""

    @cute.jit
    def run(self, product: RoleProduct) -> None:
        mma, ab, epilogue, num_k_tiles, mC = product
        level: Any = mma  # LevelProducts
        walk = self.scheduler.walk(tile_counts(self.tiles, mC))
        order = OrderedBarrier(ORDER_BARRIER)
        mine = cute.arch.warp_idx() // 4
        take = ab.consumer()
        if mine == 1:
            order.signal(0)
            take.skip(num_k_tiles)
        first = walk.start + mine * walk.step
        for index in cutlass.range(first, walk.end, 2 * walk.step, unroll=1):
            tile = walk.tile_at(index)
            turn = Turn(self.width_of(tile), order, 1 - mine, index + walk.step < walk.end)
            # NOTE: what no mainloop writes is a constant then, and holds no register meanwhile
            level.acc.fill(0.0)
            order.wait(mine)
            take = accumulate(level.acc, level.products, turn, ab, take, num_k_tiles)
            take.skip(num_k_tiles)
            self.store(level, epilogue, tile)


@cute.jit
def accumulate(
    acc: cute.Tensor,
    products: cutlass.Constexpr[tuple[WgmmaProduct, ...]],
    turn: cutlass.Constexpr[Turn],
    ab: SharedRing,
    take: PipelineState,
    num_k_tiles: Int32,
) -> PipelineState:
    """The sums of the turn's width, by `products`, into acc; returns the state after."""
    if cutlass.const_expr(len(products) == 1):
        take = sums_of(acc, products[0], turn, ab, take, num_k_tiles)
    else:
        if turn.width == products[0].mma.columns:
            take = sums_of(acc, products[0], turn, ab, take, num_k_tiles)
        else:
            take = accumulate(acc, products[1:], turn, ab, take, num_k_tiles)
    return take


@cute.jit
def sums_of(
    acc: cute.Tensor,
    product: cutlass.Constexpr[WgmmaProduct],
    turn: cutlass.Constexpr[Turn],
    ab: SharedRing,
    take: PipelineState,
    num_k_tiles: Int32,
) -> PipelineState:
    """The sums of one width, into the first columns of acc.

    NOTE: in its own registers: ptxas would wait after each wgmma for registers that several
    mainloops write (docs/facts/grouped.md#grouped-level-one-loop). 8 to 12 of them spill on their
    way to the store.
    """
    blocks, columns = cute.size(acc, mode=[1]), product.mma.columns
    own = cute.make_rmem_tensor(cute.make_layout(((2, 2, columns // 8), blocks, 1)), Float32)
    done, take = issue(product.into(own), ab, take, num_k_tiles)
    if cutlass.const_expr(turn.order is not None):  # noqa: SIM102 - known when tracing
        if turn.more:
            turn.order.signal(turn.other)
    warpgroup.wait_group(0)
    ab.release(done)
    each = cute.size(acc) // blocks
    for block in cutlass.range_constexpr(blocks):
        for i in cutlass.range_constexpr(columns // 2):
            acc[block * each + i] = own[block * (columns // 2) + i]
    return take
