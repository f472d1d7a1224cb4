"""Norms of dense rows that come and go by bulk copies, taken in turn by CTAs that stay.

Rows of any length that lie one behind the other are one run of memory, of which each copy brings a
few rows, or a CTA's part of one, while the rows before them are worked on. A CTA loads weights
once. Threads have a row by words of 32 bits, as in norm_dense.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
from cutlass import Float32, Int32, cute

from cutex.compile import Argument, Operand, Scalar
from cutex.device.pipeline import publish_barriers
from cutex.device.row.bulk import BulkRing, Run, lead_of
from cutex.device.row.columns import Columns
from cutex.device.row.vector_words import VectorWords
from cutex.device.row.words import Words
from cutex.kernels.row.kernel import ThisRow, launch_of_groups, relayed, repeated
from cutex.kernels.row.moments import Sums
from cutex.kernels.row.norm import Norm, NormConfig, Normed
from cutex.kernels.row.norm_by_words import NormByWords

LEAST_STAGES = 2  # of rows that are finished in the turn in which they are begun
RELAYS = 1  # the warp that relays


@dataclass(frozen=True)
class BulkConfig(NormConfig):
    """A norm of dense rows that come by bulk copies.

    The tile's vectors are not used. words: of 32 bits, that a thread has of a row, or of its CTA's
    part of one; stages: slots for rows on their way; resident: CTAs of an SM; vector: words of a
    vector of rows that are a whole number of them and begin with one, of which the last `open` of
    a thread may lie behind the row; 0: rows begin anywhere. ahead: turns, one or two, between the
    sums of a cluster's row and the end of them. halves: rows begin in either half of a word, and a
    cluster takes first those of one, then those of the other.
    """

    words: int = 1
    stages: int = 3
    resident: int = 1
    vector: int = 0
    open: int = 0
    ahead: int = 0
    halves: bool = False

    @property
    def meets_once(self) -> bool:
        return self.centred

    @property
    def relays(self) -> bool:
        """Whether a cluster's sums are relayed (docs/facts/rows.md#rows-norm-relayed)."""
        return self.tile.ctas > 1 and self.centred


@dataclass(frozen=True)
class Order:
    """The chunks of rows that a group takes, one a turn: every `step`-th from the first on; or, of
    all rows, the `even` ones before the others, so that those of its first `evens` turns begin
    alike, and those of the others."""

    first: Int32
    turns: Int32
    step: Int32
    even: Int32 | None = None
    evens: Int32 | None = None

    def chunk(self, turn: Int32 | int) -> Int32:
        place = self.first + turn * self.step
        if self.even is None:
            return place
        behind = place >= self.even
        return place * 2 - cutlass.select_(behind, self.even * 2 - 1, Int32(0))


