"""The path of every caller to a result: compile a stage, launch it on a device, check it, time
it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

from cutex.arch import KNOWN, Arch, arch, local_arch
from cutex.bench import timing
from cutex.problem import Check, Launch, Problem
from cutex.problem.stage import AnyStage
from cutex.results import Peer, Result, gbs, tflops

if TYPE_CHECKING:
    from cutex.compile import Compiled
    from cutex.sim import SimReport

DEVICES = ("auto", "cuda", "sim")
NOTE = "; note: "  # before what a right result's message says besides


@dataclass(frozen=True)
class Options:
    """The way to run a problem; no option changes the numbers that it computes."""

    order: str = "fifo"  # simulator: one of cutex.orders.ORDERS
    seeds: int = 1  # simulator: the number of orders of that kind, if it has seeds
    jobs: int | None = 1  # simulator: processes for grids of independent clusters; None: as pays
    count: bool = False  # simulator: count transactions with memory, and bank conflicts
    compare: tuple[str, ...] = ()  # names of the problem's peers
    cache_state: str = "cold"
    check_only: bool = False  # leave out the timing
    expect: str = ""  # a note: what the run is expected to give, and why
    id: str = field(default_factory=lambda: uuid4().hex[:12])  # the run's id in the ledger
    notice: Callable[[str], None] = lambda sentence: print(sentence, file=sys.stderr)


def choose_device(name: str, target: Arch) -> str:
    """Resolve `name` to "cuda" or "sim". Raises ValueError for "cuda" without a GPU of `target`."""
    if name not in DEVICES:
        raise ValueError(f"device {name!r} is not one of {', '.join(DEVICES)}")
    if name == "sim":
        return "sim"
    if local_arch([target.name]) is not None:
        return "cuda"
    if name == "auto":
        return "sim"
    here = local_arch(KNOWN)
    found = f"the GPU here is {here.name}" if here else "there is no GPU here that cutex knows"
    raise ValueError(f"device cuda cannot run {target.name}: {found}; use device sim")


def admit(problem: Problem, stages: Sequence[AnyStage], device: str, options: Options) -> Arch:
    """Return the one arch of `stages`. Raises ValueError if they have two, or for a run or a timing
    that is not possible."""
    target = arch(stages[0].arch)
    for stage in stages:
        if stage.arch != target.name:
            raise ValueError(f"stages of {target.name} and {stage.arch} cannot run together")
        why = stage.fitted(problem).config().why_not(problem, target)
        if why is not None:
            raise ValueError(f"stage {stage.number} of {stage.arch} cannot run this: {why}")
    if device == "cuda" and not options.check_only:
        timing.copies_to_rotate(problem.bytes, target.l2_bytes, options.cache_state)
    return target


def has_room(problem: Problem) -> None:
    """Raise ValueError unless this machine's memory can hold a simulated run of `problem`: its
    operands, and operands and result of the reference in float64."""
    needed, there = 9 * problem.bytes, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise ValueError(
            f"{problem.size}: simulated and checked, this takes some {needed / 1e9:.0f} GB of "
            f"memory, and this machine has {there / 1e9:.0f}; take smaller sizes, or --time"
        )


def run(
    problem: Problem, stage: AnyStage, device: str = "auto", options: Options | None = None
) -> Result:
    """Run one stage on one problem; see run_stages."""
    return run_stages(problem, [stage], device, options)[0]


def run_stages(
    problem: Problem,
    stages: Sequence[AnyStage],
    device: str = "auto",
    options: Options | None = None,
) -> list[Result]:
    """Compile, launch, check and, on a GPU, time `stages` of one arch; one Result each, in order.

    On a GPU all stages and peers take turns in one timing loop. A wrong output is a Result with
    ok=False, and is not timed. Raises ValueError for a problem that a stage cannot take or a device
    that is not here, Missing where the simulator finds no C compiler.
    """
    options = options or Options()
    device = choose_device(device, arch(stages[0].arch))
    if device == "cuda":
        return prepare(problem, stages, options).results()
    stages = [settle(stage, problem, timed=False) for stage in stages]
    admit(problem, stages, device, options)
    return [_named(_simulate(problem, stage, options), options) for stage in stages]


def _named(result: Result, options: Options) -> Result:
    return replace(result, id=options.id, expect=options.expect)


def settle(stage: AnyStage, problem: Problem, timed: bool) -> AnyStage:
    """The stage with its config for `problem`: if it chooses, the model's choice, or if `timed` the
    fastest on this GPU."""
    stage = stage.fitted(problem)
    if not stage.chooses:
        return stage
    from cutex.bench.autotune import tuned

    return stage.with_config(tuned(stage, problem) if timed else stage.choose(problem))


def compile_stage(stage: AnyStage, dtype: str) -> Compiled:
    from cutex.compile import compile

    return compile(stage.kernel(), dtype, stage.arch)


def _result(
    problem: Problem, stage: AnyStage, compiled: Compiled, check: Check, **device_facts: Any
) -> Result:
    return Result(
        op=stage.op,
        stage=stage.number,
        title=stage.title,
        arch=stage.arch,
        problem=problem.as_dict(),
        config=asdict(stage.config()),
        ok=check.ok,
        max_error=check.max_error,
        tolerance=check.tolerance,
        message=check.message,
        run=run_time(),
        environment=environment(),
        compile_seconds=compiled.compile_seconds,
        from_cache=compiled.from_cache,
        **device_facts,
    )


# ---- simulator


def _simulate(problem: Problem, stage: AnyStage, options: Options) -> Result:
    """Simulate all orders, up to the first that fails, and return one Result."""
    from cutex.sim import SimError, simulate
    from cutex.sim.reports import used_once

    compiled, config = compile_stage(stage, problem.dtype), stage.config()
    inputs = problem.inputs()
    orders = [("fifo", 0)]
    if options.order != "fifo":
        orders = [(options.order, problem.seed + i) for i in range(options.seeds)]
    seconds, instructions, done, once = 0.0, 0, [], list[str]()
    counts: dict[str, int] = {}
    for order, seed in orders:
        name = order if order == "fifo" else f"{order}:{seed}"
        tensors = *inputs, *problem.outputs()
        run = partial(simulate, compiled, order=order, seed=seed, jobs=options.jobs)
        if options.count:
            run = partial(run, resources=True)
        launch = problem.launcher(run, compiled.argument_names)
        try:
            report = cast("SimReport", launch(*tensors))
        except SimError as error:
            done.append(name)
            check = Check(False, float("nan"), 0.0, f"order {name}: {error}")
            break
        done.append(name)
        seconds += report.seconds
        instructions += report.instructions
        once = report.unwrapped
        if options.count:
            counts = _counts(report)
        check = problem.check(*tensors, tile=problem.tile(config))
        if check.ok and report.findings:
            check = replace(check, ok=False, message="\n".join(str(f) for f in report.findings))
        if not check.ok:
            check = replace(check, message=f"order {name}: {check.message}")
            break
    notes = [used_once(once)] if once else []
    for note in [*notes, *report.unwatched] if check.ok else ():
        check = replace(check, message=f"{check.message}{NOTE}{note}")
    return _result(
        problem,
        stage,
        compiled,
        check,
        device="sim",
        device_name="simulator",
        sim_seconds=seconds / len(done),
        sim_instructions=instructions // len(done),
        sim_orders=done,
        sim_counts=counts if options.count else None,
    )


def _counts(report: SimReport) -> dict[str, int]:
    """The transactions of all kernels of a call, by name."""
    found: dict[str, int] = {}
    for kernel in report.kernels.values():
        found = {name: n + found.get(name, 0) for name, n in kernel.counts.items()}
    return found


# ---- GPU


@dataclass(frozen=True)
class Prepared:
    """Stages of one arch on one problem, compiled, launched once and found right on this GPU, and
    their peers: all that needs no quiet GPU, and most of the seconds."""

    problem: Problem
    stages: Sequence[AnyStage]
    target: Arch
    options: Options
    compiled: Mapping[int, Compiled]  # by stage
    checks: Mapping[int, Check]
    variants: Mapping[str, Launch]  # of right stages and peers, to be timed
    versions: Mapping[str, str]  # of peers

    def results(self) -> list[Result]:
        """Time the variants, in turns; one Result for each stage, in order."""
        checks, measured = dict(self.checks), timing.Measured({}, None, None, {})
        if self.variants:
            measured = self._timed()
            for stage in self.stages:
                if f"stage {stage.number}" in self.variants:
                    again = _check_again(self.problem, stage, measured)
                    if not again.ok:
                        checks[stage.number] = again
        peers = [
            Peer(name, version, measured.timings[name])
            for name, version in self.versions.items()
            if name in measured.timings
        ]
        return [self._result(s, checks[s.number], measured, peers) for s in self.stages]

    def _timed(self) -> timing.Measured:
        state = self.options.cache_state
        copies = timing.copies_to_rotate(self.problem.bytes, self.target.l2_bytes, state)
        operands = [
            (*self.problem.inputs("cuda", copy=i), *self.problem.outputs("cuda"))
            for i in range(copies)
        ]

        def dropped(name: str, error: Exception) -> None:
            if name not in self.versions:
                raise error
            self.options.notice(_skipped(name, error))

        return timing.time_variants(
            self.variants, operands, state, self.problem.seed, dropped=dropped
        )

    def _result(
        self, stage: AnyStage, check: Check, measured: timing.Measured, peers: list[Peer]
    ) -> Result:
        import torch

        facts: dict[str, Any] = {}
        took = measured.timings.get(f"stage {stage.number}")
        if took is not None and check.ok:
            rate = tflops(self.problem.flops, took.median_us)
            peak = self.problem.needs.peak_tflops(self.target)
            facts = {
                "timing": took,
                "tflops": rate,
                "gbs": gbs(self.problem.bytes, took.median_us),
                "percent_of_peak": 100 * rate / peak if peak else None,
                "peers": peers,
                "gpu_before": measured.gpu_before,
                "gpu_after": measured.gpu_after,
            }
        found = _result(
            self.problem,
            stage,
            self.compiled[stage.number],
            check,
            device="cuda",
            device_name=torch.cuda.get_device_name(),
            **facts,
        )
        return _named(found, self.options)


def prepare(problem: Problem, stages: Sequence[AnyStage], options: Options) -> Prepared:
    """Compile and check stages of one arch on this GPU, and load their peers; see run_stages."""
    stages = [settle(stage, problem, timed=not options.check_only) for stage in stages]
    target = admit(problem, stages, "cuda", options)
    compiled = {s.number: compile_stage(s, problem.dtype) for s in stages}
    launches = {
        s.number: problem.launcher(compiled[s.number], compiled[s.number].argument_names)
        for s in stages
    }
    checks = {s.number: _check_on_gpu(problem, s, launches[s.number]) for s in stages}
    variants: dict[str, Launch] = {
        f"stage {number}": launches[number]
        for number, check in checks.items()
        if check.ok and not options.check_only
    }
    versions = {}
    for name in options.compare if variants else ():
        try:
            launch, version = problem.peers[name].load(problem)
            check = _check_launch(problem, launch)
            if not check.ok:
                raise RuntimeError(check.message)
        except Exception as error:  # NOTE: a peer that fails must not cost our own figures
            options.notice(_skipped(name, error))
        else:
            variants[name], versions[name] = launch, version
    return Prepared(problem, stages, target, options, compiled, checks, variants, versions)


def _skipped(peer: str, error: Exception) -> str:
    first_line = str(error).partition("\n")[0]
    return f"peer {peer} is skipped: {type(error).__name__}: {first_line}"


def _check_launch(problem: Problem, launch: Launch, tile: tuple[int, ...] | None = None) -> Check:
    inputs, outputs = problem.inputs("cuda"), problem.outputs("cuda")
    returned = launch(*inputs, *outputs)
    if isinstance(returned, tuple):
        outputs = returned
    return problem.check(*inputs, *outputs, tile=tile)


def _check_on_gpu(problem: Problem, stage: AnyStage, launch: Launch) -> Check:
    """Check small integers first, where the result is exact, then the problem's own data."""
    tile = problem.tile(stage.config())
    if (small := problem.exact()) != problem:
        exact = _check_launch(small, launch, tile)
        if not exact.ok:
            return replace(exact, message=f"on small integers: {exact.message}")
    return _check_launch(problem, launch, tile)


