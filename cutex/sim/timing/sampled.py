"""The time of a grid whose clusters differ in an unknown way, for instance by a causal mask.

Where a grid has more clusters than run at one time, a few spread over it are recorded, and more if
those differ. The time of each other cluster is taken from the recorded ones around it, and all are
handed out in their order, each to the first SMs that are free.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from cutex.sim.errors import SimError
from cutex.sim.host.capture import HostFunction, HostTensor, Launch
from cutex.sim.ptx.program import Program
from cutex.sim.timing.contents import Contents
from cutex.sim.timing.events import Record, Work
from cutex.sim.timing.gpus import Gpu
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
    stored,
    stream,
)
from cutex.sim.timing.units import Memory

FEW, MORE = 4, 16  # clusters that are recorded, and where those differ
ALIKE = 0.02  # relative difference in work below which clusters count as alike
MOST_STEPS = 2_000_000  # warp-instructions of all records, above which there are no more than FEW
TURN = (math.sqrt(5) - 1) / 2  # of the grid from one sample to the next: spread over any period
ROUNDS = 3  # of CTAs on an SM that are replayed


@dataclass
class Sampled:
    """The records of several clusters of one launch, by their number in the grid."""

    first: Traced  # of cluster 0, with what clusters share
    records: dict[int, Record]
    dynamic: bool = False  # clusters ask for tiles, so that all end at about the same time

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
        self.found: list[Traced | Sampled] = []

    def record(self, what: Launch, number: int = 0) -> Record:
        self.before.restore()
        return super().record(what, number)

    def see(self, what: Launch) -> None:
        super().see(what)
        first = self.traced[-1]
        self.found.append(first)
        if first.takes_over:
            return
        dynamic = bool(self.counters)
        records = {0: first.record}
        # NOTE: some clusters cannot run without those before them, as where they wait their turn
        with suppress(SimError):
            for count in (FEW, MORE):
                for number in numbers(first.clusters, count):
                    steps = sum(r.steps for r in records.values())
                    if number not in records and (len(records) < FEW or steps < MOST_STEPS):
                        records[number] = self.record(what, number)
                amounts = [work(r) for r in records.values()]
                if max(amounts) <= (1 + ALIKE) * min(amounts):
                    return
            self.found[-1] = Sampled(first, records, dynamic)
            # NOTE: clusters of other lengths begin at other places, as at the end of a causal row
            self.in_step, first.sharing = False, {}
            self.look(what)
            self.in_step = True


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
    memory = Memory(
        missed / total if total else 1.0, busy_sms, shared(first, by_tensor),
        fetched=fetched(first, gpu), stream=stream(gpu, busy_sms), ahead=gpu.l2_ahead,
    )  # fmt: skip
    for at, miss in memory.fetched.items():
        found = [r.fetched[at].loaded if at in r.fetched else 0.0 for r in records]
        total += count * sampled.mean(found)
        missed += count * sampled.mean(found) * miss.all
    runs = [
        Replay(r, gpu, memory, rounds=ROUNDS * slots, slots=slots, log=log and r is sampled.record)
        .run()
        for r in records
    ]  # fmt: skip
    each = [_each(run, slots) for run in runs]
    times = sampled.everywhere(each)
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
