"""Sums that one CTA leaves in global memory for another CTA to add to its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

LANES = 32
VECTOR = 4  # numbers of a load or store of 16 bytes


class KeptSums(NamedTuple):
    """One warp's accumulators, in the order in which its lanes hold them, for the warp of the same
    number in another CTA.

    flag   counts                          waits
    kept   1: the warp that keeps its      the warp that adds them, which sets it to 0
           sums, these being stored
    """

    sums: cute.Tensor  # (LANES * numbers of a thread) fp32 in global memory
    kept: cute.Pointer  # Int32 in global memory, 0 before and after

    @staticmethod
    def of(sums: cute.Tensor, flags: cute.Pointer, warp: Int32, numbers: int) -> KeptSums:
        """The sums of warp `warp` among all that share `sums` and `flags`, `numbers` per thread."""
        size = LANES * numbers
        # NOTE: else the place of a vector would not be known to be a multiple of 16 bytes
        first = cute.assume(Int64(warp) * size, divby=VECTOR)
        mine = cute.make_tensor(sums.iterator + first, cute.make_layout(size))
        return KeptSums(mine, flags + warp)

    def vectors(self, accs: tuple[cute.Tensor, ...]) -> Iterator[tuple[cute.Tensor, cute.Tensor]]:
        """The vectors of this thread's accumulators, one after another, and their addresses."""
        places = cute.logical_divide(self.sums, cute.make_layout(VECTOR))  # (4, NumV)
        first = 0
        for acc in accs:
            count = cute.size(acc) // VECTOR
            mine = cute.make_tensor(acc.iterator, cute.make_layout((VECTOR, count)))
            for j in range(count):
                yield mine[None, j], places[None, (first + j) * LANES + cute.arch.lane_idx()]
            first += count

    @cute.jit
    def keep(self, accs: tuple[cute.Tensor, ...]) -> None:
        """Store the accumulators and set the flag."""
        for mine, place in self.vectors(accs):
            cute.autovec_copy(mine, place)
        self.say(1)

    @cute.jit
    def add(self, accs: tuple[cute.Tensor, ...], at_once: cutlass.Constexpr[int]) -> None:
        """Wait for the flag, and add the sums to the accumulators, `at_once` vectors at a time."""
        self.await_kept()
        self.add_kept(accs, at_once)

    @cute.jit
    def add_kept(self, accs: tuple[cute.Tensor, ...], at_once: cutlass.Constexpr[int]) -> None:
        """Add the sums, whose flag has been waited for, to the accumulators, `at_once` vectors at a
        time; set the flag to 0."""
        others = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
        for number, (mine, place) in enumerate(self.vectors(accs)):
            if number % at_once == 0:
                cute.arch.sync_warp()  # NOTE: no load passes it, else more start than can be held
            cute.autovec_copy(place, others)
            mine.store(mine.load() + others.load())
        with cute.arch.elect_one():
            # NOTE: for the next launch, so nothing orders it
            cute.arch.store(self.kept, Int32(0))

    @cute.jit
    def await_kept(self) -> None:
        if cute.arch.lane_idx() == 0:
            kept = cute.arch.load(self.kept, Int32, sem="acquire", scope="gpu")
            while kept == 0:
                kept = cute.arch.load(self.kept, Int32, sem="acquire", scope="gpu")
        cute.arch.sync_warp()

    @cute.jit
    def await_several(self, count: Int32 | int, apart: int) -> None:
        """Wait for `count` flags, this one and those that follow `apart`; each lane for one at a
        time."""
        lane = cute.arch.lane_idx()
        while lane < count:
            kept = cute.arch.load(self.kept + lane * apart, Int32, sem="acquire", scope="gpu")
            while kept == 0:
                kept = cute.arch.load(self.kept + lane * apart, Int32, sem="acquire", scope="gpu")
            lane += LANES
        cute.arch.sync_warp()

    @cute.jit
    def say(self, kept: cutlass.Constexpr[int]) -> None:
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.store(self.kept, Int32(kept), sem="release", scope="gpu")
