"""The command line of an operator: one vocabulary of problem, stage, arch, device and output.

Exit codes: 0 success; 1 a wrong result or a simulator finding; 2 bad input, with one sentence on
stderr. Neither torch nor the DSL is imported before there is something to run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from cutex.arch import Arch, arch, local_arch
from cutex.bench import timing
from cutex.bench.lines import Lines
from cutex.bench.progress import progress
from cutex.bench.run import (
    DEVICES,
    Options,
    admit,
    choose_device,
    compile_stage,
    has_room,
    run_stages,
)
from cutex.command import Parser, answered, refuse, writable
from cutex.orders import MOST_JOBS, add_order
from cutex.problem import Problem, problem_class
from cutex.problem.stage import AnyStage, ladders
from cutex.results.recorder import Recorder, try_folder

DEFAULT_ARCH = "sm_100a"  # the arch to simulate where there is no GPU, if it has a ladder
LARGEST_SEED = 1 << 31
EMITS = ("ptx", "sass", "resources", "bounds")


def parser(kind: type[Problem]) -> Parser:
    p = Parser(
        prog=f"python -m cutex.{kind.op}",
        description=f"Run stages of {kind.about}, on a GPU or in the simulator; check them, and on "
        "a GPU time them.",
    )
    what = p.add_argument_group("what to run")
    what.add_argument("--stage", default="all", metavar="N,N|all|list", help="default: all")
    what.add_argument(
        "--arch",
        metavar="|".join(ladders(kind.op).runs_on),
        help="default: this GPU's, else the newest",
    )
    what.add_argument(
        "--device",
        default="auto",
        metavar="|".join(DEVICES),
        help="default: auto, which is cuda if the GPU here is of the arch, else sim",
    )
    add_problem(what, [kind])
    sim = p.add_argument_group("in the simulator")
    add_order(sim)
    sim.add_argument(
        "--seeds", type=int, metavar="N", help="run N orders of that kind; default kind: random"
    )
    add_jobs(sim)
    sim.add_argument(
        "--count", action="store_true", help="count transactions with memory, and bank conflicts"
    )
    add_clock(sim)
    add_timing(p.add_argument_group("on a GPU"), [kind])
    out = p.add_argument_group("output")
    out.add_argument("--emit", choices=EMITS, help="print what was compiled, and run nothing")
    add_output(out)
    return p


def add_problem(what: argparse._ArgumentGroup, kinds: Sequence[type[Problem]]) -> None:
    for kind in kinds:
        kind.add_options(what)
    dtypes, inits = _names(*(k.dtypes for k in kinds)), _names(*(k.inits for k in kinds))
    first = " or ".join(_names(*(k.dtypes[:1] for k in kinds)))
    what.add_argument("--dtype", metavar="|".join(dtypes), help=f"default: {first}")
    what.add_argument(
        "--data",
        "--init",
        dest="init",
        default="normal",
        metavar="FAMILY,FAMILY",
        help=f"out of {', '.join(inits)}; or all, one after the other; default: normal",
    )
    what.add_argument("--seed", type=int, default=0, help="of the data and of random orders")


def add_jobs(sim: argparse._ActionsContainer) -> None:
    sim.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="processes that simulate a grid's clusters, where these are independent; default: "
        "as many as pay, at most one a core",
    )


def add_clock(sim: argparse._ArgumentGroup) -> None:
    sim.add_argument("--time", action="store_true", help="predict the time; nothing is checked")
    sim.add_argument(
        "--trace", metavar="FILE", help="with --time: for Perfetto; FILE.svg: a picture of one CTA"
    )
    sim.add_argument(
        "--gpu",
        dest="what_if",
        metavar="NAME,K=V",
        help='for --time, as "b200,clock=1.6,l2=12" (GHz, TB/s)',
    )


def _names(*lists: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(lists)))


def add_timing(gpu: argparse._ArgumentGroup, kinds: Sequence[type[Problem]]) -> None:
    peers = _names(*(kind.peers for kind in kinds))
    gpu.add_argument("--compare", metavar="PEER,PEER", help=f"out of {', '.join(peers)}")
    gpu.add_argument("--cache-state", choices=timing.CACHE_STATES, help="of the L2; default: cold")
    gpu.add_argument("--check-only", action="store_true", help="take no times")


def add_output(out: argparse._ArgumentGroup) -> None:
    out.add_argument("--expect", default="", metavar="NOTE", help='as "1.05x: raster saves L2"')
    out.add_argument("--out", default="results", metavar="DIR", help="ledger; default: results")
    out.add_argument("--json", action="store_true", help="print JSON lines instead of a table")


@dataclass(frozen=True)
class Job:
    """A command line, validated."""

    stages: list[AnyStage]
    problems: list[Problem]
    device: str
    options: Options
    clock: Clock | None = None  # not None: predict the time instead


@dataclass(frozen=True)
class Clock:
    """The options of --time: the GPU, as `cutex.sim.timing.gpus.gpu` takes it, and a file for the
    trace."""

    gpu: str
    trace: Path | None


def parsed(kind: type[Problem], argv: Sequence[str]) -> tuple[type[Problem], argparse.Namespace]:
    """The operator that a command line of `kind` is about, and its options."""
    for option, op in kind.variants.items():
        kind = problem_class(op) if option in argv else kind
    return kind, parser(kind).parse_args(join_sizes(argv, kind.size_options))


@answered
def main(kind: type[Problem], argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` of an operator, and return the exit code."""
    try:
        given = sys.argv[1:] if argv is None else argv
        kind, args = parsed(kind, given)
        if args.stage == "list":
            list_stages(kind, args.arch)
            return 0
        job = plan(kind, args)
        if not args.emit:
            try_folder(Path(args.out))
    except ValueError as error:
        return refuse(str(error))
    if args.emit:
        try:
            for stage in job.stages:
                problem = job.problems[0]
                emit(stage.fitted(problem), problem.dtype, args.emit)
        except ValueError as error:
            return refuse(f"--emit {args.emit}: {error}")
        return 0
    if job.clock:
        return predict(job, job.clock, as_json=args.json)
    return run(job, Path(args.out), as_json=args.json)


