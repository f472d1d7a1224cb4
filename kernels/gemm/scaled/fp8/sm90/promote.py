"""The MMA roles that promote: after every 128 of K, sums leave the tensor core for fp32 registers.

Hopper's fp8 MMAs keep 13 bits below the largest summand, so the sums of each block of K are scaled
and added to the total in fp32 (DeepSeek-V3, arXiv 2412.19437, 3.3.2). Two warpgroups drift into
alternation: while one adds, the MMAs of the other run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from cutex.device.atoms.multicast import SharedRing
from cutex.device.atoms.scalar import pinned_sum
from cutex.device.atoms.wgmma import ROWS, WgmmaProduct
from cutex.device.pipeline import PipelineState
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.scaled.fp8.config import BLOCK, LANES, PROMOTED, Fp8Config
from cutex.kernels.gemm.signature import tile_counts
from cutex.kernels.gemm.sm90.mma import MmaRole, RoleProduct
from cutex.schedulers.announced import AnnouncedTiles, HeldTile


@dataclass(frozen=True)
class Promotion:
    """The promoted sums of one tile: total += part * factors, for each block of K."""

    mma: WgmmaProduct
    ab: SharedRing
    factors: TileFactors
    part: cute.Tensor  # (MMA, 1, MMA_N) the sums of one block, of 64 rows
    held: Any  # the shared factors of LANES blocks, one in each lane; None where none is shared
    waves: int  # how many times 64 rows of this warpgroup are computed

    @cute.jit
    def add_block(
        self,
        take: PipelineState,
        seen: cutlass.Boolean,
        lane: Int32,
        under: cutlass.Constexpr[Callable[[], None] | None] = None,
    ) -> tuple[PipelineState, cutlass.Boolean]:
        """Add one block of K, whose shared factors `lane` holds, and release its slot.

        A block is summed 64 rows at a time, so that one set of registers serves all rows of a
        warpgroup. `seen`: whether this warp has already seen the slot full; returns the same for
        the next slot. `under` is called while the first MMA runs.

        NOTE: between two MMAs of a warpgroup are its additions and little else, since the tensor
        core idles if the other warpgroup's MMA ends sooner: factors of rows are read under the
        first MMA, and the next slot's barrier is tested before the last additions.
        """
        mma, factors, waves = self.mma, self.factors, self.waves
        size = cute.size(self.part)
        of_waves = cute.make_layout((size, factors.waves))
        total = cute.make_tensor(mma.acc.iterator, of_waves)  # (V, MMA_M)
        part = cute.make_tensor(self.part.iterator, cute.make_layout(size))  # (V)
        if not seen:
            self.ab.wait_full(take)
        rows: list[tuple[Any, Any]] = []
        for wave in cutlass.range_constexpr(waves):
            mma.of_rows(wave).into(self.part).issue(take.slot, accumulate=False)
            if cutlass.const_expr(wave == 0):
                rows = [factors.rows(take.slot, each) for each in range(waves)]
                if cutlass.const_expr(under is not None):
                    under()
            block = factors.of_block(take.slot, self.held, lane, wave, rows[wave])
            warpgroup.wait_group(0)
            if cutlass.const_expr(wave == waves - 1):
                cute.arch.sync_warp()  # its lanes have read their factors
                self.ab.release(take)
                for _ in cutlass.range_constexpr(factors.tiles.steps):
                    take.advance()
                seen = self.ab.is_full(take)
            block.add(total[None, wave], part)
        return take, seen

    @cute.jit
    def add_round(
        self,
        take: PipelineState,
        seen: cutlass.Boolean,
        lane: Int32,
        under: cutlass.Constexpr[Callable[[], None] | None] = None,
    ) -> tuple[PipelineState, cutlass.Boolean]:
        """Add one block of K, like add_block; or with `rounds` one block per slot, starting with
        the first slot, at constant addresses."""
        if cutlass.const_expr(not self.factors.tiles.rounds):
            return self.add_block(take, seen, lane, under)
        take = PipelineState(take.num_slots, Int32(0), take.phase)
        for slot in cutlass.range_constexpr(take.num_slots):
            take, seen = self.add_block(take, seen, lane + slot, under if slot == 0 else None)
        return take, seen

    @cute.jit
    def at_boundary(
        self, add: cutlass.Constexpr[Callable[..., PipelineState]], take: PipelineState, *rest: Any
    ) -> PipelineState:
        """`add` of this promotion, traced for each place of the tile's first boundary between
        blocks of columns: neither a look-up of factors for each group of columns nor a branch then
        stands between two MMAs (docs/facts/scaled.md#fp8-boundaries)."""
        places = self.factors.boundaries
        if cutlass.const_expr(not places):
            take = add(self, take, *rest)
        else:
            here = self.factors.first_boundary()
            for i in cutlass.range_constexpr(len(places)):
                if here == places[i]:
                    factors = replace(self.factors, before=places[i])
                    take = add(replace(self, factors=factors), take, *rest)
        return take

    @cute.jit
    def add_blocks(
        self, take: PipelineState, seen: cutlass.Boolean, first: Int32, begin: Int32, end: Int32
    ) -> tuple[PipelineState, cutlass.Boolean]:
        """Add the blocks of K from `begin` to `end`; lane 0 holds the factors of block `first`."""
        for k_tile in cutlass.range(begin, end, self.factors.tiles.blocks_in_turn, unroll=1):
            take, seen = self.add_round(take, seen, k_tile - first)
        return take, seen


@cute.jit
def promoted(
    mma: WgmmaProduct,
    ab: SharedRing,
    take: PipelineState,
    factors: cutlass.Constexpr[Any],
    first: Int32 | int,
    count: Int32,
) -> PipelineState:
    """Sum `count` blocks of K from `first` on, each scaled by its factors, into mma.acc; returns
    the state after. All slots are released."""
    c: Fp8Config = factors.tiles
    mma.acc.fill(0.0)
    part = mma.mma.accumulator(ROWS * c.readers, c.tile_n)  # (MMA, 1, MMA_N)
    turn = factors.turn()
    if cutlass.const_expr(c.alternating):
        take.skip(turn)
    end, seen = first + count, cutlass.Boolean(False)
    num_shared = len(factors.shared())
    if cutlass.const_expr(num_shared == 0):
        promotion = Promotion(mma, ab, factors, part, None, factors.waves)
        take, seen = promotion.add_blocks(take, seen, first, first + turn, end)
        return take
    held = cute.make_rmem_tensor(num_shared, Float32)
    ahead = factors.ahead(first)
    promotion = Promotion(mma, ab, factors, part, held, factors.waves)
    for begin in cutlass.range(first, end, LANES, unroll=1):
        held.store(ahead.load())
        ahead.store(factors.ahead(begin + LANES).load())
        upto = cutlass.min(begin + LANES, end)
        take, seen = promotion.add_blocks(take, seen, begin, begin + turn, upto)
    return take


@dataclass(frozen=True)
class Promote(MmaRole):
    """All warpgroups compute a tile, each its own rows, promote, and store it.

    Where another warp looks up tiles, the next tile is known while one is computed, and its shared
    factors are requested: between two tiles neither is waited for
    (docs/facts/scaled.md#fp8-announced-tiles).
    """

    tiles: Fp8Config
    factors: tuple[Any, Any]  # of both sides, as FactoredOperands has them
    slots: tuple[Any, Any]
    announced: AnnouncedTiles | None = field(default=None, kw_only=True)

    ragged: ClassVar[bool] = False  # whether a tile may have rows for its first waves alone

    def run(self, product: RoleProduct) -> None:
        if self.announced is None:
            self.run_found(product)
        else:
            self.run_announced(product, self.announced)

    @cute.jit
    def run_found(self, product: RoleProduct) -> None:
        """Compute and store this CTA's tiles, each looked up when its turn comes."""
        mma, ab, epilogue, num_k_tiles, mC = product
        walk = self.scheduler.walk(tile_counts(self.tiles, mC))
        cute.arch.griddepcontrol_wait()  # the kernel before may write shared factors
        take = ab.consumer()
        for index in cutlass.range(walk.start, walk.end, walk.step, unroll=1):
            tile = walk.tile_at(index)
            take = promoted(mma, ab, take, self.factors_of(tile), 0, num_k_tiles)
            self.store(mma, epilogue, tile)

    @cute.jit
    def run_announced(
        self, product: RoleProduct, announced: cutlass.Constexpr[AnnouncedTiles]
    ) -> None:
        """Compute and store this CTA's tiles as they are announced."""
        mma, ab, epilogue, num_k_tiles, mC = product
        walk = self.scheduler.walk(tile_counts(self.tiles, mC))
        cute.arch.griddepcontrol_wait()  # the kernel before may write shared factors
        take, reader = ab.consumer(), announced.reader()
        part = mma.mma.accumulator(ROWS * self.tiles.readers, self.tiles.tile_n)
        if walk.start < walk.end:
            following = HeldTile.of(announced.take(reader))
            reader.advance()
            ahead = self.factors_of(following.tile).ahead(0)
            for index in cutlass.range(walk.start, walk.end, walk.step, unroll=1):
                tile, more = following.tile, index + walk.step < walk.end
                store, factors = self.store_of(epilogue, tile), self.factors_of(tile)
                coming = Coming(self, factors, announced, reader, following, ahead, more)
                mma.acc.fill(0.0)
                held = None
                if cutlass.const_expr(ahead is not None):
                    held = cute.make_rmem_tensor(cute.size(ahead), Float32)
                whole = Promotion(mma, ab, factors, part, held, factors.waves)
                present = cutlass.Boolean(True)
                if cutlass.const_expr(self.skips):
                    present = self.has_rows(tile)
                    if present:
                        take = whole.at_boundary(coming.promote, take, num_k_tiles)
                    else:
                        take = coming.pass_over(ab, take, num_k_tiles)
                elif cutlass.const_expr(not self.ragged or factors.waves == 1):
                    take = whole.at_boundary(coming.promote, take, num_k_tiles)
                elif self.is_short(tile):
                    few = replace(whole, waves=1)
                    take = few.at_boundary(coming.promote, take, num_k_tiles)
                else:
                    take = whole.at_boundary(coming.promote, take, num_k_tiles)
                if more:
                    reader.advance()
                if cutlass.const_expr(not self.skips):  # noqa: SIM114 - known when tracing
                    self.store(mma, store, tile)
                elif present:
                    self.store(mma, store, tile)

    @property
    def skips(self) -> bool:
        """Whether a warpgroup without rows of a tile only releases its slots."""
        return False

    def has_rows(self, tile: WorkTile) -> cutlass.Boolean:
        """Whether this warpgroup has rows of a tile, if it `skips`."""
        raise NotImplementedError

    def is_short(self, tile: WorkTile) -> cutlass.Boolean:
        """Whether a tile consists only of each warpgroup's first 64 rows, if it is `ragged`."""
        raise NotImplementedError

    def store_of(self, epilogue: Any, tile: WorkTile) -> Any:
        """The store of a tile."""
        return epilogue

    def factors_of(self, tile: WorkTile) -> TileFactors:
        """The factors of a tile."""
        return TileFactors(self.tiles, self.factors, self.slots, tile)


@dataclass(frozen=True)
class Coming:
    """What a warp looks up while it computes a tile: the next tile, and the shared factors of the
    next LANES blocks of K; at the end of this tile, those of the next tile's first blocks."""

    role: Promote
    factors: TileFactors  # of the tile that is computed
    announced: AnnouncedTiles
    reader: PipelineState
    following: HeldTile
    ahead: Any  # factors on their way to registers; None where none is shared
    more: cutlass.Boolean  # whether there is a next tile

    @cute.jit
    def promote(
        self, promotion: cutlass.Constexpr[Promotion], take: PipelineState, num_k_tiles: Int32
    ) -> PipelineState:
        """Add up all blocks of K of the tile, and meanwhile look up what comes next."""
        seen = cutlass.Boolean(False)
        for begin in cutlass.range(0, num_k_tiles, LANES, unroll=1):
            if cutlass.const_expr(self.ahead is not None):
                promotion.held.store(self.ahead.load())
            look = partial(self.look, begin, num_k_tiles)
            take, seen = promotion.add_round(take, seen, Int32(0), look)
            end = cutlass.min(begin + LANES, num_k_tiles)
            second = begin + self.factors.tiles.blocks_in_turn
            take, seen = promotion.add_blocks(take, seen, begin, second, end)
        return take

    @cute.jit
    def pass_over(self, ab: SharedRing, take: PipelineState, num_k_tiles: Int32) -> PipelineState:
        """Look up what comes next, and release all slots of the tile."""
        self.look(Int32(0), Int32(0))
        for _ in cutlass.range(0, num_k_tiles, unroll=1):
            ab.wait_full(take)
            ab.release(take)
            take.advance()
        return take

    @cute.jit
    def look(self, begin: Int32, end: Int32) -> None:
        """Look up what follows the blocks of K from `begin` on, out of `end`."""
        if (begin == 0) & self.more:
            self.following.put(self.announced.take(self.reader))
        if cutlass.const_expr(self.ahead is not None):
            if begin + LANES < end:
                self.ahead.store(self.factors.ahead(begin + LANES).load())
            else:
                following = self.role.factors_of(self.following.tile)
                self.ahead.store(following.ahead(0).load())


# ---- scale factors
#
# Those of a tile, and the addition of one block's sums, scaled by them.
#
# A row of the product, or a column, has a factor of its own for each 128 of K (1x128), which TMA
# loads into the slot of its operand; or 128 of them share one (128x128), which threads load from
# global memory when the slot is full, under the MMAs of their block.


class NoFactors(NamedTuple):
    """The factors of operands that have none in the mainloop."""

    @cute.jit
    def add(self, total: cute.Tensor, part: cute.Tensor) -> None:
        """total += part."""
        for i in cutlass.range_constexpr(cute.size(part)):
            total[i] = pinned_sum(total[i], part[i])


class ThreadFactors(NamedTuple):
    """The factors for 64 rows of a tile and for its columns, for one block of K, in registers."""

    rows: tuple[Any, Any]  # of this thread's two rows, 8 apart
    columns: tuple[Any, ...]  # of each group of columns: one for all, or this thread's two of 8
    group: int  # eights of columns that share an entry of `columns`

    def of(self, eight: int) -> list[list[Any]]:
        """The factors of this thread's 2 rows by 2 columns in group `eight` of eight columns."""
        column = self.columns[eight // self.group]
        pair = column if isinstance(column, tuple) else (column, column)
        return [[row * c if row is not None else c for c in pair] for row in self.rows]

    @cute.jit
    def add(self, total: cute.Tensor, part: cute.Tensor) -> None:
        """total += part * factors; both are 64 rows of a wgmma's accumulators.

        A thread holds 2 neighbours in each of 2 rows, 8 apart, for every 8 columns (PTX ISA, wgmma,
        "Register Fragments").
        """
        for eight in cutlass.range_constexpr(cute.size(part) // 4):
            if cutlass.const_expr(eight % self.group == 0):
                factors = self.of(eight)
            for i in cutlass.range_constexpr(2):
                for j in cutlass.range_constexpr(2):
                    at = 4 * eight + 2 * i + j
                    total[at] = total[at] + part[at] * factors[i][j]


@dataclass(frozen=True)
class TileFactors:
    """The factors of one tile: those in slots of smem, and those in global memory.

    Of the latter, each lane holds the factors of one of LANES blocks of K; they are loaded LANES
    blocks ahead, so that no MMA waits for an address or for memory.
    """

    tiles: Fp8Config
    factors: tuple[Any, Any]
    slots: tuple[Any, Any]
    tile: WorkTile
    # columns before the tile's first boundary between blocks of 128; 0 if not known when tracing
    before: int = 0

    @property
    def boundaries(self) -> tuple[int, ...]:
        """What `before` may be; none where factors are looked up for each `column_group`."""
        c = self.tiles
        if not c.bounded:
            return ()
        every = range(c.column_group, BLOCK + 1, c.column_group)
        return tuple(dict.fromkeys(min(x, c.tile_n) for x in every))

    def first_column(self) -> Int32:
        """The first column of this tile, a multiple of `column_group`."""
        return self.tile.n * self.tiles.tile_n

    def first_boundary(self) -> Int32:
        """The one of `boundaries` of this tile."""
        return cutlass.min(BLOCK - self.first_column() % BLOCK, self.tiles.tile_n)

    @property
    def column_steps(self) -> range:
        """Columns from the tile's first on that have all factors of its columns."""
        c = self.tiles
        if not self.boundaries:
            return range(0, c.tile_n, c.column_group)
        return range(0, c.touched_blocks * BLOCK, BLOCK)

    @property
    def step_of_group(self) -> list[int]:
        """The place in `column_steps` of each group of columns; `before` is known if it may be."""
        c = self.tiles
        if not self.boundaries:
            return list(range(len(self.column_steps)))
        columns = range(0, c.tile_n, c.column_group)
        return [-(-max(0, x + 1 - self.before) // BLOCK) for x in columns]

    @property
    def waves(self) -> int:
        """How many sets of 64 rows each warpgroup has."""
        return self.tiles.warpgroup_rows // ROWS

    def turn(self) -> Int32 | int:
        """The first block of K that this warpgroup computes."""
        return cute.arch.warp_idx() // 4 if self.tiles.alternating else 0

    def first_row(self, wave: int) -> Int32:
        """The first row of set `wave` of this warpgroup's 64 rows in the tile."""
        if self.tiles.alternating:
            return Int32(wave * ROWS)
        return (wave * self.tiles.mma_warpgroups + cute.arch.warp_idx() // 4) * ROWS

    def shared(self) -> list[tuple[int, Int32]]:
        """The side and one row of each factor that 128 rows share: one per wave, and per group or
        block of columns."""
        c, found = self.tiles, []
        if c.shares[0]:
            of_tile = self.tile.m * c.tile_m
            found += [(0, of_tile + self.first_row(wave)) for wave in range(self.waves)]
        if c.shares[1]:
            of_tile = self.first_column()
            found += [(1, of_tile + column) for column in self.column_steps]
        return found

    def load_shared(self, k_tile: Int32) -> list[Float32]:
        """For each factor of `shared`, the one of block `k_tile` + lane.

        NOTE: a tile may extend past the last row, and a share of K past the last block, where the
        operands are zeros.
        """
        found = []
        for side, row in self.shared():
            mS = self.factors[side]  # (RestRows, RestK), or with L last
            if cute.rank(mS) == 3:
                mS = mS[None, None, cutlass.min(self.tile.batch, cute.size(mS, mode=[2]) - 1)]
            last, last_k = (cute.size(mS, mode=[i]) - 1 for i in range(2))
            block = cutlass.min(k_tile + cute.arch.lane_idx(), last_k)
            found.append(mS[cutlass.min(row // BLOCK, last), block])
        return found

    def ahead(self, first: Int32 | int) -> Any:
        """The shared factors of LANES blocks from `first` on, being loaded to registers; None where
        none is shared."""
        values = self.load_shared(first)
        if not values:
            return None
        found = cute.make_rmem_tensor(len(values), Float32)
        for i, value in enumerate(values):
            found[i] = value
        return found

    def rows(self, slot: Int32, wave: int) -> tuple[Any, Any]:
        """The factors of this thread's two rows in `slot`; None where rows have none of their
        own."""
        if self.slots[0] is None:
            return None, None
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        row = self.first_row(wave) + 16 * (warp % 4) + lane // 4
        return self.slots[0][row, 0, slot], self.slots[0][row + 8, 0, slot]

    def of_block(
        self, slot: Int32, held: cute.Tensor | None, lane: Int32, wave: int, rows: tuple[Any, Any]
    ) -> ThreadFactors | NoFactors:
        """The factors of the block in `slot`; its shared ones are in `held` of lane `lane`."""
        c, first = self.tiles, 0
        if c.recipe == PROMOTED:
            return NoFactors()
        if rows[0] is None:
            assert held is not None  # since factors of rows are shared
            one = cute.arch.shuffle_sync(held[wave], lane)
            rows, first = (one, one), self.waves
        if self.slots[1] is not None:
            column = 2 * (cute.arch.lane_idx() % 4)
            of_columns = tuple(
                tuple(self.slots[1][8 * eight + column + j, 0, slot] for j in range(2))
                for eight in range(c.tile_n // 8)
            )
            return ThreadFactors(rows, of_columns, 1)
        assert held is not None  # since factors of columns are shared
        every = range(first, first + len(self.column_steps))
        found = [cute.arch.shuffle_sync(held[i], lane) for i in every]
        of_groups = tuple(found[step] for step in self.step_of_group)
        return ThreadFactors(rows, of_groups, c.column_group // 8)
