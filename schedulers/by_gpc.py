"""Persistent clusters that take tiles by where they run: those of one GPC work on neighbours.

Requests of SMs of one GPC for the same lines of L2 are answered once if they come together. So the
tiles' order is cut into runs, one for each GPC, and a cluster takes a place in the run of its own
(docs/facts/gemm.md#by-gpc).

A cluster's number does not say where it runs, nor do all of a launch run at one time: so a cluster
claims a place in global memory, by counting in the run of its GPC, or in another's where that is
taken. There are as many places as clusters, and each claims one; so the result never depends on the
numbers of SMs, only its speed.

words           Int32 in global memory; all 0 before a launch and after it
claimed[0..8]   the claims in each run, some beyond its end
arrived         the clusters that have claimed their place; the last resets all words

The next kernel may start its clusters once all of these have arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from cutex.device.atoms.dsmem import load_from_cta
from cutex.device.last_arrival import is_last_arrival
from cutex.schedulers.order import TileCounts, select
from cutex.schedulers.persistent import StaticPersistent, StaticWalk
from cutex.schedulers.raster import RasterOrder

# how TPCs, pairs of SMs, are numbered on an H200: in turn over 8 GPCs, 4 of the first and 8 of each
# of the others; the last 6 are in none of these turns, and have a run of their own
GPCS, FIRST_TURNS, TURNS = 8, 4, 8
IN_FIRST = FIRST_TURNS * GPCS
IN_TURNS = IN_FIRST + (TURNS - FIRST_TURNS) * (GPCS - 1)
RUNS = GPCS + 1
WORDS = 16  # of a launch


def run_of_tpc(tpc: Any) -> Any:
    """The run of a TPC's GPC.

    Plain operators only: Python ints run it, and the same code traces in the DSL.
    """
    later = select(tpc < IN_TURNS, 1 + (tpc - IN_FIRST) % (GPCS - 1), GPCS)
    return select(tpc < IN_FIRST, tpc % GPCS, later)


def start_of_run(run: Any) -> Any:
    """The place of the run's first TPC in the sequence of all.

    Plain operators only: Python ints run it, and the same code traces in the DSL.
    """
    return select(run > 0, TURNS * run - FIRST_TURNS, 0)


@dataclass(frozen=True)
class Claims:
    """The places that clusters claim."""

    words: cute.Tensor  # (WORDS) Int32 in global memory
    place: cute.Tensor  # (1) Int32 in smem: this cluster's, in its first CTA

    @cute.jit
    def claim(self, ctas: cutlass.Constexpr[int], places: Int32) -> None:
        """Claim a place for this cluster of `ctas`. One thread of its first CTA calls it."""
        run = run_here()
        found = Int32(-1)
        while found < 0:
            first = start_of_run(run) * 2 // ctas
            end = cutlass.min(start_of_run(run + 1) * 2 // ctas, places)
            if run == RUNS - 1:
                end = places
            count = self.words.iterator + run
            place = first + cute.arch.atomic_add(count, Int32(1), sem="relaxed", scope="gpu")
            if place < end:
                found = place
            run = run + 1 if run < RUNS - 1 else Int32(0)
        place = self.place
        place[0] = found

    @cute.jit
    def arrive(self, clusters: Int32) -> None:
        """Count this cluster's claim; the last resets all words. One thread of its first CTA calls
        it, before that lets the next kernel start."""
        if is_last_arrival(self.words.iterator + RUNS, clusters):
            for run in cutlass.range_constexpr(RUNS):
                cute.arch.store(self.words.iterator + run, Int32(0), sem="relaxed", scope="gpu")
            cute.arch.fence_acq_rel_gpu()

    @cute.jit
    def found(self, ctas: cutlass.Constexpr[int], tiles: Int32) -> Int32:
        """This cluster's place. Each thread that needs it calls it once, after a barrier of the
        cluster; the others may have ended.

        NOTE: the first CTA must not end before the other has read it. With a tile it drains a ring
        whose slots the other, having read its place, releases.
        """
        if cutlass.const_expr(ctas == 1):
            return self.place[0]
        place = load_from_cta(self.place.iterator, Int32(0))
        if place >= tiles:
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        return place


def run_here() -> Int32:
    """The run of the GPC that this CTA runs on."""
    return run_of_tpc(cute.arch.smid() // 2)


@dataclass(frozen=True)
class ByGpc(StaticPersistent):
    """The walk of StaticPersistent, each cluster beginning with the place it claims: there is one
    for every cluster that may run at one time, since those that do are not known."""

    claims: Claims | None = None

    def grid(self, counts: TileCounts) -> tuple[int, int, int]:
        return *self.cluster, self.num_ctas // self.ctas

    def walk(self, counts: TileCounts) -> StaticWalk:
        assert self.claims is not None
        order = RasterOrder.of(self.raster, counts, self.cluster)
        _, _, step = cute.arch.grid_dim()
        place = self.claims.found(self.ctas, order.total)
        return StaticWalk(order, place, order.total, step, Int32(0))

    @property
    def ctas(self) -> int:
        """The CTAs of a cluster."""
        return self.cluster[0] * self.cluster[1]

    @cute.jit
    def claim(self) -> None:
        """Claim this cluster's place. A whole warp of each CTA calls it, before a barrier of the
        cluster."""
        assert self.claims is not None
        if cute.arch.block_idx_in_cluster() == 0:
            with cute.arch.elect_one():
                _, _, clusters = cute.arch.grid_dim()
                self.claims.claim(self.ctas, clusters)
                cute.arch.fence_acq_rel_cluster()

    @cute.jit
    def arrive(self) -> None:
        """Count the claim. A whole warp of each CTA calls it, after a barrier of the CTA."""
        assert self.claims is not None
        if cute.arch.block_idx_in_cluster() == 0:
            with cute.arch.elect_one():
                _, _, clusters = cute.arch.grid_dim()
                self.claims.arrive(clusters)
