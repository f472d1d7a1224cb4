"""What the roles of a CTA of the decode kernel share: its walk over its parts of units, found from
the lengths of all sequences (Walk), and that with its smem and rings (Shared)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from cutex.device.attention.block_info import BlockInfo, Blocks, larger, ordered
from cutex.device.attention.new_rows import CacheRows
from cutex.device.attention.unit_rows import UnitRows
from cutex.device.pipeline import PipelineState, Ring
from cutex.device.row_source import DenseRows, PagedRows, RowSource
from cutex.kernels.attention.decode.config import ALONE_MORE, DecodeConfig
from cutex.kernels.attention.decode.signature import KernelArgs, Sizes
from cutex.kernels.attention.decode.splits import (
    NEVER,
    EntrySpan,
    EvenParts,
    Piece,
    Splits,
    are_many,
    quotient,
    weight,
)
from cutex.schedulers.order import select

WARP = 32
TOGETHER = 4  # entries that a lane looks at together
PART = len(Piece._fields) + len(Blocks._fields)  # words of a part, as it is told


class Window(NamedTuple):
    """A warp's entries, one for each lane, on the axis along which all units are laid."""

    entry: Int32  # of lane 0
    begin: Int32  # the position of its first unit
    length: Int32  # of this lane's units
    upto: Int32  # the weight of a unit of each entry up to this lane's


