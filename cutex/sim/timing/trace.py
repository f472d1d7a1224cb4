"""A functional run of a few clusters of a grid, recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from cutex.cubin import Cubin
from cutex.sim.errors import Deadlock
from cutex.sim.host.capture import HostFunction, HostTensor, Launch
from cutex.sim.isa.tensormap import MAP_BYTES, decode_map
from cutex.sim.machine.machine import Machine
from cutex.sim.machine.memory import PARAM_WINDOW
from cutex.sim.machine.pending_clusters import PendingClusters
from cutex.sim.machine.residency import Residency, gpu_of, held, residency
from cutex.sim.ptx.program import Program
from cutex.sim.scheduler import Scheduler
from cutex.sim.simulation import Simulation
from cutex.sim.timing.counters import Counter, SharedCounters
from cutex.sim.timing.events import Event, Load, Record, Reply
from cutex.sim.timing.gpus import H200
from cutex.sim.timing.machine_code import ALU, FMA, MUFU, Cost, costs, disassemble
from cutex.sim.timing.record import Enough, Recorder
from cutex.sim.timing.regions import loops as loops_of

SM_L1 = 256 << 10  # bytes, of which shared memory is a part
BESIDE = {FMA: H200.fma_beside_mma, ALU: H200.alu_beside_mma, MUFU: H200.mufu_beside_mma}
LETS_START = "griddepcontrol.launch_dependents"
MOST_LOADS = 24  # loads of each CTA that are recorded, to see which boxes CTAs share
TOGETHER = 4  # loads of a tensor within which CTAs share a box: GEMMs lose nothing so far apart


@dataclass
class Sharing:
    """The bytes that CTAs load of one tensor at the same time: of all loads, and of different
    boxes. ``footprint`` is the size of the tensor in bytes.
    """

    loaded: float = 0.0
    different: float = 0.0
    footprint: float = 0.0

    @property
    def part(self) -> float:
        return self.different / self.loaded if self.loaded else 1.0


@dataclass
class Traced:
    """The record of one launch, with its grid and the sharing of loads between CTAs."""

    record: Record
    grid: tuple[int, int, int]
    per_sm: int  # resident CTAs of an SM
    sharing: dict[int, Sharing]  # by tensor map
    name: str = ""
    overlaps: bool = False  # whether it starts before one like it, launched before, has ended
    stack: int = 0  # bytes of a thread: spilled registers, and arrays that are not in registers

    @property
    def takes_over(self) -> bool:
        """Whether running clusters take over work of those that have not started (launch
        control)."""
        programs = self.record.programs.values()
        return any(isinstance(e, Reply) for program in programs for e in program)

    @property
    def clusters(self) -> int:
        x, y, z = self.grid
        return x * y * z // self.record.cluster_size


class Few(Simulation):
    """Simulates one cluster of each launch, until ``flops`` MMA FLOPs of each CTA, and then the
    first loads of all CTAs that run side by side.
    """

    def __init__(
        self,
        programs: dict[str, Program],
        tensors: Sequence[HostTensor],
        cubin: bytes,
        flops: float,
    ) -> None:
        super().__init__(programs, tensors)
        loops = {
            ins.line: inside
            for program in programs.values()
            for ins, inside in zip(program.code, loops_of(program.code), strict=True)
        }
        self.cost: dict[int, Cost] = costs(
            disassemble(cubin), BESIDE, H200.mufu_lost_beside_mma, loops
        )
        self.machine_code, self.flops = cubin, flops
        self.traced: list[Traced] = []
        self.all_at_once, self.number = False, 0
        self.counters: set[Counter] = set()  # that cluster 0 takes tiles from
        self.in_step = True  # CTAs count as sharing a box only if they load it at the same time

    def record_only(self, what: Launch) -> None:
        self.record(what)

    def see(self, what: Launch) -> None:
        """Record a launch, and the loads that its CTAs share."""
        self.record(what)
        self.look(what)

    def record(self, what: Launch, number: int = 0) -> Record:
        """The record of the cluster of that number."""
        self.all_at_once, self.number = False, number
        super().launch(what)
        traced = self.traced[-1] if number == 0 else self.traced.pop()
        return traced.record

    def look(self, what: Launch) -> None:
        self.all_at_once = True
        super().launch(what)

    def _residency(self, program: Program, what: Launch) -> Residency:
        if self.all_at_once:
            return residency(program, what)
        return Residency(what.cluster_size, "the clusters that are timed")

    def tiles_of(self, clusters: int, at_once: int) -> list[int]:
        """The recorded cluster's number, and those that it takes over where there is launch
        control: its share of all tiles."""
        return list(range(self.number, clusters, at_once))

    def _run(self, scheduler: Scheduler, what: Launch) -> None:
        if self.all_at_once:
            self._look_at_loads(scheduler, what)
            return
        machine = scheduler.m
        clusters = what.num_ctas // what.cluster_size
        at_once = max(1, residency(machine.program, what).gpu_ctas // what.cluster_size)
        machine.pending_clusters = PendingClusters(self.tiles_of(clusters, at_once))
        machine.load_clusters(machine.pending_clusters.start(1))
        counters = None
        if 1 < clusters <= at_once:
            known = self.counters if self.number else ()
            counters = SharedCounters(machine, clusters - 1, self.number, known)
        gpu, warps = gpu_of(machine.program), what.warps_per_cta
        cubin, smem = Cubin(self.machine_code, what.kernel), machine.static_smem + what.smem
        most, _ = held(gpu, warps, smem, cubin.registers)
        beside = max(1, min(most, -(-what.num_ctas // gpu.num_sms)))
        recorder = Recorder(
            machine, self.cost, self.flops * what.cluster_size, counters=counters,
            l1=SM_L1 / beside - 1024 - smem,
        )  # fmt: skip
        try:
            complete = self._until_enough(scheduler, recorder)
        except Deadlock as error:  # NOTE: or one of its own, which the run for values tells
            if clusters == 1:
                raise
            raise ValueError(
                f"one cluster of {machine.program.title} does not come to its end alone: what it "
                "waits for from others, by global memory, is nothing that the clock knows"
            ) from error
        if self.number == 0:
            self.counters = counters.asked_again if counters else set()
        most, _ = held(gpu, warps, smem, cubin.registers, recorder.columns)
        self.traced.append(
            Traced(
                recorder.record(complete), what.grid, max(1, most), {}, machine.program.title,
                what.programmatic and any(i.op == LETS_START for i in machine.program.code),
                cubin.stack_bytes,
            )
        )  # fmt: skip

    def _look_at_loads(self, scheduler: Scheduler, what: Launch) -> None:
        machine, traced = scheduler.m, self.traced[-1]
        most = _loads_that_tell(traced.record)
        if not most:
            return
        count = machine.grid.num_ctas // what.cluster_size
        clusters = range(what.num_ctas // what.cluster_size)[:count]
        machine.pending_clusters = PendingClusters(list(clusters))
        machine.load_clusters(machine.pending_clusters.start(count))
        recorder = Recorder(machine, {}, enough_loads=most)
        self._until_enough(scheduler, recorder)
        boxes: dict[tuple[Any, ...], int] = {}
        paths = _paths(traced.record)
        for warp, program in recorder.programs.items():
            first = {load_.source[0]: load_ for load_ in reversed(_loads(program)[:most])}
            for tmap, load_ in first.items():
                _, *at = load_.source
                sharing = traced.sharing.setdefault(tmap, Sharing())
                path = paths.get((tmap, int(machine.grid.warp_in_cta[warp])), [()])
                for box in _boxes(at, path, self.in_step):
                    boxes[(tmap, *box)] = load_.size
                    sharing.loaded += load_.size
        for source, size in boxes.items():
            traced.sharing[source[0]].different += size
        for tmap, sharing in traced.sharing.items():
            sharing.footprint = _footprint(machine, tmap)

    def _until_enough(self, scheduler: Scheduler, recorder: Recorder) -> bool:
        scheduler.m.observe(recorder)
        try:
            scheduler.run()
        except Enough:
            return False
        return True


def _loads(program: list[Event]) -> list[Load]:
    """The loads by tensor map of a program."""
    return [e for e in program if isinstance(e, Load) and isinstance(e.source[0], int)]


def _paths(record: Record) -> dict[tuple[int, int], list[tuple[int, ...]]]:
    """Return, by tensor and warp of a CTA, the offsets of the recorded cluster's next boxes from
    its first.
    """
    paths: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for warp, program in record.programs.items():
        by_tensor: dict[int, list[tuple[int, ...]]] = {}
        for load_ in _loads(program):
            by_tensor.setdefault(load_.source[0], []).append(load_.source[1:])
        for tmap, found in by_tensor.items():
            steps = [
                tuple(x - first for x, first in zip(at, found[0], strict=True))
                for at in found[:TOGETHER]
            ]
            paths.setdefault((tmap, record.place[warp]), steps)
    return paths


def _boxes(
    first: Sequence[int], path: Sequence[tuple[int, ...]], in_step: bool
) -> list[tuple[int, ...]]:
    """The boxes at ``first`` and along ``path``; if not ``in_step``, with their number on the path
    instead of the coordinates that change along it, for CTAs that walk the same way from elsewhere.
    """
    if in_step:
        return [tuple(x + dx for x, dx in zip_longest(first, by, fillvalue=0)) for by in path]
    stays = [x for x, *by in zip_longest(first, *path, fillvalue=0) if not any(by)]
    return [(n, *stays) for n in range(len(path))]


def _loads_that_tell(record: Record) -> int:
    """The number of loads of a CTA among which is one of each tensor; at most MOST_LOADS."""
    most = 0
    for program in record.programs.values():
        loads = _loads(program)
        first: dict[int, int] = {}
        for i, load_ in enumerate(loads):
            first.setdefault(load_.source[0], i)
        again = [i for i, e in enumerate(loads) if first and i > max(first.values())]
        tells = (again[0] if again else len(loads)) if first else 0
        most = max(most, tells)
    return min(most, MOST_LOADS)


def _footprint(machine: Machine, address: int) -> float:
    """Bytes of the tensor of a map among the kernel's parameters; 0 for other addresses."""
    if not address & PARAM_WINDOW:
        return 0.0
    at = address & (PARAM_WINDOW - 1)
    tmap = decode_map(machine.params[at : at + MAP_BYTES].tobytes())
    size = float(tmap.itemsize)
    for n in tmap.dims[: tmap.rank]:
        size *= n
    return size