def join_sizes(argv: Sequence[str], options: Sequence[str]) -> list[str]:
    """Turn `--size -8` into `--size=-8`, since argparse takes a negative size for an option."""
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1] in options:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def plan(kind: type[Problem], args: argparse.Namespace) -> Job:
    """Return the Job that the arguments state. Raises ValueError, with one sentence, for bad
    ones."""
    if args.device not in DEVICES:
        raise ValueError(f"--device {args.device!r} is not one of {', '.join(DEVICES)}")
    archs = ladders(kind.op).archs
    here = local_arch(archs) if args.arch is None and args.device != "sim" else None
    usual = DEFAULT_ARCH if DEFAULT_ARCH in archs else archs[0]
    target = arch((here.name if here else usual) if args.arch is None else args.arch)
    if args.emit == "bounds" and not target.tmem_columns:
        raise ValueError(f"--emit bounds reads tcgen05 code, which {target.name} has not")
    wanted = choose_stages(kind, args.stage, target)
    return job(kind, args, wanted, "sim" if args.emit else choose_device(args.device, target))


def choose_stages(kind: type[Problem], text: str, target: Arch) -> list[AnyStage]:
    """The stages that `text`, the value of --stage, names. Raises ValueError, with one sentence,
    for one that is not there."""
    found, numbers = ladders(kind.op), dict.fromkeys(text.split(","))
    if text == "all":
        chosen = found.stages(target.name)
    elif all(n.removeprefix("-").isdecimal() for n in numbers):
        chosen = [found.stage(target.name, n) for n in dict.fromkeys(map(int, numbers))]
    else:
        raise ValueError(
            f"--stage {text!r} is neither a number nor all nor list; several are 2,5,9"
        )
    for stage in chosen:
        if why := stage.why_no_kernel():
            raise ValueError(why)
    return chosen


