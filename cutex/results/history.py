"""python -m cutex.results list|compare|best|merge: the history of the results, from the ledgers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cutex.command import Parser, answered
from cutex.problem import OPS, Sizes, problem_class
from cutex.results import Result, Timing, append, folder_given, ledger, notice, read, read_all
from cutex.results.rate import rate_of

Table = list[list[str]]

FIELDS: dict[str, Callable[[Result], str | None]] = {  # the fields that `compare --by` takes
    "commit": lambda r: _text(r.environment.get("commit")),
    "dsl": lambda r: _text(r.environment.get("nvidia-cutlass-dsl")),
    "torch": lambda r: _text(r.environment.get("torch")),
    "run": lambda r: r.id or r.run,
    "gpu": lambda r: r.device_name,
}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


class Kind(NamedTuple):
    """The properties that two figures must share to be compared."""

    op: str
    arch: str
    device_name: str
    dtype: str
    init: str
    cache_state: str


def kind(r: Result) -> Kind:
    cache_state = r.timing.cache_state if r.timing is not None else ""
    return Kind(r.op, r.arch, r.device_name, r.problem["dtype"], r.problem["init"], cache_state)


def timed(results: Iterable[Result]) -> list[Result]:
    """The results with a figure: correct, and measured on a GPU; oldest first."""
    right = (r for r in results if r.ok and r.timing is not None and r.tflops is not None)
    return sorted(right, key=lambda r: r.run)


def best(results: Iterable[Result]) -> list[Result]:
    """The fastest result of each problem and kind, by kind and size."""
    fastest: dict[tuple[Kind, tuple[Any, ...]], Result] = {}
    for r in timed(results):
        held = fastest.setdefault((kind(r), r.sizes), r)
        if _median(r) < _median(held):
            fastest[kind(r), r.sizes] = r
    return sorted(fastest.values(), key=lambda r: (kind(r), _flops(r), r.size))


def _flops(r: Result) -> int:
    """The FLOPs of the problem; 0 for a problem that this version does not have."""
    return r.case.flops if r.known else 0


def _took(r: Result) -> Timing:
    assert r.timing is not None
    return r.timing


def _median(r: Result) -> float:
    return _took(r).median_us


@dataclass(frozen=True)
class Change:
    """The same stage on the same problem, at two points of the history."""

    before: Result
    after: Result

    @property
    def speedup(self) -> float:
        """The ratio of the times, before over after: above 1 is faster. If both runs timed the same
        peer, times are relative to it, and the GPU's own drift cancels."""
        plain = _median(self.before) / _median(self.after)
        peer = self.peer
        if peer is None:
            return plain
        old, new = self.before.ratio(peer), self.after.ratio(peer)
        assert old is not None and new is not None
        return new / old

    @property
    def peer(self) -> str | None:
        """The peer that both were timed beside, in the same version; None if there is none."""
        versions = {p.name: p.version for p in self.after.peers}
        for p in self.before.peers:
            if versions.get(p.name) == p.version:
                return p.name
        return None

    @property
    def noise(self) -> float:
        """The sum of half the p20-p80 bands, relative to the medians; a smaller change counts as
        none."""
        return sum((_took(r).p80_us - _took(r).p20_us) / 2 / _median(r) for r in self._both)

    @property
    def _both(self) -> tuple[Result, Result]:
        return self.before, self.after

    @property
    def verdict(self) -> str:
        if abs(self.speedup - 1) <= self.noise:
            return "same"
        return "faster" if self.speedup > 1 else "SLOWER"


def changes(results: Iterable[Result], by: str, before: str, after: str) -> list[Change]:
    """The newest rows of `before` and of `after` that timed the same problem, paired."""
    newest: dict[str, dict[tuple[Any, ...], Result]] = {before: {}, after: {}}
    for r in timed(results):
        name = FIELDS[by](r)
        for wanted, rows in newest.items():
            if name is not None and (name == wanted or (by == "commit" and _is(name, wanted))):
                what = kind(r)
                if by == "gpu":
                    what = what._replace(device_name="")
                rows[what, r.sizes, r.stage] = r
    old, new = newest[before], newest[after]
    return [Change(old[key], new[key]) for key in old if key in new]


