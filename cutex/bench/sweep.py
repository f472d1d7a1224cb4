"""A sweep: the speed of the library's call, untuned or tuned, on every problem of a corpus, beside
other libraries.

All variants of a problem take turns in one process (cutex/bench/timing.py); problems that the file
has a row of, from the same commit, are left out, so that a sweep that was cut off goes on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutex.arch import local_arch
from cutex.bench import timing
from cutex.bench.cli import Parser, refuse
from cutex.bench.run import environment, run_time
from cutex.command import answered
from cutex.problem.layer import PEERS
from cutex.problem.models import DTYPES, Entry, corpus, draw
from cutex.results import sweep as rows
from cutex.results.sweep import SweepRow

if TYPE_CHECKING:
    from cutex.problem import Launch

HALVES = ("report", "fit", "all")
SAMPLING = timing.Sampling(rounds=15, warm_up_seconds=0.05, sample_us=2000.0, eager_calls=3)


@dataclass(frozen=True)
class Ours:
    """The library's functions that are timed."""

    matmul: Callable[..., Any]  # (a, b, out=...)
    tuning: Callable[[], AbstractContextManager[Any]]  # a context in which every problem is tuned
    build: Callable[[Iterable[tuple[Any, Any]], Any], int]  # kernels of many (a, b), for a dtype
    tiles: Callable[[Any, Any, Any], str]  # the tiles for (a, b) and a dtype of out


def measure(
    entry: Entry, ours: Ours, compare: Sequence[str], tuned: bool, l2_bytes: int
) -> SweepRow:
    """Check ours, then time it beside `compare` on this process's GPU."""
    import torch

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
    return SweepRow(
        name=entry.name,
        source=entry.source,
        layer=entry.layer,
        mnk=problem.mnk,
        direction=problem.direction,
        dtype=problem.dtype,
        fits=entry.fits,
        ok=check.ok,
        message=check.message,
        us=us.pop("ours", None),
        peers=us,
        tuned=tuned,
        device_name=torch.cuda.get_device_name(),
        run=run_time(),
        flops=problem.flops,
        bytes=problem.bytes,
        kernel=ours.tiles(*operands[0][:2], operands[0][2].dtype),
        environment=environment(),
    )


def sweep(
    entries: Iterable[Entry],
    ours: Ours,
    file: Path,
    compare: Sequence[str],
    tuned: bool = False,
    seconds: float | None = None,
) -> list[SweepRow]:
    """Measure `entries` that `file` has no row of from this commit, and return all rows of
    `entries`.

    It stops after `seconds`; the next call goes on from there. Problems come in an order drawn by
    their names, so that a sweep that was cut off is a fair sample.
    """
    arch = local_arch()
    assert arch is not None, "the command line has seen to it"
    begin = time.monotonic()
    commit = environment()["commit"]
    known = {
        r.name
        for r in rows.read(file)
        if r.tuned == tuned and r.environment.get("commit") == commit
    }
    wanted = list(entries)
    left = [e for e in wanted if e.name not in known]
    left.sort(key=lambda e: draw(e.name, 1 << 32))
    if left and not tuned:
        begun = time.monotonic()
        operands = [e.problem.inputs("meta") for e in left]
        kernels = ours.build(operands, left[0].problem.outputs("meta")[0].dtype)
        print(f"{kernels} kernels built in {time.monotonic() - begun:.0f} s", file=sys.stderr)
    for i, entry in enumerate(left):
        if seconds is not None and time.monotonic() - begin > seconds:
            break
        row = measure(entry, ours, compare, tuned, arch.l2_bytes)
        rows.append(file, row)
        ratio = "wrong" if not row.ok else f"{row.ratio:.3f}x" if row.ratio else f"{row.us} us"
        print(f"[{i + 1}/{len(left)}] {entry.name}: {ratio}", flush=True)
    names = {e.name for e in wanted}
    return [r for r in rows.read(file) if r.name in names and r.tuned == tuned]


# ---- the command line


def parser() -> Parser:
    p = Parser(
        prog="python -m cutex.sweep",
        description="Time cutex.matmul on linear layers of public models, beside others, on this "
        "GPU. Goes on where it was cut off.",
    )
    p.add_argument("--half", choices=HALVES, default="report", help="default: report")
    p.add_argument("--dtype", choices=DTYPES, default="bf16", help="default: bf16")
    p.add_argument("--compare", default=",".join(PEERS), metavar="PEER,PEER")
    p.add_argument("--tuned", action="store_true", help="tune each problem first (cutex.tune)")
    p.add_argument(
        "--below",
        type=float,
        metavar="RATIO",
        help="only problems whose untuned row in the file has less than so many times the best of "
        "the others' speed",
    )
    p.add_argument("--seconds", type=float, metavar="S", help="stop after so many")
    p.add_argument("--out", default="results", metavar="DIR", help="default: results")
    p.add_argument("--list", action="store_true", help="print the problems and their sources")
    p.add_argument("--summary", action="store_true", help="time nothing, sum up what is there")
    return p


@answered
def main(load: Callable[[], Ours], argv: Sequence[str] | None = None) -> int:
    """Run the command line; `load` imports the functions that are timed."""
    try:
        args = parser().parse_args(argv)
        compare = [name for name in args.compare.split(",") if name]
        for name in compare:
            if name not in PEERS:
                raise ValueError(f"--compare {name!r} is not one of {', '.join(PEERS)}")
        entries = chosen(args.half, args.dtype)
        if args.list:
            for e in entries:
                print(f"{e.name:<40} {e.source} {e.layer}")
            return 0
        if args.summary:
            files = sorted(Path(args.out).glob("sweep/*.jsonl"))
            names = {e.name for e in entries}
            found = [r for f in files for r in rows.read(f) if r.name in names]
            print(rows.text([r for r in found if r.tuned == args.tuned]))
            return 0
        if local_arch() is None:
            raise ValueError(
                "there is no GPU here that cutex knows; --list and --summary need none"
            )
    except ValueError as error:
        return refuse(str(error))
    import torch

    ours = load()
    device = torch.cuda.get_device_name().lower().replace(" ", "-")
    file = Path(args.out) / "sweep" / f"{device}.jsonl"
    if args.below is not None:
        entries = timed_below(args.below, entries, file)
        if not entries:
            return refuse(f"{file}: no problem was timed untuned below {args.below}")
    with ours.tuning() if args.tuned else nullcontext():
        found = sweep(entries, ours, file, compare, args.tuned, args.seconds)
    print(rows.text(found))
    return 0 if all(r.ok for r in found) else 1


def timed_below(ratio: float, entries: Iterable[Entry], file: Path) -> list[Entry]:
    """Those of `entries` whose untuned row in `file` has less than `ratio` times the speed of the
    fastest other library."""
    timed = {row.name: row.ratio for row in rows.read(file) if not row.tuned}
    return [e for e in entries if (found := timed.get(e.name)) is not None and found < ratio]


def chosen(half: str, dtype: str) -> list[Entry]:
    """The problems of one half of the corpus, or of both."""
    return [e for e in corpus(dtype) if half == "all" or e.fits == (half == "fit")]
