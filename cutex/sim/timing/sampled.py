"""The time of a grid whose clusters differ in an unknown way, for instance by a causal mask.

Where a grid has more clusters than run at one time, a few spread over it are recorded, and more if
those differ. Where none has MMAs (a fractal, rows of a sparse matrix) the instructions of many more
are counted instead, side by side, and the recorded ones tell what time those take. The time of each
other cluster is taken from those around it, and all are handed out in their order, each to the
first SMs that are free.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from cutex.sim.errors import SimError
from cutex.sim.host.capture import HostFunction, HostTensor, Launch
from cutex.sim.machine.batch import Batch
from cutex.sim.machine.events import Observer
from cutex.sim.machine.machine import Machine
from cutex.sim.machine.pending_clusters import PendingClusters
from cutex.sim.machine.residency import Residency
from cutex.sim.ptx.program import Program
from cutex.sim.scheduler import Scheduler
from cutex.sim.timing.contents import Contents
from cutex.sim.timing.events import Added, Fetched, Record, Work
from cutex.sim.timing.gpus import Gpu
from cutex.sim.timing.machine_code import Cost
from cutex.sim.timing.replay import Replay, Run
from cutex.sim.timing.timed import Timed
from cutex.sim.timing.trace import Few, Traced, machine_code
from cutex.sim.timing.traffic import (
    clusters_at_once,
    dram,
    fetched,
    loaded,
    narrow,
    shared,
    slices,
    stored,
    stream,
)
from cutex.sim.timing.units import Memory

FEW, MORE = 4, 16  # clusters that are recorded, and where those differ
ALIKE = 0.02  # relative difference in work below which clusters count as alike
COUNTED = 0.25  # the same above which their instructions tell their time
MANY = 256  # clusters whose instructions are counted
MOST_COUNTED = 4_000_000  # warp-instructions of all of these
MOST_STEPS = 2_000_000  # warp-instructions of all records, above which there are no more than FEW
TURN = (math.sqrt(5) - 1) / 2  # of the grid from one sample to the next: spread over any period
ROUNDS = 3  # of CTAs on an SM that are replayed


@dataclass
class Sampled:
    """The records of several clusters of one launch, by their number in the grid."""

    first: Traced  # of cluster 0, with what clusters share
    records: dict[int, Record]
    dynamic: bool = False  # clusters ask for tiles, so that all end at about the same time
    counted: dict[int, float] = field(default_factory=dict)  # issue slots of many clusters

    @property
    def record(self) -> Record:
        """The record with most work."""
        return max(self.records.values(), key=work)

    @property
    def name(self) -> str:
        return self.first.name

    @property
    def overlaps(self) -> bool:
        return self.first.overlaps

    @property
    def stack(self) -> int:
        return self.first.stack

    @property
    def clusters(self) -> int:
        return self.first.clusters

    def everywhere(self, values: Sequence[float]) -> np.ndarray:
        """For each cluster of the grid (CLUSTERS) a value, linear between those of the samples."""
        numbers = sorted(self.records)
        by_number = dict(zip(self.records, values, strict=True))
        return np.interp(range(self.clusters), numbers, [by_number[n] for n in numbers])

    def mean(self, values: Sequence[float]) -> float:
        return float(self.everywhere(values).mean())

    def fetched(self) -> dict[int, Fetched]:
        """What a cluster fetches of each tensor, in the mean. Of the tensor counts what lies
        between the first and the last byte that any of the records fetches."""
        records, means = list(self.records.values()), {}
        for at in dict.fromkeys(at for r in records for at in r.fetched):
            found = [r.fetched.get(at, Fetched(0.0, 0.0, 0.0)) for r in records]
            most = max(found, key=lambda f: f.loaded)
            loaded = self.mean([f.loaded for f in found])
            part = loaded / most.loaded if most.loaded else 0.0
            again = tuple((between, part * size) for between, size in most.again)
            spans = [f.span for f in found if f.loaded] or [(0.0, 0.0)]
            span = max(end for _, end in spans) - min(begin for begin, _ in spans)
            different = self.mean([f.different for f in found])
            means[at] = Fetched(loaded, different, min(most.size, span), again)
        return means

    def added(self) -> Added:
        """The lines that a cluster adds to, in the mean, between the first and the last of all; it
        spans them all where those of later clusters are not further on.
        """
        found = [r.added for _, r in sorted(self.records.items())]
        some = [a for a in found if a.lines] or found
        first, end = min(a.first for a in some), max(a.end for a in some)
        lines, span = self.mean([a.lines for a in found]), self.mean([a.span for a in found])
        if any(later.first < a.first for a, later in pairwise(some)):
            span = float(end - first)
        return Added(lines, first, end, span)

    def times(self, each: Sequence[float]) -> np.ndarray:
        """For each cluster of the grid its cycles, by those of the records; by its issue slots,
        where many were counted: linear between and beyond the records."""
        if not self.counted:
            return self.everywhere(each)
        amounts = np.array([work(r) for r in self.records.values()])
        slope, start = np.polyfit(amounts, each, 1)
        numbers = sorted(self.counted)
        slots = np.interp(range(self.clusters), numbers, [self.counted[n] for n in numbers])
        least = min(each) * np.minimum(1.0, slots / amounts.min())
        return np.maximum(start + slope * slots, least)


def work(record: Record) -> float:
    """The amount of work of a cluster: MMA FLOPs, or issue slots where there are none."""
    if record.flops:
        return record.flops
    every = (e for program in record.programs.values() for e in program)
    return sum(e.slots for e in every if isinstance(e, Work))


def numbers(clusters: int, count: int) -> list[int]:
    """The numbers of ``count`` clusters of a grid, or of all, with the first and the last among
    them.
    """
    spread = (int((n * TURN) % 1 * clusters) for n in range(1, 3 * count))
    return list(dict.fromkeys((0, clusters - 1, *spread)))[:count]


class Sampler(Few):
    """Records one cluster of each launch, and several where those of a grid differ; each finds
    memory as it was before the call.
    """

    def __init__(
        self,
        programs: dict[str, Program],
        tensors: Sequence[HostTensor],
        cubin: bytes,
    ) -> None:
        super().__init__(programs, tensors, cubin, 0.0)
        self.before = Contents(tensors)
        self.counting: list[int] = []  # clusters that run side by side, for their instructions
        self.found: list[Traced | Sampled] = []

    def record(self, what: Launch, number: int = 0) -> Record:
        self.before.restore()
        return super().record(what, number)

    def count(self, what: Launch, most: int) -> dict[int, float]:
        """The issue slots of so many clusters, which run side by side, by their number; none where
        they cannot."""
        self.before.restore()
        self.counting = numbers(what.num_ctas // what.cluster_size, most)
        try:
            super(Few, self).launch(what)
            return dict(zip(self.counting, self.slots.tolist(), strict=True))
        finally:
            self.counting = []

    def _residency(self, program: Program, what: Launch) -> Residency:
        if self.counting:
            return Residency(
                len(self.counting) * what.cluster_size, "the clusters that are counted"
            )
        return super()._residency(program, what)

    def _run(self, scheduler: Scheduler, what: Launch) -> None:
        if not self.counting:
            super()._run(scheduler, what)
            return
        machine = scheduler.m
        machine.pending_clusters = PendingClusters(self.counting)
        machine.load_clusters(machine.pending_clusters.start(len(self.counting)))
        slots = Slots(machine, self.cost)
        machine.observe(slots)
        scheduler.run()
        self.slots = slots.by_warp.reshape(len(self.counting), -1).sum(1)

    def see(self, what: Launch) -> None:
        super().see(what)
        first = self.traced[-1]
        self.found.append(first)
        if first.takes_over:
            return
        dynamic = bool(self.counters)
        records, counted = {0: first.record}, {}
        # NOTE: some clusters cannot run without those before them, as where they wait their turn
        with suppress(SimError):
            for count in (FEW, MORE):
                for number in numbers(first.clusters, count):
                    steps = sum(r.steps for r in records.values())
                    if number not in records and (len(records) < FEW or steps < MOST_STEPS):
                        records[number] = self.record(what, number)
                amounts = [work(r) for r in records.values()]
                if max(amounts) <= (1 + ALIKE) * min(amounts):
                    alike = Sampled(first, records, dynamic)
                    first.record.fetched, first.record.added = alike.fetched(), alike.added()
                    return
                largest = max(r.steps for r in records.values())
                most = min(first.clusters, MANY, MOST_COUNTED // largest)
                differ = max(amounts) > (1 + COUNTED) * min(amounts)
                if differ and most > MORE and not any(r.flops for r in records.values()):
                    with suppress(SimError):
                        counted = self.count(what, most)
                        break
            self.found[-1] = Sampled(first, records, dynamic, counted)
            # NOTE: clusters of other lengths begin at other places, as at the end of a causal row
            self.in_step, first.sharing = False, {}
            self.look(what)
            self.in_step = True


class Slots(Observer):
    """Adds up the issue slots of each warp."""

    def __init__(self, machine: Machine, costs: Mapping[int, Cost]) -> None:
        code = machine.program.code
        every = [costs.get(ins.line) for ins in code]
        self.cost = np.array([cost.slots if cost else 0.0 for cost in every])
        self.by_warp = np.zeros(machine.grid.num_warps)

    def executing(self, batch: Batch, pc: int) -> None:
        self.by_warp[batch.idx] += self.cost[pc]


def sample(
    host: HostFunction,
    programs: dict[str, Program],
    arguments: list[Any],
    regions: Sequence[HostTensor],
) -> list[Traced | Sampled]:
    """Record every launch of a call, and put back what ``regions`` held. Raises ValueError for a
    kernel whose machine code is not known.
    """
    sampler = Sampler(programs, regions, machine_code(host))
    try:
        host(arguments, sampler.see)
    finally:
        sampler.before.restore()
    return sampler.found


def predict_sampled(sampled: Sampled, gpu: Gpu, log: bool = False) -> Timed:
    """Return the cycles of the whole grid."""
    first, count = sampled.first, sampled.clusters
    size = first.record.cluster_size
    groups = clusters_at_once(gpu, size)
    slots = min(first.per_sm, math.ceil(count / groups))
    records = list(sampled.records.values())
    loads = [loaded(r) for r in records]
    tensors = dict.fromkeys(tmap for of in loads for tmap in of)
    by_tensor = {t: count * sampled.mean([of.get(t, 0.0) for of in loads]) for t in tensors}
    total = sum(by_tensor.values())
    missed = dram(first, by_tensor, gpu)
    busy_sms = min(count, groups) * size
    mean = replace(first.record, fetched=sampled.fetched(), added=sampled.added())
    as_the_mean = replace(first, record=mean)
    memory = Memory(
        missed / total if total else 1.0, busy_sms, shared(first, by_tensor),
        fetched=fetched(as_the_mean, gpu), stream=stream(gpu, busy_sms),
        ahead=gpu.l2_ahead, slices=slices(as_the_mean, gpu),
    )  # fmt: skip
    for at, miss in memory.fetched.items():
        found = [r.fetched[at].loaded if at in r.fetched else 0.0 for r in records]
        total += count * sampled.mean(found)
        missed += count * sampled.mean(found) * miss.all

    def runs_of(apart: Sequence[float], log: bool = False) -> list[Run]:
        rounds = ROUNDS * slots
        return [
            Replay(
                r, gpu, memory, rounds=rounds, slots=slots, apart=by,
                log=log and r is sampled.record,
            ).run()
            for r, by in zip(records, apart, strict=True)
        ]  # fmt: skip

    runs = runs_of([0.0] * len(records), log and slots == 1)
    if slots > 1:  # NOTE: CTAs that start together would all wait for memory at the same time
        runs = runs_of([_each(run, slots) / slots for run in runs], log)
    each = [_each(run, slots) for run in runs]
    times = sampled.times(each)
    longest = runs[records.index(sampled.record)]
    drained = max(0.0, longest.stores_end - longest.end)
    detailed = sum(run.end for run in runs)
    end = _handed_out(times, groups * slots)
    if sampled.dynamic:  # NOTE: between the mean, and what it would be if each asked as often
        end = (end + float(times.sum()) / min(count, groups * slots)) / 2
    return Timed(
        cycles=end + drained + gpu.launch,
        detailed=longest.end,
        busy=_part([run.units for run in runs], detailed),
        worked=_part([run.worked for run in runs], detailed),
        waited={
            role: _part([run.waits.get(role, {}) for run in runs], detailed)
            for role in dict.fromkeys(role for run in runs for role in run.waits)
        },
        intervals=longest.intervals,
        miss=memory.miss,
        rounds=math.ceil(count / groups),
        flops=count * sampled.mean([r.flops for r in records]),
        narrow=narrow(first.record),
        loaded=total,
        stored=count * sampled.mean([stored(r) for r in records]),
        written=count * sampled.mean([stored(r, added=False) for r in records]),
        dram=missed,
        side_by_side=slots,
        sampled=(len(records), count),
        sampling_error=float(np.std(each) / np.mean(each) / len(each) ** 0.5),
    )


def _each(run: Run, slots: int) -> float:
    """Cycles from the start of a cluster to that of the next one on the same SMs."""
    starts = sorted(run.starts)
    return (starts[-1] - starts[slots - 1]) / (len(starts) / slots - 1)


def _handed_out(times: np.ndarray, workers: int) -> float:
    """The end of the last of ``workers``, where the first free one takes the next cluster."""
    free = [0.0] * min(workers, len(times))
    for cycles in times.tolist():
        heapq.heapreplace(free, free[0] + cycles)
    return max(free)


def _part(parts: Sequence[dict[str, float]], whole: float) -> dict[str, float]:
    """The shares of ``parts`` in ``whole``, summed up by name."""
    total: dict[str, float] = defaultdict(float)
    for part in parts:
        for name, cycles in part.items():
            total[name] += cycles
    return {name: cycles / whole for name, cycles in total.items()}
