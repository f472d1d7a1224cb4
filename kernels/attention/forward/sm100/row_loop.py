"""One thread's loop over the blocks of keys of its row, the maximum of each block found first.

    S[n] -> registers -> maximum -> exponentials -> 16 bits -> P[n], over S, 32 columns at a time

References move so seldom that the thread scales its row of O itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from cutex.device.atoms.tmem import fence_after_sync, fence_before_sync
from cutex.device.attention.block_info import Blocks
from cutex.device.attention.row_softmax import RowSoftmax
from cutex.device.attention.scores import ScoreOps
from cutex.device.attention.tmem_rows import PART, ScoreRow, scale_columns, store_columns
from cutex.kernels.attention.forward.sm100.config import Sm100ForwardConfig
from cutex.kernels.attention.forward.sm100.tiles import Shared

ALL_BLOCKS = 0b100


class State(NamedTuple):
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
