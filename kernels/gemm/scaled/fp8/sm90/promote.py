"""The MMA roles that promote: after each 128 of K, sums leave the tensor core for fp32 registers.

Hopper's fp8 MMAs keep 13 bits below the largest of what they add up, so the sums of one block of K
are scaled and added to others in fp32 (DeepSeek-V3, arXiv 2412.19437, 3.3.2). Two warpgroups
alternate by themselves: while one adds, the MMAs of the other run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from cutex.device.atoms.multicast import SharedRing
from cutex.device.atoms.wgmma import ROWS, WgmmaProduct
from cutex.device.pipeline import PipelineState
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.scaled.fp8.config import Fp8Config
from cutex.kernels.gemm.scaled.fp8.sm90.factors import LANES, TileFactors
from cutex.kernels.gemm.signature import tile_counts
from cutex.kernels.gemm.sm90.mma import EpilogueStore, MmaRole
from cutex.kernels.gemm.sm90.roles import Walk
from cutex.kernels.gemm.sm90.split_k import SplitK


class Under(Protocol):
    """What a warpgroup does under its MMAs, beside a tile's sums."""

    def first(self) -> None:
        """Under the first MMA of a tile, before anything is added: sets the sums to zero."""

    def second(self) -> None:
        """Under the first MMA of the second block of K, or of the only one."""

    def last(self) -> None:
        """Under the last MMA of a tile, when the sums of all rows but the last 64 are complete."""

    def load_shared(self, k_tile: Int32) -> None:
        """Load the shared factors of LANES blocks from `k_tile` on."""


class Zeros(NamedTuple):
    """Nothing but what the sums of one tile need."""

    total: cute.Tensor
    factors: TileFactors
    ahead: cute.Tensor | None

    def first(self) -> None:
        self.total.fill(0.0)

    def second(self) -> None:
        """Nothing."""

    def last(self) -> None:
        """Nothing."""

    def load_shared(self, k_tile: Int32) -> None:
        self.factors.load_shared(k_tile, self.ahead)


@dataclass(frozen=True)
class Promotion:
    """The sums of one tile, promoted: total += part * factors, for each block of K.

    The sums of a block are of 64 rows at a time, so that one set of registers serves all rows of a
    warpgroup.
    """

    mma: WgmmaProduct
    ab: SharedRing
    factors: TileFactors
    under: Under
    ends: tuple[Int32 | int, Int32]  # the first block of K, and behind the last
    acc: cute.Tensor  # (MMA, 1, MMA_N): of a block
    held: Any  # (SHARED) factors that 128 rows share, of a block in each lane; None without

    @classmethod
    def of(
        cls,
        mma: WgmmaProduct,
        ab: SharedRing,
        factors: TileFactors,
        under: Under,
        ends: tuple[Int32 | int, Int32],
    ) -> Promotion:
        c, num_shared = factors.tiles, len(factors.shared())
        acc = mma.mma.accumulator(ROWS * c.mma_warpgroups, c.tile_n)
        held = cute.make_rmem_tensor(num_shared, Float32) if num_shared else None
        return cls(mma, ab, factors, under, ends, acc, held)

    @cute.jit
    def add_block(
        self,
        take: PipelineState,
        seen: cutlass.Boolean,
        k_tile: Int32 | int,
        lane: Int32 | int,
        first: cutlass.Constexpr[bool] = False,
    ) -> tuple[PipelineState, cutlass.Boolean]:
        """Add up block `k_tile`, whose shared factors `lane` has, and release its slot; return the
        state after.

        `seen`: whether the slot is known to be full. The barrier of the next is looked at before
        sums are added, so that the next MMA need not wait for the answer.
        """
        mma, factors, waves = self.mma, self.factors, self.factors.waves
        size = cute.size(self.acc)
        total = cute.make_tensor(mma.acc.iterator, cute.make_layout((size, waves)))  # (V, MMA_M)
        part = cute.make_tensor(self.acc.iterator, cute.make_layout(size))  # (V)
        full = cute.arch.vote_all_sync(seen)
        if not full:
            self.ab.wait_full(take)
        for wave in cutlass.range_constexpr(waves):
            rows = factors.rows(take.slot, wave)
            mma.of_rows(wave).into(self.acc).issue(take.slot, accumulate=False)
            block = factors.of_block(take.slot, self.held, lane, wave, rows)
            if cutlass.const_expr(first and wave == 0):
                self.under.first()
            elif cutlass.const_expr(wave == 0):  # noqa: SIM102 - known when tracing, the next not
                if k_tile == self.ends[0] + 1:
                    self.under.second()
            if cutlass.const_expr(wave == waves - 1):
                if k_tile == self.ends[1] - 1:
                    if cutlass.const_expr(first):
                        self.under.second()
                    self.under.last()
                cute.arch.sync_warp()  # its lanes have read their factors
            warpgroup.wait_group(0)
            if cutlass.const_expr(wave == waves - 1):
                self.ab.release(take)
                take.advance()
                seen = self.ab.sees_full(take)
            block.add(total[None, wave], part)
        return take, seen

    @cute.jit
    def run(
        self, take: PipelineState, seen: cutlass.Boolean, ahead: Any
    ) -> tuple[PipelineState, cutlass.Boolean]:
        """Add up all blocks of K, and release all slots; return the state after. `ahead`: the
        factors that 128 rows share, of the first LANES blocks; None without."""
        first, end = self.ends
        if cutlass.const_expr(ahead is None):
            take, seen = self.add_block(take, seen, first, 0, first=True)
            for k_tile in cutlass.range(first + 1, end, unroll=1):
                take, seen = self.add_block(take, seen, k_tile, 0)
        else:
            self.held.store(ahead.load())
            take, seen = self.add_block(take, seen, first, 0, first=True)
            for begin in cutlass.range(first, end, LANES, unroll=1):
                self.held.store(ahead.load())
                if begin + LANES < end:
                    self.under.load_shared(begin + LANES)
                upto = cutlass.min(begin + LANES, end)
                for k_tile in cutlass.range(cutlass.max(begin, first + 1), upto, unroll=1):
                    take, seen = self.add_block(take, seen, k_tile, k_tile - begin)
        return take, seen


