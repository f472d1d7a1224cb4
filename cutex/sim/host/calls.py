"""The launches of a script on a machine without a GPU, and their findings."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import cuda.bindings.runtime as cuda_runtime
from cutlass.base_dsl.runtime.cuda import create_cuda_runtime_error

from cutex.sim.errors import CooperativeTooLarge, SimError
from cutex.sim.finding import Finding
from cutex.sim.host.arguments import tensors_in
from cutex.sim.host.capture import HostFunction, HostTensor, Launch
from cutex.sim.host.cuda_graphs import deferred
from cutex.sim.host.loaded import captured
from cutex.sim.host.stopwatch import STOPWATCH
from cutex.sim.host.streams import STREAMS
from cutex.sim.host.torch_stand_in import DeviceMemory
from cutex.sim.ptx.program import Program
from cutex.sim.reports import around, folded
from cutex.sim.simulation import SimReport, Simulation


class CapturedKernel(Protocol):
    """A kernel in the simulator's form: its host code, and its device functions by name."""

    @property
    def host(self) -> HostFunction: ...
    @property
    def programs(self) -> dict[str, Program]: ...
    @property
    def ptx(self) -> str: ...


@dataclass
class Clock:
    """The times that --time prints: on which GPU, and the file for a trace of the last launch."""

    gpu: str
    trace: str | None
    printed: set[str] = field(default_factory=set)

    def run(
        self,
        function: CapturedKernel,
        arguments: list[Any],
        regions: list[HostTensor],
    ) -> None:
        """Print the time of the call's launches, each kernel once per grid."""
        from cutex.sim.timing.call import time_call

        try:
            reports = time_call(
                function.host, function.programs, arguments, regions, self.gpu,
                log=self.trace is not None,
            )  # fmt: skip
        except ValueError as error:
            print(f"cutex: no time: {error}", file=sys.stderr)
            return
        for report in reports:
            STOPWATCH.predicted = (STOPWATCH.predicted or 0.0) + report.us / 1e3
            if str(report) not in self.printed:
                self.printed.add(str(report))
                print(f"cutex: {report}", file=sys.stderr)
            if self.trace:
                report.write_trace(Path(self.trace))


class Loaded(NamedTuple):
    """A kernel of cutex.compile in the simulator's form."""

    host: HostFunction
    programs: dict[str, Program]
    ptx: str


