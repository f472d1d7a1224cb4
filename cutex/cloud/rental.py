"""Renting a GPU for a run: preflight, plan and price first; replies into the ledger as they come.

The function that rents is passed in (by modal_app.py), so all of this runs, and is tested, without
Modal.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from cutex.arch import arch
from cutex.bench import cli, sweep
from cutex.bench.run import Options, commit, run_time
from cutex.cloud import prices
from cutex.cloud.calls import Plan, Request
from cutex.cloud.preflight import preflight
from cutex.cloud.prices import Rental
from cutex.cloud.replies import Ledger, Reply
from cutex.command import INTERRUPTED, answered, print_nowhere, refuse
from cutex.errors import Missing
from cutex.problem import DEFAULT_OP, OPS, Problem, problem_class
from cutex.problem.stage import AnyStage, ladders, stages
from cutex.results import sweep as rows
from cutex.results.recorder import try_folder

Rent = Callable[[str, list[dict[str, Any]], int], AsyncIterator[Reply]]

DEFAULT_GPU = "B200"
DEFAULT_TESTS = f"tests/{DEFAULT_OP}/test_{DEFAULT_OP}.py -q"

# The seconds that a call takes: generous estimates; the final price is by measured seconds.
CHECK = 6.0  # per problem: inputs, reference, check
VARIANT = 2.0  # per stage or peer: warm-up and 50 rounds; a peer's setup is in its PeerKernel
TUNE = 10.0  # a stage that chooses its config by time
TESTS = 300.0
SCRIPT = 60.0
PROBES = 60.0
LAYERS, LAYER = 20.0, 0.7  # a call that sweeps over layers of models; each layer, each thing timed
BATCH = 48  # layers that one call sweeps over


def kinds() -> list[type[Problem]]:
    """The problems of all operators."""
    return [problem_class(op) for op in OPS]


class Parser(cli.Parser):
    """A parser of command lines that end in `-- ARG...`, the arguments of a script."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        given = list(sys.argv[1:] if args is None else args)
        at = given.index("--") if "--" in given else len(given)
        found = super().parse_args(given[:at], namespace)
        found.arguments = given[at + 1 :]
        return found


def as_typed(argv: Sequence[str], typed: Sequence[str]) -> list[str]:
    """`argv` with the `--` put back that `modal run` removes from the command line `typed`."""
    own = list(typed[typed.index("--") + 1 :]) if "--" in typed else []
    if not own or "--" in argv or list(argv[-len(own) :]) != own:
        return list(argv)
    return [*argv[: -len(own)], "--", *own]


def parser() -> Parser:
    p = Parser(
        prog="modal run modal_app.py",
        description="Run cutex on a GPU rented from Modal. Every request is first compiled and "
        "simulated here; then its price is shown.",
    )
    what = p.add_argument_group("what to run")
    what.add_argument(
        "--op",
        choices=(*OPS, "script", "tests", "sweep", "layers", "confirm"),
        default=DEFAULT_OP,
        help=f"{', '.join(OPS)}: as python -m cutex.OP; script: a file of yours, in the simulator "
        "here and then as it is there; tests: pytest there; sweep: many problems and GPUs; layers: "
        "as python -m cutex.sweep, in parts; confirm: all that only a B200 can answer; default: "
        f"{DEFAULT_OP}",
    )
    what.add_argument(
        "--gpu",
        default=DEFAULT_GPU,
        metavar="|".join(prices.RENTALS),
        help="default: B200; for sweep and layers several, as B200,H200",
    )
    what.add_argument("--stage", default="all", metavar="N,N|all|list", help="default: all")
    cli.add_problem(what, kinds())
    what.add_argument(
        "--tests",
        default=DEFAULT_TESTS,
        metavar="ARGS",
        help=f"of pytest; default: {DEFAULT_TESTS}",
    )
    what.add_argument(
        "--half",
        choices=sweep.HALVES,
        default="report",
        help="of --op layers, whose --dtype is bf16 or e4m3; default: report",
    )
    what.add_argument("--tuned", action="store_true", help="of --op layers: tune each first")
    what.add_argument(
        "script",
        nargs="?",
        metavar="FILE",
        help="of --op script, which travels alone; its own arguments stand behind --",
    )
    cli.add_timing(p.add_argument_group("timing"), kinds())
    money = p.add_argument_group("money")
    money.add_argument(
        "--dry-run",
        action="store_true",
        help="show the plan and its price; compile nothing, and rent nothing",
    )
    money.add_argument(
        "--preflight-only", action="store_true", help="compile and simulate here; rent nothing"
    )
    money.add_argument(
        "--max-cost", type=float, metavar="USD", help="never rent for more than this"
    )
    money.add_argument(
        "--rate",
        action="append",
        default=[],
        metavar="GPU=USD",
        help="dollars per hour, as B200=6.25",
    )
    money.add_argument("--no-preflight", action="store_true", help="rent without simulating first")
    cli.add_output(p.add_argument_group("output"))
    return p