def job(
    kind: type[Problem],
    args: argparse.Namespace,
    wanted: list[AnyStage],
    device: str,
    case: str | None = None,
) -> Job:
    """Return the Job of these stages on this device, "cuda" or "sim". Without sizes in `args` it
    has those of `case`, by default the device's."""
    clock, emit = _clock(args, wanted[0], device), getattr(args, "emit", None)
    if emit:
        _refuse_beside(f"--emit {emit}", args, ("time", *RUNNING, "json"))
        if len(given := kind.sizes_given(args)) > 1:
            raise ValueError(f"--emit {emit} prints what one size takes, these are {len(given)}")
    case = "cuda" if clock and case is None else case
    problems = [
        kind.of(sizes, args.dtype, init, args.seed)
        for sizes in kind.sizes_given(args) or kind.cases[case or device]
        for init in (kind.inits if args.init == "all" else args.init.split(","))
    ]
    options = _options(kind, args, device)
    for problem in problems:
        admit(problem, wanted, device, options)
        if device == "sim" and not (clock or emit):
            has_room(problem)
    if clock and clock.trace and len(wanted) * len(problems) > 1:
        raise ValueError(
            f"--trace keeps one run, these are {len(wanted)} stages of {len(problems)} sizes"
        )
    return Job(wanted, problems, device, options, clock)


def _clock(args: argparse.Namespace, stage: AnyStage, device: str) -> Clock | None:
    """Return the options --time, --trace and --gpu. Raises ValueError for a bad combination."""
    # NOTE: a rental's --gpu is another option
    options = {"--trace": "trace", "--gpu": "what_if"}
    given = [name for name, n in options.items() if getattr(args, n, None) is not None]
    if not getattr(args, "time", False):
        if given:
            raise ValueError(f"{given[0]} goes with --time")
        return None
    if device != "sim":
        raise ValueError("--time is for device sim: on a GPU times are measured")
    _refuse_beside("--time", args, RUNNING)
    from cutex.sim.timing.gpus import gpu, of_arch

    text = args.what_if or of_arch(stage.arch)
    if gpu(text).arch != stage.arch:
        raise ValueError(f"--gpu {text}: is no GPU of {stage.arch}")
    return Clock(text, writable("--trace", args.trace) if args.trace is not None else None)


RUNNING = ("order", "seeds", "jobs", "count", "compare", "cache_state", "check_only", "expect")


def _refuse_beside(what: str, args: argparse.Namespace, names: Iterable[str]) -> None:
    """Raise ValueError if one of these options is given, which `what` would ignore."""
    for name in names:
        if getattr(args, name, None):
            raise ValueError(f"--{name.replace('_', '-')} does not go with {what}")


def _options(kind: type[Problem], args: argparse.Namespace, device: str) -> Options:
    if not 0 <= args.seed < LARGEST_SEED:
        raise ValueError(f"--seed {args.seed}: takes a number from 0 to {LARGEST_SEED - 1}")
    groups = {
        "sim": ("order", "seeds", "jobs", "count"),
        "cuda": ("compare", "cache_state", "check_only"),
    }
    for group, names in groups.items():
        for name in names if group != device else ():
            if getattr(args, name, None) not in (None, False):
                option = name.replace("_", "-")
                raise ValueError(f"--{option} is for device {group}, and this runs on {device}")
    if args.seeds is not None and (not 1 <= args.seeds <= 10_000 or args.order == "fifo"):
        raise ValueError(
            f"--seeds {args.seeds}: takes a number from 1 to 10000, of orders other than fifo"
        )
    if args.jobs is not None and not 1 <= args.jobs <= MOST_JOBS:
        raise ValueError(f"--jobs {args.jobs}: takes a number from 1 to {MOST_JOBS}")
    compare = tuple(dict.fromkeys(_peers(kind, args.compare))) if args.compare else ()
    return Options(
        order=args.order or ("random" if args.seeds else "fifo"),
        seeds=args.seeds or 1,
        jobs=args.jobs,
        count=getattr(args, "count", False),
        compare=compare,
        cache_state=args.cache_state or "cold",
        check_only=args.check_only,
        expect=args.expect,
    )