def _check_again(problem: Problem, stage: AnyStage, measured: timing.Measured) -> Check:
    """Check the output of the timed graph itself, since a figure counts only with a right
    result."""
    tensors, blanks = measured.operands, problem.outputs("cuda")
    for output, blank in zip(tensors[-len(blanks) :], blanks, strict=True):
        output.copy_(blank)
    measured.replay[f"stage {stage.number}"]()
    check = problem.check(*tensors, tile=problem.tile(stage.config()))
    return check if check.ok else replace(check, message=f"after timing: {check.message}")


# ---- date, versions and commit of a run


@cache
def run_time() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@cache
def environment() -> dict[str, Any]:
    """The versions and the commit that a figure belongs to."""
    import torch

    found: dict[str, Any] = {"python": sys.version.partition(" ")[0], "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if driver := timing.driver_version():
        found["driver"] = driver
    for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found["commit"] = commit()
    return found


def commit() -> str | None:
    """CUTEX_COMMIT, or the commit of the clone that holds this package, with "+edited" if any file
    of the package was edited or added since; None without either."""
    given = os.environ.get("CUTEX_COMMIT")
    package = Path(__file__).resolve().parents[1]
    root = package.parent
    if given or not (root / ".git").exists():
        return given or None
    parts = [package, *(link.resolve() for link in package.iterdir() if link.is_symlink())]

    def git(*args: str) -> str:
        ran = subprocess.run(
            ("git", "-C", root, *args), capture_output=True, text=True, check=True, encoding="utf-8"
        )
        return ran.stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        edited = git("status", "--porcelain", "--", *map(str, parts))
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}+edited" if edited else head
