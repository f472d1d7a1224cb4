"""The tiles of the backward's main kernel: the keys that each CTA owns, and their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute

from cutex.device.attention.block_info import BlockInfo, Blocks, ceil_div, larger, smaller
from cutex.device.attention.seqlen_info import SeqlenInfo
from cutex.device.row_source import END
from cutex.device.work_tile import WorkTile
from cutex.kernels.attention.backward.signature import KernelArgs, RowTiles, Tensors, keys, queries
from cutex.kernels.attention.backward.spec import BackwardSpec
from cutex.kernels.attention.order import AttentionOrder, Wave
from cutex.kernels.attention.tail import Ramp, RampTail, Tail
from cutex.schedulers.dispatch import Ticket
from cutex.schedulers.order import select
from cutex.schedulers.ranked import Ranked, RankedTile

APART = 4  # blocks of queries that take longer than an add until its turn is passed on


class Sizes(NamedTuple):
    """The extents of a problem."""

    heads_kv: Int32  # of K and V; with `head_parts` each counts once a part
    heads_per_kv: Int32  # query heads of each
    rows_q: Int32  # size of mode seqlen; packed, the rows of all sequences
    rows_k: Int32
    num_n_blocks: Int32  # of the longest sequence
    batch: Int32


def tile_order(config: BackwardSpec, sizes: Sizes) -> AttentionOrder:
    """The order of key blocks; those of a cluster count as one `m`.

    With a causal mask the first keys see the most queries. They go first, from as many heads at a
    time as fill the SMs twice; with `late_zeros`, from one head at a time except at the end. Where
    they go last: from as many heads as fill the SMs once, or fewer if a tile is as long as several
    heads'."""
    count = ceil_div(sizes.num_n_blocks, config.key_ctas)
    waves = tiles_in_turn(config, sizes)
    units = (waves + count - 1) // count
    wave = Wave(1, units) if config.late_zeros else Wave(units, 2 * units)
    if config.rotated:
        # NOTE: no more CTAs wait for each other than run at one time
        group = Rotation.of(config, sizes).group
        wave = Wave(
            select(group > 1, config.num_ctas // group, units), select(group > 1, 1, 2 * units)
        )
    return AttentionOrder(
        num_m_blocks=count,
        heads=sizes.heads_kv,
        batch=sizes.batch,
        longest_first=config.interleaved and not config.ranked,
        rows_k=1,
        heads_per_kv=1,
        l2_rows=END,  # groups are as large as a wave
        wave=wave,
    )


def tiles_in_turn(config: BackwardSpec, sizes: Sizes) -> Int32:
    """About how many key blocks the heads have that are processed in turn; those of a cluster count
    as one."""
    waves = config.waves * config.num_ctas // config.key_ctas
    return larger(waves // sizes.heads_per_kv, 1) if config.longest_last else waves


class Rotation(NamedTuple):
    """Where tiles of keys begin that add to the same tiles of dQ in turn, if all queries see them.

    A group of neighbouring key blocks of a head begins at one time, its members at blocks of
    queries that are equally far apart, and each goes around. So a tile of dQ is added to by the
    member that begins there, then by the one that begins before it, and so on; then by the next
    group. An add has landed when the next one is due, so that nobody waits, at the start either: if
    all began at the same queries, the last of 26 CTAs would wait for 25 adds.

    Plain operators only: Python ints run it, and the same code traces in the DSL.
    """

    blocks: Any  # of queries
    keys: Any  # blocks of keys of a head
    group: Any  # of these, whose members begin at one time; no more than `blocks`

    @staticmethod
    def of(config: BackwardSpec, sizes: Sizes) -> Rotation:
        """A group is as large as leaves its members APART, or as keeps all CTAs busy."""
        blocks, keys = ceil_div(sizes.rows_q, config.tile_m), sizes.num_n_blocks
        busy = config.num_ctas // (sizes.heads_kv * sizes.batch)
        most = smaller(larger(blocks // APART, busy), smaller(blocks, config.num_ctas))
        most = larger(most, 1)
        groups = (keys + most - 1) // most
        return Rotation(blocks, keys, (keys + groups - 1) // groups)

    def start(self, n_block: Any) -> Any:
        """The block of queries at which a key block begins."""
        return n_block % self.group * self.blocks // self.group

    def block(self, n_block: Any, step: Any) -> Any:
        """The block of queries that a key block takes in a step."""
        block = self.start(n_block) + step
        return select(block < self.blocks, block, block - self.blocks)

    def turn(self, n_block: Any, m_block: Any) -> Any:
        """How many key blocks add to a block of queries before `n_block`."""
        first = n_block // self.group * self.group
        members = smaller(self.keys - first, self.group)
        # NOTE: the last member that begins there or before
        begins = ((m_block + 1) * self.group - 1) // self.blocks
        behind = smaller(begins, members - 1) - (n_block - first)
        return first + select(behind < 0, behind + members, behind)


def tail_of(config: BackwardSpec, sizes: Sizes) -> Tail:
    """The tiles of `tile_order`, of which the last are cut."""
    blocks = ceil_div(sizes.rows_q, config.tile_m)
    how = config.num_ctas, *config.tail_steps
    if not config.causal:
        steps = blocks * sizes.heads_per_kv
        return Tail(tile_order(config, sizes).total, steps, *how)
    shift, tile = sizes.rows_k - sizes.rows_q, (config.tile_m, config.tile_n)
    ramp = Ramp(sizes.num_n_blocks, blocks, sizes.heads_per_kv, shift, *tile)
    tiles = sizes.num_n_blocks * sizes.heads_kv * sizes.batch
    return RampTail(tiles, ramp.before(ramp.count), *how, ramp)


def tiles_ahead(config: BackwardSpec, sizes: Sizes) -> Int32:
    """How far ahead of its own number a tile zeroes sums of dQ.

    At least the tiles of the last group, so that a tile waits only for tiles handed out before it;
    two waves, so that what it waits for is already done.
    """
    return 2 * config.num_ctas + sizes.num_n_blocks


def ranked(config: BackwardSpec, args: KernelArgs, sizes: Sizes) -> Ranked | None:
    """The tiles of packed sequences in the order of preprocess's ranking; None: all tiles of the
    order."""
    if not config.ranked:
        return None
    s = sizes
    most = ceil_div(s.num_n_blocks, config.key_ctas)
    return Ranked(
        args.ranks, s.heads_kv, s.batch, most, config.interleaved, config.last_first,
        tail=2 * config.num_ctas // config.key_ctas if config.ends_interleaved else None,
        wave=tiles_in_turn(config, sizes) if config.longest_last else None,
    )  # fmt: skip


def most_tiles(config: BackwardSpec, args: KernelArgs, sizes: Sizes) -> Int32:
    """How many tiles of keys, those of a cluster counting as one, there are at most: all of the
    order or, of packed sequences, as many as their rows have."""
    found = tile_order(config, sizes).total
    if config.ranked:
        each = sizes.rows_k // (config.tile_n * config.key_ctas) + sizes.batch
        found = smaller(found, each * sizes.heads_kv)
    if config.last_parts:
        found = args.whole + (found - args.whole) * args.query_parts
    return found


def sizes_of(config: BackwardSpec, tensors: Tensors, args: KernelArgs) -> tuple[Sizes, RowTiles]:
    """The extents of a problem, and the location of its query tiles."""
    c = config
    mQ, mK = tensors.q, tensors.k
    at_q, at_k = (0 if c.varlen_q else 1), (0 if c.varlen_k else 1)
    rows_q, rows_k = Int32(cute.size(mQ, mode=[at_q])), Int32(cute.size(mK, mode=[at_k]))
    heads, heads_kv = cute.size(mQ, mode=[at_q + 1]), cute.size(mK, mode=[at_k + 1])
    batch = cute.size(mQ, mode=[0])
    if c.varlen_q:
        batch = cute.size(args.cu_seqlens_q, mode=[0]) - 1
    longest_k = args.max_seqlen_k if c.varlen_k else rows_k
    num_n_blocks = cute.ceil_div(longest_k, c.tile_n)
    heads_per_kv = heads // heads_kv
    if cutlass.const_expr(c.head_parts):
        heads_kv = Int32(heads_kv) * args.head_parts
        heads_per_kv = heads_per_kv // (args.head_parts // args.query_parts)
    tiles = RowTiles.of(c, Int32(heads), rows_q, Int32(batch))
    sizes = Sizes(
        Int32(heads_kv), Int32(heads_per_kv), rows_q, rows_k, Int32(num_n_blocks), Int32(batch)
    )
    return sizes, tiles


@dataclass(frozen=True)
class Tile:
    """A CTA's keys, and the lengths of their sequence."""

    n_block: Int32
    head_kv: Int32  # of Sizes.heads_kv
    batch: Int32
    seq_q: SeqlenInfo
    seq_k: SeqlenInfo
    flipped: Any = False  # of the last group of heads, where these are taken the other way around
    rotation: Any = None  # a Rotation, where the queries are taken so
    head_parts: Any = None  # that a head of K and V counts as; None: it counts once
    query_parts: Any = None  # that differ in their queries, of these; None: all have all queries
    last: Any = None  # LastParts, where tiles of the last round are divided

    @property
    def key_head(self) -> Int32:
        """The head of K and V."""
        return self.head_kv if self.head_parts is None else self.head_kv // self.head_parts

    @property
    def head_group(self) -> Int32:
        """The number of the group of query heads that the tile sums over."""
        return self.head_kv if self.query_parts is None else self.head_kv // self.query_parts

    def own(self, blocks: Blocks) -> Blocks:
        """Of `blocks` of queries, those that the tile's part has."""
        if self.last is not None:
            parts, part = self.last.count, self.last.which
        elif self.query_parts is not None:
            parts, part = self.query_parts, self.head_kv % self.query_parts
        else:
            return blocks
        count, first = blocks.end - blocks.first, blocks.first
        return blocks._replace(
            first=first + count * part // parts, end=first + count * (part + 1) // parts
        )

    def has_keys(self, config: BackwardSpec) -> Boolean:
        """Whether the sequence has keys of this CTA, or of its pair."""
        ctas = config.key_ctas
        return self.n_block // ctas * ctas * config.tile_n < self.seq_k.length


class LastParts(NamedTuple):
    """The part of a tile that a CTA has, where those of the last round are divided along their
    queries.

    First come the first parts of all these tiles, and so on: so the last part's CTA, which adds dK
    and dV of the others, does not wait for one that has not begun.
    """

    number: Int32  # of the tile, those of a cluster counting as one
    which: Int32
    count: Int32  # of the tile; 1: it is not divided
    whole: Int32  # tiles that are not

    @staticmethod
    def of(args: KernelArgs, total: Any, index: Any) -> LastParts:
        """The part with number `index` in the order of `total` tiles."""
        whole, left = args.whole, total - args.whole
        behind = larger(index - whole, 0)
        which = behind // left
        number = select(index < whole, index, whole + behind - which * left)
        return LastParts(number, which, select(index < whole, 1, args.query_parts), whole)

    def part(self, tile: Tile) -> Int32:
        return self.which

    def share(self, config: BackwardSpec, tile: Tile, part: Int32) -> Int32:
        """The number, among all that are kept, of the sums of a part of the tile of keys."""
        ctas = config.key_ctas
        place = (self.number - self.whole) * ctas + tile.n_block % ctas
        return place * (self.count - 1) + part


class HeadParts(NamedTuple):
    """The parts that the work of each head of K and V is divided into, each with a CTA of its own
    for a tile of keys, where tiles are few: its query heads, and then the blocks of queries of each
    group of these.

    The last part's CTA adds dK and dV of the others, which keep theirs for it. In every order of
    tiles it comes after them, so that it does not wait for one that has not begun.
    """

    count: Int32
    heads: Int32  # of K and V
    per_head: Int32  # tiles of keys of one head: of one batch entry or, packed, of all sequences

    @staticmethod
    def of(config: BackwardSpec, args: KernelArgs, sizes: Sizes) -> HeadParts:
        ctas = config.key_ctas  # whose tiles stand together, though the last may have no keys
        if config.varlen_k:  # as tiles of queries lie (signature.RowTiles)
            per_head = sizes.rows_k // (ctas * config.tile_n) + sizes.batch
        else:
            per_head = ceil_div(sizes.num_n_blocks, ctas)
        return HeadParts(args.head_parts, sizes.heads_kv // args.head_parts, per_head * ctas)

    def part(self, tile: Tile) -> Int32:
        """The number of a tile's part."""
        return tile.head_kv % self.count

    def share(self, config: BackwardSpec, tile: Tile, part: Int32) -> Int32:
        """The number, among all that are kept, of the sums of a part of a tile of keys."""
        ctas = config.key_ctas
        if config.varlen_k:
            before = tile.seq_k.offset // (ctas * config.tile_n) + tile.batch
            first = tile.key_head * self.per_head + before * ctas
        else:
            first = (tile.batch * self.heads + tile.key_head) * self.per_head
        return (first + tile.n_block) * (self.count - 1) + part


def key_block(config: BackwardSpec, order: AttentionOrder, work: WorkTile) -> tuple[Any, Any]:
    """The key block (or pair) of a tile, and whether it belongs to the group processed in
    reverse."""
    if config.flips:
        flipped = order.in_last_group(work)
        return select(flipped, order.num_m_blocks - 1 - work.m, work.m), flipped
    return (order.num_m_blocks - 1 - work.m if config.reversed else work.m), False


def tile_of(config: BackwardSpec, index: Int32, args: KernelArgs, sizes: Sizes) -> Tile:
    """The keys of number `index` in the order."""
    order, ctas = tile_order(config, sizes), config.key_ctas
    number, last = index // ctas, None
    if config.last_parts:
        last = LastParts.of(args, order.total, number)
        number = last.number
    work = order.tile(number)
    n_block, flipped = key_block(config, order, work)
    n_block = n_block * ctas + index % ctas
    batch = work.batch
    seq_q, seq_k = queries(args, sizes.rows_q).of(batch), keys(args, sizes.rows_k).of(batch)
    rotation = Rotation.of(config, sizes) if config.rotated else None
    parts = (args.head_parts, args.query_parts if config.head_parts else None)
    return Tile(n_block, work.head, batch, seq_q, seq_k, flipped, rotation, *parts, last)


def turn_of(config: BackwardSpec, info: BlockInfo, tile: Tile, m_block: Int32) -> Int32:
    """How many key blocks (or pairs) add to a block of queries before this CTA's."""
    if config.rotated:
        return tile.rotation.turn(tile.n_block, m_block)
    ctas = config.key_ctas
    info = info._replace(tile_n=ctas * info.tile_n)
    blocks = info.n_blocks(m_block, tile.seq_q.length, tile.seq_k.length)
    if config.flips:
        before, behind = tile.n_block - blocks.first, blocks.end - 1 - tile.n_block
        return select(tile.flipped, before, behind)
    if config.last_first:
        return blocks.end - 1 - tile.n_block // ctas
    return tile.n_block // ctas - blocks.first


@dataclass(frozen=True)
class Walk:
    """The tiles that a persistent CTA processes one after another, as its roles see them."""

    config: BackwardSpec
    dispatch: Any  # CounterDispatch or ClcDispatch
    args: KernelArgs
    sizes: Sizes

    @property
    def total(self) -> Int32:
        """The number of tiles, whole or cut."""
        return self.dispatch.order.tiles if self.config.spread else self.dispatch.total

    def tile(self, ticket: Ticket) -> Tile:
        return tile_of(self.config, ticket.index, self.args, self.sizes)

    def pieces(self, ticket: Ticket) -> Int32 | int:
        """The number of tiles, or parts of them, that a ticket stands for."""
        return self.dispatch.order.pieces(ticket.index) if self.config.spread else 1

    def piece(self, ticket: Ticket, which: Int32 | int) -> tuple[Tile, Any]:
        """Number `which` of a ticket's tiles, and the steps of it to process; None: all."""
        if not self.config.spread:
            return self.tile(ticket), None
        piece = self.dispatch.order.piece(ticket.index, which)
        return self.tile(ticket.moved_to(piece.index)), piece

    def number(self, ticket: Ticket) -> Int32:
        """The number of a ticket's tile among those of all units (heads of K and V of a batch
        entry), unit by unit."""
        if not self.config.ranked:
            return ticket.index
        tile = self.tile(ticket)
        return self.dispatch.chosen.number(tile.n_block, tile.head_kv, tile.batch)

    def numbered(self, number: Int32) -> RankedTile:
        """The tile with a number. A whole warp calls it."""
        if self.config.ranked:
            return self.dispatch.chosen.tile(number)
        s = self.sizes
        unit, block = number // s.num_n_blocks, number % s.num_n_blocks
        return RankedTile(block, unit % s.heads_kv, unit // s.heads_kv, s.num_n_blocks)
