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

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from cutex.sim.timing.events import Event, Record, Store, Wait
from cutex.sim.timing.gpus import Gpu
from cutex.sim.timing.timeline import RunningCluster, Timeline
from cutex.sim.timing.units import Interval, Memory
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


class Replay(Timeline):
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
        super().__init__(record, gpu, memory, log=log)
        self.rounds, self.slots, self.apart = rounds, slots, apart
        self.starts: list[float] = []  # of clusters
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
                self.start(0, slot, slot * self.apart)
        self.play()
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

    def start(self, which: int, slot: int, now: float) -> None:
        """Start a cluster with the programs of recorded cluster `which`."""
        self.starts.append(now)
        cluster = RunningCluster(self, self.programs_of[which], slot, self.ended)
        for number, program in cluster.programs.items():
            self.left += 1
            self.at(now, Warp(cluster, number, program).go)

    def ended(self, now: float, slot: int) -> None:
        """Start the next cluster in ``slot``, whose cluster has left its SMs."""
        if self.queue:
            self.queue.popleft()
            which = (self.rounds - len(self.queue)) % len(self.programs_of)
            at = max(now + self.gpu.cta_turnover, self.starts[-1] + self.gpu.cta_interval)
            self.start(which, slot, at)


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
