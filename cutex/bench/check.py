"""python -m cutex.check FILE.py: a kernel author's inner loop.

The script runs in the simulator up to its first launch, and from there once in every order of
events, and with several seeds where an order has them; each finding is printed once, with the
orders in which it occurs, and of each order what it adds to those before. Advisories follow. The
first run also prints the resources that each kernel takes of an SM, and the bank conflicts of
shared memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from cutex.arch import KNOWN
from cutex.command import Parser, answered, refuse
from cutex.cores import cores
from cutex.orders import ABOUT, ORDERS
from cutex.sim.reports import used_once

ALIKE = ("fifo", "eager")  # orders that no seed changes
_RULE = re.compile(r"(?:^|:\d+: )([a-z][a-z -]*): ")  # the rule, in a report's first line
LOOK = 0.3  # seconds between two looks at a file that is watched


@dataclass
class Run:
    """One run of the script: its exit code, its output, and the simulator's findings."""

    order: str
    seed: int
    code: int
    output: str  # the output of the script and of the simulator
    found: dict[str, Any] = field(default_factory=dict)  # the file that --json of cutex.sim writes

    @property
    def name(self) -> str:
        return self.order if self.order in ALIKE else f"{self.order}:{self.seed}"

    @property
    def launched(self) -> bool:
        return bool(self.found.get("launches") or self.found.get("errors"))

    @property
    def refused(self) -> bool:
        """Whether the simulator could not run it: no Python, no C compiler, no cache."""
        return self.code == 2 and not self.launched and self.output.startswith("cutex: ")

    @property
    def reports(self) -> list[str]:
        """The reports of findings and errors; of a script that failed without one, its code and
        output."""
        found = [r["text"] for r in self.found.get("findings", [])]
        found += [e["report"] for e in self.found.get("errors", [])]
        return found or ([f"exit code {self.code}\n{self.output.rstrip()}"] if self.code else [])

    @property
    def advisories(self) -> list[str]:
        return [r["text"] for r in self.found.get("advisories", [])]


def parser() -> Parser:
    p = Parser(
        prog="python -m cutex.check",
        description="Run a script that asks for a GPU in the simulator, in every order of events.",
        epilog="Exit codes: 0 nothing found in any order; 1 something; 2 bad input.",
    )
    p.add_argument("--arch", default="sm_100a", choices=KNOWN, help="default: %(default)s")
    p.add_argument("--seeds", type=int, default=3, metavar="N", help="of each order; default: 3")
    p.add_argument("--watch", action="store_true", help="again whenever the file is saved")
    p.add_argument("script", type=Path, metavar="FILE.py")
    rest = p.add_argument("arguments", nargs=argparse.REMAINDER, help="those of the script")
    rest.required = False
    return p


def orders(seeds: int) -> list[tuple[str, int]]:
    return [(o, s) for o in ORDERS for s in range(1 if o in ALIKE else seeds)]


def runs(args: argparse.Namespace) -> Generator[Run, None, None]:
    """Run the script in every order, as many at a time as there are cores; yield in the order of
    `orders`."""
    wanted, ended = orders(args.seeds), dict[int, int]()  # exit codes
    with tempfile.TemporaryDirectory(prefix="cutex-") as name:
        folder = Path(name)
        commands = [
            ["--arch", args.arch, "--order", order, "--seed", str(seed),
             "--json", str(folder / f"{i}.json"), *(["--resources"] if i == 0 else []),
             str(args.script), *args.arguments]
            for i, (order, seed) in enumerate(wanted)
        ]  # fmt: skip
        (folder / "runs.json").write_text(json.dumps(commands), encoding="utf-8")
        command = [sys.executable, "-m", "cutex.sim.each_order", name, str(cores())]
        with _group(command) as process:
            assert process.stdout is not None
            for i, (order, seed) in enumerate(wanted):
                while i not in ended:
                    number, _, code = process.stdout.readline().partition(" ")
                    if not number:  # NOTE: a run that was killed, for instance
                        ended |= dict.fromkeys(range(i, len(wanted)), process.wait() or 1)
                        break
                    ended[int(number)] = int(code)
                output, found = (_text(folder / f"{i}.{kind}") for kind in ("txt", "json"))
                yield Run(order, seed, ended[i], output, json.loads(found) if found else {})


