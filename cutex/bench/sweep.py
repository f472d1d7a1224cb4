"""A sweep: the speed of the library's call, untuned or tuned, on every problem of a corpus, beside
other libraries.

All variants of a problem take turns in one process (cutex/bench/timing.py); problems that the file
has a row of, from the same commit, are left out, so that a sweep that was cut off goes on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutex.arch import ARCHS, local_arch
from cutex.bench import timing
from cutex.bench.cli import Parser, refuse
from cutex.bench.run import environment, run_time
from cutex.command import answered
from cutex.problem import any_shapes, models
from cutex.problem.layer import PEERS, LayerProblem
from cutex.problem.models import Entry, hash_below
from cutex.results import sweep as rows
from cutex.results.recorder import try_folder
from cutex.results.sweep import SweepRow

if TYPE_CHECKING:
    from cutex.problem import Launch

HALVES = ("report", "fit", "all")
CORPORA = {"models": models.DTYPES, "any": any_shapes.DTYPES}
SAMPLING = timing.Sampling(rounds=15, warm_up_seconds=0.05, sample_us=2000.0, eager_calls=3)


@dataclass(frozen=True)
class Ours:
    """The library's functions that are timed."""

    matmul: Callable[..., Any]  # (a, b, out=...)
    tuning: Callable[[], AbstractContextManager[Any]]  # a context in which every problem is tuned
    build: Callable[[Iterable[tuple[Any, Any]], Any], list[Path]]  # for many (a, b), a dtype of out
    tiles: Callable[[Any, Any, Any], str]  # the tiles for (a, b) and a dtype of out
    simulated: Callable[[str], AbstractContextManager[Any]]  # a context that runs in the simulator


@dataclass(frozen=True)
class SweepRequest:
    """The problems of a sweep, and the names of the libraries beside which they are timed."""

    entries: list[Entry]
    compare: tuple[str, ...]


def left(
    asked: SweepRequest, there: Iterable[SweepRow], commit: str | None, tuned: bool
) -> list[Entry]:
    """The entries of `asked` that have no row in `there`, ordered by a hash of the problems' names,
    so that a sweep that was cut off is a fair sample."""
    known = rows.timed(there, commit, tuned, asked.compare)
    unknown = [e for e in asked.entries if e.name not in known]
    return sorted(unknown, key=lambda e: hash_below(e.name, 1 << 32))


def measure(
    entry: Entry, ours: Ours, compare: Sequence[str], tuned: bool, l2_bytes: int
) -> SweepRow:
    """Check ours, then time it beside `compare` on this process's GPU."""
    problem = entry.problem
    copies = timing.copies_to_rotate(problem.bytes, l2_bytes, "cold")
    operands = [(*problem.inputs("cuda", copy=i), *problem.outputs("cuda")) for i in range(copies)]
    variants: dict[str, Launch] = {"ours": lambda a, b, out: ours.matmul(a, b, out=out)}
    variants["ours"](*operands[0])
    check = problem.check(*operands[0])
    for name in compare:
        try:
            launch = PEERS[name](problem)
            launch(*operands[0])
        except Exception as error:  # NOTE: a peer that fails must not cost our own figures
            print(f"{entry.name}: {name}: {type(error).__name__}: {error}"[:200], file=sys.stderr)
        else:
            variants[name] = launch
    us: dict[str, float] = {}
    if check.ok:
        measured = timing.time_variants(variants, operands, "cold", sampling=SAMPLING)
        us = {name: round(t.median_us, 3) for name, t in measured.timings.items()}
    row = row_of(entry, compare, tuned, check.message)
    return replace(
        row,
        ok=check.ok,
        us=us.pop("ours", None),
        peers=us,
        kernel=ours.tiles(*operands[0][:2], operands[0][2].dtype),
    )


def row_of(entry: Entry, compare: Sequence[str], tuned: bool, message: str) -> SweepRow:
    """The row of a problem without a result, with `message` as the reason."""
    import torch

    problem = entry.problem
    return SweepRow(
        name=entry.name,
        source=entry.source,
        layer=entry.layer,
        mnk=problem.mnk,
        direction=problem.direction,
        dtype=problem.dtype,
        fits=entry.fits,
        ok=False,
        message=message,
        us=None,
        peers={},
        tuned=tuned,
        device_name=torch.cuda.get_device_name(),
        run=run_time(),
        flops=problem.flops,
        bytes=problem.bytes,
        environment=environment(),
        asked=tuple(compare),
    )