@dataclass
class Calls:
    """The launches of a script by kernel, and all findings, even where the script catches the
    error.
    """

    order: str
    seed: int
    memory: DeviceMemory
    limit: int | None = None
    clock: Clock | None = None
    resources: bool = False  # report each kernel's resources
    jobs: int | None = 1  # processes that simulate a grid together; None: as many as pay
    checks: bool = True  # look for races
    clusters: int | None = None  # clusters of a grid that are simulated; None: all
    at_launch: Callable[[], None] | None = None  # called once, before the first call
    launches: dict[str, int] = field(default_factory=dict)
    report: SimReport = field(default_factory=SimReport)
    errors: list[tuple[SimError, str]] = field(default_factory=list)  # with the kernel's PTX
    _ptx: dict[Finding, str] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        STREAMS.begin(self._of_streams)

    def run(
        self,
        function: CapturedKernel,
        arguments: list[Any],
        tensors: Sequence[HostTensor] = (),
        stream: int | None = None,
    ) -> None:
        """Simulate one call; ``tensors`` are those that ``arguments`` hold only as addresses,
        ``stream`` the handle of the one that it names, else it is torch's current one."""
        first, self.at_launch = self.at_launch, None
        if first is not None:
            first()
        started = time.perf_counter()
        named = [*tensors, *tensors_in(arguments)]
        regions = self.memory.regions(named)
        untimed: SimError | None = None
        if self.clock is not None:
            try:
                self.clock.run(function, arguments, regions)
            except SimError as error:  # NOTE: the run below ends so too, and tells more of it
                untimed = error
        sim = Simulation(
            function.programs, regions, order=self.order, seed=self.seed, limit=self.limit,
            cubin=(function.host.cubin or b"") if self.resources else None, jobs=self.jobs,
            checks=self.checks, clusters=self.clusters,
        )  # fmt: skip
        sim.watch = "all" if STREAMS.several else "written"

        def launch(what: Launch) -> None:
            self.launches[what.kernel] = self.launches.get(what.kernel, 0) + 1
            try:
                sim.launch(what)
            except CooperativeTooLarge as error:
                raise create_cuda_runtime_error(
                    cuda_runtime.cudaError_t.cudaErrorCooperativeLaunchTooLarge.value,
                    cuda_runtime.cudaError_t,
                    error,
                ) from None
            except SimError as error:  # NOTE: counted, also where the script catches it
                self.errors.append((error, function.ptx))
                raise

        try:
            function.host(arguments, launch)
        finally:
            owners = {t.address: t.owner for t in regions if t.owner is not None}
            for title, touched in sim.touched:
                STREAMS.launched(stream, title, touched, owners)
            sim.report.seconds = time.perf_counter() - started
            self._add(sim.report, function.ptx)
        if untimed is not None:
            self.errors.append((untimed, function.ptx))
            raise untimed

    def launch(self, compiled: Any, tensors: tuple[Any, ...]) -> None:
        """Simulate a launch of one of cutex's own kernels."""
        if deferred(lambda: self.launch(compiled, tensors)):
            return
        host, programs, arguments, _ = captured(compiled, tensors)
        self.run(Loaded(host, programs, compiled.ptx), arguments)

    @property
    def failed(self) -> bool:
        return bool(self.errors or self.report.findings)

    def __str__(self) -> str:
        done, kernels, launches = self.report, len(self.launches), sum(self.launches.values())
        found, advised = len(self.report.findings), len(self.report.advisories)
        findings = (
            f", {found or 'no'} finding{'s' * (found != 1)}" if found or not self.errors else ""
        )
        more = f", {advised} advisor{'y' if advised == 1 else 'ies'}" if advised else ""
        names = ", ".join(dict.fromkeys(type(e).__name__ for e, _ in self.errors))
        ended = f", ended by {names}" if names else ""
        return (
            f"{launches} launch{'es' * (launches != 1)} of {kernels} "
            f"kernel{'s' * (kernels != 1)} in order {self.order}, {done.instructions} "
            f"warp-instructions, {done.seconds:.1f} s{findings}{more}{ended}"
            f"{'' if self.checks else ', races unchecked'}"
            + "".join(
                f"; {text}" for text in dict.fromkeys((*map(str, done.sampled), *done.unwatched))
            )
        )

    def as_dict(self) -> dict[str, Any]:
        """The content of `str`, and all findings, for programs."""
        return {
            "order": self.order,
            "seed": self.seed,
            "launches": self.launches,
            "warp_instructions": self.report.instructions,
            "seconds": self.report.seconds,
            "sampled": [str(s) for s in self.report.sampled],
            "unwatched": self.report.unwatched,
            "used_once": self.report.unwrapped,
            "errors": [{"type": type(e).__name__, "report": str(e)} for e, _ in self.errors],
            "kernels": [k.as_dict() for k in self.report.kernels.values()],
            "findings": [r.as_dict() for r in folded(self.report.findings)],
            "advisories": [r.as_dict() for r in folded(self.report.advisories)],
        }

    def tell(self, with_ptx: bool) -> None:
        """Print all findings to stderr, those that ended a run first and advisories last, with the
        surrounding PTX if asked for.
        """
        texts = [str(error) for error, _ in self.errors]
        reported = [(text, ptx) for text, (_, ptx) in zip(texts, self.errors, strict=True)]
        for report in (*folded(self.report.findings), *folded(self.report.advisories)):
            text = str(report)
            if not any(text.partition("\n")[0] in end for end in texts):  # reported with the end
                reported.append((text, self._ptx[report.root]))
        for text, ptx in reported:
            print(f"cutex: {text}", file=sys.stderr)
            if with_ptx:
                print(around(ptx, text), file=sys.stderr)
        for kernel in self.report.kernels.values():
            print(f"cutex: {kernel}", file=sys.stderr)

    def _of_streams(self, finding: Finding) -> None:
        """Take up a finding of two streams."""
        found = self.report.advisories if finding.advisory else self.report.findings
        if not any((f.rule, f.where) == (finding.rule, finding.where) for f in found):
            found.append(finding)
            self._ptx[finding] = ""

    def _add(self, new: SimReport, ptx: str) -> None:
        total = self.report
        total.launches += new.launches
        total.ctas += new.ctas
        total.instructions += new.instructions
        total.seconds += new.seconds
        total.kernels.update(new.kernels)
        total.sampled += new.sampled
        total.unwatched += [s for s in new.unwatched if s not in total.unwatched]
        for name, (slots, phases) in new.rings.items():
            total.rings[name] = slots, max(phases, total.rings.get(name, (0, 0))[1])
        for mine, theirs in ((total.findings, new.findings), (total.advisories, new.advisories)):
            known = {(f.rule, f.where) for f in mine}
            for finding in theirs:
                if (finding.rule, finding.where) not in known:
                    mine.append(finding)
                    self._ptx[finding] = ptx
