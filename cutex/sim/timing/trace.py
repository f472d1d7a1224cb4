"""A functional run of a few clusters of a grid, recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cutex.sim.host.capture import HostTensor, Launch
from cutex.sim.isa.tensormap import MAP_BYTES, decode_map
from cutex.sim.machine.machine import Machine
from cutex.sim.machine.memory import PARAM_WINDOW
from cutex.sim.machine.pending_clusters import PendingClusters
from cutex.sim.machine.residency import SM_SMEM, SM_THREADS, Residency, residency
from cutex.sim.ptx.parse import Program
from cutex.sim.run import Simulation, _arguments, load
from cutex.sim.scheduler import Scheduler
from cutex.sim.timing.machine_code import Cost, costs, disassemble
from cutex.sim.timing.record import Enough, Load, Record, Recorder

SM_REGISTERS = 65536
SAMPLED_LOADS = 4  # of each CTA, to see what they share


@dataclass
class Sharing:
    """What CTAs that run at the same time load: bytes in all, and of different boxes."""

    loaded: float = 0.0
    different: float = 0.0

    @property
    def part(self) -> float:
        return self.different / self.loaded if self.loaded else 0.0


@dataclass
class Traced:
    """The record of one launch, and what is known of the whole grid."""

    record: Record
    grid: tuple[int, int, int]
    per_sm: int  # CTAs that an SM holds
    footprint: float  # bytes of all tensors that TMA loads
    sharing: Sharing
    name: str = ""

    @property
    def clusters(self) -> int:
        x, y, z = self.grid
        return x * y * z // self.record.cluster_size


class _Few(Simulation):
    """Simulates one cluster of each launch, until ``limit`` MMA FLOPs a CTA, after a look at the
    first loads of all that run side by side.
    """

    def __init__(
        self,
        programs: dict[str, Program],
        tensors: Sequence[HostTensor],
        cubin: bytes,
        registers: int,
        limit: float,
    ) -> None:
        super().__init__(programs, tensors)
        self.cost: dict[int, Cost] = costs(disassemble(cubin))
        self.registers, self.limit = registers, limit
        self.traced: list[Traced] = []
        self.all_at_once = False

    def launch(self, what: Launch) -> None:
        self.all_at_once = True
        self.sharing, self.footprint = Sharing(), 0.0
        super().launch(what)
        self.all_at_once = False
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
        machine.pending_clusters = PendingClusters([0])
        machine.load_clusters(machine.pending_clusters.start(1))
        recorder = Recorder(machine, self.cost, self.limit * what.cluster_size)
        complete = self._until_enough(scheduler, recorder)
        threads = 32 * what.warps_per_cta
        held = min(
            SM_THREADS // threads,
            SM_SMEM // (1024 + machine.static_smem + what.smem),
            SM_REGISTERS // (threads * max(self.registers, 16)),
        )
        self.traced.append(
            Traced(
                recorder.record(complete), what.grid, max(1, held), self.footprint, self.sharing,
                what.kernel,
            )
        )  # fmt: skip

    def _look_at_loads(self, scheduler: Scheduler, what: Launch) -> None:
        machine = scheduler.m
        if not any(i.op.startswith("cp.async.bulk.tensor") for i in machine.program.code):
            return
        count = machine.grid.num_ctas // what.cluster_size
        clusters = range(what.num_ctas // what.cluster_size)[:count]
        machine.pending_clusters = PendingClusters(list(clusters))
        machine.load_clusters(machine.pending_clusters.start(count))
        recorder = Recorder(machine, {}, enough_loads=SAMPLED_LOADS)
        self._until_enough(scheduler, recorder)
        boxes: dict[tuple[Any, ...], int] = {}
        for program in recorder.programs.values():
            loads = [e for e in program if isinstance(e, Load)]
            for load_ in loads[:SAMPLED_LOADS]:
                boxes[load_.source] = load_.size
                self.sharing.loaded += load_.size
        self.sharing.different = float(sum(boxes.values()))
        self.footprint = _footprint(machine, {source[0] for source in boxes})

    def _until_enough(self, scheduler: Scheduler, recorder: Recorder) -> bool:
        scheduler.recorder = recorder
        try:
            scheduler.run()
        except Enough:
            return False
        return True


def _footprint(machine: Machine, maps: set[int]) -> float:
    total = 0.0
    for address in maps:
        if address & PARAM_WINDOW:
            at = address & (PARAM_WINDOW - 1)
            tmap = decode_map(machine.params[at : at + MAP_BYTES].tobytes())
            size = float(tmap.itemsize)
            for n in tmap.dims[: tmap.rank]:
                size *= n
            total += size
    return total


def trace(
    compiled: Any,
    tensors: Sequence[Any],
    cubin: bytes,
    registers: int,
    arch: str,
    limit: float = 0.0,
) -> list[Traced]:
    """Records the first cluster of every launch of ``compiled`` on CPU tensors."""
    host, programs = load(compiled, tensors, arch)
    arguments = _arguments(compiled, host, tensors)
    reached = [a for a in arguments if isinstance(a, HostTensor)]
    few = _Few(programs, reached, cubin, registers, limit)
    host(arguments, few.launch)
    return few.traced
