"""Named barriers of a CTA and the barrier of a cluster (PTX ISA 9.7.13.1, 9.7.13.4)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.errors import BarrierMisuse
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.core import Core

NUM_NAMED_BARRIERS = 16


@dataclass
class NamedBarrier:
    arrived: int = 0  # threads
    expected: int = 0  # threads; 0 for all live ones
    reduces: bool = False  # those who have arrived do so by bar.red
    voters: int = 0  # of bar.red: threads that arrived
    votes: int = 0  # of bar.red: arrived threads whose predicate holds
    result: tuple[int, int] = (0, 0)  # votes and voters of the phase that completed last


class NamedBarriers:
    """The barriers of all resident CTAs, by (cta, number)."""

    def __init__(self, machine: Core) -> None:
        self.machine = machine
        self.clear()

    def clear(self) -> None:
        self.barriers: dict[tuple[int, int], NamedBarrier] = {}

    def arrive(
        self, warp: int, number: int, threads: int, votes: int, expected: int, ins: Instruction
    ) -> bool:
        """Let threads of a warp arrive; return True if that completes the barrier (the others then
        wake).

        Against an ``expected`` number a whole warp counts 32, however many threads it has: a CTA
        need not be a multiple of 32.
        """
        m = self.machine
        if number >= NUM_NAMED_BARRIERS:
            raise BarrierMisuse.at(ins, f"barrier {number} does not exist (0..15)")
        if expected % 32:
            raise BarrierMisuse.at(
                ins, f"a thread count of {expected} is no multiple of the warp size"
            )
        key = (int(m.grid.warp_cta[warp]), number)
        barrier = self.barriers.setdefault(key, NamedBarrier())
        if barrier.arrived and barrier.expected != expected:
            raise BarrierMisuse.at(
                ins,
                f"{m.grid.name_warp(warp)} arrives at barrier {number} with a count of "
                f"{expected or 'all'} threads, others with {barrier.expected or 'all'}",
            )
        reduces = "red" in ins.parts
        if barrier.arrived and barrier.reduces != reduces:
            raise BarrierMisuse.at(
                ins,
                f"{m.grid.name_warp(warp)} arrives at barrier {number} by {ins.op}, others by "
                f"{'bar.red' if barrier.reduces else 'bar.sync or bar.arrive'}: what such a "
                "mixture does is not defined",
            )
        barrier.expected, barrier.reduces = expected, reduces
        whole = threads == int(m.live[warp].sum())
        barrier.arrived += 32 if expected and whole else threads
        barrier.voters += threads
        barrier.votes += votes
        m.events.named_arrives(key, warp, whole, ins)
        return self._release_if_full(key)

    def threads_left(self, cta: int) -> None:
        """Threads of ``cta`` have returned: barriers that wait for all threads wait for fewer."""
        for key, barrier in self.barriers.items():
            if key[0] == cta and barrier.arrived and not barrier.expected:
                self._release_if_full(key)

    def describe(self, cta: int, number: int) -> str:
        barrier = self.barriers[cta, number]
        return (
            f"named barrier {number} of {self.machine.grid.name_cta(cta)}: {barrier.arrived} of "
            f"{self._wanted(cta, barrier)} threads have arrived"
        )

    def _wanted(self, cta: int, barrier: NamedBarrier) -> int:
        m = self.machine
        return barrier.expected or int(m.live[m.grid.warp_cta == cta].sum())

    def _release_if_full(self, key: tuple[int, int]) -> bool:
        barrier = self.barriers[key]
        if barrier.arrived < self._wanted(key[0], barrier):
            return False
        barrier.result = barrier.votes, barrier.voters
        barrier.arrived = barrier.voters = barrier.votes = 0
        self.machine.events.named_completed(key)
        for warp, _ in self.machine.sleepers.get(("bar", *key), ()):
            self.machine.events.named_passed(key, warp)
        self.machine.wake(("bar", *key))
        return True


@dataclass
class ClusterBarrier:
    arrived: set[int] = field(default_factory=set)  # warps
    phase: int = 0


def arrived_again(who: str, ins: Instruction) -> BarrierMisuse:
    """The error of a warp that arrives at the cluster barrier and has not waited since its last
    arrival.
    """
    return BarrierMisuse.at(
        ins,
        f"{who} arrives at the cluster barrier again without a barrier.cluster.wait since its last "
        "arrival: that may not have completed",
    )


class ClusterBarriers:
    """The barrier of each resident cluster."""

    def __init__(self, machine: Core) -> None:
        self.machine = machine
        self.clear()

    def clear(self) -> None:
        self.barriers: dict[int, ClusterBarrier] = {}
        self.arrived_in: dict[
            int, int
        ] = {}  # warp -> the phase of its arrival, until it has waited

    def of(self, warp: int) -> int:
        """The number of the warp's cluster."""
        return int(self.machine.grid.warp_cta[warp]) // self.machine.grid.cluster_size

    def arrive(self, warp: int, relaxed: bool, ins: Instruction) -> None:
        which = self.of(warp)
        barrier = self.barriers.setdefault(which, ClusterBarrier())
        if warp in barrier.arrived:
            raise arrived_again(self.machine.grid.name_warp(warp), ins)
        self.machine.events.cluster_arrives(which, warp, relaxed, ins)
        barrier.arrived.add(warp)
        self.arrived_in[warp] = barrier.phase
        self.machine.progress += 1
        self._release_if_full(which)

    def passed(self, warp: int, ins: Instruction) -> bool:
        """Whether the phase in which the warp arrived is complete."""
        barrier = self.barriers.setdefault(self.of(warp), ClusterBarrier())
        if warp not in self.arrived_in:
            raise BarrierMisuse.at(
                ins,
                f"{self.machine.grid.name_warp(warp)} waits at the cluster barrier without having "
                "arrived since it waited last",
            )
        if barrier.phase == self.arrived_in[warp]:
            return False
        del self.arrived_in[warp]
        self.machine.events.cluster_passed(self.of(warp), warp)
        return True

    def warps_left(self, cta: int) -> None:
        """Warps of ``cta`` have returned: the barrier waits for them no more."""
        which = cta // self.machine.grid.cluster_size
        if which in self.barriers:
            self._release_if_full(which)

    def describe(self, which: int) -> str:
        m = self.machine
        absent = [w for w in self._live(which) if w not in self.barriers[which].arrived]
        names = ", ".join(m.grid.name_warp(w) for w in absent[:4])
        return f"the cluster barrier, at which {names} has not arrived"

    def _live(self, which: int) -> list[int]:
        m = self.machine
        return np.nonzero((m.grid.warp_cta // m.grid.cluster_size == which) & m.live.any(1))[
            0
        ].tolist()

    def _release_if_full(self, which: int) -> None:
        barrier = self.barriers[which]
        if barrier.arrived and set(self._live(which)) <= barrier.arrived:
            barrier.arrived = set()
            barrier.phase += 1
            self.machine.events.cluster_completed(which)
            self.machine.wake(("cluster", which))