def _peers(kind: type[Problem], text: str) -> Iterator[str]:
    """The peers that --compare names: each by its name, or all whose names begin with it and a
    dash."""
    for name in text.split(","):
        if name in kind.peers:
            yield name
        elif several := [peer for peer in kind.peers if peer.startswith(f"{name}-")]:
            yield from several
        else:
            raise ValueError(f"--compare {name!r} is not one of {', '.join(kind.peers)}")


def list_stages(kind: type[Problem], only: str | None) -> None:
    """Print the ladder of every arch, or of one."""
    found = ladders(kind.op)
    for target in map(arch, found.archs) if only is None else [arch(only)]:
        stages = found.stages(target.name)
        print(f"{target.name}  {target.title} ({target.board})")
        for s in stages:
            print(f"{s.number:5}  {s.title:<24}  {s.idea}")


def emit(stage: AnyStage, dtype: str, what: str) -> None:
    """Print the PTX, the SASS or the resources of one stage as compiled."""
    from cutex.compile.resources import all_resources, sass

    compiled = compile_stage(stage, dtype)
    print(f"// stage {stage.number} of {stage.arch}, {dtype}: {compiled.symbol}")
    match what:
        case "ptx":
            print(compiled.ptx)
        case "sass":
            print(sass(compiled))
        case "resources":
            print("\n\n".join(map(str, all_resources(compiled))))
        case "bounds":
            from cutex.analysis import bounds

            print(bounds.table([bounds.stage_row(stage, dtype)]))


# ---- running and printing


def run(job: Job, out: Path, as_json: bool) -> int:
    """Run a job, print a line and append a line to the ledger per result, and return the exit code.

    A result is printed before it is recorded; one that cannot be written does not end the run.
    """
    console = Lines(job.device, job.options.compare, as_json, job.options.count)
    recorder = Recorder(out)
    code = 0
    # NOTE: on a GPU the stages of one problem take turns, so they finish together.
    turns = [job.stages] if job.device == "cuda" else [[s] for s in job.stages]
    try:
        for problem in job.problems:
            for stages in turns:
                numbers = ", ".join(str(s.number) for s in stages)
                running = f"stage {numbers} of {stages[0].arch} on {job.device}, {problem.size}"
                with progress(running):
                    found = run_stages(problem, stages, job.device, job.options)
                unprinted = None
                for result in found:
                    try:
                        console.result(result)
                    except Exception as error:  # NOTE: the result is still recorded
                        unprinted = error
                    recorder.row(result)
                    code = code if result.ok else 1
                if unprinted is not None:
                    raise unprinted
                console.peers(found[-1])
    finally:
        for sentence in recorder.summary():
            code = refuse(sentence)
    if job.device == "sim" and not as_json:
        console.note("simulated on the CPU: the time is the simulator's, and there is no TFLOPS")
    return code


def predict(job: Job, clock: Clock, as_json: bool) -> int:
    """Print the predicted time of each problem and stage, by launch; no ledger, for nothing was
    measured. A trace is that of the longest launch."""
    from cutex.bench.clock import time_launches
    from cutex.sim.timing.gpus import gpu

    for problem in job.problems:
        for stage in job.stages:
            reports = time_launches(problem, stage, gpu(clock.gpu), log=clock.trace is not None)
            us = sum(report.us for report in reports)
            for report in reports:
                text = f"stage {stage.number}, {problem.size}: {report}"
                print(report.to_json() if as_json else text, flush=True)
            if len(reports) > 1 and not as_json:
                print(f"{len(reports)} launches: {us:,.1f} us in all", flush=True)
            if clock.trace:
                max(reports, key=lambda report: report.us).write_trace(clock.trace)
    return 0
