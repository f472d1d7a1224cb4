"""The timeline of a replay, and the state of one running cluster that its warps share."""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable
from math import log1p
from typing import Any

from cutex.sim.timing.events import BarrierId, Event, Record
from cutex.sim.timing.gpus import Gpu
from cutex.sim.timing.units import Barrier, Interval, Memory, Sm

_LATEST = 4.0


class Timeline:
    """What happens next, by time, on the SMs of one cluster; and what was seen of it so far."""

    def __init__(self, record: Record, gpu: Gpu, memory: Memory, *, log: bool) -> None:
        self.record, self.gpu, self.memory, self.log = record, gpu, memory, log
        self.sms = [Sm(i) for i in range(record.cluster_size)]
        self.heap: list[tuple[float, int, Callable[[float], None]]] = []
        self.number = 0
        self.random = random.Random(0)
        self.flops = 0.0
        self.mma: list[tuple[float, float]] = []
        self.waits: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.worked: dict[str, float] = defaultdict(float)
        self.intervals: list[Interval] = []
        self.end = self.stores_end = 0.0
        self.stores: list[float] = []  # the end of each bulk store
        self.left = 0  # warps that have not ended
        self.ended_by: tuple[str, float] | None = None  # the track that ended a wait, and the time

    def at(self, when: float, then: Callable[[float], None]) -> None:
        """Call `then` at `when`."""
        self.number += 1
        heapq.heappush(self.heap, (when, self.number, then))

    def drawn(self) -> float:
        """The next of the numbers from -1 to 1 that are the same in every replay."""
        return self.random.uniform(-1.0, 1.0)

    def latest(self, count: int) -> float:
        """The next of the greatest of `count` numbers that are exponentially distributed, of mean
        1, none above `_LATEST`."""
        return min(_LATEST, -log1p(-(self.random.random() ** (1.0 / count))))

    def play(self) -> None:
        """Until nothing happens any more."""
        while self.heap:
            at, _, then = heapq.heappop(self.heap)
            self.end = max(self.end, at)
            then(at)


class RunningCluster:
    """The state of one cluster's barriers and groups."""

    def __init__(
        self,
        timeline: Timeline,
        programs: dict[int, list[Event]],
        slot: int,
        ended: Callable[[float, int], None],
    ) -> None:
        """`ended` is called with the time and `slot` when the last warp has ended."""
        self.timeline, self.gpu, self.programs = timeline, timeline.gpu, programs
        self.slot, self.ended = slot, ended
        record = timeline.record
        self.barriers = {at: Barrier(n, n) for at, n in record.barriers.items()}
        self.named: dict[tuple[int, int], list[Any]] = defaultdict(lambda: [0, []])
        self.cluster_count, self.cluster_phase = 0, 0
        self.cluster_waiting: list[tuple[int, Callable[[float], None]]] = []
        self.alive = len(programs)
        self.meeting: dict[tuple[int, int, int], list[float]] = defaultdict(list)
        self.loaded: dict[Any, float] = defaultdict(float)  # bytes by tensor, where they are known
        self.done_mma: dict[tuple[int, int], list[float]] = defaultdict(list)
        self.sm = {c: timeline.sms[c % record.cluster_size] for c in set(record.cta.values())}

    def warp_ended(self, now: float) -> None:
        self.alive -= 1
        self.timeline.left -= 1
        if not self.alive:
            self.ended(now, self.slot)
        else:
            self.check_cluster(now)

    def check_cluster(self, now: float) -> None:
        """Complete the cluster barrier once every warp that has not ended has arrived."""
        if 0 < self.cluster_count >= self.alive:
            self.cluster_count = 0
            self.cluster_phase += 1
            ready, self.cluster_waiting = self.cluster_waiting, []
            for _, wake in ready:
                self.timeline.at(now + self.gpu.cluster_barrier, wake)

    # -- mbarriers ---------------------------------------------------------------------------------

    def arrive(
        self, place: BarrierId, count: int, expect: int, by: str, track: str, now: float
    ) -> None:
        b = self.barriers[place]
        if count and not expect:
            b.by, b.track = by, track
        b.tx += expect
        b.pending -= count
        self.check(b, now)

    def bytes(self, place: BarrierId, size: int, by: str, now: float) -> None:
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
                    self.timeline.at(now + self.gpu.wake, self._woken(wake, b.track, now))

    def _woken(
        self, wake: Callable[[float], None], track: str, since: float
    ) -> Callable[[float], None]:
        def then(now: float) -> None:
            self.timeline.ended_by = (track, since)
            wake(now)
            self.timeline.ended_by = None

        return then