# ---- the request


def plan(args: argparse.Namespace) -> Plan:
    """The Plan of a command line; ValueError, in one sentence, for options that do not go
    together."""
    rentals = prices.overridden([prices.rental(name) for name in args.gpu.split(",")], args.rate)
    rentals = list({r.gpu: r for r in rentals}.values())
    if len(rentals) > 1 and args.op not in ("sweep", "layers"):
        raise ValueError(
            f"--gpu {args.gpu}: --op {args.op} takes one GPU; sweep and layers take several"
        )
    if args.preflight_only and (args.dry_run or args.no_preflight):
        other = "--dry-run" if args.dry_run else "--no-preflight"
        raise ValueError(f"--preflight-only compiles and simulates, and {other} does not")
    if args.max_cost is not None and not args.max_cost > 0:
        raise ValueError(f"--max-cost {args.max_cost}: dollars above 0 are needed")
    requests: list[Request] = []
    for r in rentals:
        requests += _requests(args, r)
    requests = [replace(request, index=i) for i, request in enumerate(requests)]
    rentals = [r for r in rentals if any(request.gpu == r.gpu for request in requests)]
    if not rentals:
        raise ValueError(f"--op layers: {args.out} has all of these from this commit already")
    made = Plan(rentals, requests, args.max_cost)
    if args.max_cost is not None and made.usd > args.max_cost:
        raise ValueError(
            f"--max-cost {args.max_cost:g}: this would cost about ${made.usd:.2f}; "
            "ask for fewer problems, stages or GPUs, or allow more"
        )
    if args.max_cost is not None and made.max_usd > args.max_cost * 1.001:
        raise ValueError(
            f"--max-cost {args.max_cost:g}: this costs about ${made.usd:.2f}, but up to "
            f"${made.max_usd:.2f} if containers start late, calls hang or are preempted; "
            "ask for less, or allow that"
        )
    return made


def _requests(args: argparse.Namespace, rental: Rental) -> list[Request]:
    shared: dict[str, Any] = {"index": 0, "run": run_time(), "commit": commit()}
    shared.update(gpu=rental.gpu, arch=rental.arch)
    if args.op == "tests" and args.script is None:
        return [Request(**shared, seconds=TESTS, pytest=shlex.split(args.tests))]
    if args.op == "script":
        return [Request(**shared, seconds=SCRIPT, **_script(args))]
    if args.script is not None:
        raise ValueError(f"{args.script!r}: --op script runs a file, and this is --op {args.op}")
    if args.op == "layers":
        return [Request(**shared, **asked) for asked in _layers(args, rental)]
    if args.op == "confirm" and rental.arch != "sm_100a":
        raise ValueError(f"--gpu {rental.gpu}: --op confirm asks what only a B200 can answer")
    requests = [
        Request(**shared, **asked)
        for kind in _kinds(args, rental)
        for asked in _asked(kind, args, rental)
    ]
    if args.op == "confirm":
        requests.append(Request(**shared, seconds=PROBES, probes=True))
    return requests


def _script(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a Request for the script named in `args`."""
    if args.script is None:
        raise ValueError("--op script: the path of a Python file is needed")
    try:
        source = Path(args.script).read_bytes()
    except OSError as error:
        raise ValueError(f"--op script {args.script}: {error.strerror}") from None
    return {"script": Path(args.script).name, "source": source, "arguments": args.arguments}


def _layers(args: argparse.Namespace, rental: Rental) -> Iterator[dict[str, Any]]:
    """The fields of the Requests for the layers of models that have no row yet, in batches."""
    given = ["--half", args.half, "--dtype", args.dtype or "bf16", *["--tuned"] * args.tuned]
    given += [] if args.compare is None else ["--compare", args.compare]
    todo = sweep.asked(sweep.parser().parse_args(given))
    files = Path(args.out).glob("sweep/*.jsonl")
    there = [r for f in files for r in rows.read(f) if r.environment.get("rented") == rental.gpu]
    left = sweep.left(todo, there, commit(), args.tuned)
    each = LAYER * (1 + len(todo.compare)) + TUNE * args.tuned
    for first in range(0, len(left), BATCH):
        names = [entry.name for entry in left[first : first + BATCH]]
        yield {"seconds": LAYERS + each * len(names), "layers": names, "arguments": given}


def _kinds(args: argparse.Namespace, rental: Rental) -> list[type[Problem]]:
    """The operators that `args` mean: the one named; else those whose sizes are given, or all that
    have a ladder for the GPU, with the stage if one is named."""
    if args.op in OPS:
        return [problem_class(args.op)]
    able = [kind for kind in kinds() if rental.arch in ladders(kind.op).archs]
    there = {kind: {str(s.number) for s in stages(kind.op, rental.arch)} for kind in able}
    named = any(args.stage in numbers for numbers in there.values())
    able = [kind for kind in able if not named or args.stage in there[kind]]
    return [kind for kind in kinds() if kind.sizes_given(args)] or able


def _asked(
    kind: type[Problem], args: argparse.Namespace, rental: Rental
) -> Iterator[dict[str, Any]]:
    """The fields of the Requests for one operator on one GPU, one for each problem."""
    args = argparse.Namespace(**{**vars(args), "seeds": None, "order": None, "jobs": None})
    args.compare = _peers_of(kind, _kinds(args, rental), args.compare)
    case = None if args.op in OPS else args.op
    if args.op == "confirm":
        args.compare = args.compare or ",".join(kind.confirm_peers or list(kind.peers)[:1])
    stages = cli.choose_stages(kind, args.stage, arch(rental.arch))
    job = cli.job(kind, args, stages, "cuda", case)
    for problem in job.problems:
        yield {
            "op": kind.op,
            "seconds": _estimate(kind, job.stages, job.options),
            "stages": [s.number for s in job.stages],
            "problem": problem.as_dict(),
            "options": _plain(job.options),
        }


def _peers_of(
    kind: type[Problem], kinds: Sequence[type[Problem]], compare: str | None
) -> str | None:
    """The peers of --compare that are one operator's: with several operators each has its own."""
    if compare is None or len(kinds) == 1:
        return compare
    names = compare.split(",")
    known = list(dict.fromkeys(name for k in kinds for name in k.peers))
    for name in names:
        if name not in known:
            raise ValueError(f"--compare {name!r} is not one of {', '.join(known)}")
    return ",".join(name for name in names if name in kind.peers) or None


def _plain(options: Options) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name != "notice"}