def trace(
    host: HostFunction,
    programs: dict[str, Program],
    arguments: list[Any],
    regions: Sequence[HostTensor],
    limit: float = 0.0,
    look: bool = True,
) -> list[Traced]:
    """Record the first cluster of every launch of a call, until ``limit`` MMA FLOPs of each CTA; 0:
    to its end.

    look: record also which loads CTAs that run side by side share. Raises ValueError for a kernel
    without a cubin.
    """
    few = _few(host, programs, regions, limit)
    host(arguments, few.see if look else few.record_only)
    return few.traced


def _few(
    host: HostFunction,
    programs: dict[str, Program],
    regions: Sequence[HostTensor],
    limit: float = 0.0,
) -> Few:
    return Few(programs, regions, machine_code(host), limit)


def machine_code(host: HostFunction) -> bytes:
    """Return the cubin, which has the costs of instructions. Raises ValueError where there is
    none."""
    if not host.cubin:
        raise ValueError("its cubin is not there, which tells what instructions cost")
    return host.cubin


def look_at(
    host: HostFunction,
    programs: dict[str, Program],
    arguments: list[Any],
    regions: Sequence[HostTensor],
    like: Traced,
) -> Traced:
    """Return a copy of the record ``like`` with the grid of another call and the sharing of its
    loads.
    """
    few = _few(host, programs, regions)

    def launch(what: Launch) -> None:
        few.traced.append(replace(like, grid=what.grid, sharing={}))
        few.look(what)

    host(arguments, launch)
    return few.traced[0]