def _is(commit: str, wanted: str) -> bool:
    """Whether two commits are the same; one may be abbreviated, and an edited commit differs from a
    clean one."""
    commit, _, edited = commit.partition("+")
    wanted, _, wanted_edited = wanted.partition("+")
    shortest = min(len(commit), len(wanted))
    return edited == wanted_edited and shortest >= 4 and commit[:shortest] == wanted[:shortest]


# ---- the command


def parser() -> Parser:
    p = Parser(prog="python -m cutex.results", description="Read the ledgers in results/.")
    common = Parser(add_help=False)
    common.add_argument("--results", type=Path, default=Path("results"), metavar="DIR")
    common.add_argument("--stage", type=int, metavar="N")
    common.add_argument("--arch", help="such as sm_90a")
    for op in OPS:
        problem_class(op).add_options(common.add_argument_group(f"sizes of {op}"))
    common.add_argument("--device", metavar="NAME", help="part of the device's name, such as h200")
    sub = p.add_subparsers(dest="what", required=True, metavar="list|best|compare|merge")
    listing = sub.add_parser("list", parents=[common], help="the last rows, with their notes")
    listing.add_argument("--last", type=int, default=30, metavar="N", help="default: 30")
    sub.add_parser("best", parents=[common], help="the fastest of each problem")
    compare = sub.add_parser(
        "compare",
        parents=[common],
        help="two commits (or DSL versions, ...) side by side; exit code 1 if any is slower",
    )
    compare.add_argument("before", nargs="?", help="default: the last but one")
    compare.add_argument("after", nargs="?", help="default: the last")
    compare.add_argument("--by", choices=FIELDS, default="commit", help="default: commit")
    merge = sub.add_parser("merge", help="add the rows of other ledgers, each once")
    merge.add_argument("files", nargs="+", type=Path, metavar="FILE")
    merge.add_argument("--results", type=Path, default=Path("results"), metavar="DIR")
    return p


@answered
def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if args.what == "merge":
            return _merge(args.files, args.results)
        if args.what == "list" and args.last < 1:
            raise ValueError(f"--last {args.last}: takes a number from 1")
        rows = _chosen(read_all(folder_given(args.results), notice), args)
        if not rows:
            notice("the ledger has no row like that")
        match args.what:
            case "list":
                _print(_listed(rows[-args.last :]))
            case "best":
                _print(_best_table(best(rows)))
            case _:
                return _compare(rows, args)
    except ValueError as error:
        print(f"cutex: {error}", file=sys.stderr)
        return 2
    return 0


def _merge(files: Sequence[Path], folder: Path) -> int:
    """Append the rows in `files` that the ledgers in `folder` lack."""
    rows = [row for file in files for row in read(file, notice)]
    added = sum(append(ledger(folder, row), row, once=True) for row in rows)
    print(f"{added} of {len(rows)} rows added to {folder}")
    return 0


def _chosen(rows: list[Result], args: argparse.Namespace) -> list[Result]:
    wanted = {op: sizes for op in OPS if (sizes := problem_class(op).sizes_given(args))}
    if wanted:
        rows = [r for r in rows if any(_has(r, sizes) for sizes in wanted.get(r.op, ()))]
    if args.stage is not None:
        rows = [r for r in rows if r.stage == args.stage]
    if args.arch is not None:
        rows = [r for r in rows if r.arch == args.arch]
    if args.device is not None:
        rows = [r for r in rows if args.device.lower() in r.device_name.lower()]
    return sorted(rows, key=lambda r: r.run)


def _has(r: Result, sizes: Sizes) -> bool:
    return sizes.items() <= r.problem.items()


def _compare(rows: list[Result], args: argparse.Namespace) -> int:
    names = dict.fromkeys(FIELDS[args.by](r) for r in timed(rows))
    known = [name for name in names if name is not None]
    before, after = args.before, args.after
    if after is None:
        if len(known) < 2 and before is None:
            found = f"only {known[0]} has" if known else "none has"
            raise ValueError(f"--by {args.by}: {found} timed rows, and two are needed")
        before, after = _latest(rows, args.by, known, before)
    for name in (before, after):
        same = (lambda k, n=name: _is(k, n)) if args.by == "commit" else (lambda k, n=name: k == n)
        if not any(map(same, known)):
            some = ", ".join(known[-5:]) or "none"
            raise ValueError(f"no timed row of {args.by} {name!r}; the last are {some}")
    pairs = changes(rows, args.by, before, after)
    if not pairs:
        raise ValueError(f"{before} and {after} timed no stage on the same problem and GPU")
    print(f"{args.by} {before} -> {after}")
    _print(_changes_table(pairs))
    return 1 if any(c.verdict == "SLOWER" for c in pairs) else 0


