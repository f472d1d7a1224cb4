"""The softmax role: four warps for each Q tile, each thread one row, from S to P in tensor memory.

    S[n] -> registers -> exponentials -> 16 bits -> P[n], over S, 32 columns at a time

Where nothing larger is looked for, the columns of a row need not wait for each other: the first
part of P is written while the last of S has yet to be read. Where references do move, by more than
`slack` powers of two, these warps scale their rows of O themselves: so seldom that no other has to
be kept waiting for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import tcgen05

from cutex.device.atoms.tmem import LANES, fence_after_sync, fence_before_sync
from cutex.device.attention.mask import Mask
from cutex.device.attention.row_softmax import RowSoftmax
from cutex.device.attention.scores import ScoreOps
from cutex.device.attention.seqlen_info import SeqlenInfo
from cutex.device.attention.softmax import row_max
from cutex.device.epilogue.sm100.tma_store import SubTiles, sub_tiles
from cutex.device.pipeline import PipelineState
from cutex.kernels.attention.sm90.block_loop import BlockLoop
from cutex.kernels.attention.sm90.work_ring import END, SAFE, Work
from cutex.kernels.attention.sm100.config import P_PART, Sm100Config
from cutex.kernels.attention.sm100.tiles import Shared

State = tuple[Int32, Int32]  # blocks of this tile so far; parities, see `wait_scores`
ALL_BLOCKS = 0b100


@dataclass(frozen=True)
class RowLoop:
    """One thread's walk over the blocks of keys of its row."""

    shared: Shared
    tile: Int32
    softmax: RowSoftmax
    score_ops: ScoreOps
    factors: cute.Tensor  # (1)
    dtype: type[cutlass.Numeric]
    optimistic: bool

    run = BlockLoop.run

    @property
    def config(self) -> Sm100Config:
        return self.shared.config

    @cute.jit
    def first(self, n_block: Int32, state: State) -> State:
        """The first block; the end of the keys may lie in it."""
        buffer, state = self.wait_scores(state)
        softmax = self.softmax
        softmax.reference[0] = self.search(buffer, n_block, True)
        softmax.sums[0] = Float32(0.0)
        self.stream(buffer, n_block, "masked")
        return state

    @cute.jit
    def steps(
        self, n_block: Int32, count: Int32, state: State, kind: cutlass.Constexpr[str]
    ) -> State:
        """`count` steps from `n_block` down."""
        done, parities = state
        for i in cutlass.range(count, unroll=1):
            done, parities = self.step(n_block - i, (done, parities), kind)
        return done, parities

    @cute.jit
    def step(self, n_block: Int32, state: State, kind: cutlass.Constexpr[str]) -> State:
        """kind: "masked", "clean" or, of blocks that are clean, "add": without looking for a larger
        score."""
        buffer, state = self.wait_scores(state)
        if cutlass.const_expr(kind != "add"):
            highest = self.search(buffer, n_block, kind == "masked")
            if self.softmax.raise_references([highest], self.factors):
                self.scale_output(state)
        self.stream(buffer, n_block, kind)
        return state

    # ---- S

    @cute.jit
    def wait_scores(self, state: State) -> tuple[Int32, State]:
        """The buffer in which the next block's scores are, when they are.

        Parities are those of S, a bit a buffer, and above them that of all blocks so far.
        """
        done, parities = state
        buffer = self.tile if self.config.q_tiles > 1 else done & 1
        self.shared.barriers.s_full.wait((parities >> buffer) & 1, buffer)
        fence_after_sync()
        return buffer, (done + 1, parities ^ (1 << buffer) ^ ALL_BLOCKS)

    @cute.jit
    def score_parts(self, buffer: Int32) -> SubTiles:
        c = self.config
        return columns_of(self.shared.tmem, buffer * c.tile_n, c.tile_n)

    @cute.jit
    def search(self, buffer: Int32, n_block: Int32, masked: cutlass.Constexpr[bool]) -> Float32:
        """The largest score of the row. Scores that are masked, or otherwise not what QK left, are
        written back, to be read again by `stream`: a row of 128 in registers would leave none."""
        c = self.config
        parts = self.score_parts(buffer)
        highest = -Float32.inf
        following = parts.start_load(0)
        for part in cutlass.range_constexpr(parts.num_parts):
            columns = following
            parts.wait_loads()
            if cutlass.const_expr(part < parts.num_parts - 1):
                following = parts.start_load(part + 1)
            scores = cute.make_tensor(columns.iterator, cute.make_layout((1, P_PART)))
            self.score_ops.apply(scores, n_block, masked, part * P_PART)
            highest = cute.arch.fmax(highest, row_max(scores, 0))
            if cutlass.const_expr(masked or self.score_ops.elementwise):
                flat = cute.make_tensor(columns.iterator, cute.make_layout(P_PART))
                store_columns(self.shared.tmem, buffer * c.tile_n + part * P_PART, flat)
        if cutlass.const_expr(masked or self.score_ops.elementwise):
            cute.arch.fence_view_async_tmem_store()
        return highest

    @cute.jit
    def stream(self, buffer: Int32, n_block: Int32, kind: cutlass.Constexpr[str]) -> None:
        """Turn S into P part by part; one is loaded while the one before is worked on."""
        softmax = self.softmax
        if cutlass.const_expr(kind != "masked" and not self.config.modified):
            softmax = softmax.partly_by_fma(self.config.by_fma)
        parts = self.score_parts(buffer)
        following = parts.start_load(0)
        for part in cutlass.range_constexpr(parts.num_parts):
            columns = following
            parts.wait_loads()
            if cutlass.const_expr(part < parts.num_parts - 1):
                following = parts.start_load(part + 1)
            scores = cute.make_tensor(columns.iterator, cute.make_layout((1, P_PART)))
            if cutlass.const_expr(kind == "add"):
                self.score_ops.apply(scores, n_block, False, part * P_PART)
            softmax.add(scores)
            self.store_part(buffer, scores, part)

    # ---- P

    @cute.jit
    def store_part(self, buffer: Int32, scores: cute.Tensor, part: cutlass.Constexpr[int]) -> None:
        """Round a part of a row, put it over S, and tell MMA at the ends of what it waits for."""
        c, b = self.config, self.shared.barriers
        rounded = cute.make_rmem_tensor(cute.make_layout(P_PART), self.dtype)
        rounded.store(
            cute.make_tensor(scores.iterator, cute.make_layout(P_PART)).load().to(self.dtype)
        )
        words = P_PART * self.dtype.width // 32
        column = buffer * c.tile_n + part * words
        store_columns(self.shared.tmem, column, cute.recast_tensor(rounded, Float32))
        done = (part + 1) * P_PART
        if cutlass.const_expr(done in (c.p_first, c.tile_n)):
            cute.arch.fence_view_async_tmem_store()
            fence_before_sync()
            self.shared.signal(b.p_first if done == c.p_first else b.p_rest, buffer)

    # ---- O

    @cute.jit
    def scale_output(self, state: State) -> None:
        """Multiply this thread's row of O by its factor.

        NOTE: with two Q tiles QK of a block is started behind PV of the one before, so whoever has
        seen its scores has O for himself.
        """
        c, factors = self.config, self.factors
        if cutlass.const_expr(c.q_tiles == 1):
            _, parities = state
            self.shared.barriers.pv_done.wait(cutlass.min(parities & ALL_BLOCKS, 1))
            fence_after_sync()
        first = c.o_column + self.tile * c.head_dim_v
        parts = columns_of(self.shared.tmem, first, c.head_dim_v)
        for part in cutlass.range_constexpr(parts.num_parts):
            values = parts.load(part)
            for i in cutlass.range_constexpr(cute.size(values)):
                values[i] *= factors[0]
            flat = cute.make_tensor(values.iterator, cute.make_layout(P_PART))
            store_columns(self.shared.tmem, first + part * P_PART, flat)


