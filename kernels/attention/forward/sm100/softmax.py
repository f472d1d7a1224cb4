"""The softmax role: four warps for each Q tile, each thread one row, from S to P in tensor memory.

How a thread takes the blocks of its row: RowLoop, or TentativeRowLoop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from cutex.device.atoms.tmem import LANES, fence_after_sync, fence_before_sync
from cutex.device.attention.block_info import Blocks
from cutex.device.attention.mask import Mask
from cutex.device.attention.row_softmax import RowSoftmax
from cutex.device.attention.scores import ScoreOps
from cutex.device.attention.seqlen_info import SeqlenInfo, store_lse
from cutex.device.attention.softmax import threshold_of
from cutex.device.attention.tmem_rows import PART, ScoreRow, scale_columns, store_columns
from cutex.device.pipeline import PipelineState
from cutex.device.work_tile import WorkTile
from cutex.kernels.attention.forward.sm100.config import Sm100ForwardConfig
from cutex.kernels.attention.forward.sm100.tiles import Shared
from cutex.kernels.attention.work_ring import END


@dataclass(frozen=True)
class SoftmaxRole:
    """The softmax role of one Q tile, warps 4 (1 + tile) to 4 (1 + tile) + 3."""

    shared: Shared
    tile: Int32
    rows: type[RowLoop]

    @property
    def config(self) -> Sm100ForwardConfig:
        return self.shared.config

    @cute.jit
    def run(self) -> None:
        tiles = self.shared.work
        take = tiles.q.consumer()
        state = self.rows.state.start()
        tiles.q.wait_full(take)
        mode = tiles.mode(take.slot)
        while mode != END:
            work = tiles.work(take.slot)
            seq_q, seqlen_k = tiles.lengths(take.slot)
            state = self.tile_rows(work, seq_q, seqlen_k, take, state.of_next_tile())
            tiles.q.release(take)
            take.advance()
            tiles.q.wait_full(take)
            mode = tiles.mode(take.slot)

    @cute.jit
    def tile_rows(
        self,
        work: WorkTile,
        seq_q: SeqlenInfo,
        seqlen_k: Int32,
        take: PipelineState,
        state: State,
    ) -> State:
        """Compute P of all blocks of a tile, then write the row's factor and LSE. Return the state
        after."""
        c, shared = self.config, self.shared
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % LANES
        blocks, count = shared.blocks(work, self.tile, seq_q.length, seqlen_k)
        row = shared.row_block(work, self.tile) * LANES + lane
        score_ops = self.score_ops(work, row, seq_q.length, seqlen_k)
        softmax = RowSoftmax.start(score_ops.unit(), *self.range)
        factors = cute.make_rmem_tensor(cute.make_layout(1), Float32)
        lse = cute.make_rmem_tensor(cute.make_layout(1), Float32)
        if count > 0:
            loop = self.rows(
                shared, self.tile, softmax, score_ops, factors, shared.sQ.element_type
            )  # fmt: skip
            state = loop.run(blocks, state)
        softmax.finish(self.sinks(work, row), factors, lse)
        into = shared.factors
        into[lane, self.tile, take.slot] = factors[0]
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            shared.barriers.scaled.arrive(self.tile * c.work_slots + take.slot)
        if cutlass.const_expr(c.lse):
            self.store_lse(lse[0], work, seq_q, row)
        return state

    @property
    def range(self) -> tuple[float, float, float]:
        """The threshold, the headroom and the margin: of bf16, whose exponents reach as far down as
        up, half of the threshold and all of it; fp16 ends at 2^15, and is coarse far below 1."""
        dtype = self.shared.sQ.element_type
        threshold = threshold_of(dtype, self.config.rescale_threshold, 15.0)
        if dtype is cutlass.Float16:
            return threshold, 0.0, 0.0
        return threshold, threshold / 2, threshold

    def score_ops(self, work: WorkTile, row: Int32, seqlen_q: Int32, seqlen_k: Int32) -> ScoreOps:
        c, args = self.config, self.shared.args
        mask = Mask(self.shared.info.band, c.tile_n, seqlen_q, seqlen_k, (row // c.pack,))
        functions = c.score_mod, c.mask_mod
        heads = (work.head * c.pack + row % c.pack,)
        ops = ScoreOps(mask, args.scale, args.softcap, *functions, work.batch, heads)
        return ops.with_slopes(args.slopes)

    def sinks(self, work: WorkTile, row: Int32) -> tuple[Float32, ...]:
        c, sink = self.config, self.shared.args.sink
        return () if sink is None else (sink[work.head * c.pack + row % c.pack],)

    @cute.jit
    def store_lse(self, lse: Float32, work: WorkTile, seq_q: SeqlenInfo, row: Int32) -> None:
        c, mLSE = self.config, self.shared.args.lse
        query, head = row // c.pack, work.head * c.pack + row % c.pack
        if query < seq_q.length:
            store_lse(mLSE, lse, work.batch, head, seq_q, query)


# ---- blocks of a row
#
# One thread's loop over the blocks of keys of its row, the maximum of each block found first.
#
#     S[n] -> registers -> maximum -> exponentials -> 16 bits -> P[n], over S, 32 columns at a time
#
# References move so seldom that the thread scales its row of O itself.


ALL_BLOCKS = 0b100


class State(NamedTuple):
    """What a row loop passes from block to block."""

    done: Int32  # blocks of this tile so far
    parities: Int32  # see `wait_scores`

    @staticmethod
    def start() -> State:
        return State(Int32(0), Int32(0))

    def of_next_tile(self) -> State:
        return State(Int32(0), self.parities)

    def after_block(self, buffer: Int32) -> State:
        return self._replace(
            done=self.done + 1, parities=self.parities ^ (1 << buffer) ^ ALL_BLOCKS
        )


@dataclass(frozen=True)
class RowLoop:
    """A thread's loop over the blocks of its row: the maximum first, then the exponentials."""

    shared: Shared
    tile: Int32
    softmax: RowSoftmax
    score_ops: ScoreOps
    factors: cute.Tensor  # (1)
    dtype: type[cutlass.Numeric]

    state: ClassVar[Any] = State  # the class of what passes from block to block

    @property
    def config(self) -> Sm100ForwardConfig:
        return self.shared.config

    @property
    def row(self) -> ScoreRow:
        softmax = self.softmax.partly_by_fma(self.config.by_fma)
        return ScoreRow(self.shared.tmem, self.config.tile_n, softmax, self.score_ops)

    @cute.jit
    def run(self, blocks: Blocks, state: State) -> State:
        """Compute P of all blocks, of which there is at least one, from the last one down."""
        band = self.score_ops.mask.band
        n_block = blocks.end - 1
        cut = Int32(1)  # blocks to mask first; the end of the keys may be in the last one
        if cutlass.const_expr(band.hi is not None):
            cut = cutlass.max(blocks.end - blocks.clean_end, 1)
        clean_first = blocks.first
        if cutlass.const_expr(band.lo is not None):
            clean_first = cutlass.min(blocks.clean_first, blocks.end - cut)
        n_block, state = self.descend(n_block, clean_first, blocks.end - cut, state)
        if cutlass.const_expr(band.lo is not None):
            for i in cutlass.range(n_block + 1 - blocks.first, unroll=1):
                state = self.searched(n_block - i, state, True)
        return state

    @cute.jit
    def descend(
        self, n_block: Int32, first: Int32, clean_end: Int32, state: State
    ) -> tuple[Int32, State]:
        """Compute P of the blocks from `n_block` down to `first`, masked from `clean_end` on.
        Return the block below, and the state."""
        while n_block >= first:
            state = self.searched(n_block, state, n_block >= clean_end)
            n_block -= 1
        return n_block, state

    @cute.jit
    def searched(self, n_block: Int32, state: State, masked: Boolean | bool) -> State:
        """Compute P of one block, its maximum first."""
        buffer, state = self.wait_scores(state)
        column, row = buffer * self.config.tile_n, self.row
        found = row.search(column, n_block, masked)
        raised = self.softmax.raise_reference(found[0], self.factors)
        raised = raised & (state.done > 1)  # the first block's product does not add to O
        if raised:
            self.scale_output(state.parities)
        row.exponentials(column, found, self.dtype, lambda p, part: self.store(buffer, p, part))
        return self.after_search(state, raised)

    def after_search(self, state: Any, raised: Boolean) -> Any:
        """The state after a block whose maximum `raised` the row's reference, or did not."""
        return state

    @cute.jit
    def wait_scores(self, state: State) -> tuple[Int32, State]:
        """Wait for the scores of the next block; return the buffer that they are in, and the state.

        Parities are those of S, one bit per buffer, and above them that of all blocks so far.
        """
        buffer = self.tile if self.config.q_tiles > 1 else state.done & 1
        self.shared.barriers.s_full.wait((state.parities >> buffer) & 1, buffer)
        fence_after_sync()
        return buffer, state.after_block(buffer)

    @cute.jit
    def store(
        self, buffer: Int32, probabilities: cute.Tensor, part: cutlass.Constexpr[int]
    ) -> None:
        """Store a part of a row, (PART), over S, and signal MMA when the columns that it waits for
        are complete."""
        c, b = self.config, self.shared.barriers
        words = cute.recast_tensor(probabilities, Float32)
        column = buffer * c.tile_n + part * cute.size(words)
        store_columns(self.shared.tmem, column, words)
        done = (part + 1) * PART
        if cutlass.const_expr(done in (c.p_first, c.tile_n)):
            cute.arch.fence_view_async_tmem_store()
            fence_before_sync()
            self.shared.signal(b.p_first if done == c.p_first else b.p_rest, buffer)

    @cute.jit
    def scale_output(self, parities: Int32) -> None:
        """Multiply this thread's row of O by its factor.

        NOTE: with two Q tiles, QK of a block is started after PV of the one before, so when its
        scores are complete no MMA is writing O.
        """
        c = self.config
        if cutlass.const_expr(c.q_tiles == 1):
            self.shared.barriers.pv_done.wait(cutlass.min(parities & ALL_BLOCKS, 1))
            fence_after_sync()
        column = c.o_column + self.tile * c.head_dim_v
        scale_columns(self.shared.tmem, column, c.head_dim_v, self.factors[0])