@dataclass(frozen=True)
class Promote(MmaRole):
    """All warpgroups compute a tile, each its own rows, promoting, and store it, under MMAs of the
    same tile and of the next."""

    tiles: Fp8Config
    factors: tuple[Any, Any]  # of both sides, as FactoredOperands has them
    slots: tuple[Any, Any]

    @cute.jit
    def run(
        self,
        mma: WgmmaProduct,
        ab: SharedRing,
        epilogue: EpilogueStore,
        num_k_tiles: Int32,
        mC: cute.Tensor,
    ) -> None:
        walk = self.scheduler.walk(tile_counts(self.tiles, mC))
        cute.arch.griddepcontrol_wait()  # the kernel before may write shared factors
        take, seen = ab.consumer(), cutlass.Boolean(False)
        if walk.start < walk.end:
            first = walk.tile_at(walk.start)
            here, following = HeldTile.of(first), HeldTile.of(first)
            ahead = self.factors_of(first).first_shared(0)
            for index in cutlass.range(walk.start, walk.end, walk.step, unroll=1):
                tiles = here, following
                under = StoresUnder(self, mma, epilogue, walk, index, tiles, ahead)
                factors = self.factors_of(following.tile)
                promotion = Promotion.of(mma, ab, factors, under, (0, num_k_tiles))
                take, seen = promotion.run(take, seen, ahead)
                if cutlass.const_expr(not self.stores_under):
                    self.store(mma, epilogue, here.tile)
            if cutlass.const_expr(self.stores_under):
                self.store_rows(mma, epilogue, here.tile, cute.size(mma.acc, mode=[1]) - 1, 1)

    @property
    def stores_under(self) -> bool:
        """Whether tiles are stored under MMAs: where registers suffice, which operations of the
        epilogue and factors of each column take."""
        return not self.config.ops and not all(self.tiles.vectors)

    def store_rows(
        self, mma: WgmmaProduct, epilogue: EpilogueStore, tile: WorkTile, first: int, count: int
    ) -> None:
        """Store `count` times 64 rows of each warpgroup, from its `first`-th on."""
        acc = cute.logical_divide(mma.acc, (None, 1, None))  # (MMA, (1, MMA_M), MMA_N)
        rows = acc[None, (None, first), None]  # (MMA, 1, MMA_N)
        shape = rows.shape[0], count, rows.shape[2]
        stride = rows.stride[0], acc.stride[1][1], rows.stride[2]
        layout = cute.make_layout(shape, stride=stride)
        self.store(mma.into(cute.make_tensor(rows.iterator, layout)), epilogue, tile, first)

    def factors_of(self, tile: WorkTile) -> TileFactors:
        """The factors of a tile."""
        return TileFactors(self.tiles, self.factors, self.slots, tile)


