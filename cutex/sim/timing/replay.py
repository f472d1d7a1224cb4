"""The discrete-event model: programs of warps on the units of a few SMs.

Time is in cycles of the SM. Every unit is a queue: it serves requests in the order in which they
come, one at a time, each for as long as its constant gives. A latency, the further time until a
request's effect is visible, delays that effect, not the unit.

    sub-core    issue slots and pipes, four an SM; each warp belongs to one
    port        shared memory: operands of MMAs, TMA, loads and stores of warps
    tensor      wgmma or tcgen05.mma
    tma         boxes that the TMA engine takes on; bytes into the SM
    L2, HBM     an SM's share of the rate of all
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cutex.sim.timing.events import Event, Place, Record, Store, Wait
from cutex.sim.timing.gpus import Gpu
from cutex.sim.timing.units import Barrier, Interval, Memory, Sm
from cutex.sim.timing.warp import Warp


@dataclass
class Run:
    """The outcome of a replay, in cycles."""

    end: float
    mma: list[tuple[float, float]]  # for each MMA: its end, and the FLOPs done by then
    units: dict[str, float]  # busy cycles of each unit of SM 0
    waits: dict[str, dict[str, float]]  # cycles by role and by who ends the wait
    worked: dict[str, float]
    intervals: list[Interval]
    stores_end: float
    starts: list[float]
    drain: float  # from a tile's last MMA to the end of its stores
    tiles: list[float]  # for each tile, the end of the bulk stores of it and of all before it


class Replay:
    """Runs ``record``'s clusters, each on its own SMs.

    ``slots`` clusters run side by side on the same SMs, each of which starts ``apart`` cycles after
    the one before; ``rounds`` clusters run in all, each in the first slot that is free.
    """

    def __init__(
        self,
        record: Record,
        gpu: Gpu,
        memory: Memory,
        *,
        rounds: int = 1,
        slots: int = 1,
        apart: float = 0.0,
        log: bool = False,
    ) -> None:
        self.record, self.gpu, self.memory = record, gpu, memory
        self.rounds, self.slots, self.apart, self.log = rounds, slots, apart, log
        self.sms = [Sm(i) for i in range(record.cluster_size)]
        self.heap: list[tuple[float, int, Callable[[float], None]]] = []
        self.number = 0
        self.flops = 0.0
        self.mma: list[tuple[float, float]] = []
        self.waits: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.worked: dict[str, float] = defaultdict(float)
        self.intervals: list[Interval] = []
        self.end = self.stores_end = 0.0
        self.starts: list[float] = []
        self.stores: list[float] = []  # the end of each bulk store
        self.left = 0
        self.ended_by: tuple[str, float] | None = None  # the track that ended a wait, and the time
        clusters = record.ctas // record.cluster_size
        self.programs_of = [
            {w: p for w, p in record.programs.items() if record.cta[w] // record.cluster_size == c}
            for c in range(clusters)
        ]

    def run(self) -> Run:
        self.queue = deque(range(self.rounds))
        for slot in range(self.slots):
            if self.queue:
                self.queue.popleft()
                Instance(self, self.programs_of[0], slot).start(slot * self.apart)
        while self.heap:
            at, _, then = heapq.heappop(self.heap)
            self.end = max(self.end, at)
            then(at)
        units: dict[str, float] = defaultdict(float)
        for unit in self.sms[0].units:
            units[unit.name] = max(units[unit.name], unit.busy)
        if self.left and self.record.complete:
            raise RuntimeError(f"the replay stopped with {self.left} warps waiting")
        return Run(
            self.end, self.mma, dict(units), {r: dict(w) for r, w in self.waits.items()},
            dict(self.worked), self.intervals, self.stores_end, self.starts, self._drain(),
            self._tiles(),
        )  # fmt: skip

    def _drain(self) -> float:
        """Cycles from the last MMA of the first tile to the end of its stores.

        NOTE: the first store of a tile follows its last MMA, so the first gap in the stores that is
        longer than a load takes ends the first tile's.
        """
        if not self.stores or not self.mma:
            return 0.0
        first, last = self.stores[0], self.stores[0]
        for at in self.stores:
            if at - last > 2 * self.gpu.l2_latency + 2000:
                break
            last = at
        before = max((t for t, _ in self.mma if t <= first), default=first)
        return last - before

    def _tiles(self) -> list[float]:
        each = sum(map(_stores_of_a_tile, self.programs_of[0].values()))
        ends = sorted(self.stores)
        return ends[each - 1 :: each] if each else []

    def at(self, when: float, then: Callable[[float], None]) -> None:
        self.number += 1
        heapq.heappush(self.heap, (when, self.number, then))

    def ended(self, now: float, slot: int) -> None:
        """Start the next cluster in ``slot``, whose cluster has left its SMs."""
        if self.queue:
            self.queue.popleft()
            which = (self.rounds - len(self.queue)) % len(self.programs_of)
            Instance(self, self.programs_of[which], slot).start(now + self.gpu.cta_turnover)


class Instance:
    """One running cluster: the state of its barriers and groups."""

    def __init__(self, replay: Replay, programs: dict[int, list[Event]], slot: int) -> None:
        self.r, self.gpu, self.programs = replay, replay.gpu, programs
        self.slot = slot
        record = replay.record
        self.barriers = {at: Barrier(n, n) for at, n in record.barriers.items()}
        self.named: dict[tuple[int, int], list[Any]] = defaultdict(lambda: [0, []])
        self.cluster_count, self.cluster_phase = 0, 0
        self.cluster_waiting: list[tuple[int, Callable[[float], None]]] = []
        self.warps = {w: Warp(self, w, p) for w, p in programs.items()}
        self.alive = len(self.warps)
        self.meeting: dict[tuple[int, int, int], list[float]] = defaultdict(list)
        self.done_mma: dict[tuple[int, int], list[float]] = defaultdict(list)
        self.sm = {c: replay.sms[c % record.cluster_size] for c in set(record.cta.values())}

    def start(self, now: float) -> None:
        self.r.starts.append(now)
        for warp in self.warps.values():
            self.r.left += 1
            self.r.at(now, warp.go)

    def warp_ended(self, now: float) -> None:
        self.alive -= 1
        self.r.left -= 1
        if not self.alive:
            self.r.ended(now, self.slot)
        else:
            self.check_cluster(now)

    def check_cluster(self, now: float) -> None:
        """Complete the cluster barrier once every warp that has not ended has arrived."""
        if 0 < self.cluster_count >= self.alive:
            self.cluster_count = 0
            self.cluster_phase += 1
            ready, self.cluster_waiting = self.cluster_waiting, []
            for _, wake in ready:
                self.r.at(now + self.gpu.cluster_barrier, wake)

    # -- mbarriers ---------------------------------------------------------------------------------

    def arrive(
        self, place: Place, count: int, expect: int, by: str, track: str, now: float
    ) -> None:
        b = self.barriers[place]
        if count and not expect:
            b.by, b.track = by, track
        b.tx += expect
        b.pending -= count
        self.check(b, now)

    def bytes(self, place: Place, size: int, by: str, now: float) -> None:
        b = self.barriers[place]
        b.by, b.track = by, "TMA in"
        b.tx -= size
        self.check(b, now)

    def check(self, b: Barrier, now: float) -> None:
        if b.pending <= 0 and b.tx == 0:
            b.pending += b.arrivals
            b.phases += 1
            ready = [w for w in b.waiting if w[0] <= b.phases]
            if ready:
                b.waiting = [w for w in b.waiting if w[0] > b.phases]
                for _, wake in ready:
                    self.r.at(now + self.gpu.wake, self._woken(wake, b.track, now))

    def _woken(
        self, wake: Callable[[float], None], track: str, since: float
    ) -> Callable[[float], None]:
        def then(now: float) -> None:
            self.r.ended_by = (track, since)
            wake(now)
            self.r.ended_by = None

        return then


def _stores_of_a_tile(program: Sequence[Event]) -> int:
    """The number of bulk stores of a warp before it waits for the next tile."""
    count = 0
    for e in program:
        if isinstance(e, Store):
            count += 1
        elif count and isinstance(e, Wait):
            break
    return count


def when(run: Run, flops: float) -> float:
    """The time at which ``flops`` FLOPs were done."""
    for at, done in run.mma:
        if done >= flops * (1 - 1e-9):
            return at
    return run.mma[-1][0]