def sweep(
    asked: SweepRequest,
    ours: Ours,
    file: Path,
    tuned: bool = False,
    seconds: float | None = None,
) -> list[SweepRow]:
    """Measure the entries of `asked` that `file` has no row of from this commit, and return all
    their rows.

    It stops after `seconds`; the next call goes on from there. A problem that raises is a row that
    is not ok, which the next call does not try again.
    """
    arch = local_arch()
    assert arch is not None, "the command line has seen to it"
    begin = time.monotonic()
    todo = left(asked, rows.read(file), environment()["commit"], tuned)
    if len(todo) < len(asked.entries):
        print(f"{len(asked.entries) - len(todo)} problems are in {file} already", file=sys.stderr)
    if todo and not tuned:
        begun = time.monotonic()
        kernels = build(todo, ours)
        print(f"{len(kernels)} kernels built in {time.monotonic() - begun:.0f} s", file=sys.stderr)
    first = time.monotonic()
    for i, entry in enumerate(todo):
        if seconds is not None and time.monotonic() - begin > seconds:
            after = f"stopped after {seconds:g} s; {len(todo) - i} problems are left"
            print(f"{after} for the same command", file=sys.stderr)
            break
        try:
            row = measure(entry, ours, asked.compare, tuned, arch.l2_bytes)
        except Exception as error:  # NOTE: one problem must not cost those behind it
            row = row_of(entry, asked.compare, tuned, f"{type(error).__name__}: {error}"[:200])
        rows.append(file, row)
        ratio = "wrong" if not row.ok else f"{row.ratio:.3f}x" if row.ratio else f"{row.us} us"
        minutes = (time.monotonic() - first) / (i + 1) * (len(todo) - i - 1) / 60
        print(f"[{i + 1}/{len(todo)}] {entry.name}: {ratio}, {minutes:.0f} min left", flush=True)
        if not row.ok and not gpu_works():
            print(f"stopped: {entry.name} left the GPU unusable for this process", file=sys.stderr)
            break
    names = {e.name for e in asked.entries}
    return [r for r in rows.read(file) if r.name in names and r.tuned == tuned]


def build(entries: Sequence[Entry], ours: Ours) -> list[Path]:
    """Compile the kernels of `entries`, which are of one dtype, and return their folders."""
    operands = [e.problem.inputs("meta") for e in entries]
    return ours.build(operands, entries[0].problem.outputs("meta")[0].dtype)


def gpu_works() -> bool:
    """Whether this process can still use its GPU: after an access to a wrong address no launch
    succeeds, and all later problems would count as wrong."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


# ---- the command line


def parser() -> Parser:
    p = Parser(
        prog="python -m cutex.sweep",
        description="Time cutex.matmul on linear layers of public models, or on products of any "
        "sizes, beside others, on this GPU; print the sorted ratios, those of each class of M, N, "
        "K and layout, and the ten worst. Goes on where it was cut off: what DIR/sweep/ has from "
        "this commit stays.",
    )
    p.add_argument("--half", choices=HALVES, default="report", help="default: report")
    p.add_argument("--corpus", choices=CORPORA, default="models", help="default: models")
    p.add_argument(
        "--seed",
        metavar="TEXT",
        help="of the corpus any, of which another seed gives other problems; default: any",
    )
    dtypes = tuple(dict.fromkeys(x for of in CORPORA.values() for x in of))
    p.add_argument("--dtype", choices=dtypes, default="bf16", help="default: bf16")
    p.add_argument(
        "--only", metavar="FILE", help="only the problems that its lines begin with, as of --list"
    )
    p.add_argument(
        "--compare",
        default=",".join(PEERS),
        metavar="PEER,PEER",
        help=f"default: {','.join(PEERS)}; '' for none",
    )
    p.add_argument("--tuned", action="store_true", help="tune each problem first (cutex.tune)")
    p.add_argument(
        "--below",
        type=float,
        metavar="RATIO",
        help="only problems whose untuned row in the file has less than so many times the best of "
        "the others' speed",
    )
    p.add_argument("--seconds", type=float, metavar="S", help="stop after so many")
    p.add_argument("--out", default="results", metavar="DIR", help="ledger; default: results")
    instead = p.add_mutually_exclusive_group()
    instead.add_argument("--list", action="store_true", help="print the problems and their sources")
    instead.add_argument(
        "--summary", action="store_true", help="time nothing, sum up what is there"
    )
    instead.add_argument(
        "--preflight",
        choices=ARCHS,
        help="time nothing: compile the kernels for this arch, of which no GPU need be here, run a "
        "small problem of each layout in the simulator, and print where the kernels are",
    )
    return p


def asked(args: argparse.Namespace) -> SweepRequest:
    """Return the sweep that `args` state. Raises ValueError, with one sentence, for bad ones."""
    compare = tuple(name for name in args.compare.split(",") if name)
    for name in compare:
        if name not in PEERS:
            raise ValueError(f"--compare {name!r} is not one of {', '.join(PEERS)}")
    for option in ("below", "seconds"):
        value = getattr(args, option)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{option} {value:g}: a number above 0 is needed")
    if args.below is not None and (args.list or args.summary or args.preflight):
        raise ValueError("--below takes problems to time, and this times none")
    half = [e for e in corpus(args) if args.half == "all" or e.fits == (args.half == "fit")]
    entries = listed(half, args.only) if args.only else half
    if not entries:
        raise ValueError(f"--only {args.only}: it names no problem")
    return SweepRequest(entries, compare)


def corpus(args: argparse.Namespace) -> tuple[Entry, ...]:
    """The problems of the corpus that `args` name, of both halves."""
    if args.dtype not in CORPORA[args.corpus]:
        known = ", ".join(CORPORA[args.corpus])
        raise ValueError(f"--dtype {args.dtype}: the corpus {args.corpus} has {known}")
    if args.corpus == "any":
        return any_shapes.shapes(args.dtype, seed=args.seed or "any")
    if args.seed is not None:
        raise ValueError(f"--seed {args.seed}: only the corpus any is sampled")
    return models.corpus(args.dtype)


def listed(entries: Sequence[Entry], file: str) -> list[Entry]:
    """The entries whose names begin the lines of `file`."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--only {file}: {getattr(error, 'strerror', None) or error}") from None
    by_name = {e.name: e for e in entries}
    names = [" ".join(line.split()[:3]) for line in lines if line.strip()]
    for name in names:
        if name not in by_name:
            raise ValueError(f"--only {file}: {name!r} is none of the problems that --list prints")
    return [by_name[name] for name in dict.fromkeys(names)]