class NormBulk(Norm):
    """The norm of dense rows, without a residual. Thread 0 starts the copies; of a cluster, warp 1
    relays the sums of each row before its turn to be finished."""

    title = "norm_bulk"
    archs = ("sm_90a", "sm_100a", "sm_120a")

    def __init__(self, config: BulkConfig) -> None:
        super().__init__(config)
        tile = config.tile
        if config.residual or config.out or tile.aligned:
            raise ValueError("rows by bulk copies are plain, and may begin anywhere")
        if tile.rows > 1 and (tile.rows % 2 or tile.ctas > 1 or config.vector):
            raise ValueError("a CTA has a part of a row, one row, or an even number of them")
        if config.ahead not in ((1, 2) if config.relays else (int(tile.ctas > 1),)):
            raise ValueError(
                f"ahead={config.ahead}: one turn of a cluster's rows, or two if relayed"
            )
        least = LEAST_STAGES + config.ahead
        if config.stages < least:
            raise ValueError(f"stages={config.stages} must be at least {least}")

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        made = (*super().operands(dtype), Scalar("groups", "int32"))
        if not self.config.vector:
            return made
        by_vectors = {"x", "y", *self.config.vectors}
        return tuple(
            replace(a, aligned=a.name in by_vectors) if isinstance(a, Operand) else a for a in made
        )

    @cute.jit
    def __call__(self, mX: cute.Tensor, mY: cute.Tensor, *rest) -> None:
        c = self.config
        optional = dict(zip(c.optional, rest[:-3], strict=True))
        eps, groups, stream = rest[-3:]
        how = launch_of_groups(self.tile, c.resident, groups, stream)
        self.kernel(mX, mY, optional, eps, groups).launch(**how)

    @cute.kernel
    def kernel(
        self, mX: cute.Tensor, mY: cute.Tensor, optional: dict[str, cute.Tensor], eps: Float32,
        groups: Int32,
    ) -> None:  # fmt: skip
        c, tile = self.config, self.tile
        made = relayed if c.relays else repeated
        sums = made(tile, *c.reduced)
        words = tile.num_threads * c.words
        ring = BulkRing.allocate(mX.element_type, words * 32 // mX.element_type.width, c.stages)
        publish_barriers((ring.full,))
        order = self.order(mX, Int32(cute.arch.block_idx()[0]) // tile.ctas, groups)
        for turn in cutlass.range_constexpr(c.stages - 1):
            self.fetch(mX, order, ring, turn)
        if cutlass.const_expr(c.halves):
            for half in cutlass.range(2, unroll=1):
                begin = cutlass.select_(half == 0, Int32(0), order.evens)
                end = cutlass.select_(half == 0, order.evens, order.turns)
                if begin < end:
                    self.turns((mX, mY), order, (begin, end), ring, sums, eps, optional)
        else:
            self.turns((mX, mY), order, (0, order.turns), ring, sums, eps, optional)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def turns(
        self, matrices: tuple[cute.Tensor, cute.Tensor], order: Order, span: tuple[Int32, Int32],
        ring: BulkRing, sums: Sums, eps: Float32, optional: dict[str, cute.Tensor],
    ) -> None:  # fmt: skip
        """Take the rows of the turns from the first to the last of a span, which begin alike."""
        c, (mX, mY), (begin, end) = self.config, matrices, span
        norm = self.norm(mX, order.chunk(begin), optional, sums)
        for turn in cutlass.range_constexpr(c.ahead):
            self.start(mX, order, ring, norm, (begin + turn, end))
        if cutlass.const_expr(c.ahead > 0):
            cute.arch.sync_threads()
        for turn in cutlass.range_constexpr(c.ahead * c.relays):
            self.relay(norm, Int32(begin + turn), end)
        for turn in cutlass.range(begin, end, unroll=1):
            chunk = order.chunk(turn)
            if cutlass.const_expr(c.ahead > 0):
                self.start(mX, order, ring, norm, (turn + c.ahead, end))
            else:
                ring.wait(turn)
            self.rows((mX, mY), chunk, ring[turn], norm, (turn, order.turns), eps, optional)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()
            # NOTE: other warps would only find where a row lies
            # (docs/facts/rows.md#rows-norm-instructions)
            if cute.arch.warp_idx() == 0:
                self.run(mY, chunk, mX).store(ring[turn])
                # the slot of the turn before, whose rows are on their way out
                cute.arch.cp_async_bulk_wait_group(1, read=True)
                self.fetch(mX, order, ring, turn + (c.stages - 1))
            if cutlass.const_expr(c.relays):
                self.release(norm, turn, order.turns)
                self.relay(norm, turn + c.ahead, end)

    def order(self, mX: cute.Tensor, group: Int32, groups: Int32) -> Order:
        """The chunks of rows that a group has."""
        rows = Int32(cute.size(mX, mode=[0]))
        if not self.config.halves:
            chunks = cute.ceil_div(rows, self.tile.rows)
            return Order(group, cute.ceil_div(chunks - group, groups), groups)
        each, more = rows // groups, rows % groups
        first = group * each + cutlass.min(group, more)
        turns = each + (group < more).to(Int32)
        even = (rows + 1) // 2
        return Order(first, turns, Int32(1), even, cutlass.min(cutlass.max(even - first, 0), turns))

    def norm(
        self, mX: cute.Tensor, chunk: Int32, optional: dict[str, cute.Tensor], sums: Sums
    ) -> NormByWords:
        """What this thread needs for its row of a chunk, and of all chunks that begin like it to a
        word, since an even number of rows lies between them."""
        c, tile, first = self.config, self.tile, self.run(mX, chunk)
        n, per = Int32(cute.size(mX, mode=[1])), 32 // mX.element_type.width
        lead = (first.lead + self.own() * n) & (per - 1)
        parts = tile.ctas > 1
        columns = Int32(cute.size(first.gX)) if parts else n
        if c.vector:
            how = Int32(0), columns, c.open, True, c.vector
            words: Words = VectorWords(tile.threads, c.words, per, *how)
        else:
            words = Words(tile.threads, c.words, per, lead, columns, 1 + parts, tile.rows == 1)
        column = self.column(n)
        vectors = {name: cute.domain_offset((column,), optional[name]) for name in c.vectors}
        return NormByWords.of(c, words, vectors, sums, n, columns if c.relays else None)

    @cute.jit
    def start(
        self, mX: cute.Tensor, order: Order, ring: BulkRing, norm: NormByWords,
        span: tuple[Int32, Int32],
    ) -> None:  # fmt: skip
        """Begin the sums of the row of a turn that has not come yet, if it comes before the end."""
        turn, end = span
        if turn < end:
            ring.wait(turn)
            norm.start(ring[turn], self.begin(mX, order.chunk(turn)), turn)

    @cute.jit
    def relay(self, norm: NormByWords, turn: Int32, turns: Int32) -> None:
        """Send this CTA's sums of a row, if there is one, which all threads have begun."""
        if (cute.arch.warp_idx() == RELAYS) & (turn < turns):
            norm.moments.sums.relay(norm.moments.gather_of_cta, turn)

    @cute.jit
    def release(self, norm: NormByWords, turn: Int32, turns: Int32) -> None:
        """Give the place of a row's sums back, which all threads have read."""
        if cute.arch.warp_idx() == RELAYS:
            norm.moments.sums.release(turn, turns)

    @cute.jit
    def rows(
        self, matrices: tuple, chunk: Int32, slot: cute.Tensor, norm: NormByWords,
        turn: tuple[Int32, Int32], eps: Float32, optional: dict[str, cute.Tensor],
    ) -> None:  # fmt: skip
        """Put the norms of a chunk of rows in their place in a slot; store what belongs to them
        beside. turn: which it is, and of how many."""
        mX, mY = matrices
        rows, n = (Int32(cute.size(mY, mode=[i])) for i in range(2))
        own, begin = self.own(), self.begin(mX, chunk)
        row = chunk * self.tile.rows + own
        # a CTA with one row at a time has no turn without one
        exists = row < rows if self.tile.rows > 1 else cutlass.Boolean(True)
        if cutlass.const_expr(self.config.ahead > 0):
            mean, rstd = norm.finish(slot, begin, eps, *turn)
        else:
            mean, rstd = norm(slot, begin + own * n, exists, eps, *turn)
        if exists:
            columns = Columns(self.tile, n, Int32(0))
            found = Normed(ThisRow(row, rows), columns, None, None, mean, rstd)
            self.store_rest(found, optional)

    @cute.jit
    def fetch(self, mX: cute.Tensor, order: Order, ring: BulkRing, turn: Int32 | int) -> None:
        """Start the copy of a turn's chunk to its slot; none behind the last."""
        if (turn < order.turns) & (cute.arch.thread_idx()[0] == 0):
            ring.load(self.run(mX, order.chunk(turn)), turn)

    def own(self) -> Int32:
        """The row of a chunk that this thread has."""
        return Int32(cute.arch.thread_idx()[0] // self.tile.threads)

    def column(self, n: Int32) -> Int32:
        """The first column of this CTA's part of a row of n."""
        return self.part(n) * self.rank() if self.tile.ctas > 1 else Int32(0)

    def part(self, n: Int32) -> Int32:
        """The columns of a CTA's part of a row of n, but for the last part: a multiple of 8."""
        return cute.ceil_div(cute.ceil_div(n, self.tile.ctas), 8) * 8

    def rank(self) -> Int32:
        return Int32(cute.arch.block_idx_in_cluster())

    def begin(self, mX: cute.Tensor, chunk: Int32) -> Int32:
        """Where a chunk begins in its slot, in elements."""
        n = Int32(cute.size(mX, mode=[1]))
        return lead_of(mX, chunk * self.tile.rows * n + self.column(n))

    def run(self, mX: cute.Tensor, chunk: Int32, like: cute.Tensor | None = None) -> Run:
        """This CTA's part of a chunk of rows of mX (M, N), which is dense; of `like`, where that
        begins in its slot."""
        c, most = self.config, self.tile.rows
        rows, n = (Int32(cute.size(mX, mode=[i])) for i in range(2))
        row, column = chunk * most, self.column(n)
        if self.tile.ctas > 1:
            count = cutlass.min(self.part(n), n - column)
        else:
            count = cutlass.min(rows - row, most) * n
        gX = cute.make_tensor(mX[row, None].iterator + column, cute.make_layout(count))
        last = (row + most >= rows) & (column + count >= n * (rows - row))
        lead = self.begin(mX if like is None else like, chunk)
        return Run(gX, lead, (row > 0) | (column > 0), ~last, c.vector > 0)
