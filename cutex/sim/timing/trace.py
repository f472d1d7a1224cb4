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
from cutex.sim.machine.residency import SM_SMEM, SM_THREADS, Residency, residency
from cutex.sim.ptx.parse import Program
from cutex.sim.run import Simulation
from cutex.sim.scheduler import Scheduler
from cutex.sim.timing.events import Event, Load, Record, Reply
from cutex.sim.timing.gpus import H200
from cutex.sim.timing.machine_code import ALU, FMA, MUFU, Cost, costs, disassemble
from cutex.sim.timing.record import Enough, Recorder

SM_REGISTERS = 65536
BESIDE = {FMA: H200.fma_beside_mma, ALU: H200.alu_beside_mma, MUFU: H200.mufu_beside_mma}
TMEM_COLUMNS = 512  # of an SM
MOST_LOADS = 24  # of each CTA, to see what they share
TOGETHER = 4  # loads of a tensor within which CTAs share a box: so far apart costs GEMMs nothing


@dataclass
class Sharing:
    """What CTAs that run at the same time load of one tensor: bytes in all, and of different boxes;
    ``footprint`` is the tensor's own.
    """

    loaded: float = 0.0
    different: float = 0.0
    footprint: float = 0.0

    @property
    def part(self) -> float:
        return self.different / self.loaded if self.loaded else 1.0


@dataclass
class Traced:
    """The record of one launch, and what is known of the whole grid."""

    record: Record
    grid: tuple[int, int, int]
    per_sm: int  # CTAs that an SM holds
    sharing: dict[int, Sharing]  # by tensor map
    name: str = ""

    @property
    def takes_over(self) -> bool:
        """Whether running clusters take over those that have not started."""
        programs = self.record.programs.values()
        return any(isinstance(e, Reply) for program in programs for e in program)

    @property
    def clusters(self) -> int:
        x, y, z = self.grid
        return x * y * z // self.record.cluster_size


class _Few(Simulation):
    """Simulates one cluster of each launch, until ``flops`` of MMAs a CTA, after a look at the
    first loads of all that run side by side.
    """

    def __init__(
        self,
        programs: dict[str, Program],
        tensors: Sequence[HostTensor],
        cubin: bytes,
        flops: float,
    ) -> None:
        super().__init__(programs, tensors)
        self.cost: dict[int, Cost] = costs(disassemble(cubin), BESIDE, H200.mufu_lost_beside_mma)
        self.registers, self.flops = Cubin(cubin).registers, flops
        self.traced: list[Traced] = []
        self.all_at_once = False

    def launch(self, what: Launch) -> None:
        self.record(what)
        self.look(what)

    def record(self, what: Launch) -> None:
        self.all_at_once = False
        super().launch(what)

    def look(self, what: Launch) -> None:
        self.all_at_once = True
        super().launch(what)

    def _residency(self, program: Program, what: Launch) -> Residency:
        if self.all_at_once:
            return residency(program, what)
        return Residency(what.cluster_size, "the clusters that are timed")

    def _run(self, scheduler: Scheduler, what: Launch) -> None:
        if self.all_at_once:
            self._look_at_loads(scheduler, what)
            return
        machine = scheduler.m
        clusters = what.num_ctas // what.cluster_size
        # NOTE: by cluster launch control the first takes what would be its share of all
        at_once = max(1, residency(machine.program, what).gpu_ctas // what.cluster_size)
        machine.pending_clusters = PendingClusters(list(range(0, clusters, at_once)))
        machine.load_clusters(machine.pending_clusters.start(1))
        recorder = Recorder(machine, self.cost, self.flops * what.cluster_size)
        try:
            complete = self._until_enough(scheduler, recorder)
        except Deadlock as error:  # NOTE: or one of its own, which the run for values tells
            if clusters == 1:
                raise
            raise ValueError(
                f"one cluster of {what.kernel} does not come to its end alone: what it waits for "
                "from others, by global memory, is nothing that the clock knows"
            ) from error
        threads = 32 * what.warps_per_cta
        held = min(
            SM_THREADS // threads,
            SM_SMEM // (1024 + machine.static_smem + what.smem),
            SM_REGISTERS // (threads * max(self.registers, 16)),
            TMEM_COLUMNS // recorder.columns if recorder.columns else SM_THREADS,
        )
        self.traced.append(
            Traced(
                recorder.record(complete), what.grid, max(1, held), {}, what.kernel
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
                for step in paths.get((tmap, int(machine.grid.warp_in_cta[warp])), [()]):
                    box = (tmap, *(x + dx for x, dx in zip_longest(at, step, fillvalue=0)))
                    boxes[box] = load_.size
                    sharing.loaded += load_.size
        for source, size in boxes.items():
            traced.sharing[source[0]].different += size
        for tmap, sharing in traced.sharing.items():
            sharing.footprint = _footprint(machine, tmap)

    def _until_enough(self, scheduler: Scheduler, recorder: Recorder) -> bool:
        scheduler.recorder = recorder
        try:
            scheduler.run()
        except Enough:
            return False
        return True


def _loads(program: list[Event]) -> list[Load]:
    """Those of tensors that TMA knows by a map."""
    return [e for e in program if isinstance(e, Load) and isinstance(e.source[0], int)]


def _paths(record: Record) -> dict[tuple[int, int], list[tuple[int, ...]]]:
    """By tensor and warp of a CTA, how far the recorded cluster's next loads are from its first."""
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


def _loads_that_tell(record: Record) -> int:
    """So many loads of a CTA that each tensor is among them."""
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
    """Bytes of the tensor of a map among the kernel's parameters; 0 of others."""
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
    """Records the first cluster of every launch of a call, until ``limit`` FLOPs of MMAs a CTA; 0:
    to its end. look: see what CTAs that run side by side share of their loads. Raises ValueError
    for a kernel whose machine code is not known.
    """
    few = _few(host, programs, regions, limit)
    host(arguments, few.launch if look else few.record)
    return few.traced


def _few(
    host: HostFunction,
    programs: dict[str, Program],
    regions: Sequence[HostTensor],
    limit: float = 0.0,
) -> _Few:
    if not host.cubin:
        raise ValueError("its cubin is not there, which tells what instructions cost")
    return _Few(programs, regions, host.cubin, limit)


def look_at(
    host: HostFunction,
    programs: dict[str, Program],
    arguments: list[Any],
    regions: Sequence[HostTensor],
    like: Traced,
) -> Traced:
    """A record of the same kernel with the grid of another call, and with what its CTAs share."""
    few = _few(host, programs, regions)

    def launch(what: Launch) -> None:
        few.traced.append(replace(like, grid=what.grid, sharing={}))
        few.look(what)

    host(arguments, launch)
    return few.traced[0]