@dataclass(frozen=True)
class Walk:
    """A CTA's walk over its parts of units, which each of its warps does on its own."""

    config: Any  # says `start`, `least`, `packed` and `page_size`
    info: BlockInfo
    args: KernelArgs
    sizes: Sizes

    asks_shortest: ClassVar[bool] = False  # `uncut` does

    # ---- entries

    def entry(self, number: Int32) -> tuple[Int32, Int32]:
        """The sequence and the block of rows of an entry."""
        batch = number // self.sizes.m_blocks
        return batch, number - batch * self.sizes.m_blocks

    @cute.jit
    def blocks(self, number: Int32) -> Blocks:
        """The blocks of keys that the rows of an entry see."""
        batch, m_block = self.entry(number)
        seq_q, keys = self.sizes.queries(self.args, batch), self.sizes.keys(self.args, batch)
        return self.info.n_blocks(m_block, seq_q.length, keys)

    @property
    def sees_all(self) -> bool:
        """Whether the rows of an entry, which exist, see all keys of its sequence."""
        c, args = self.config, self.args
        causal = args.lo is None and args.hi is None
        return bool(c.one_block and causal and not c.varlen_q)

    @cute.jit
    def length(self, number: Int32) -> Int32:
        """The length in key blocks of each unit of an entry, at least 1; 0 if it has no rows or
        does not exist."""
        exists = number < self.sizes.entries
        number = cutlass.min(number, self.sizes.entries - 1)
        found = Int32(0)
        if cutlass.const_expr(self.sees_all):
            keys = self.sizes.keys(self.args, number)
            found = (keys + self.info.tile_n - 1) >> (self.info.tile_n.bit_length() - 1)
            if cutlass.const_expr(self.info.tile_n & (self.info.tile_n - 1)):
                found = (keys + self.info.tile_n - 1) // self.info.tile_n
        else:
            batch, m_block = self.entry(number)
            seq_q = self.sizes.queries(self.args, batch)
            exists = exists & (m_block * self.info.tile_m < seq_q.length * self.info.pack)
            blocks = self.blocks(number)
            found = blocks.end - blocks.first
        return cutlass.max(found, 1) if exists else Int32(0)

    # ---- the walk

    def worker(self) -> tuple[Int32, Int32]:
        """The number of the CTA among those with a share of their own, and how many there are."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        return cta, ctas

    @cute.jit
    def begin(self) -> tuple[Any, Any, Int32]:
        """This CTA's share (Splits, or EvenParts if cut by room), its first entry (in shares the
        window to look for it), and the end of the axis of all units. A whole warp calls it: each
        lane examines every 32nd entry."""
        c, team = self.config, self.sizes.team
        owners = quotient(self.sizes.heads, team)  # of units, in a team's view
        lane = cute.arch.lane_idx()
        cta, ctas = self.worker()
        if cutlass.const_expr(c.by_room):
            parts, zero = 1 if c.whole else self.args.num_splits, Int32(0)
            even = EvenParts(self.sizes.heads, cta, team, quotient(ctas, team), parts, c.merge)
            return even, EntrySpan(zero, zero, zero), self.sizes.entries * owners * parts
        total, quota, num_splits, size, lengths = self.shares(owners, quotient(ctas, team))
        whole = num_splits > 0 if c.in_shares else None
        splits = Splits(self.sizes.heads, quota, c.start, num_splits, cta, team, size, whole)
        if cutlass.const_expr(c.in_shares):
            window = self.window(splits, Int32(0), Int32(0), lengths)
            return splits, window, cutlass.min(splits.end, total)
        entry, begin, here = Int32(0), Int32(0), Int32(0)
        searching = splits.begin < total
        while searching:
            length = self.length(entry + lane)
            mine = splits.weight(length)
            upto = self.sum_to(mine)
            behind = begin + upto * owners <= splits.begin
            before = cute.arch.popc(cute.arch.vote_ballot_sync(behind))
            if before == WARP:
                entry += WARP
                begin += cute.arch.shuffle_sync(upto, WARP - 1) * owners
            else:
                entry += before
                begin += cute.arch.shuffle_sync(upto - mine, before) * owners
                here = cute.arch.shuffle_sync(length, before)
                searching = False
        return splits, EntrySpan(entry, begin, here), cutlass.min(splits.end, total)

    @cute.jit
    def shares(self, owners: Int32, teams: Int32) -> tuple[Int32, Int32, Int32, Any, Any]:
        """The length of the axis of all units, the length of each team's share, the number of parts
        that units are cut into (0: where shares end), the size of parts that are alone, and the
        lengths of the first entries, one for each lane, where there are no more."""
        c, lengths = self.config, None
        if cutlass.const_expr(c.few_entries):
            lengths = self.length(cute.arch.lane_idx())
            total = longest = weight(lengths, c.start)
            shortest = longest
        else:
            total, longest, shortest = self.totals()
        total = cute.arch.warp_redux_sync(total, "add") * owners
        longest = cute.arch.warp_redux_sync(longest, "max")
        if cutlass.const_expr(self.asks_shortest):
            shortest = cute.arch.warp_redux_sync(shortest, "min")
        quota = Splits.quota_of(total, teams, c.least)
        size = self.size_alone(total, longest, quota, owners, teams)
        many = are_many(self.sizes.entries * owners, teams)
        quota, num_splits = self.uncut(quota, longest, shortest, many)
        if cutlass.const_expr(size is not None):
            total, quota = self.row_of_parts(total, quota, size, owners, lengths)
        return total, quota, num_splits, size, lengths

    @cute.jit
    def totals(self) -> tuple[Int32, Int32, Int32]:
        """The sum, the largest and the least of the weights of a unit of the entries that this lane
        looks at."""
        c, total, longest, shortest = self.config, Int32(0), Int32(0), Int32(NEVER)
        for first in cutlass.range(0, self.sizes.entries, WARP * TOGETHER, unroll=1):
            # NOTE: all are loaded before any is used; an unrolled loop would wait for each
            lane = first + cute.arch.lane_idx()
            lengths = tuple(self.length(lane + i * WARP) for i in range(TOGETHER))
            for i in cutlass.range_constexpr(TOGETHER):
                mine = weight(lengths[i], c.start)
                total += mine
                longest = cutlass.max(longest, mine)
                if cutlass.const_expr(self.asks_shortest):
                    shortest = cutlass.min(shortest, select(mine > 0, mine, NEVER))
        return total, longest, shortest

    @cute.jit
    def size_alone(
        self, total: Int32, longest: Int32, quota: Int32, owners: Int32, teams: Int32
    ) -> Int32 | None:
        """The most blocks of a part if each part has a team to itself; 0 where shares of `quota`
        blocks are faster. `total` and `longest` include the cost of starting a unit."""
        c, size = self.config, Int32(0)
        if cutlass.const_expr(not c.alone):
            return None
        units = self.sizes.entries * owners
        if (self.args.num_splits == 0) & (units <= teams) & (c.merge > 0):
            longest -= c.start
            if cutlass.const_expr(not c.varlen_q):  # else some entries may have no rows
                total -= units * c.start
            size = Int32(self.best_alone(total, longest, units, teams, quota))
        return size

    def best_alone(self, total: Any, longest: Any, units: Any, teams: Any, share: Any) -> Any:
        """`size_alone` of `units` units, no more than `teams`, of at most `longest` blocks each and
        `total` in all."""
        c = self.config
        size = larger(Splits.size_alone(total, longest, units, teams), c.least)
        size = select(size + c.start <= share + ALONE_MORE, size, 0)
        whole = c.are_whole_alone(longest + c.start, share)
        whole |= are_many(units, teams) & (longest <= c.most_whole)
        return select(whole, NEVER, size)

    @cute.jit
    def row_of_parts(
        self, total: Int32, quota: Int32, size: Int32, owners: Int32, lengths: Int32 | None
    ) -> tuple[Int32, Int32]:
        """The length of the axis of all parts of at most `size` blocks, and a team's share of it,
        which is one; without a size, `total` and `quota`. `lengths`: of all entries, if known."""
        if size > 0:
            total, quota = Int32(0), Int32(1)
            if cutlass.const_expr(lengths is not None):
                total = quotient(lengths + size - 1, size)
            else:
                for first in cutlass.range(0, self.sizes.entries, WARP, unroll=1):
                    length = self.length(first + cute.arch.lane_idx())
                    total += quotient(length + size - 1, size)
            total = cute.arch.warp_redux_sync(total, "add") * owners
        return total, quota

    def uncut(
        self, quota: Int32, longest: Int32, shortest: Int32, many: Boolean
    ) -> tuple[Int32, Int32]:
        """A share, and the number of parts that units are cut into: no unit is cut where merging
        its parts would take longer, and a CTA then processes the units that start in its share."""
        merge, num_splits = self.config.merge, self.args.num_splits
        if merge == 0:
            return quota, num_splits
        whole = self.config.is_whole(longest)
        whole |= many & (longest <= self.config.most_whole + self.config.start)
        if self.config.in_shares:
            num_splits = 0
        whole = (num_splits == 0) & whole
        return quota, select(whole, Int32(1), num_splits)

    @cute.jit
    def sum_to(self, x: Int32) -> Int32:
        """The sum of x over this lane and those before it."""
        lane = cute.arch.lane_idx()
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(x, 1 << step)
            x += other if lane >= 1 << step else 0
        return x

    @cute.jit
    def window(
        self, splits: Splits, entry: Int32, begin: Int32, lengths: Int32 | None = None
    ) -> Window:
        """The window of the entries from `entry` on, whose first unit is at `begin`."""
        if cutlass.const_expr(lengths is None):
            lengths = self.length(entry + cute.arch.lane_idx())
        return Window(entry, begin, lengths, self.sum_to(splits.weight(lengths)))

    @cute.jit
    def found(self, splits: Any, at: Int32, place: Any) -> tuple[Any, EntrySpan]:
        """The entry at position `at`, and where it was found: in `place`, a window, or after
        it."""
        if cutlass.const_expr(not isinstance(place, Window)):
            span = self.span_at(splits, at, place)
            return span, span
        before = self.before(splits, at, place)
        if cutlass.const_expr(not self.config.few_entries):
            while before == WARP:
                begin = place.begin + cute.arch.shuffle_sync(place.upto, WARP - 1) * splits.owners
                place = self.window(splits, place.entry + WARP, begin)
                before = self.before(splits, at, place)
        upto = cute.arch.shuffle_sync(place.upto, cutlass.max(before - 1, 0))
        begin = place.begin + select(before > 0, upto * splits.owners, 0)
        blocks = cute.arch.shuffle_sync(place.length, before)
        return place, EntrySpan(place.entry + before, begin, blocks)

    def before(self, splits: Splits, at: Int32, window: Window) -> Int32:
        """The number of the window's entries that end before position `at`."""
        behind = window.begin + window.upto * splits.owners <= at
        return Int32(cute.arch.popc(cute.arch.vote_ballot_sync(behind)))

    @cute.jit
    def span_at(self, splits: Splits, at: Int32, span: EntrySpan) -> EntrySpan:
        """The entry at position `at`, in `span` or after it."""
        if cutlass.const_expr(self.config.by_room):
            return span
        entry, begin, blocks = span
        while begin + splits.units(blocks) <= at:
            begin += splits.units(blocks)
            entry += 1
            blocks = self.length(entry)
        return EntrySpan(entry, begin, blocks)

    @cute.jit
    def piece(self, splits: Any, at: Int32, span: EntrySpan) -> Piece:
        """The part that starts at position `at` or after it, in one of the units of `span`."""
        # NOTE: one of the three is computed: their divisions are on the way to the first load
        piece = Piece(*(Int32(0) for _ in Piece._fields))
        if cutlass.const_expr(self.config.whole):
            piece = Piece(*(Int32(x) for x in splits.whole(at)))
            if cutlass.const_expr(self.config.varlen_q):
                exists = self.length(piece.entry) > 0
                piece = piece._replace(end=select(exists, piece.end, 0))
        elif cutlass.const_expr(self.config.by_room):
            blocks = self.length(splits.entry(at))
            piece = Piece(*(Int32(x) for x in splits.piece(at, blocks)))
        elif cutlass.const_expr(splits.size is None):
            piece = Piece(*(Int32(x) for x in splits.piece(at, span)))
        elif splits.size > 0:
            piece = Piece(*(Int32(x) for x in splits.piece_alone(at, span)))
        else:
            piece = Piece(*(Int32(x) for x in splits.piece(at, span)))
        return piece

    @cute.jit
    def each_part(self, work: cutlass.Constexpr[Callable[[Piece, Any], Any]], state: Any) -> Any:
        """Do the `work` of each of this CTA's parts, one after the other: it has the part and
        `state`, and returns the next. Returns the last."""
        splits, place, end = self.begin()
        at = splits.begin
        while at < end:
            place, span = self.found(splits, at, place)
            piece = self.piece(splits, at, span)
            at = piece.after
            if piece.end > piece.first:
                state = work(piece, state)
        return state

    def rows(self, piece: Piece) -> UnitRows:
        """The rows of a part's unit."""
        batch, m_block = self.entry(piece.entry)
        seq_q = self.sizes.queries(self.args, batch)
        m_block, head = self.sizes.owner(m_block, piece.head)
        return UnitRows(batch, m_block, head, seq_q, self.sizes.pack, self.config.tile_m)

    def kv_head(self, owner: Int32) -> Int32:
        """The head of K and V that an owner of units reads."""
        head = owner // self.sizes.row_blocks
        return head if self.config.packed else head // self.sizes.heads_per_kv

    def source(self, batch: Int32, keys: Int32, pitch: Int32) -> RowSource:
        """The rows of a sequence's cache of `keys` keys; pages, or sequences, start `pitch` rows
        apart."""
        args, page_size = self.args, self.config.page_size
        pad = None if args.leftpad is None else Int32(args.leftpad[batch])
        if page_size:
            return PagedRows(args.page_table[batch, None], keys, page_size, pitch, pad)
        entry = batch if args.batch_idx is None else Int32(args.batch_idx[batch])
        first = entry * pitch
        return DenseRows(first if pad is None else first + pad, keys)

    def descale(self, scales: cute.Tensor, rows: UnitRows) -> Float32:
        """The scale of a unit's keys or values, from (batch, heads_kv)."""
        return scales[rows.batch, self.kv_head(rows.head * self.sizes.row_blocks)]

    def of_piece(self, piece: Piece) -> Blocks:
        """The key blocks of a part; none for a unit that sees none."""
        whole = self.blocks(piece.entry)
        first = whole.first + piece.first
        end = cutlass.min(whole.first + piece.end, whole.end)
        first = cutlass.min(first, end)
        return ordered(first, end, whole.clean_first, whole.clean_end)


