"""The launches of one call, run on a CPU one after another, and the report of them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from threadpoolctl import ThreadpoolController

from cutex.sim import division, sampling, unreached
from cutex.sim.errors import CooperativeTooLarge, Deadlock, SimError
from cutex.sim.finding import Finding
from cutex.sim.hazards.checks import Checks
from cutex.sim.hazards.cluster_order import orders_clusters
from cutex.sim.hazards.global_marks import Touched
from cutex.sim.hazards.grid_order import Stream
from cutex.sim.host.capture import HostTensor, Launch
from cutex.sim.machine.banks import BankConflicts
from cutex.sim.machine.findings import Findings
from cutex.sim.machine.machine import Machine
from cutex.sim.machine.memory import MODULE_WINDOW, GlobalMemory, Region
from cutex.sim.machine.pending_clusters import PendingClusters
from cutex.sim.machine.residency import Residency, gpu_of, residency
from cutex.sim.machine.sectors import GlobalSectors
from cutex.sim.policy import policy
from cutex.sim.ptx.program import Instruction, Program
from cutex.sim.reports import as_text, folded, headed, is_cause
from cutex.sim.resources import KernelResources, resources
from cutex.sim.sampling import Sampled
from cutex.sim.scheduler import Scheduler
from cutex.sim.sides import sides_of
from cutex.tracing import uncollected

if TYPE_CHECKING:
    from cutex.sim.timing.report import TimeReport


_CLUSTER_CTAS = 16  # more than 8 are a size that is not portable
# the most CTAs of a grid and threads of a CTA (CUDA C++ Programming Guide, Compute Capabilities)
_GRID, _BLOCK = ((1 << 31) - 1, 65535, 65535), (1024, 1024, 64)
_TIME_OUTS = 4  # of each try_wait: more than the tries of a wait that does not come back


@dataclass
class SimReport:
    """The outcome of a simulated run. ``instructions`` counts warp-instructions, ``counts`` the
    same by opcode; ``advisories`` break the letter of the PTX ISA, and are no failure.
    """

    findings: list[Finding] = field(default_factory=list)
    advisories: list[Finding] = field(default_factory=list)
    instructions: int = 0
    launches: int = 0
    ctas: int = 0
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    times: list[TimeReport] = field(default_factory=list)  # one for each launch, with ``time``
    kernels: dict[str, KernelResources] = field(default_factory=dict)  # where asked for
    # if only some clusters of a launch were simulated: which launches, and which elements of each
    # tensor of up to 64 MB were written
    sampled: list[Sampled] = field(default_factory=list)
    written: dict[str, np.ndarray] = field(default_factory=dict)
    unwatched: list[str] = field(default_factory=list)  # where no races were looked for, and why
    rings: dict[str, tuple[int, int]] = field(default_factory=dict)  # slots, most phases of one

    @property
    def unwrapped(self) -> list[str]:
        """The rings of mbarriers of which no slot was used twice, so that a wait for a free slot
        which is missing, or one phase off, cannot show: a larger problem would tell. Arrays of one
        object, as `ab.full` and `ab.empty`, are one ring.
        """
        most: dict[str, int] = {}
        for name, (_, phases) in self.rings.items():
            ring = name.rpartition(".")[0] or name
            most[ring] = max(phases, most.get(ring, 0))
        return [
            name
            for name, (slots, _) in self.rings.items()
            if slots > 1 and most[name.rpartition(".")[0] or name] == 1
        ]

    def __str__(self) -> str:
        """What was found, how long launches take where that was asked for, and one line of all."""
        found = len(self.findings)
        done = (
            f"{self.launches} launch{'es' * (self.launches != 1)} of {self.ctas} "
            f"CTA{'s' * (self.ctas != 1)}, "
            f"{self.instructions} warp-instructions, {self.seconds:.1f} s, {found or 'no'} "
            f"finding{'s' * (found != 1)}, {len(self.advisories) or 'no'} "
            f"advisor{'y' if len(self.advisories) == 1 else 'ies'}"
        )
        texts = as_text(self.findings), as_text(self.advisories)
        parts = [*texts, *self.kernels.values(), *self.times]
        said = (*map(str, self.sampled), *self.unwatched)
        return "\n".join([*(str(part) for part in parts if part), *said, done])


@lru_cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController()


class Simulation:
    """The launches of one call, run one after another; ``report`` adds up their outcomes."""

    def __init__(
        self,
        programs: dict[str, Program],
        tensors: Sequence[HostTensor],
        *,
        order: str = "fifo",
        seed: int = 0,
        limit: int | None = None,
        cubin: bytes | None = None,
        jobs: int | None = 1,
        checks: bool = True,
        clusters: int | None = None,
    ) -> None:
        """``cubin``: the kernels' code, if their resources and bank conflicts are to be
        reported."""
        self.limit, self.cubin, self.stream, self.jobs = limit, cubin, Stream(), jobs
        self.checks, self.clusters = checks, clusters
        self.programs, self.tensors, self.order, self.seed = programs, tensors, order, seed
        self.report = SimReport()
        # which bytes launches touch: "" (not kept), "written" or "all"; with the kernels' names
        self.watch, self.touched = "", list[tuple[str, Touched]]()
        self._found: dict[tuple[str, str, bool], Finding] = {}

    def launch(self, what: Launch) -> None:
        """Run every CTA of ``what`` to its end. Raises SimError for a run that cannot continue."""
        program = self.programs.get(what.kernel)
        if program is None:
            raise SimError(
                f"the host code launches {what.kernel}, which is not in the PTX "
                f"({', '.join(self.programs)})"
            )
        _check_launch(program, what)
        sampling.refuse_more(self.report.sampled, what)
        where = self._residency(program, what)
        if what.cooperative and 0 < where.gpu_ctas < what.num_ctas:
            raise CooperativeTooLarge(
                f"launch: {what.kernel} is launched cooperatively with {what.num_ctas} CTAs, of "
                f"which {where.gpu_ctas} run side by side, {where.why}"
            )
        memory = GlobalMemory()
        for tensor in self.tensors:
            memory.add_tensor(tensor)
        # NOTE: products are small here; one BLAS thread is faster than several that wait for each
        # other
        with uncollected(), _blas().limit(limits=1, user_api="blas"):
            if self.jobs != 1 and self._run_divided(program, what, memory):
                return
            # NOTE: a call, so that all it made is gone before the collector looks at what is left
            self._run_whole(program, what, memory, where)

    def _run_whole(
        self, program: Program, what: Launch, memory: GlobalMemory, where: Residency
    ) -> None:
        """Run the launch in this process, and take up what was found."""
        scheduler, checks = self._scheduler(program, what, memory, where)
        try:
            self._run(scheduler, what)
            checks.finish()
            if self.watch and self.checks:
                races, every = checks.global_races, {region.base for region in memory.regions}
                found = races.touched(every) if self.watch == "all" else Touched(races.written())
                self.touched.append((program.title, found))
            unreached.tell(program, scheduler.m, scheduler.executed)
        finally:  # NOTE: findings before an error count
            checks.stop()
            self._add_up(scheduler, what)
            if self.checks:
                self._unwatched(checks.global_races.unwatched())
            self._sample(program, what, memory, [checks.global_races.written()])
            scheduler.m.release()

    def _clusters(self, program: Program, what: Launch) -> list[int]:
        return sampling.pick(program, what, self.clusters)

    def _unwatched(self, said: Sequence[str]) -> None:
        self.report.unwatched += [s for s in said if s not in self.report.unwatched]

    def _sample(
        self,
        program: Program,
        what: Launch,
        memory: GlobalMemory,
        written: Sequence[dict[int, np.ndarray]],
    ) -> None:
        """Record the clusters that were not run; ``written``: the bytes that the others wrote."""
        ran, count = len(self._clusters(program, what)), what.num_ctas // what.cluster_size
        if ran < count:
            self.report.sampled.append(Sampled(program.title, ran, count))
            self.report.written |= sampling.elements(self.tensors, memory, written)

    def _run_divided(self, program: Program, what: Launch, memory: GlobalMemory) -> bool:
        """Run the launch in several processes; return False if that is impossible, or if one
        process has to report findings.
        """
        order = policy(self.order, self.seed + self.report.launches)
        clusters = order.start_order(self._clusters(program, what))
        jobs = self.jobs or division.paying(program, what, len(clusters))
        if jobs == 1:
            return False
        if self.limit is not None or self.cubin is not None or not self.checks:
            return False  # NOTE: only the checks record the memory that clusters access
        if division.why_not(program, what, order, memory, orders_clusters(program)):
            return False
        size, where = what.cluster_size, self._residency(program, what)

        def run(clusters: list[int]) -> division.Part | None:
            here = replace(where, ctas=min(where.ctas, len(clusters) * size))
            scheduler, checks = self._scheduler(program, what, memory, here)
            machine = scheduler.m
            machine.findings.first_ends = True
            rings = self._run_clusters(scheduler, clusters)
            checks.finish()
            if unreached.unknown(program, machine, scheduler.executed):
                return None
            return division.Part(scheduler.executed, checks.global_races.touched(), rings)

        parts = division.run_parts(memory, division.shares(clusters, jobs), run)
        if parts is None:
            return False
        for part in parts:
            self._add_rings(part.rings)
            if self.watch:
                self.touched.append((program.title, part.touched))
        self._sample(program, what, memory, [part.touched.written for part in parts])
        self._count(program, what, np.sum([part.executed for part in parts], 0))
        return True

    def _scheduler(
        self, program: Program, what: Launch, memory: GlobalMemory, where: Residency
    ) -> tuple[Scheduler, Checks]:
        params = np.zeros(-(-program.param_bytes // 64) * 64 + 64, np.uint8)
        for p, raw in zip(
            program.params, what.param_bytes([p.size for p in program.params]), strict=True
        ):
            params[p.offset : p.offset + p.size] = np.frombuffer(raw, np.uint8)
        order = policy(self.order, self.seed + self.report.launches)
        machine = Machine(program, what, memory, params, where, order)
        checks = Checks(machine, what, self.stream)
        if self.checks:
            machine.watchers.append(checks.observers)
        self.banks, self.sectors = BankConflicts(), GlobalSectors()
        if self.cubin is not None:
            machine.watchers.append(lambda: [self.banks, self.sectors])
        _add_module_variables(machine)
        return Scheduler(machine, self.limit), checks

    def _residency(self, program: Program, what: Launch) -> Residency:
        return residency(program, what, len(self._clusters(program, what)) * what.cluster_size)

    def _run(self, scheduler: Scheduler, what: Launch) -> None:
        clusters = self._clusters(scheduler.m.program, what)
        self._add_rings(self._run_clusters(scheduler, scheduler.policy.start_order(clusters)))

    def _add_rings(self, rings: dict[str, tuple[int, int]]) -> None:
        for name, (slots, phases) in rings.items():
            most = max(phases, self.report.rings.get(name, (0, 0))[1])
            self.report.rings[name] = slots, most

    def _run_clusters(
        self, scheduler: Scheduler, clusters: Sequence[int]
    ) -> dict[str, tuple[int, int]]:
        """Run ``clusters`` of the grid, in the order in which they start. Return, by name, the
        slots of each ring of mbarriers, and the phases of the one that went furthest.
        """
        machine = scheduler.m
        rings: dict[str, tuple[int, int]] = {}
        machine.early_time_outs = _TIME_OUTS if self.checks else 0
        queue = machine.pending_clusters = PendingClusters(clusters)
        while queue:
            machine.load_clusters(queue.start(machine.grid.num_ctas // machine.grid.cluster_size))
            try:
                scheduler.run()
            except SimError as error:
                if isinstance(error, Deadlock):
                    error = _with_cause(error, machine.mbarriers.miscounted())
                raise _reported(error, machine.findings) from None
            scheduler.leftovers()
            for name, (slots, phases) in machine.mbarriers.uses().items():
                rings[name] = slots, max(phases, rings.get(name, (0, 0))[1])
        return rings

    def _add_up(self, scheduler: Scheduler, what: Launch) -> None:
        report, machine = self.report, scheduler.m
        self._count(machine.program, what, scheduler.executed)
        if self.cubin is not None:
            report.kernels[what.kernel] = resources(
                machine, what, self.cubin, self.banks, self.sectors
            )
        for finding in machine.findings:
            self._found.setdefault((finding.rule, finding.where, finding.advisory), finding)
        report.findings = [f for f in self._found.values() if not f.advisory]
        report.advisories = [f for f in self._found.values() if f.advisory]

    def _count(self, program: Program, what: Launch, executed: np.ndarray) -> None:
        report = self.report
        report.launches += 1
        report.ctas += len(self._clusters(program, what)) * what.cluster_size
        report.instructions += int(executed.sum())
        counts = Counter(report.counts)
        for ins, n in zip(program.code, executed.tolist(), strict=True):
            if n:
                counts[ins.op] += n
        report.counts = dict(counts.most_common())


def _with_cause(error: Deadlock, causes: Sequence[tuple[str, Instruction]]) -> Deadlock:
    """The deadlock, with the announcement of bytes that causes it before the warps."""
    head, _, rest = str(error).partition("\n")
    lines = [f"  {message}\n    at {ins.where()}" for message, ins in causes]
    return Deadlock("\n".join([head, *lines, rest]))


def _reported(error: SimError, findings: Findings) -> SimError:
    """The error that ended a run, as a report, together with the findings before it."""
    before = [f for f in findings if not f.advisory]
    causes = [r for r in folded(before) if is_cause(r.root, error.rule, str(error))]
    text = findings.names.with_names(str(error))
    sides = sides_of(text, findings.program)
    text = headed(text, sides)
    if causes:  # the cause first, with what became of it in its first line
        head, _, rest = str(causes[0]).partition("\n")
        text = f"{head}; the run ends by {error.rule}\n{rest}\nthe end of the run:\n{text}"
        sides = causes[0].root.sides + sides
    others = [r for r in folded(before) if not causes or r.root != causes[0].root]
    if others:
        text = "\n".join([text, "found before that:", *map(str, others)])
    out = type(error)(text)
    out.sides = sides
    return out


def _check_launch(program: Program, what: Launch) -> None:
    """Raise ValueError for a launch that the driver refuses: empty or oversized dimensions, a grid
    that is no multiple of the cluster.
    """
    threads = what.block[0] * what.block[1] * what.block[2]
    if min(what.grid) < 1 or threads < 1 or threads > 1024:
        raise ValueError(
            f"launch of {what.kernel}: grid {what.grid} or block {what.block} is not a valid size"
        )
    for sizes, limits, of in ((what.grid, _GRID, "grid"), (what.block, _BLOCK, "block")):
        for size, limit, mode in zip(sizes, limits, "xyz", strict=True):
            if size > limit:
                raise ValueError(
                    f"launch of {what.kernel}: {of} {sizes}, a GPU takes at most {limit} in {mode}"
                )
    if program.max_threads and threads > program.max_threads:
        raise ValueError(
            f"launch of {what.kernel}: {threads} threads, compiled for at most "
            f"{program.max_threads}"
        )
    if any(g % c for g, c in zip(what.grid, what.cluster, strict=True)):
        raise ValueError(
            f"launch of {what.kernel}: grid {what.grid} is no multiple of the cluster "
            f"{what.cluster}"
        )
    if what.cluster_size > _CLUSTER_CTAS:
        raise ValueError(
            f"launch of {what.kernel}: a cluster of {what.cluster_size} CTAs, a GPU takes at most "
            f"{_CLUSTER_CTAS}"
        )
    gpu = gpu_of(program)
    smem = what.smem + sum(v.size for v in program.variables.values() if v.space == "shared")
    if smem > gpu.smem_per_cta:
        raise ValueError(
            f"launch of {what.kernel}: {smem} bytes of shared memory, an SM of {gpu.name} "
            f"gives a CTA at most {gpu.smem_per_cta}"
        )


def _add_module_variables(machine: Machine) -> None:
    for v in machine.program.variables.values():
        if v.space in ("global", "const") and v.size:
            data = np.zeros(v.size, np.uint8)
            if v.init:
                data[: len(v.init)] = np.frombuffer(v.init, np.uint8)
            at = MODULE_WINDOW + machine.offsets[v.name]
            machine.memory.add(Region(v.name, at, data, description=f"the variable {v.name}"))
