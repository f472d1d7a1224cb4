"""Renting a GPU for a run: preflight, plan and price first; replies into the ledger as they come.

What rents is given from outside (modal_app.py), so all of this runs, and is tested, without Modal.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cutex.arch import arch
from cutex.bench import cli
from cutex.bench.run import Options, commit, compile_stage, run_stages, run_time
from cutex.cloud import prices, remote
from cutex.cloud.prices import Rental
from cutex.command import INTERRUPTED, answered, print_nowhere, refuse
from cutex.errors import Missing
from cutex.problem import DEFAULT_OP, OPS, Problem, problem_class, size_name
from cutex.problem.stage import Config, Stage, ladders
from cutex.problem.stage import stage as stage_named
from cutex.results import Result
from cutex.results.recorder import Recorder, try_folder

Reply = dict[str, Any] | BaseException
Rent = Callable[[str, list[dict[str, Any]], int], AsyncIterator[Reply]]

DEFAULT_GPU = "B200"
DEFAULT_TESTS = f"tests/test_{DEFAULT_OP}.py -q"

# What a call takes, in seconds. Estimates, with room: the price afterwards is by measured seconds.
START = 40.0  # a container starts, imports torch and the DSL; once per GPU
CHECK = 6.0  # per problem: inputs, reference, check
VARIANT = 2.0  # per stage or peer: warm-up and 50 rounds; what a peer takes beside: PeerKernel
TUNE = 10.0  # a stage that chooses its config by time
TESTS = 300.0
SCRIPT = 60.0
PROBES = 60.0
SLACK = 4.0  # times the estimate, after which a call is ended
SHORTEST_LIMIT = 120
LEAST_LIMIT = 60  # under --max-cost: the first call of a container still imports torch and the DSL
STARTUP_LIMIT = 180  # seconds after which Modal gives up on a container that does not start
RESTARTS = 1  # of each call, on a container that is taken away, are counted in the most
NOT_COVERED = (
    "not counted: a second preemption of one call, building the image (once), and the volume of "
    "compiled kernels (cents a month)"
)


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
    """`argv` with the `--` that `modal run` takes out of the command line `typed`."""
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
        choices=(*OPS, "script", "tests", "sweep", "confirm"),
        default=DEFAULT_OP,
        help=f"{', '.join(OPS)}: as python -m cutex.OP; script: a file of yours, in the simulator "
        "here and then as it is there; tests: pytest there; sweep: many problems "
        f"and GPUs; confirm: all that only a B200 can answer; default: {DEFAULT_OP}",
    )
    what.add_argument(
        "--gpu",
        default=DEFAULT_GPU,
        metavar="|".join(prices.RENTALS),
        help="default: B200; for sweep several, as B200,H200",
    )
    what.add_argument("--stage", default="all", metavar="N|all|list", help="default: all")
    cli.add_problem(what, kinds())
    what.add_argument(
        "--tests",
        default=DEFAULT_TESTS,
        metavar="ARGS",
        help=f"of pytest; default: {DEFAULT_TESTS}",
    )
    what.add_argument(
        "script",
        nargs="?",
        metavar="FILE",
        help="of --op script, which travels alone; its own arguments stand behind --",
    )
    cli.add_timing(p.add_argument_group("timing"), kinds())
    money = p.add_argument_group("money")
    money.add_argument("--dry-run", action="store_true", help="show the plan, and rent nothing")
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


# ---- what is asked for


@dataclass(frozen=True)
class Request:
    """One call in one container; `remote.execute` takes it as a dict."""

    index: int
    run: str  # UTC time, alike for all that one command asks for
    gpu: str
    arch: str
    seconds: float  # estimate
    op: str = ""
    stages: list[int] = field(default_factory=list)
    problem: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    probes: bool = False
    pytest: list[str] | None = None
    script: str | None = None  # the name of a file
    source: bytes = b""  # its text
    arguments: list[str] = field(default_factory=list)  # those of the script
    commit: str | None = None
    kernels: bytes = b""

    def __str__(self) -> str:
        if self.pytest is not None:
            return f"pytest {shlex.join(self.pytest)}"
        if self.script is not None:
            return shlex.join(["python", self.script, *self.arguments])
        if self.problem is None:
            return "timing probes"
        size, dtype = size_name(self.op, self.problem), self.problem["dtype"]
        stages = ",".join(map(str, self.stages))
        peers = " ".join(("beside", *self.options["compare"])) if self.options["compare"] else ""
        return f"stage {stages} on {size} {dtype} {peers}".rstrip()


@dataclass(frozen=True)
class Plan:
    """All that one command asks for, by GPU, and what it costs."""

    rentals: list[Rental]
    requests: list[Request]
    max_cost: float | None

    def on(self, gpu: str) -> list[Request]:
        return [r for r in self.requests if r.gpu == gpu]

    def seconds(self, rental: Rental) -> float:
        return START + sum(r.seconds for r in self.on(rental.gpu))

    @property
    def usd(self) -> float:
        return sum(r.usd(self.seconds(r)) for r in self.rentals)

    def limit(self, rental: Rental) -> int:
        """Seconds after which Modal ends a call: generous, yet within --max-cost in all.

        The start of a container has a limit of its own, STARTUP_LIMIT.
        """
        longest = max(r.seconds for r in self.on(rental.gpu))
        limit = max(SHORTEST_LIMIT, SLACK * longest)
        if self.max_cost is not None:
            share = self.max_cost / self.usd * self.seconds(rental)
            limit = min(limit, self._each(rental, share))
        return max(LEAST_LIMIT, int(longest), int(limit))

    def _each(self, rental: Rental, seconds: float) -> float:
        """What of `seconds` each call may take, if each is begun again once."""
        runs = 1 + RESTARTS
        return (seconds - runs * STARTUP_LIMIT) / (runs * len(self.on(rental.gpu)))

    @property
    def most(self) -> float:
        """Dollars that it costs if every call is begun again, and runs into its limit each time."""
        return sum(
            r.usd((1 + RESTARTS) * (STARTUP_LIMIT + len(self.on(r.gpu)) * self.limit(r)))
            for r in self.rentals
        )

    def __str__(self) -> str:
        lines = []
        for rental in self.rentals:
            seconds = self.seconds(rental)
            lines.append(
                f"{rental.gpu}: {seconds:.0f} s, about ${rental.usd(seconds):.2f} at "
                f"${rental.usd_per_second * 3600:.2f} an hour (rates of {prices.AS_OF})"
            )
            lines += [f"  {request.seconds:4.0f} s  {request}" for request in self.on(rental.gpu)]
        lines.append(f"in all about ${self.usd:.2f}, at most ${self.most:.2f}; {NOT_COVERED}")
        return "\n".join(lines)


def plan(args: argparse.Namespace) -> Plan:
    """The Plan of a command line; ValueError, in one sentence, where it makes no sense."""
    rentals = prices.overridden([prices.rental(name) for name in args.gpu.split(",")], args.rate)
    rentals = list({r.gpu: r for r in rentals}.values())
    if len(rentals) > 1 and args.op != "sweep":
        raise ValueError(f"--gpu {args.gpu}: --op {args.op} takes one GPU; sweep takes several")
    if args.max_cost is not None and not args.max_cost > 0:
        raise ValueError(f"--max-cost {args.max_cost}: dollars above 0 are needed")
    requests: list[Request] = []
    for r in rentals:
        requests += _requests(args, r)
    requests = [replace(request, index=i) for i, request in enumerate(requests)]
    made = Plan(rentals, requests, args.max_cost)
    if args.max_cost is not None and made.usd > args.max_cost:
        raise ValueError(
            f"--max-cost {args.max_cost:g}: this would cost about ${made.usd:.2f}; "
            "ask for fewer problems, stages or GPUs, or allow more"
        )
    if args.max_cost is not None and made.most > args.max_cost * 1.001:
        raise ValueError(
            f"--max-cost {args.max_cost:g}: this costs about ${made.usd:.2f}, but up to "
            f"${made.most:.2f} if containers start late, calls hang or are preempted; "
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
    """The fields of a Request for the script that `args` name."""
    if args.script is None:
        raise ValueError("--op script: the path of a Python file is needed")
    try:
        source = Path(args.script).read_bytes()
    except OSError as error:
        raise ValueError(f"--op script {args.script}: {error.strerror}") from None
    return {"script": Path(args.script).name, "source": source, "arguments": args.arguments}


def _kinds(args: argparse.Namespace, rental: Rental) -> list[type[Problem]]:
    """The operators that `args` mean: one by name; else those with sizes in `args`, or all that
    have a ladder for the GPU."""
    if args.op in OPS:
        return [problem_class(args.op)]
    able = [kind for kind in kinds() if rental.arch in ladders(kind.op).archs]
    return [kind for kind in kinds() if kind.sizes_given(args)] or able


def _asked(
    kind: type[Problem], args: argparse.Namespace, rental: Rental
) -> Iterator[dict[str, Any]]:
    """The fields of the Requests for one operator on one GPU, one for each problem."""
    args = argparse.Namespace(**{**vars(args), "seeds": None, "order": None})
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


def _plain(options: Options) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name != "notice"}


def _estimate(kind: type[Problem], stages: Sequence[Stage], options: Options) -> float:
    if options.check_only:
        return CHECK
    extra = TUNE * sum(stage.chooses for stage in stages)
    extra += sum(kind.peers[name].setup_seconds for name in options.compare)
    return CHECK + VARIANT * (len(stages) + len(options.compare)) + extra


# ---- before anything is rented


def preflight(made: Plan, say: Callable[[str], None]) -> tuple[bool, dict[str, bytes]]:
    """Compile every kernel asked for, and run it in the simulator on less.

    Returns whether all was right, and by arch the compiled kernels, packed to travel.
    """
    entries: dict[str, set[Path]] = {}
    right, seen = True, set()
    for request in made.requests:
        folders = entries.setdefault(request.arch, set())
        if request.probes:
            right &= _preflight_probes(request.arch, folders, say)
        if request.script is not None:
            right &= _preflight_script(request, say)
        if request.problem is None:
            continue
        problem = problem_class(request.op)(**request.problem)
        for number in request.stages:
            stage = stage_named(request.op, request.arch, number).fitted(problem)
            for config in _configs(stage, problem):
                compiled = compile_stage(replace(stage, default=config), problem.dtype)
                folders.add(compiled.object_path.parent)
            small = problem.reduced()
            if (stage, small) in seen:
                continue
            seen.add((stage, small))
            result = run_stages(small, [stage], "sim")[0]
            if not result.ok:
                right = False
                what = f"stage {stage.number} of {stage.arch} on {small.size}"
                say(f"preflight: {what}: {result.message}")
    return right, {name: remote.pack(folders) for name, folders in entries.items()}


def _configs(stage: Stage, problem: Problem) -> list[Config]:
    """All configs that `stage` may run with there: of one that chooses by time, every candidate."""
    if not stage.chooses:
        return [stage.config()]
    from cutex.bench.autotune import CANDIDATES

    return stage.shortlist(problem, CANDIDATES)


def _preflight_script(request: Request, say: Callable[[str], None]) -> bool:
    """Run the script in the simulator, in a process of its own; its output is shown."""
    assert request.script is not None
    with tempfile.TemporaryDirectory(prefix="cutex-") as folder:
        file = Path(folder) / request.script
        file.write_bytes(request.source)
        command = [sys.executable, "-m", "cutex.sim", "--arch", request.arch, str(file)]
        code = subprocess.run([*command, *request.arguments], check=False).returncode
    if code:
        say(f"preflight: {request}: exit code {code} in the simulator")
    return code == 0


def _preflight_probes(target: str, folders: set[Path], say: Callable[[str], None]) -> bool:
    from cutex.bench.probes import compile_all, measure
    from cutex.sim import SimError

    folders |= {compiled.object_path.parent for compiled in compile_all(target)}
    try:
        wrong = [row["probe"] for row in measure(target, "sim") if not row["ok"]]
    except SimError as error:
        wrong = [str(error)]
    for what in wrong:
        say(f"preflight: probe: {what}")
    return not wrong


# ---- the command


@answered
def main(
    argv: Sequence[str],
    rent: Rent,
    running: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> int:
    """Run the command line `argv`, renting through `rent` while `running`; the exit code."""
    try:
        size_options = [option for kind in kinds() for option in kind.size_options]
        args = parser().parse_args(cli.join_sizes(argv, size_options))
        if args.stage == "list":
            rental = prices.rental(args.gpu.partition(",")[0])
            for kind in _kinds(args, rental):
                cli.list_stages(kind, rental.arch)
            return 0
        made = plan(args)
        if not args.dry_run:
            try_folder(Path(args.out))
    except ValueError as error:
        return refuse(str(error))

    def say(text: str) -> None:
        try:
            print(text, file=sys.stderr if args.json else sys.stdout, flush=True)
        except BrokenPipeError:
            print_nowhere()

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
    say(str(made))
    if args.dry_run:
        return 0
    requests = [
        replace(request, kernels=kernels.get(request.arch, b"")) for request in made.requests
    ]
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
    """Rent all GPUs at once, and record each reply as it arrives; the exit code."""
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


class Ledger:
    """The replies that have arrived: printed, recorded, and added up.

    Each stands for itself: whatever is wrong with one, or with writing it down, costs no other.
    """

    def __init__(self, made: Plan, args: argparse.Namespace, say: Callable[[str], None]) -> None:
        self.made, self.say = made, say
        self.as_json = args.json
        self.recorder = Recorder(Path(args.out))
        self.compare = next((r.options["compare"] for r in made.requests if r.options), ())
        self.lines: cli.Lines | None = None
        self.seconds = dict.fromkeys((r.gpu for r in made.rentals), 0.0)
        self.since = dict.fromkeys(self.seconds, time.monotonic())  # the last reply of each GPU
        self.answered: set[int] = set()  # indices of requests
        self.failed = 0  # calls that ended in an exception
        self.code = 0

    def take(self, rental: Rental, reply: Reply) -> None:
        if isinstance(reply, BaseException):
            self._fails()
            self.failed += 1
            # NOTE: what failed ran, and is paid for, from the reply before it on; no longer than
            # its limits let it
            most = STARTUP_LIMIT + self.made.limit(rental)
            self.seconds[rental.gpu] += min(time.monotonic() - self.since[rental.gpu], most)
            self._arrived(rental)
            print(f"cutex: a call on {rental.gpu} failed: {_sentence(reply)}", file=sys.stderr)
            traceback.print_exception(reply, file=sys.stderr)
            return
        self._arrived(rental)
        try:
            index, seconds = _stamp(reply, self.made)
        except ValueError as error:
            self._foreign(reply, error)
            if not isinstance(reply, dict):
                return
            index, seconds = -1, 0.0
        again = index in self.answered
        self.answered.add(index)
        if not again:  # NOTE: a reply may be delivered twice, and is paid for once
            self.seconds[rental.gpu] += seconds
        with self._apart(reply):
            for notice in reply.get("notices", ()):
                print(f"cutex: {notice}", file=sys.stderr)
        self._take_rows(rental, reply, seconds)
        if "probes" in reply:
            self._take_probes(reply["probes"])
        if "junit" in reply:
            self._take_junit(reply)
        if "script" in reply:
            with self._apart(reply):
                self._take_script(reply)

    def _arrived(self, rental: Rental) -> None:
        self.since[rental.gpu] = time.monotonic()

    def account(self) -> None:
        """Tell at the end what was paid for, what is missing, and what went wrong."""
        for rental in self.made.rentals:
            spent = self.seconds[rental.gpu]
            self.say(f"{rental.gpu}: {spent:.0f} s measured, about ${rental.usd(spent):.2f}")
        missing = len(self.made.requests) - len(self.answered - {-1}) - self.failed
        if missing > 0:
            self._fails()
            print(f"cutex: {missing} of {len(self.made.requests)} calls were not answered",
                  file=sys.stderr)  # fmt: skip
        for sentence in self.recorder.summary():
            self._fails()
            print(f"cutex: {sentence}", file=sys.stderr)

    def _fails(self, code: int = 1) -> None:
        self.code = self.code or code

    def _foreign(self, what: object, error: Exception) -> None:
        self._fails()
        self.recorder.foreign(what, error)

    @contextmanager
    def _apart(self, what: object) -> Iterator[None]:
        """Within, an error costs only itself; `what` it concerns is kept."""
        try:
            yield
        except OSError:  # NOTE: nobody reads what is printed, and it is recorded all the same
            print_nowhere()
        except Exception as error:
            self._foreign(what, error)

    def _take_rows(self, rental: Rental, reply: dict[str, Any], seconds: float) -> None:
        rows: list[Result] = []
        lines = reply.get("results", [])
        for line in lines if isinstance(lines, list) else [lines]:
            with self._apart(line):
                if not isinstance(line, str):
                    raise ValueError(f"{type(line).__name__} where a row belongs")
                rows.append(Result.from_json(line))
        for row in rows:
            row = replace(row, cost_usd=rental.usd(seconds) / len(rows))
            with self._apart(row.to_json()):
                self.lines = self.lines or cli.Lines(row.device, self.compare, self.as_json)
                self.lines.result(row)
            self.recorder.row(row)
            if not row.ok:
                self._fails()
        if rows and self.lines is not None:
            with self._apart(rows[-1].to_json()):
                self.lines.peers(rows[-1])

    def _take_probes(self, found: list[dict[str, Any]]) -> None:
        from cutex.bench import probes

        out, when = self.recorder.folder, self.made.requests[0].run
        with self._apart(found):
            self.say(probes.table(found))
            if not all(row["ok"] for row in found):
                self._fails()
        self.recorder.attempt("probes", lambda: probes.record(found, when, out), found)

    def _take_script(self, reply: dict[str, Any]) -> None:
        said, code = reply["script"], int(reply["code"])
        sys.stderr.write(str(said["stderr"]))
        sys.stdout.write(str(said["stdout"]))
        sys.stdout.flush()
        self.say(f"exit code {code}")
        if code:
            self._fails(code)

    def _take_junit(self, reply: dict[str, Any]) -> None:
        with self._apart(reply):
            self._fails(int(reply["code"]))
        junit = reply["junit"]
        if not junit:
            self.say("pytest wrote no report")
            return
        name = f"junit-{self.made.requests[0].run[:19].replace(':', '')}.xml"
        path = self.recorder.folder / name
        self.recorder.attempt("junit", lambda: path.write_text(junit, errors="replace"), junit)
        self.say(f"pytest's report is in {path}")


def _stamp(reply: object, made: Plan) -> tuple[int, float]:
    """The index of the request that `reply` answers, and the seconds that it took."""
    if not isinstance(reply, dict):
        raise ValueError(f"{type(reply).__name__} where a dict belongs")
    index, seconds = reply.get("index"), reply.get("seconds")
    if type(index) is not int or index not in {r.index for r in made.requests}:
        raise ValueError(f"it answers request {index!r}, which was not asked")
    if not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise ValueError(f"it took {seconds!r} seconds")
    return index, float(seconds)


def _sentence(error: BaseException) -> str:
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