@dataclass(frozen=True)
class Shared(Walk):
    """A CTA's walk, and its smem."""

    config: DecodeConfig
    sQ: cute.Tensor | None  # (bM, D, 1), where Q comes from smem
    sK: cute.Tensor  # (bN, D, SLOT)
    sV: cute.Tensor  # (bN, DV, SLOT)
    k: Ring
    v: Ring
    parts: Any = None  # a WordRing, where only the warps that load walk; None: each role does

    def take_part(self, told: PipelineState) -> tuple[Piece, Blocks, PipelineState]:
        """The next part announced by the load warps; without blocks after the last."""
        found, told = self.parts.take(told)
        return Piece(*found[: -len(Blocks._fields)]), Blocks(*found[-len(Blocks._fields) :]), told

    @cute.jit
    def each_told(
        self, work: cutlass.Constexpr[Callable[[Piece, Blocks, Any], Any]], state: Any
    ) -> Any:
        """As `each_part`, of the parts that the warps that load tell."""
        piece, blocks, told = self.take_part(self.parts.ring.consumer())
        while piece.end > piece.first:
            state = work(piece, blocks, state)
            piece, blocks, told = self.take_part(told)
        return state

    def new_rows(self) -> tuple[Any, Any, CacheRows]:
        """The new keys and values, the caches they are appended to, and where."""
        a, page_size = self.args, self.config.page_size
        where = CacheRows(page_size, a.page_table, a.batch_idx)
        return (a.k_new, a.v_new), (a.k_cache, a.v_cache), where