# ---- tentative exponentials
#
# One thread's loop over the blocks of keys of its row, with exponentials before the maximum.
#
# A block without a mask is taken tentatively: exponentials with the reference of the blocks before,
# while the maximum is searched under them, so that S is read only once. Where a row of the warp
# exceeds its reference by more than `rescale_threshold` powers of two, which S, not yet
# overwritten, shows in time, the block is taken again as one with a mask is, the maximum first; and
# so are those after it, until one raises no reference.


class Backoff(NamedTuple):
    """When a warp may take a block tentatively: after one whose maximum came first and raised no
    reference, and later after each that was taken in vain, which costs as much as several others.

    NOTE: it outlives the tile, because a head with wild scores stays wild.
    """

    calm: Int32  # blocks since one raised a reference, less those to wait for
    failures: Int32  # blocks taken in vain

    @staticmethod
    def start() -> Backoff:
        return Backoff(Int32(1), Int32(0))

    @property
    def is_over(self) -> Boolean:
        return self.calm > 0

    def of_next_tile(self) -> Backoff:
        return Backoff(self.calm, self.failures // 2)

    def after_search(self, raised: Boolean) -> Backoff:
        calm = cutlass.select_(raised, cutlass.min(self.calm, 0), self.calm + 1)
        return Backoff(calm, self.failures)

    def after_failure(self) -> Backoff:
        failures = cutlass.min(self.failures + 1, 3)
        return Backoff(1 - failures * failures, failures)


class TentativeState(NamedTuple):
    """State, and when a block may be taken tentatively."""

    done: Int32  # as in State
    parities: Int32
    backoff: Backoff

    @staticmethod
    def start() -> TentativeState:
        return TentativeState(Int32(0), Int32(0), Backoff.start())

    def of_next_tile(self) -> TentativeState:
        return TentativeState(Int32(0), self.parities, self.backoff.of_next_tile())

    def after_block(self, buffer: Int32) -> TentativeState:
        return self._replace(
            done=self.done + 1, parities=self.parities ^ (1 << buffer) ^ ALL_BLOCKS
        )


class TentativeRowLoop(RowLoop):
    """A RowLoop that takes blocks without a mask with the reference that it has, and takes one
    again, maximum first, where that does not hold."""

    state: ClassVar[Any] = TentativeState

    @cute.jit
    def descend(
        self, n_block: Int32, first: Int32, clean_end: Int32, state: TentativeState
    ) -> tuple[Int32, TentativeState]:
        """As RowLoop's; blocks are taken tentatively from one on that raises no reference."""
        while n_block >= first:
            is_tentative = Boolean(False)
            while (n_block >= first) & ~is_tentative:
                state = self.searched(n_block, state, n_block >= clean_end)
                tame = self.softmax.is_tame() & state.backoff.is_over
                n_block -= 1
                is_tentative = tame & (n_block < clean_end)
            while (n_block >= first) & is_tentative:
                state, is_tentative = self.tentative(n_block, state)
                n_block -= Int32(is_tentative)
        return n_block, state

    def after_search(self, state: TentativeState, raised: Boolean) -> TentativeState:
        return state._replace(backoff=state.backoff.after_search(raised))

    @cute.jit
    def tentative(self, n_block: Int32, state: TentativeState) -> tuple[TentativeState, Boolean]:
        """Compute P of one block without a mask with the present references. Return the state, and
        whether they held; if not, nothing has changed."""
        c = self.config
        buffer, after = self.wait_scores(state)
        kept = self.row.tentative(
            buffer * c.tile_n, n_block, c.p_first // PART, self.dtype,
            lambda p, part: self.store(buffer, p, part),
        )  # fmt: skip
        done, parities, backoff = state
        if kept:
            done, parities, backoff = after
        else:
            backoff = backoff.after_failure()
        return TentativeState(done, parities, backoff), kept