def _estimate(kind: type[Problem], stages: Sequence[AnyStage], options: Options) -> float:
    if options.check_only:
        return CHECK
    extra = TUNE * sum(stage.chooses for stage in stages)
    extra += sum(kind.peers[name].setup_seconds for name in options.compare)
    return CHECK + VARIANT * (len(stages) + len(options.compare)) + extra


# ---- the command


@answered
def main(
    argv: Sequence[str],
    rent: Rent,
    running: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> int:
    """Run the command line `argv`, renting through `rent` while `running`; return the exit code."""
    try:
        size_options = [option for kind in kinds() for option in kind.size_options]
        args = parser().parse_args(cli.join_sizes(argv, size_options))
        if args.stage == "list":
            rental = prices.rental(args.gpu.partition(",")[0])
            for kind in _kinds(args, rental):
                cli.list_stages(kind, rental.arch)
            return 0
        made = plan(args)
        if not (args.dry_run or args.preflight_only):
            try_folder(Path(args.out))
    except ValueError as error:
        return refuse(str(error))

    def say(text: str) -> None:
        try:
            print(text, file=sys.stderr if args.json else sys.stdout, flush=True)
        except BrokenPipeError:
            print_nowhere()

    say(str(made))  # before minutes of work, so that a plan that was not meant is seen at once
    if args.dry_run:
        return 0
    kernels: dict[str, bytes] = {}
    if not args.no_preflight and args.op != "tests":
        say("preflight: compiles, and simulates a reduced size, before anything is rented")
        try:
            right, kernels = preflight(made, say)
        except (Missing, ModuleNotFoundError) as error:
            return refuse(f"no preflight here: {error}; --no-preflight rents without")
        if not right:
            say("nothing was rented; --no-preflight rents all the same")
            return 1
        size = sum(map(len, kernels.values())) / 1024
        say(f"preflight: right in the simulator; {size:.0f} KB of compiled kernels travel along")
    if args.preflight_only:
        return 0
    requests = [
        replace(request, kernels=kernels.get(request.arch, b"")) for request in made.requests
    ]
    say("renting: Modal is asked for the GPUs")
    with running():
        try:
            return asyncio.run(collect(replace(made, requests=requests), args, rent, say))
        except KeyboardInterrupt:
            # NOTE: leaving `running` ends the app and with it every call that still runs; Modal's
            # own handling of Ctrl-C would do that too, but with exit code 0.
            print("cutex: interrupted; what runs remotely is ended", file=sys.stderr)
            return INTERRUPTED


async def collect(
    made: Plan, args: argparse.Namespace, rent: Rent, say: Callable[[str], None]
) -> int:
    """Rent all GPUs at once, and record each reply as it arrives; return the exit code."""
    ledger = Ledger(made, args, say)

    async def fetch(rental: Rental) -> None:
        requests = [vars(request) for request in made.on(rental.gpu)]
        try:
            async for reply in rent(rental.gpu, requests, made.limit(rental)):
                ledger.take(rental, reply)
        except Exception as error:
            ledger.take(rental, error)

    try:
        async with asyncio.TaskGroup() as group:
            for rental in made.rentals:
                group.create_task(fetch(rental))
    finally:
        ledger.account()
    return ledger.code
