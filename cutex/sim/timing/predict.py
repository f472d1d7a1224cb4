"""From the record of a few clusters to the time of the grid."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from cutex.sim.timing.gpus import Gpu
from cutex.sim.timing.record import Load, Store, Touch
from cutex.sim.timing.replay import Replay, Run
from cutex.sim.timing.trace import Traced
from cutex.sim.timing.units import Interval, Memory


@dataclass(frozen=True)
class Whole:
    """What the whole grid has to do, where the kernel does not say: MMA FLOPs, and those of one
    CTA for one output tile; 0: not known, the record is of all that a cluster does.
    """

    flops: float = 0.0
    tile_flops: float = 0.0


@dataclass
class Timed:
    """Cycles of one launch, and where they went."""

    cycles: float
    detailed: float  # cycles that were replayed event by event
    busy: dict[str, float]  # part of the replayed time, by unit of an SM
    worked: dict[str, float]  # part of the replayed time, by role
    waited: dict[str, dict[str, float]]  # the same, by role and what for
    intervals: list[Interval] = field(default_factory=list)
    miss: float = 0.0
    rounds: int = 1
    flops: float = 0.0
    loaded: float = 0.0  # bytes through L2
    stored: float = 0.0
    dram: float = 0.0
    side_by_side: int = 1  # CTAs of an SM

    @property
    def binds(self) -> str:
        return max(self.busy, key=lambda u: self.busy[u])


def predict(
    traced: Traced,
    gpu: Gpu,
    whole: Whole | None = None,
    log: bool = False,
    most_rounds: int = 0,
) -> Timed:
    """Cycles of the SM's clock, from the end of the kernel before to the end of this one.

    log: keep what happened when, in ``intervals``. most_rounds: of CTAs on an SM, for a picture; 0
        for all, without which the cycles are not those of the grid.
    """
    whole = whole or Whole()
    record = traced.record
    size = record.cluster_size
    groups = gpu.sms // size
    if size == 4 and gpu.clusters_of_four:
        groups = min(groups, gpu.clusters_of_four)
    slots = min(traced.per_sm, math.ceil(traced.clusters / groups))
    rounds = math.ceil(traced.clusters / groups)
    workers = traced.clusters
    if traced.takes_over:
        rounds, workers = 1, min(groups * traced.per_sm, traced.clusters)
    busy_sms = min(traced.clusters, groups) * size
    share = work = 0.0
    if whole.flops:  # of the busiest cluster
        work = whole.flops / workers
        if whole.tile_flops:
            tiles = math.ceil(whole.flops / whole.tile_flops / workers / size - 1e-9)
            work = tiles * whole.tile_flops * size
        share = work / record.flops if record.flops else 1.0
    extended = bool(share) and not record.complete
    times = (share if extended else 1.0) * workers
    loads, stores = _sum(traced, Load) * times, _sum(traced, Store, Touch) * times
    dram = _dram(traced, times, gpu)
    memory = Memory(dram / loads if loads else 1.0, busy_sms, _shared(traced))
    turns = 1 if extended else min(rounds, most_rounds or rounds)
    replay = Replay(record, gpu, memory, rounds=turns, slots=slots, log=log)
    run = replay.run()
    cycles = run.end
    if extended:
        cycles = _extended(run, work, whole.tile_flops * size, record.flops)
    drained = max(0.0, run.stores_end - run.end) if not extended else 0.0
    return Timed(
        cycles=cycles + drained + gpu.launch,
        detailed=run.end,
        busy={u: b / run.end for u, b in run.units.items()},
        worked={r: w / run.end for r, w in run.worked.items()},
        waited={r: {k: v / run.end for k, v in w.items()} for r, w in run.waits.items()},
        intervals=run.intervals,
        miss=memory.miss,
        rounds=rounds,
        flops=whole.flops or record.flops * traced.clusters,
        loaded=loads,
        stored=stores,
        dram=dram,
        side_by_side=slots,
    )


def _extended(run: Run, work: float, tile: float, recorded: float) -> float:
    """The end of a cluster that does ``work`` FLOPs, from the steady part of its record."""
    first = tile or recorded / 4
    last = math.floor(recorded / tile) * tile if tile else recorded
    a = _when(run, first)
    b = _when(run, last)
    rate = (last - first) / (b - a)
    drain = run.drain if run.drain else 0.0
    return b + (work - last) / rate + drain


def _when(run: Run, flops: float) -> float:
    for at, done in run.mma:
        if done >= flops * (1 - 1e-9):
            return at
    return run.mma[-1][0]


def _sum(traced: Traced, *kinds: type) -> float:
    """Bytes that a cluster moves."""
    total = 0.0
    for program in traced.record.programs.values():
        for e in program:
            if not isinstance(e, kinds):
                continue
            if isinstance(e, Touch):
                total += 0.0 if e.waits else 32 * e.sectors
            elif isinstance(e, Load | Store):
                total += e.size
    return total


def _shared(traced: Traced) -> float:
    """Part of the bytes that a cluster loads which another asks for at the same time."""
    loaded = sum(s.loaded for s in traced.sharing.values())
    different = sum(s.different for s in traced.sharing.values())
    return 1.0 - different / loaded if loaded else 0.0


def _dram(traced: Traced, times: float, gpu: Gpu) -> float:
    """Bytes that loads bring from memory, ``times`` a cluster's record: each tensor once if L2
    holds them all, else what CTAs that run side by side do not share, again for each round.
    """
    loads: dict[int, float] = defaultdict(float)
    for program in traced.record.programs.values():
        for e in program:
            if isinstance(e, Load):
                loads[e.source[0]] += e.size * times
    footprint = sum(s.footprint for s in traced.sharing.values())
    total = 0.0
    for tmap, size in loads.items():
        sharing = traced.sharing.get(tmap)
        if sharing is None:  # as the best shared of those that were seen
            total += size * min((s.part for s in traced.sharing.values()), default=1.0)
            continue
        least = min(sharing.footprint or size, size)
        again = min(size, sharing.part * size) if footprint > gpu.l2_capacity else 0.0
        total += max(least, again)
    return total
