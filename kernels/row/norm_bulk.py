"""Norms of dense rows, bulk-copied by persistent CTAs.

Dense rows of any length form one run of memory. Each copy brings a few rows, or a CTA's part of
one, while earlier rows are being processed. A CTA loads the weights once. Threads hold a row as
32-bit words, as in norm_dense.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
from cutlass import Boolean, Float32, Int32, cute

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
    """A norm of dense rows that are bulk-copied. The tile's vectors are not used.

    words: the 32-bit words per thread of a row, or of its CTA's part; stages: slots for rows in
    flight; resident: CTAs per SM; vector: the words of a vector, for rows that consist of whole
    vectors and start on one, and of a thread's vectors the last `open` may be past the row's end; 0
    if rows start anywhere. ahead: one or two turns between the start and the end of a cluster's row
    sums. halves: rows start in either half of a word; a cluster takes all rows of one kind, then
    those of the other.
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
    """The chunks of rows that a group processes, one per turn: every `step`-th from the first on.
    With `even`, the even-numbered rows come before the odd ones, so that the rows of its first
    `evens` turns are aligned alike, and so are the rest."""

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
    """The norm of dense rows, without a residual. Thread 0 starts the copies; in a cluster, warp 1
    relays the sums of each row before the turn that finishes it."""

    title = "norm_bulk"
    archs = ("sm_90a", "sm_100a", "sm_120a")

    def __init__(self, config: BulkConfig) -> None:
        super().__init__(config)
        tile = config.tile
        if config.residual or config.out or tile.aligned:
            raise ValueError("rows by bulk copies are plain, and may begin anywhere")
        if tile.rows > 1 and (tile.rows % 2 or tile.ctas > 1 or config.vector):
            raise ValueError("a CTA has a part of a row, one row, or an even number of them")
        if reason := self.why_not_ahead():
            raise ValueError(f"ahead={config.ahead}: {reason}")
        least = LEAST_STAGES + config.ahead
        if config.stages < least:
            raise ValueError(f"stages={config.stages} must be at least {least}")

    @property
    def sharers(self) -> int:
        """The CTAs that share a row."""
        return self.tile.ctas

    @property
    def open_words(self) -> int:
        """Of a thread's words, the last ones that may lie past the row's end."""
        return 1 + (self.sharers > 1)

    def why_not_ahead(self) -> str | None:
        """Why rows cannot be started so many turns before they are finished; None if they can."""
        known = (1, 2) if self.config.relays else (int(self.tile.ctas > 1),)
        told = "one turn of a cluster's rows, or two if relayed"
        return None if self.config.ahead in known else told

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
        self.all_turns((mX, mY), order, ring, sums, eps, optional)

    @cute.jit
    def all_turns(
        self, matrices: tuple[cute.Tensor, cute.Tensor], order: Order, ring: BulkRing, sums: Sums,
        eps: Float32, optional: dict[str, cute.Tensor],
    ) -> None:  # fmt: skip
        """Process this group's rows."""
        c, (mX, mY) = self.config, matrices
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
        """Process the turns of a span, whose rows are aligned alike."""
        c, (mX, mY), (begin, end) = self.config, matrices, span
        norm = self.norm(mX, order.chunk(begin), optional, sums)
        for turn in cutlass.range_constexpr(c.ahead):
            self.start(mX, order, ring, norm, (begin + turn, end))
        if cutlass.const_expr(c.ahead > 0):
            self.sync()
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
            self.sync()
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
        """The chunks of rows that this group processes."""
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
        """What a thread needs for its row of a chunk. It holds for every chunk with the same offset
        from a word, since an even number of rows separates them."""
        c, tile, first = self.config, self.tile, self.run(mX, chunk)
        n, per = Int32(cute.size(mX, mode=[1])), 32 // mX.element_type.width
        lead = (first.lead + self.own() * n) & (per - 1)
        parts = self.sharers > 1
        columns = Int32(cute.size(first.gX)) if parts else n
        if c.vector:
            how = Int32(0), columns, c.open, True, c.vector
            words: Words = VectorWords(tile.threads, c.words, per, *how)
        else:
            words = Words(
                tile.threads, c.words, per, lead, columns, self.open_words, tile.rows == 1
            )
        column = self.column(n)
        vectors = {name: cute.domain_offset((column,), optional[name]) for name in c.vectors}
        return NormByWords.of(c, words, vectors, sums, n, columns if c.relays else None)

    @cute.jit
    def start(
        self, mX: cute.Tensor, order: Order, ring: BulkRing, norm: NormByWords,
        span: tuple[Int32, Int32],
    ) -> None:  # fmt: skip
        """Start the sums of the row of a later turn, if that turn is before the end."""
        turn, end = span
        if turn < end:
            ring.wait(turn)
            norm.start(ring[turn], self.begin(mX, order.chunk(turn)), turn)

    @cute.jit
    def relay(self, norm: NormByWords, turn: Int32, turns: Int32) -> None:
        """Send this CTA's sums of a row, if it exists, which all threads have started."""
        if (cute.arch.warp_idx() == RELAYS) & (turn < turns):
            norm.moments.sums.relay(norm.moments.gather_of_cta, turn)

    @cute.jit
    def release(self, norm: NormByWords, turn: Int32, turns: Int32) -> None:
        """Release the slot of a row's sums, which all threads have read."""
        if cute.arch.warp_idx() == RELAYS:
            norm.moments.sums.release(turn, turns)

    @cute.jit
    def rows(
        self, matrices: tuple, chunk: Int32, slot: cute.Tensor, norm: NormByWords,
        turn: tuple[Int32, Int32], eps: Float32, optional: dict[str, cute.Tensor],
    ) -> None:  # fmt: skip
        """Overwrite a chunk of rows in its slot with their norms, and store their other outputs.
        turn: the current one, of how many."""
        mX, mY = matrices
        rows, n = (Int32(cute.size(mY, mode=[i])) for i in range(2))
        own, begin = self.own(), self.begin(mX, chunk)
        row = chunk * self.tile.rows + own
        # a CTA with one row at a time has no turn without one
        exists = row < rows if self.tile.rows > 1 else Boolean(True)
        if cutlass.const_expr(self.config.ahead > 0):
            mean, rstd = norm.finish(slot, begin, eps, *turn)
        else:
            mean, rstd = norm(slot, begin + own * n, exists, eps, *turn)
        if exists & self.tells():
            columns = Columns(self.tile, n, Int32(0))
            found = Normed(ThisRow(row, rows), columns, None, None, mean, rstd)
            self.store_rest(found, optional)

    @cute.jit
    def fetch(self, mX: cute.Tensor, order: Order, ring: BulkRing, turn: Int32 | int) -> None:
        """Start the copy of a turn's chunk into its slot; nothing past the last."""
        if (turn < order.turns) & (cute.arch.thread_idx()[0] == 0):
            ring.load(self.run(mX, order.chunk(turn)), turn)

    def own(self) -> Int32:
        """The row of a chunk that this thread works on."""
        return Int32(cute.arch.thread_idx()[0] // self.tile.threads)

    def column(self, n: Int32) -> Int32:
        """The first column of this CTA's part of a row of n."""
        return self.part(n) * self.rank() if self.sharers > 1 else Int32(0)

    def part(self, n: Int32) -> Int32:
        """The columns of each CTA's part of a row of n, except the last: a multiple of 8."""
        return cute.ceil_div(cute.ceil_div(n, self.sharers), 8) * 8

    def tells(self) -> Boolean:
        """Whether this CTA stores the moments of its rows; of a cluster the first alone does."""
        return Boolean(True)

    def sync(self) -> None:
        """A barrier of all threads that have parts of rows."""
        cute.arch.sync_threads()

    def rank(self) -> Int32:
        """This CTA's number among those that share its rows."""
        return Int32(cute.arch.block_idx_in_cluster())

    def begin(self, mX: cute.Tensor, chunk: Int32) -> Int32:
        """The offset of a chunk in its slot, in elements."""
        n = Int32(cute.size(mX, mode=[1]))
        return lead_of(mX, chunk * self.tile.rows * n + self.column(n))

    def run(self, mX: cute.Tensor, chunk: Int32, like: cute.Tensor | None = None) -> Run:
        """This CTA's part of a chunk of rows of the dense mX (M, N), at the slot offset of
        `like`'s."""
        c, most = self.config, self.tile.rows
        rows, n = (Int32(cute.size(mX, mode=[i])) for i in range(2))
        row, column = chunk * most, self.column(n)
        if self.sharers > 1:
            count = cutlass.min(self.part(n), n - column)
        else:
            count = cutlass.min(rows - row, most) * n
        gX = cute.make_tensor(mX[row, None].iterator + column, cute.make_layout(count))
        last = (row + most >= rows) & (column + count >= n * (rows - row))
        lead = self.begin(mX if like is None else like, chunk)
        return Run(gX, lead, (row > 0) | (column > 0), ~last, c.vector > 0)
