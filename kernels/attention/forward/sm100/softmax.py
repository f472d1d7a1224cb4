"""The softmax role: four warps for each Q tile, each thread one row, from S to P in tensor memory.

    S[n] -> registers -> exponentials -> 16 bits -> P[n], over S, 32 columns at a time

Where no larger score is looked for, the columns of a row need not wait for each other: the first
part of P is written before the last of S is read. Where references do move, by more than `slack`
powers of two, these warps scale their rows of O themselves, which is too rare to deserve a role.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from cutex.device.atoms.tmem import LANES, fence_after_sync, fence_before_sync
from cutex.device.attention.block_info import Blocks
from cutex.device.attention.mask import Mask
from cutex.device.attention.row_softmax import RowSoftmax
from cutex.device.attention.scores import ScoreOps
from cutex.device.attention.seqlen_info import SeqlenInfo
from cutex.device.attention.tmem_rows import PART, ScoreRow, rounded, scale_columns, store_columns
from cutex.device.pipeline import PipelineState
from cutex.device.work_tile import WorkTile
from cutex.kernels.attention.forward.sm100.config import Sm100Config
from cutex.kernels.attention.forward.sm100.tiles import Shared
from cutex.kernels.attention.work_ring import END, SAFE

State = tuple[Int32, Int32]  # blocks of this tile so far; parities, see `wait_scores`
ALL_BLOCKS = 0b100


@dataclass(frozen=True)
class RowLoop:
    """One thread's loop over the blocks of keys of its row."""

    shared: Shared
    tile: Int32
    softmax: RowSoftmax
    score_ops: ScoreOps
    factors: cute.Tensor  # (1)
    dtype: type[cutlass.Numeric]

    @property
    def config(self) -> Sm100Config:
        return self.shared.config

    @property
    def optimistic(self) -> bool:
        return self.config.may_fail

    @property
    def row(self) -> ScoreRow:
        return ScoreRow(self.shared.tmem, self.config.tile_n, self.softmax, self.score_ops)

    @cute.jit
    def run(self, blocks: Blocks, state: State, safe: Boolean) -> State:
        """Compute P of all blocks, of which there is at least one, from the last one down."""
        band = self.score_ops.mask.band
        self.softmax.reference[0] = -Float32.inf
        self.softmax.sums[0] = Float32(0.0)
        n_block = blocks.end - 1
        cut = Int32(1)  # blocks to mask first; the end of the keys may be in the last one
        if cutlass.const_expr(band.hi is not None):
            cut = cutlass.max(blocks.end - blocks.clean_end, 1)
        clean_first = blocks.first
        if cutlass.const_expr(band.lo is not None):
            clean_first = cutlass.min(blocks.clean_first, blocks.end - cut)
        clean = blocks.end - cut - clean_first
        if cutlass.const_expr(self.optimistic):
            # NOTE: with a band, a row may see no key before the first block that it sees whole
            searched = clean if safe else cutlass.min(clean, 1 if band.hi is not None else 0)
            state = self.steps(n_block, cut + searched, state, "searched", cut)
            n_block -= cut + searched
            clean -= searched
            state = self.steps(n_block, clean, state, "add")
        else:
            state = self.steps(n_block, cut, state, "masked")
            n_block -= cut
            state = self.steps(n_block, clean, state, "clean")
        n_block -= clean
        if cutlass.const_expr(band.lo is not None):
            state = self.steps(n_block, n_block + 1 - blocks.first, state, "masked")
        return state

    @cute.jit
    def steps(
        self,
        n_block: Int32,
        count: Int32,
        state: State,
        kind: cutlass.Constexpr[str],
        cut: Int32 | int = 0,
    ) -> State:
        """Run `count` steps from `n_block` down; the first `cut` of "searched" blocks are
        masked."""
        done, parities = state
        for i in cutlass.range(count, unroll=1):
            masked = kind == "masked"
            if cutlass.const_expr(kind == "searched"):
                masked = i < cut
            done, parities = self.step(n_block - i, (done, parities), kind, masked)
        return done, parities

    @cute.jit
    def step(
        self, n_block: Int32, state: State, kind: cutlass.Constexpr[str], masked: Boolean | bool
    ) -> State:
        """Compute P of one block.

        kind: "masked"; "clean", without a mask; "searched", with a mask if `masked`; or "add",
        without a mask and without looking for a larger score.
        """
        buffer, state = self.wait_scores(state)
        if cutlass.const_expr(kind != "add"):
            highest = self.row.search(buffer * self.config.tile_n, n_block, masked)
            rescale = self.softmax.raise_references([highest], self.factors)
            if rescale & (state[0] > 1):  # the first block's product does not add to O
                self.scale_output(state)
        self.exponentials(buffer, n_block, kind)
        return state

    @cute.jit
    def wait_scores(self, state: State) -> tuple[Int32, State]:
        """Wait for the scores of the next block; return the buffer that they are in, and the state.

        Parities are those of S, one bit per buffer, and above them that of all blocks so far.
        """
        done, parities = state
        buffer = self.tile if self.config.q_tiles > 1 else done & 1
        self.shared.barriers.s_full.wait((parities >> buffer) & 1, buffer)
        fence_after_sync()
        return buffer, (done + 1, parities ^ (1 << buffer) ^ ALL_BLOCKS)

    @cute.jit
    def exponentials(self, buffer: Int32, n_block: Int32, kind: cutlass.Constexpr[str]) -> None:
        """Turn S into P. FMA units are used only where nothing is masked, and not in a tile that is
        computed again because it overflowed or has a NaN."""
        c = self.config
        fast = kind == ("add" if c.may_fail else "clean") and not c.modified
        self.row.exponentials(
            buffer * c.tile_n,
            n_block,
            kind != "add",
            c.by_fma if fast else 0,
            lambda scores, part: self.store(buffer, scores, part),
        )

    @cute.jit
    def store(self, buffer: Int32, scores: cute.Tensor, part: cutlass.Constexpr[int]) -> None:
        """Store a part of a row over S, and signal MMA when the columns that it waits for are
        complete."""
        c, b = self.config, self.shared.barriers
        words = cute.recast_tensor(rounded(scores, self.dtype), Float32)
        column = buffer * c.tile_n + part * cute.size(words)
        store_columns(self.shared.tmem, column, words)
        done = (part + 1) * PART
        if cutlass.const_expr(done in (c.p_first, c.tile_n)):
            cute.arch.fence_view_async_tmem_store()
            fence_before_sync()
            self.shared.signal(b.p_first if done == c.p_first else b.p_rest, buffer)

    @cute.jit
    def scale_output(self, state: State) -> None:
        """Multiply this thread's row of O by its factor.

        NOTE: with two Q tiles, QK of a block is started after PV of the one before, so when its
        scores are complete no MMA is writing O.
        """
        c = self.config
        if cutlass.const_expr(c.q_tiles == 1):
            _, parities = state
            self.shared.barriers.pv_done.wait(cutlass.min(parities & ALL_BLOCKS, 1))
            fence_after_sync()
        column = c.o_column + self.tile * c.head_dim_v
        scale_columns(self.shared.tmem, column, c.head_dim_v, self.factors[0])