@contextmanager
def _group(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A context with `command` in a process group of its own, which ends with the block."""
    with (
        _ends_in_order(),
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, process_group=0, encoding="utf-8"
        ) as process,
    ):
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)


@contextmanager
def _ends_in_order() -> Iterator[None]:
    """A context in which the signals of `kill` and of a terminal that closes raise SystemExit: by
    default they end a process without its `finally`."""
    signals = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
    for number in signals:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_DFL)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _text(file: Path) -> str:
    return file.read_text(errors="replace", encoding="utf-8") if file.exists() else ""


def check(args: argparse.Namespace) -> int:
    """Run all orders, print their findings, and return the exit code. A script that ends before it
    has launched anything would end so in every order, and is run in the first only."""
    by_report: dict[str, list[str]] = {}
    advised: dict[str, list[str]] = {}
    kernels: list[str] = []
    once: set[str] | None = None  # the rings of which no order has used a slot twice
    unwatched: dict[str, None] = {}  # where an order has looked for no races
    count, started = 0, time.monotonic()
    with closing(runs(args)) as ended:
        for done in ended:
            count += 1
            if done.refused:
                print(done.output, end="", file=sys.stderr)
                return 2
            if done.found and not done.launched and not done.code:
                return refuse(f"{args.script} launches no kernel, so there is nothing to check")
            before = len(by_report)
            for kind, reports in ((by_report, done.reports), (advised, done.advisories)):
                for report in reports:
                    kind.setdefault(_cause(report), [report]).append(done.name)
            print(_verdict(done, len(by_report) - before), file=sys.stderr, flush=True)
            kernels += [kernel["text"] for kernel in done.found.get("kernels", [])]
            rings = set(done.found.get("used_once", ()))
            once = rings if once is None else once & rings
            unwatched |= dict.fromkeys(done.found.get("unwatched", ()))
            if done.found and not done.launched:
                break
    for report, *names in (*by_report.values(), *advised.values()):
        print(f"\n{report}\n  in order {', '.join(names)}")
    if kernels:
        print("", *kernels, sep="\n")
    if once:
        print(f"\n{used_once(sorted(once))}")
    for says in unwatched:
        print(f"\n{says}")
    seconds = time.monotonic() - started
    found = (
        f"{len(by_report)} report{'s' * (len(by_report) != 1)}" if by_report else "nothing found"
    )
    if advised:
        found += f", {len(advised)} advisor{'y' if len(advised) == 1 else 'ies'}"
    print(f"\n{args.script}: {count} order{'s' * (count != 1)}, {found}, {seconds:.1f} s")
    return 1 if by_report else 0


def _verdict(done: Run, new: int) -> str:
    """One line of what a run found, what of it is new, and what its order of events is."""
    found = len(done.reports)
    said = f"{found} found" if found else "nothing found"
    if found:
        said += f", {new or 'none'} new"
    return f"{done.name:<12} {said:<18} {ABOUT[done.order]}"


def _cause(report: str) -> str:
    """The rule and the place of a report: equal where two orders' reports have one cause."""
    lines = report.splitlines()
    place = next((line for line in lines if line.lstrip().startswith("at PTX line")), "")
    rule = _RULE.search(lines[0])
    return (rule[1] if rule else lines[0].partition(":")[0]) + place


@answered
def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if not args.script.is_file():
        return refuse(f"{args.script} is not a file")
    if not 1 <= args.seeds <= 1000:
        return refuse(f"--seeds {args.seeds}: takes a number from 1 to 1000")
    saved = _saved(args.script)  # before each run, so that a file saved during it is run again
    code = check(args)
    while args.watch:
        print(f"watching {args.script}; Ctrl-C ends it", file=sys.stderr)
        while _saved(args.script) in (saved, 0):
            time.sleep(LOOK)
        saved = _saved(args.script)
        code = check(args)
    return code


def _saved(file: Path) -> int:
    """The file's modification time, in ns; 0 while an editor replaces it."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0
