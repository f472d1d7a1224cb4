"""WordRing: numbers that one role passes to the warps of others, through slots of smem.

A computation that takes long, or many instructions, is then done by one warp of a CTA instead of by
each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.pipeline import Barrier, PipelineState, Ring

SLOTS = 2


@dataclass(frozen=True)
class WordRing:
    """A ring of slots of Int32 words, written by one warp and read by the warps of other roles."""

    ring: Ring
    words: cute.Tensor  # (words, SLOT) Int32

    @classmethod
    def allocate(
        cls, smem: SmemAllocator, name: str, words: int, writers: int, readers: int
    ) -> Self:
        """Allocate a ring that `readers` warps read. Of `writers` warps, all of which arrive, one
        writes."""
        slots = smem.allocate_tensor(Int32, cute.make_layout((words, SLOTS)), 16)
        full = Barrier.allocate(smem, f"{name} full", arrivals=writers, slots=SLOTS)
        empty = Barrier.allocate(smem, f"{name} empty", arrivals=readers, slots=SLOTS)
        return cls(Ring(SLOTS, 0, full, empty), slots)

    @cute.jit
    def tell(
        self, state: PipelineState, values: tuple[Int32, ...], writes: Boolean
    ) -> PipelineState:
        """Fill the next slot with `values`, by the one warp that `writes`."""
        self.ring.empty.wait(state.phase, state.slot)
        with cute.arch.elect_one():
            self._write(values, state.slot, writes)
            self.ring.full.arrive(state.slot)
        state.advance()
        return state

    @cute.jit
    def _write(self, values: tuple[Int32, ...], slot: Int32, writes: Boolean) -> None:
        words = self.words
        if writes:
            for i in cutlass.range_constexpr(len(values)):
                words[i, slot] = values[i]

    @cute.jit
    def take(self, state: PipelineState) -> tuple[tuple[Int32, ...], PipelineState]:
        """Read the next slot, and release it."""
        self.ring.wait_full(state)
        found = tuple(self.words[i, state.slot] for i in range(cute.size(self.words, mode=[0])))
        cute.arch.sync_warp()
        self.ring.release(state)
        state.advance()
        return found, state