@cute.jit
def columns_of(tmem: cute.Pointer, column: Int32, count: cutlass.Constexpr[int]) -> SubTiles:
    """This thread's row of `count` columns of tensor memory, by 32."""
    thread, _, _ = cute.arch.thread_idx()
    layout = cute.make_layout((LANES, count), stride=(1 << 16, 1))
    return sub_tiles(cute.make_tensor(tmem + column, layout), None, thread % LANES, P_PART)


@cute.jit
def store_columns(tmem: cute.Pointer, column: Int32, values: cute.Tensor) -> None:
    """Start the store of a thread's `values`, 32 bits each, to columns of its lane."""
    thread, _, _ = cute.arch.thread_idx()
    count = cute.size(values)
    layout = cute.make_layout((LANES, count), stride=(1 << 16, 1))
    target = cute.make_tensor(tmem + column, layout)
    atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(count)), Float32)
    store = tcgen05.make_tmem_copy(atom, target).get_slice(thread % LANES)
    coords = store.partition_S(cute.make_identity_tensor((LANES, count)))
    source = cute.make_tensor(values.iterator, cute.make_layout(coords.shape))
    cute.copy(store, source, store.partition_D(target))


@dataclass(frozen=True)
class SoftmaxRole:
    """Warps 4 (1 + tile) to 4 (1 + tile) + 3: the rows of one Q tile."""

    shared: Shared
    tile: Int32
    optimistic: bool

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
        work: Work,
        seq_q: SeqlenInfo,
        seqlen_k: Int32,
        take: PipelineState,
        safe: Boolean,
        parities: Int32,
    ) -> tuple[Int32, Boolean]:
        """P of all blocks, and at their end the row's factor and LSE; whether the sum is one that a
        reference of the first blocks may be trusted for."""
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
                shared, self.tile, softmax, score_ops, factors, shared.sQ.element_type,
                self.optimistic,
            )  # fmt: skip
            _, parities = loop.run(blocks, (Int32(0), parities), safe)
            trusted = softmax.finish(sinks, factors, lse) | safe
        else:
            factors[0] = Float32(0.0)
            lse[0] = -Float32.inf if sinks is None else sinks[0]
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
        """fp16 ends at 2^16, which `Softmax.add` should not reach either."""
        c = self.config
        return min(c.slack, 4.0) if self.shared.sQ.element_type is cutlass.Float16 else c.slack

    def score_ops(self, work: Work, row: Int32, seqlen_q: Int32, seqlen_k: Int32) -> ScoreOps:
        c, passed = self.config, self.shared.passed
        mask = Mask(self.shared.info.band, c.tile_n, seqlen_q, seqlen_k, (row // c.pack,))
        functions = c.score_mod, c.mask_mod
        heads = (work.head * c.pack + row % c.pack,)
        return ScoreOps(mask, passed.scale, passed.softcap, *functions, work.batch, heads)

    def sinks(self, work: Work, row: Int32) -> tuple[Float32, ...] | None:
        c, sink = self.config, self.shared.passed.sink
        return None if sink is None else (sink[work.head * c.pack + row % c.pack],)

    @cute.jit
    def store_lse(self, lse: Float32, work: Work, seq_q: SeqlenInfo, row: Int32) -> None:
        c, mLSE = self.config, self.shared.passed.lse
        query, head = row // c.pack, work.head * c.pack + row % c.pack
        if query < seq_q.length:
            if cutlass.const_expr(c.varlen_q):
                mLSE[head, seq_q.offset + query] = lse
            else:
                mLSE[work.batch, head, query] = lse