@dataclass(frozen=True)
class HeldTile:
    """A work tile in registers, which a loop changes: to find it out takes divisions, that no MMA
    should wait for."""

    known: WorkTile  # whose numbers are fixed; of the others the registers count
    registers: cute.Tensor

    @classmethod
    def of(cls, tile: WorkTile) -> HeldTile:
        held = cls(tile, cute.make_rmem_tensor(len(tile), Int32))
        held.set(tile)
        return held

    def set(self, tile: WorkTile) -> None:
        for i, value in enumerate(tile):
            self.registers[i] = Int32(value)

    @property
    def tile(self) -> WorkTile:
        fields = [x if isinstance(x, int) else self.registers[i] for i, x in enumerate(self.known)]
        return WorkTile(*fields)


@dataclass(frozen=True)
class StoresUnder:
    """The stores of a walk's tiles under MMAs: of all rows but each warpgroup's last 64 under the
    tile's own last MMA, of these under the first one of the next tile. There, too, the next tile is
    found out, and its first shared factors are loaded."""

    role: Promote
    mma: WgmmaProduct
    epilogue: EpilogueStore
    walk: Any
    index: Int32
    tiles: tuple[HeldTile, HeldTile]  # the one before, from `first` on this one; and the following
    ahead: cute.Tensor | None

    @cute.jit
    def first(self) -> None:
        here, following = self.tiles
        last = cute.size(self.mma.acc, mode=[1]) - 1
        if cutlass.const_expr(self.role.stores_under):  # noqa: SIM102 - known when tracing
            if self.index > self.walk.start:
                self.role.store_rows(self.mma, self.epilogue, here.tile, last, 1)
        here.set(following.tile)
        self.mma.acc.fill(0.0)

    @cute.jit
    def second(self) -> None:
        index = self.index + self.walk.step
        if index < self.walk.end:
            self.tiles[1].set(self.walk.tile_at(index))

    @cute.jit
    def last(self) -> None:
        here, following = self.tiles
        if cutlass.const_expr(self.ahead is not None):
            self.role.factors_of(following.tile).load_shared(0, self.ahead)
        before_last = cute.size(self.mma.acc, mode=[1]) - 1
        if cutlass.const_expr(before_last > 0 and self.role.stores_under):
            self.role.store_rows(self.mma, self.epilogue, here.tile, 0, before_last)

    def load_shared(self, k_tile: Int32) -> None:
        here, _ = self.tiles
        self.role.factors_of(here.tile).load_shared(k_tile, self.ahead)


@dataclass(frozen=True)
class PromoteSplitK(SplitK):
    """A CTA promotes a share of one tile's K, and exchanges sums in fp32 (sm90/split_k.py)."""

    tiles: Fp8Config
    factors: tuple[Any, Any]
    slots: tuple[Any, Any]

    def compute(self, mma: WgmmaProduct, ab: SharedRing, walk: Walk, count: Int32) -> None:
        cute.arch.griddepcontrol_wait()  # the kernel before may write shared factors
        factors = TileFactors(self.tiles, self.factors, self.slots, walk.tile_at(walk.start))
        first = walk.split * count
        ahead = factors.first_shared(first)
        under = Zeros(mma.acc, factors, ahead)
        promotion = Promotion.of(mma, ab, factors, under, (first, first + count))
        promotion.run(ab.consumer(), cutlass.Boolean(False), ahead)
