"""One thread's loop over the blocks of keys of its row, with exponentials before the maximum.

A block without a mask is taken tentatively: exponentials with the reference of the blocks before,
while the maximum is searched under them, so that S is read only once. Where a row of the warp
exceeds its reference by more than `rescale_threshold` powers of two, which S, not yet overwritten,
shows in time, the block is taken again as one with a mask is, the maximum first; and so are those
after it, until one raises no reference.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute

from cutex.device.attention.tmem_rows import PART
from cutex.kernels.attention.forward.sm100.row_loop import ALL_BLOCKS, RowLoop


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
    done: Int32  # as in row_loop.State
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
