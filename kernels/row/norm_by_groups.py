"""Norms of long dense rows, each shared by a group of any number of CTAs."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from cutex.compile import Argument, Operand
from cutex.device.pipeline import publish_barriers
from cutex.device.row.bulk import BulkRing
from cutex.device.row.exchanged import ExchangedReduction, words_of
from cutex.device.row.tile import WARP
from cutex.kernels.row.moments import Moments
from cutex.kernels.row.norm_bulk import BulkConfig, NormBulk

EXCHANGING = 2  # warps that exchange sums, beside those that have parts of rows
WORKERS = 1  # the named barrier of all others
WORDS = Operand("words", ("words",), "int32", aligned=False, whole=False)


@dataclass(frozen=True)
class GroupsConfig(BulkConfig):
    """A norm by bulk copies of rows that `sharers` CTAs share, without a cluster. Of a thread's
    words, too, the last `open` may be past the row's end."""

    sharers: int = 2

    @property
    def num_threads(self) -> int:
        """The threads of a CTA."""
        return self.tile.num_threads + EXCHANGING * WARP

    @property
    def values(self) -> int:
        """The values of a warp's part of a row."""
        return 3 if self.centred else 1

    def words_of(self, groups: int) -> int:
        """The words of 32 bits in which a launch's groups exchange sums."""
        return words_of(groups, self.sharers, 1 + self.centred, self.ahead)


class NormByGroups(NormBulk):
    """The norm of dense rows, whose groups of CTAs exchange sums through gmem. All CTAs of the
    launch have to be resident, one on each SM, so it is cooperative.

    warps            do
    0 to W - 1       a part of each row
    W                publishes the CTA's sums of each row
    W + 1            collects those of all CTAs of the group
    """

    title = "norm_by_groups"

    def __init__(self, config: GroupsConfig) -> None:
        super().__init__(config)
        if config.tile.ctas > 1 or config.tile.rows > 1 or config.sharers < 2:
            raise ValueError("a CTA of a group has one part of a row, and no cluster")

    @property
    def sharers(self) -> int:
        return self.config.sharers

    @property
    def open_words(self) -> int:
        return self.config.open

    def why_not_ahead(self) -> str | None:
        return None if self.config.ahead > 0 else "sums take a turn at least to be exchanged"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        *tensors, eps, groups = super().operands(dtype)
        return (*tensors, WORDS, eps, groups)

    @cute.jit
    def __call__(self, mX: cute.Tensor, mY: cute.Tensor, *rest) -> None:
        c = self.config
        *given, mWords, eps, groups, stream = rest
        optional = dict(zip(c.optional, given, strict=True))
        self.kernel(mX, mY, optional, mWords, eps, groups).launch(
            grid=(groups * c.sharers, 1, 1), block=(c.num_threads, 1, 1), stream=stream,
            min_blocks_per_mp=c.resident, preferred_smem_carveout=100, cooperative=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, mX: cute.Tensor, mY: cute.Tensor, optional: dict[str, cute.Tensor],
        mWords: cute.Tensor, eps: Float32, groups: Int32,
    ) -> None:  # fmt: skip
        c, tile = self.config, self.tile
        group, warp = Int32(cute.arch.block_idx()[0]) // c.sharers, cute.arch.warp_idx()
        sums = ExchangedReduction.allocate(
            tile, c.sharers, c.values, c.ahead, mWords, group, groups
        )
        words = tile.num_threads * c.words
        ring = BulkRing.allocate(mX.element_type, words * 32 // mX.element_type.width, c.stages)
        publish_barriers((ring.full, *sums.barriers))
        order = self.order(mX, group, groups)
        if warp < tile.warps:
            self.all_turns((mX, mY), order, ring, sums, eps, optional)
        else:
            self.exchange(mX, order.turns, sums)

    @cute.jit
    def exchange(self, mX: cute.Tensor, turns: Int32, sums: ExchangedReduction) -> None:
        """Publish or collect the sums of all rows of this group."""
        rank, counts = self.rank(), self.counts(mX)
        moments = self.moments_of(mX, sums, rank)
        if cute.arch.warp_idx() == self.tile.warps:
            for turn in cutlass.range(turns, unroll=1):
                sums.publish(moments.gather_of_cta, rank, turn)
        else:
            for turn in cutlass.range(turns, unroll=1):
                sums.collect(moments.gather, counts, turn)
            sums.leave()

    def moments_of(self, mX: cute.Tensor, sums: ExchangedReduction, rank: Int32) -> Moments:
        """What combines the sums of a CTA's warps, or of all CTAs."""
        n = Int32(cute.size(mX, mode=[1]))
        return Moments.of(self.config.centred, sums, None, n, self.columns_of(n, rank))

    def columns_of(self, n: Int32, rank: Int32) -> Int32:
        """The columns of a CTA's part of a row of n; 0 past the last CTA."""
        part = self.part(n)
        return cutlass.max(Int32(0), cutlass.min(part, n - rank * part))

    def counts(self, mX: cute.Tensor) -> list[Float32]:
        """The columns of each CTA whose sums this lane collects."""
        n, lane = Int32(cute.size(mX, mode=[1])), Int32(cute.arch.lane_idx())
        turns = -(-self.sharers // WARP)
        ranks = [lane + i * WARP for i in range(turns)]
        held = [cutlass.select_(r < self.sharers, self.columns_of(n, r), Int32(0)) for r in ranks]
        return [Int32(x).to(Float32) for x in held]

    def rank(self) -> Int32:
        return Int32(cute.arch.block_idx()[0]) % self.sharers

    def tells(self) -> Boolean:
        return self.rank() == 0

    def sync(self) -> None:
        cute.arch.barrier(barrier_id=WORKERS, number_of_threads=self.tile.num_threads)