@dataclass(frozen=True)
class SoftmaxRole:
    """The softmax role of one Q tile, warps 4 (1 + tile) to 4 (1 + tile) + 3."""

    shared: Shared
    tile: Int32

    @property
    def config(self) -> Sm100Config:
        return self.shared.config

    @cute.jit
    def run(self) -> None:
        tiles = self.shared.work
        take = tiles.q.consumer()
        parities = Int32(0)
        tiles.q.wait_full(take)
        mode = tiles.mode(take.slot)
        while mode != END:
            work = tiles.work(take.slot)
            seq_q, seqlen_k = tiles.lengths(take.slot)
            parities, trusted = self.tile_rows(work, seq_q, seqlen_k, take, mode == SAFE, parities)
            tiles.release(take, trusted)
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
        safe: Boolean,
        parities: Int32,
    ) -> tuple[Int32, Boolean]:
        """Compute P of all blocks of a tile, then write the row's factor and LSE. Return the
        parities, and whether the row's sum is in the range where the first blocks' reference is
        valid."""
        c, shared = self.config, self.shared
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % LANES
        blocks, count = shared.blocks(work, self.tile, seq_q.length, seqlen_k)
        row = shared.row_block(work, self.tile) * LANES + lane
        score_ops = self.score_ops(work, row, seq_q.length, seqlen_k)
        softmax = RowSoftmax.start(score_ops.scale_log2(), self.slack)
        factors = cute.make_rmem_tensor(cute.make_layout(1), Float32)
        lse = cute.make_rmem_tensor(cute.make_layout(1), Float32)
        sinks = self.sinks(work, row)
        trusted = Boolean(True)
        if count > 0:
            loop = RowLoop(
                shared, self.tile, softmax, score_ops, factors, shared.sQ.element_type
            )  # fmt: skip
            _, parities = loop.run(blocks, (Int32(0), parities), safe)
            trusted = softmax.finish(sinks, factors, lse)
            trusted = trusted & softmax.by_fma_is_exact() | safe
        else:
            factors[0] = Float32(0.0)
            lse[0] = sinks[0] if len(sinks) > 0 else -Float32.inf
        into = shared.factors
        into[lane, self.tile, take.slot] = factors[0]
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            shared.barriers.scaled.arrive(self.tile * c.work_slots + take.slot)
        if cutlass.const_expr(c.lse):
            self.store_lse(lse[0], work, seq_q, row)
        return parities, trusted

    @property
    def slack(self) -> float:
        """The slack in powers of two; smaller for fp16, whose range ends at 2^16, which
        `Softmax.add` should not reach either."""
        c = self.config
        return min(c.slack, 4.0) if self.shared.sQ.element_type is cutlass.Float16 else c.slack

    def score_ops(self, work: WorkTile, row: Int32, seqlen_q: Int32, seqlen_k: Int32) -> ScoreOps:
        c, passed = self.config, self.shared.passed
        mask = Mask(self.shared.info.band, c.tile_n, seqlen_q, seqlen_k, (row // c.pack,))
        functions = c.score_mod, c.mask_mod
        heads = (work.head * c.pack + row % c.pack,)
        return ScoreOps(mask, passed.scale, passed.softcap, *functions, work.batch, heads)

    def sinks(self, work: WorkTile, row: Int32) -> tuple[Float32, ...]:
        c, sink = self.config, self.shared.passed.sink
        return () if sink is None else (sink[work.head * c.pack + row % c.pack],)

    @cute.jit
    def store_lse(self, lse: Float32, work: WorkTile, seq_q: SeqlenInfo, row: Int32) -> None:
        c, mLSE = self.config, self.shared.passed.lse
        query, head = row // c.pack, work.head * c.pack + row % c.pack
        if query < seq_q.length:
            if cutlass.const_expr(c.varlen_q):
                mLSE[head, seq_q.offset + query] = lse
            else:
                mLSE[work.batch, head, query] = lse
