"""The softmax role: four warps for each Q tile, each thread one row, from S to P in tensor memory.

How a thread takes the blocks of its row: row_loop.py, or tentative.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute

from cutex.device.atoms.tmem import LANES
from cutex.device.attention.mask import Mask
from cutex.device.attention.row_softmax import RowSoftmax
from cutex.device.attention.scores import ScoreOps
from cutex.device.attention.seqlen_info import SeqlenInfo, store_lse
from cutex.device.attention.softmax import threshold_of
from cutex.device.pipeline import PipelineState
from cutex.device.work_tile import WorkTile
from cutex.kernels.attention.forward.sm100.config import Sm100ForwardConfig
from cutex.kernels.attention.forward.sm100.row_loop import RowLoop, State
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
        c, passed = self.config, self.shared.passed
        mask = Mask(self.shared.info.band, c.tile_n, seqlen_q, seqlen_k, (row // c.pack,))
        functions = c.score_mod, c.mask_mod
        heads = (work.head * c.pack + row % c.pack,)
        ops = ScoreOps(mask, passed.scale, passed.softcap, *functions, work.batch, heads)
        return ops.with_slopes(passed.slopes)

    def sinks(self, work: WorkTile, row: Int32) -> tuple[Float32, ...]:
        c, sink = self.config, self.shared.passed.sink
        return () if sink is None else (sink[work.head * c.pack + row % c.pack],)

    @cute.jit
    def store_lse(self, lse: Float32, work: WorkTile, seq_q: SeqlenInfo, row: Int32) -> None:
        c, mLSE = self.config, self.shared.passed.lse
        query, head = row // c.pack, work.head * c.pack + row % c.pack
        if query < seq_q.length:
            store_lse(mLSE, lse, work.batch, head, seq_q, query)
