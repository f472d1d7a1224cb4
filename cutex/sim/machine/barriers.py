"""Named barriers of a CTA and the barrier of a cluster (PTX ISA 9.7.13.1, 9.7.13.4)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.errors import BarrierMisuse
from cutex.sim.ptx.parse import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

NUM_NAMED_BARRIERS = 16


@dataclass
class NamedBarrier:
    arrived: int = 0  # threads
    expected: int = 0  # threads; 0 for all live ones
    voters: int = 0  # of bar.red: threads that arrived
    votes: int = 0  # of bar.red: arrived threads whose predicate holds
    result: tuple[int, int] = (0, 0)  # votes and voters of the phase that completed last
    given: np.ndarray | None = None  # the clock that the arrived warps release (see clocks)
    released: np.ndarray | None = None  # the clock of the last completed phase
    # warps that have arrived in this phase with all lanes, with their counts (see clocks); and for
    # each warp, those of the last phase in which it arrived
    present: dict[int, int] = field(default_factory=dict)
    last: dict[int, dict[int, int]] = field(default_factory=dict)


class NamedBarriers:
    """The barriers of all resident CTAs, by (cta, number)."""

    def __init__(self, machine: Machine) -> None:
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
        barrier.expected = expected
        whole = threads == int(m.live[warp].sum())
        barrier.arrived += 32 if expected and whole else threads
        barrier.voters += threads
        barrier.votes += votes
        if whole:
            self._check_again(barrier, warp, number, ins)
            barrier.present[warp] = m.clocks.now(warp)
            barrier.last[warp] = barrier.present
        barrier.given = m.clocks.join(barrier.given, m.clocks.give(warp))
        return self._release_if_full(key)

    def _check_again(self, barrier: NamedBarrier, warp: int, number: int, ins: Instruction) -> None:
        """Report a warp that did not wait at its last arrival and arrives again without being
        ordered after that phase's completion: it may arrive twice in one phase, and not at all in
        the next (9.7.13.1). A warp may count twice in one phase where that is intended: in
        FlashAttention-4 one arrives as all do, then waits as the one that stores.
        """
        m, last = self.machine, barrier.last.get(warp, {})
        for peer, count in last.items() if last is not barrier.present else ():
            if m.clocks.known[warp, m.clocks.slot[peer]] < count:
                m.findings.add(
                    "barrier",
                    f"{m.grid.name_warp(warp)} arrives at named barrier {number} again, and "
                    "nothing that it has waited for says that the barrier has completed: its own "
                    "last arrival was a bar.arrive, which does not wait",
                    ins,
                    remedy="bar.sync at the arrival before, or a wait for another barrier behind "
                    "which all have arrived at this one",
                )
                return

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
        barrier.present = {}
        barrier.released, barrier.given = barrier.given, None
        for warp, _ in self.machine.sleepers.get(("bar", *key), ()):
            self.machine.clocks.take(warp, barrier.released)
        self.machine.wake(("bar", *key))
        return True


@dataclass
class ClusterBarrier:
    arrived: set[int] = field(default_factory=set)  # warps
    phase: int = 0
    given: np.ndarray | None = None
    released: np.ndarray | None = None


class ClusterBarriers:
    """The barrier of each resident cluster."""

    def __init__(self, machine: Machine) -> None:
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
        if warp in self.arrived_in and not self._knows(warp, barrier):
            raise BarrierMisuse.at(
                ins,
                f"{self.machine.grid.name_warp(warp)} arrives at the cluster barrier again without "
                "a barrier.cluster.wait since its last arrival: that may not have completed",
            )
        barrier.arrived.add(warp)
        barrier.given = self.machine.clocks.join(
            barrier.given, self.machine.clocks.give(warp, relaxed)
        )
        self.arrived_in[warp] = barrier.phase
        self.machine.progress += 1
        self._release_if_full(which)

    def _knows(self, warp: int, barrier: ClusterBarrier) -> bool:
        """Whether the phase of the warp's last arrival is complete, and the warp is ordered after
        it by other barriers.
        """
        if warp in barrier.arrived or barrier.released is None:
            return False
        released = barrier.released[2]
        return bool((released <= self.machine.clocks.follows[warp, : len(released)]).all())

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
        self.machine.clocks.take(warp, barrier.released)
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
            barrier.released, barrier.given = barrier.given, None
            self.machine.wake(("cluster", which))
