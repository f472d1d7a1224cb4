"""What the roles of a CTA of the decode kernel share: the walk over its parts of units, smem and
rings; and Load and CopyLoad, the role of the warps that load K and V."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync

from cutex.device.attention.block_info import BlockInfo, Blocks, larger, ordered
from cutex.device.attention.new_rows import CacheRows, append_rows
from cutex.device.attention.unit_rows import UnitRows
from cutex.device.pipeline import PipelineState, Ring
from cutex.device.row_copies import NO_ROW, RowCopies
from cutex.device.row_source import BoxLoads, DenseRows, PagedRows, RowSource, row_list
from cutex.kernels.attention.decode.config import ALONE_MORE, DecodeConfig
from cutex.kernels.attention.decode.signature import KernelArgs, Sizes
from cutex.kernels.attention.decode.splits import (
    NEVER,
    EntrySpan,
    EvenParts,
    Piece,
    Splits,
    are_many,
    weight,
)
from cutex.schedulers.order import select

WARP = 32
TOGETHER = 4  # entries that a lane looks at together
PART = len(Piece._fields) + len(Blocks._fields)  # words of a part, as it is told


class Part(NamedTuple):
    """A part of a unit that has keys, as the loading warps see it."""

    entry: Int32
    head: Int32
    first: Int32  # block of keys
    end: Int32  # not more than `first`: there is no part left
    after: Int32  # the position after the part
    span: EntrySpan


@dataclass(frozen=True)
class Walk:
    """A CTA's walk over its parts of units, which each of its warps does on its own."""

    config: Any  # says `start`, `least`, `packed` and `page_size`
    info: BlockInfo
    args: KernelArgs
    sizes: Sizes

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

    @cute.jit
    def length(self, number: Int32) -> Int32:
        """The length in key blocks of each unit of an entry, at least 1; 0 if it has no rows or
        does not exist."""
        exists = number < self.sizes.entries
        number = cutlass.min(number, self.sizes.entries - 1)
        batch, m_block = self.entry(number)
        seq_q = self.sizes.queries(self.args, batch)
        exists = exists & (m_block * self.info.tile_m < seq_q.length * self.info.pack)
        blocks = self.blocks(number)
        return cutlass.max(blocks.end - blocks.first, 1) if exists else Int32(0)

    # ---- the walk

    def worker(self) -> tuple[Int32, Int32]:
        """The number of the CTA among those with a share of their own, and how many there are."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        return cta, ctas

    @cute.jit
    def begin(self) -> tuple[Any, EntrySpan, Int32]:
        """This CTA's share (Splits, or EvenParts if cut by room), its first entry, and the end of
        the axis of all units. A whole warp calls it: each lane examines every 32nd entry."""
        c, team = self.config, self.sizes.team
        owners = self.sizes.heads // team  # of units, in a team's view
        lane = cute.arch.lane_idx()
        cta, ctas = self.worker()
        if cutlass.const_expr(c.by_room):
            parts, zero = 1 if c.whole else self.args.num_splits, Int32(0)
            even = EvenParts(self.sizes.heads, cta, team, ctas // team, parts, c.merge)
            return even, EntrySpan(zero, zero, zero), self.sizes.entries * owners * parts
        total, quota, num_splits, size = self.shares(owners, ctas // team)
        splits = Splits(self.sizes.heads, quota, c.start, num_splits, cta, team, size)
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
    def shares(self, owners: Int32, teams: Int32) -> tuple[Int32, Int32, Int32, Any]:
        """The length of the axis of all units, the length of each team's share, the number of parts
        that units are cut into (0: where shares end), and the size of parts that are alone."""
        c, total, longest, shortest = self.config, Int32(0), Int32(0), Int32(NEVER)
        for first in cutlass.range(0, self.sizes.entries, WARP * TOGETHER, unroll=1):
            # NOTE: all are loaded before any is used; an unrolled loop would wait for each
            lane = first + cute.arch.lane_idx()
            lengths = tuple(self.length(lane + i * WARP) for i in range(TOGETHER))
            for i in cutlass.range_constexpr(TOGETHER):
                mine = weight(lengths[i], c.start)
                total += mine
                longest = cutlass.max(longest, mine)
                shortest = cutlass.min(shortest, select(mine > 0, mine, NEVER))
        total = cute.arch.warp_redux_sync(total, "add") * owners
        longest = cute.arch.warp_redux_sync(longest, "max")
        shortest = cute.arch.warp_redux_sync(shortest, "min")
        quota = Splits.quota_of(total, teams, c.least)
        size = self.size_alone(total, longest, quota, owners, teams)
        many = are_many(self.sizes.entries * owners, teams)
        quota, num_splits = self.uncut(quota, longest, shortest, many)
        if cutlass.const_expr(size is not None):
            total, quota = self.row_of_parts(total, quota, size, owners)
        return total, quota, num_splits, size

    @cute.jit
    def size_alone(
        self, total: Int32, longest: Int32, quota: Int32, owners: Int32, teams: Int32
    ) -> Int32 | None:
        """The most blocks of a part if each part has a team to itself; 0 where shares of `quota`
        blocks are faster. `total` and `longest` include the cost of starting a unit."""
        c, size = self.config, Int32(0)
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
        self, total: Int32, quota: Int32, size: Int32, owners: Int32
    ) -> tuple[Int32, Int32]:
        """The length of the axis of all parts of at most `size` blocks, and a team's share of it,
        which is one; without a size, `total` and `quota`."""
        if size > 0:
            total, quota = Int32(0), Int32(1)
            for first in cutlass.range(0, self.sizes.entries, WARP, unroll=1):
                length = self.length(first + cute.arch.lane_idx())
                total += (length + size - 1) // size
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
        elif splits.size > 0:
            piece = Piece(*(Int32(x) for x in splits.piece_alone(at, span)))
        else:
            piece = Piece(*(Int32(x) for x in splits.piece(at, span)))
        return piece

    @cute.jit
    def each_part(self, work: cutlass.Constexpr[Callable[[Piece, Any], Any]], state: Any) -> Any:
        """Do the `work` of each of this CTA's parts, one after the other: it has the part and
        `state`, and returns the next. Returns the last."""
        splits, span, end = self.begin()
        at = splits.begin
        while at < end:
            span = self.span_at(splits, at, span)
            piece = self.piece(splits, at, span)
            at = piece.after
            if piece.end > piece.first:
                state = work(piece, state)
        return state

    @cute.jit
    def part(self, splits: Splits, end: Int32, at: Int32, span: EntrySpan) -> Part:
        """The first part with keys that starts at position `at` or after it."""
        entry, head, first, last = Int32(0), Int32(0), Int32(0), Int32(0)
        while (first >= last) & (at < end):
            span = self.span_at(splits, at, span)
            piece = self.piece(splits, at, span)
            at = piece.after
            if piece.end > piece.first:
                blocks = self.of_piece(piece)
                entry, head, first, last = piece.entry, piece.head, blocks.first, blocks.end
        return Part(entry, head, first, last, at, span)

    def rows(self, piece: Piece | Part) -> UnitRows:
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


# ---- loads


@dataclass(frozen=True)
class Load:
    """The role of a load warp: its share of each block of K and V, through their rings."""

    k: cpasync.TmaInfo
    v: cpasync.TmaInfo
    pitch_k: Int32  # rows from one page, or one sequence, to the next
    pitch_v: Int32
    number: Int32  # of this warp among those that load
    shared: Shared

    @cute.jit
    def run(self) -> None:
        """Load the keys of this CTA's parts, in the order in which the products need them."""
        s = self.shared
        self.prefetch()
        splits, place, end = s.begin()
        fills, told = (s.k.producer(), s.v.producer()), self.parts_told()
        part, told = self.next_part(splits, end, splits.begin, place, told)
        while part.end > part.first:
            fills, part, told = self.load(splits, end, part, fills, told)
        if cutlass.const_expr(s.config.overlaps):
            cute.arch.griddepcontrol_launch_dependents()

    def prefetch(self) -> None:
        """Fetch the tensor maps."""
        for operand in (self.k, self.v):
            cpasync.prefetch_descriptor(operand.atom)

    @cute.jit
    def load(
        self,
        splits: Splits,
        end: Int32,
        part: Part,
        fills: tuple[PipelineState, PipelineState],
        told: PipelineState,
    ) -> tuple[tuple[PipelineState, PipelineState], Part, PipelineState]:
        """Load the keys of a part; returns the next part, which is searched for while the last slot
        is still full."""
        s = self.shared
        k_fill, v_fill = fills
        batch, _ = s.entry(part.entry)
        keys, head = s.sizes.keys(s.args, batch), s.kv_head(part.head)
        if cutlass.const_expr(s.config.appends):
            before, size = Int32(s.args.seqused_k[batch]), s.config.tile_n
            to = cutlass.min(keys, part.end * size)
            rows = cutlass.max(before, part.first * size), to, before
            append_rows(*s.new_rows(), (batch, head), rows)
        of_k, of_v = (s.source(batch, keys, x) for x in (self.pitch_k, self.pitch_v))
        loads_k = BoxLoads(self.k, of_k, s.sK, head)
        loads_v = BoxLoads(self.v, of_v, s.sV, head)
        share = 0, self.number, s.config.load_warps
        loads_k.load(part.end - 1, k_fill.slot, s.k.acquire(k_fill), *share)
        k_fill.advance()
        for i in cutlass.range(part.end - 1 - part.first, unroll=1):
            block = part.end - 1 - i
            loads_k.load(block - 1, k_fill.slot, s.k.acquire(k_fill), *share)
            k_fill.advance()
            loads_v.load(block, v_fill.slot, s.v.acquire(v_fill), *share)
            v_fill.advance()
        following = part
        if cutlass.const_expr(s.parts is None):
            following, told = self.next_part(splits, end, part.after, part.span, told)
        loads_v.load(part.first, v_fill.slot, s.v.acquire(v_fill), *share)
        v_fill.advance()
        if cutlass.const_expr(s.parts is not None):
            # NOTE: a part is told when one before has been taken, for which this one must be there
            following, told = self.next_part(splits, end, part.after, part.span, told)
        return (k_fill, v_fill), following, told

    def parts_told(self) -> PipelineState:
        """The state in the ring of announced parts, for this warp, which fills it."""
        s = self.shared
        return s.k.producer() if s.parts is None else s.parts.ring.producer()

    @cute.jit
    def next_part(
        self, splits: Splits, end: Int32, at: Int32, span: EntrySpan, told: PipelineState
    ) -> tuple[Part, PipelineState]:
        """The first part with keys at position `at` or after it; announces to the roles that do not
        walk this part, those without keys before it, and the end."""
        s = self.shared
        if cutlass.const_expr(s.parts is None):
            part = s.part(splits, end, at, span)
        else:
            entry, head, first, last = (Int32(0) for _ in range(4))
            while (first >= last) & (at < end):
                span = s.span_at(splits, at, span)
                piece = s.piece(splits, at, span)
                at = piece.after
                if piece.end > piece.first:
                    blocks = s.of_piece(piece)
                    entry, head, first, last = piece.entry, piece.head, blocks.first, blocks.end
                    told = s.parts.tell(told, (*piece, *blocks), self.number == 0)
            if first >= last:
                told = s.parts.tell(told, tuple(Int32(0) for _ in range(PART)), self.number == 0)
            part = Part(entry, head, first, last, at, span)
        return part, told