def _latest(
    rows: list[Result], by: str, known: Sequence[str], before: str | None
) -> tuple[str, str]:
    """The last two of `known`, or `before` and the last, that timed the same; or just the last."""
    last = known[-1] if known else ""
    for i in range(len(known) - 1, 0, -1):
        for name in [*reversed(known[:i])] if before is None else [before]:
            if name != known[i] and changes(rows, by, name, known[i]):
                return name, known[i]
    return before or known[-2], last


def _listed(rows: list[Result]) -> Table:
    head = [
        "when",
        "commit",
        "stage",
        "device",
        "problem",
        "us",
        "p20-p80",
        "TFLOPS, GB/s",
        "x peers",
        "$",
        "note",
    ]
    return [head, *([r.run[:16], _commit(r), f"{r.arch} {r.stage}", *_figures(r)] for r in rows)]


def _commit(r: Result) -> str:
    return (FIELDS["commit"](r) or "-")[:19]


def _figures(r: Result) -> list[str]:
    cells = [r.device_name, problem(r)]
    if not r.ok:
        cells += ["WRONG", "", "", ""]
    elif r.timing is None:
        cells += ["", "", "none" if r.device == "sim" else "", ""]
    else:
        band = f"{r.timing.p20_us:.1f}-{r.timing.p80_us:.1f}"
        cells += [f"{r.timing.median_us:.1f}", band, _rate(r), _ratios(r)]
    cost = "" if r.cost_usd is None else f"{r.cost_usd:.3f}"
    return [*cells, cost, r.expect]


def _rate(r: Result) -> str:
    """The rate in the unit of what limits the problem; the time has a column of its own."""
    found = rate_of(r)
    return "" if found is None else f"{found.value:.0f}{' GB/s' if found.by_memory else ''}"


def problem(r: Result) -> str:
    return f"{r.size} {r.problem['dtype']} {r.problem['init']}"


def _ratios(r: Result) -> str:
    return " ".join(f"{p.name} {r.ratio(p.name):.2f}" for p in r.peers)


def _best_table(rows: list[Result]) -> Table:
    head = [
        "device",
        "problem",
        "cache",
        "stage",
        "us",
        "p20-p80",
        "TFLOPS, GB/s",
        "% peak",
        "x peers",
        "commit",
        "when",
    ]
    table = [head]
    for r in rows:
        t = _took(r)
        table.append(
            [
                *(r.device_name, problem(r), t.cache_state, f"{r.arch} {r.stage}"),
                *(f"{t.median_us:.1f}", f"{t.p20_us:.1f}-{t.p80_us:.1f}", _rate(r)),
                *(
                    f"{x.percent:.1f}" if (x := rate_of(r)) else "",
                    _ratios(r),
                    _commit(r),
                    r.run[:10],
                ),
            ]
        )
    return table


def _changes_table(found: list[Change]) -> Table:
    head = [
        "device",
        "problem",
        "stage",
        "us",
        "p20-p80",
        "us after",
        "p20-p80",
        "speed",
        "noise",
        "beside",
        "verdict",
    ]
    table = [head]
    for c in found:
        cells = [c.after.device_name, problem(c.after), f"{c.after.arch} {c.after.stage}"]
        for t in (_took(c.before), _took(c.after)):
            cells += [f"{t.median_us:.1f}", f"{t.p20_us:.1f}-{t.p80_us:.1f}"]
        cells += [f"{c.speedup:.3f}", f"{c.noise:.3f}", c.peer or "-", c.verdict]
        table.append(cells)
    return table


def _print(table: Table) -> None:
    table = [[_printable(cell) for cell in row] for row in table]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def _printable(cell: str) -> str:
    """A cell without characters that move a terminal's cursor: a row may come from elsewhere."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in cell)