@answered
def main(load: Callable[[], Ours], argv: Sequence[str] | None = None) -> int:
    """Run the command line; `load` imports the functions that are timed."""
    try:
        args = parser().parse_args(argv)
        todo = asked(args)
        if args.list:
            for e in todo.entries:
                print(f"{e.name:<40} {e.source} {e.layer}")
            return 0
        if args.summary:
            return summary(args, todo.entries)
        if args.preflight:
            return preflight(args.preflight, todo.entries, load())
        if local_arch() is None:
            raise ValueError(
                "there is no GPU here that cutex knows; --list, --summary and --preflight need none"
            )
        try_folder(Path(args.out))
    except ValueError as error:
        return refuse(str(error))
    import torch

    ours = load()
    file = rows.file_of(Path(args.out), torch.cuda.get_device_name())
    if args.below is not None:
        todo = replace(todo, entries=timed_below(args.below, todo.entries, file))
        if not todo.entries:
            return refuse(f"{file}: no problem was timed untuned below {args.below}")
    with ours.tuning() if args.tuned else nullcontext():
        found = sweep(todo, ours, file, args.tuned, args.seconds)
    print(rows.text_by_device(found))
    return 0 if all(r.ok for r in found) else 1


def summary(args: argparse.Namespace, entries: Iterable[Entry]) -> int:
    """Print the rows of `entries` by device, and return the exit code."""
    files = sorted(Path(args.out).glob("sweep/*.jsonl"))
    names = {e.name for e in entries}
    every = [r for f in files for r in rows.read(f) if r.name in names]
    found = [r for r in every if r.tuned == args.tuned]
    if not found:
        tuned = "tuned" if args.tuned else "untuned"
        raise ValueError(
            f"{Path(args.out) / 'sweep'} has no {tuned} row of --half {args.half} in {args.dtype}"
        )
    print(rows.text_by_device(found))
    return 0


def preflight(arch_name: str, entries: Sequence[Entry], ours: Ours) -> int:
    """Compile the kernels of `entries` for `arch_name`, check a small problem of each of their
    layouts in the simulator, print the folders of the kernels, and return the exit code."""
    right = True
    with ours.simulated(arch_name):
        for direction in dict.fromkeys(e.problem.direction for e in entries):
            problem = LayerProblem(48, 96, 80, direction, entries[0].problem.dtype)
            a, b = problem.inputs()
            (out,) = problem.outputs()
            ours.matmul(a, b, out=out)
            check = problem.check(a, b, out)
            if not check.ok:
                print(f"{direction} is wrong in the simulator: {check.message}", file=sys.stderr)
                right = False
        for folder in build(entries, ours):
            print(folder)
    return 0 if right else 1


def timed_below(ratio: float, entries: Iterable[Entry], file: Path) -> list[Entry]:
    """The entries whose untuned row in `file` has less than `ratio` times the speed of the fastest
    other library."""
    timed = {row.name: row.ratio for row in rows.read(file) if not row.tuned}
    return [e for e in entries if (found := timed.get(e.name)) is not None and found < ratio]