@dataclass(frozen=True)
class CopyLoad(Load):
    """A load warp's share of each block of K and V, whose rows may be anywhere in memory."""

    def prefetch(self) -> None:
        """There are no descriptors."""

    @cute.jit
    def load(
        self,
        splits: Splits,
        end: Int32,
        part: Part,
        fills: tuple[PipelineState, PipelineState],
        told: PipelineState,
    ) -> tuple[tuple[PipelineState, PipelineState], Part, PipelineState]:
        """As Load's. A lane knows the places of one row of a block, before its slot is empty, and
        those of V from when K was loaded."""
        s = self.shared
        k_fill, v_fill = fills
        batch, _ = s.entry(part.entry)
        keys, head = s.sizes.keys(s.args, batch), s.kv_head(part.head)
        copies_k, copies_v = (
            RowCopies(row_list(mX), sX, head, self.number, s.config.load_warps)
            for mX, sX in ((s.args.k_cache, s.sK), (s.args.v_cache, s.sV))
        )
        of_k, of_v = self.places(batch, keys, part.end - 1)
        copies_k.load(of_k, k_fill.slot, s.k.acquire(k_fill))
        k_fill.advance()
        for i in cutlass.range(part.end - 1 - part.first, unroll=1):
            of_k, next_v = self.places(batch, keys, part.end - 2 - i)
            copies_k.load(of_k, k_fill.slot, s.k.acquire(k_fill))
            k_fill.advance()
            copies_v.load(of_v, v_fill.slot, s.v.acquire(v_fill))
            v_fill.advance()
            of_v = next_v
        following = part
        if cutlass.const_expr(s.parts is None):
            following, told = self.next_part(splits, end, part.after, part.span, told)
        copies_v.load(of_v, v_fill.slot, s.v.acquire(v_fill))
        v_fill.advance()
        if cutlass.const_expr(s.parts is not None):
            # NOTE: a part is told when one before has been taken, for which this one must be there
            following, told = self.next_part(splits, end, part.after, part.span, told)
        return (k_fill, v_fill), following, told

    @cute.jit
    def places(self, batch: Int32, keys: Int32, block: Int32) -> tuple[Int32, Int32]:
        """The places in K's and in V's list of rows of the row of a block that is this lane's;
        NO_ROW if there is none."""
        s, lane = self.shared, cute.arch.lane_idx()
        mine = s.config.tile_n // s.config.load_warps
        row = block * s.config.tile_n + self.number * mine + lane
        k, v = (s.source(batch, keys, x).box(row, 1) for x in (self.pitch_k, self.pitch_v))
        exists = (k.count > 0) & (lane < mine)
        return select(exists, k.offset, NO_ROW), select(exists, v.offset, NO_ROW)
