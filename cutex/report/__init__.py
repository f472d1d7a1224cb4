"""python -m cutex.report: a page of all results, and the ladders in README.md, from results/."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cutex.arch import Arch
from cutex.command import Parser, answered, writable
from cutex.errors import BadOption
from cutex.problem import DEFAULT_OP
from cutex.problem.stage import AnyStage
from cutex.report import charts, sweeps
from cutex.report.page import DOCTYPE, page
from cutex.report.rows import (
    CACHE,
    DATA,
    Sizes,
    all_ladders,
    baseline,
    caption,
    heading,
    kinds,
    ladder_bars,
    main_sizes,
    peer_title,
)
from cutex.results import Result, folder_given, notice, read_all
from cutex.results.history import kind as kind_of
from cutex.results.rate import rate, rate_of
from cutex.results.sweep import SweepRow
from cutex.svg import alone

BEGIN = "<!-- ladders: written by python -m cutex.report from results/ -->"
END = "<!-- end of ladders -->"

PICTURES = "docs"  # folder beside the README
PREDICTED = Path("results/timing")

Kind = tuple[str, str, str, str]  # device, dtype, data, state of the L2


def ladders(results: Iterable[Result]) -> str:
    """Return the ladders as Markdown: for each operator and arch one table per GPU and kind of
    data, or the bare ladder if it is untimed."""
    timed: dict[tuple[str, str], dict[Kind, list[Result]]] = {}
    for r in results:
        if r.ok and r.timing is not None:
            kind = r.device_name, r.problem["dtype"], r.problem["init"], r.timing.cache_state
            timed.setdefault((r.op, r.arch), {}).setdefault(kind, []).append(r)
    parts = []
    for op, target, ladder in all_ladders():
        tables = timed.get((op, target.name), {})
        parts.append(f"### {heading(op, target)} ({target.name})")
        if tables:
            parts.append(f"![The ladder as bars]({PICTURES}/{_picture(op, target)})")
        for kind, found in tables.items():
            parts += _timed_table(target, ladder, kind, found)
        if not tables:
            parts += _untimed_table(target, ladder)
    return "\n\n".join(parts)


def _timed_table(
    target: Arch, ladder: Sequence[AnyStage], kind: Kind, results: list[Result]
) -> tuple[str, str]:
    device_name, dtype, init, cache_state = kind
    newest: dict[tuple[int, Sizes], Result] = {}
    for r in sorted(results, key=lambda r: r.run):
        newest[r.stage, r.sizes] = r
    sizes = {r.sizes: r.size for r in results}
    peers = sorted({peer.name for r in newest.values() for peer in r.peers})
    first = baseline(ladder[0].op)

    def cell(r: Result | None) -> str:
        found = rate_of(r) if r is not None else None
        if r is None or found is None:
            return "–"
        ratio = r.ratio(first)
        return f"{found}" + (f" ({ratio:.2f})" if ratio is not None else "")

    rows = [
        [str(s.number), s.idea, *(cell(newest.get((s.number, which))) for which in sizes)]
        for s in ladder
    ]
    for name in peers:
        cells, version = [], ""
        for which in sizes:
            same = [r for (_, size), r in newest.items() if size == which]
            last = max(same, key=lambda r: (r.run, r.stage))
            peer = next((p for p in last.peers if p.name == name), None)
            if peer is None:
                cells.append("–")
                continue
            version = peer.version
            cells.append(str(rate(last.case, last.arch, peer.timing.median_us)))
        rows.append(["", f"{peer_title(name)} ({version})", *cells])
    dates = sorted({r.run[:10] for r in newest.values()})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    beside = f" (and ratio to {peer_title(first)} in the same run)" if first in peers else ""
    memory = any((x := rate_of(r)) and x.by_memory for r in newest.values())
    other = ", GB/s and microseconds where memory binds" if memory else ""
    caption = (
        f"TFLOPS{other}{beside}, median, on one {device_name}: {dtype}, {DATA.get(init, init)}, "
        f"{CACHE.get(cache_state, cache_state)}, "
        f"{when}. Stated dense peak: {target.dense_tflops[dtype]:.0f}."
    )
    return caption, _table(["stage", "what it adds", *sizes.values()], rows)


def _untimed_table(target: Arch, ladder: Sequence[AnyStage]) -> tuple[str, str]:
    caption = f"Not timed yet: no {target.board} has run it. The tests check it in the simulator."
    head, rows = ["stage", "what it adds"], [[str(s.number), s.idea] for s in ladder]
    found = predicted(ladder[0].op, target.name)
    sizes = list(dict.fromkeys(r["size"] for r in found))
    if found:
        caption += (
            " TFLOPS are predicted, not measured: by the simulator's clock, on Gaussian data, with "
            "the band in which they should be ([docs/time.md](docs/time.md))."
        )
        by = {(r["stage"], r["size"]): r for r in found}
        head += [f"{size}, predicted" for size in sizes]
        for row, s in zip(rows, ladder, strict=True):
            row += [_band(by.get((s.number, size))) for size in sizes]
    return caption, _table(head, rows)


def _band(row: dict[str, Any] | None) -> str:
    return f"{row['tflops']} ({row['low']} to {row['high']})" if row else "–"


def predicted(op: str, arch: str) -> list[dict[str, Any]]:
    """The rows that `python -m cutex.clock --predict` wrote for a ladder without measurements."""
    file = PREDICTED / f"predicted-{arch}.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    fields = ("op", "stage", "size", "tflops", "low", "high")
    try:
        rows = [{name: row[name] for name in fields} for row in map(json.loads, lines)]
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{file} is damaged: python -m cutex.clock --predict writes it anew"
        ) from None
    return [row for row in rows if row["op"] == op]


def _table(head: list[str], rows: list[list[str]]) -> str:
    rule = ["---", "---", *("---:" for _ in head[2:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def rewrite(
    readme: str, results: Iterable[Result], models: dict[str, list[SweepRow]] | None = None
) -> str:
    """Return `readme` with the part between the marks made anew, from results and from sweeps over
    models' layers by device. Raises ValueError without marks."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"there is no {BEGIN} with {END} after it to write between")
    text = "\n\n".join([ladders(results), *sweeps.markdown(models or {}, PICTURES)])
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def pictures(results: Iterable[Result]) -> dict[str, str]:
    """The ladder of each arch that was timed, as SVG by file name, for its main kind and size."""
    rows = list(results)
    drawn = {}
    for op, target, ladder in all_ladders():
        ours = op, target.name
        of_arch = [found for kind, found in kinds(rows).items() if (kind.op, kind.arch) == ours]
        if of_arch:
            found = max(of_arch, key=len)
            (main, *_) = main_sizes(found)
            unit = x.unit if (x := rate_of(main)) else "TFLOPS"
            title = f"{heading(op, target)}: {unit} at {main.size}, {caption(kind_of(found[0]))}"
            bars = ladder_bars(ladder, found, main.sizes)
            top = max(bar.value or 0.0 for bar in bars)
            drawn[_picture(op, target)] = alone(charts.bars(title, bars, top))
    return drawn


def _picture(op: str, target: Arch) -> str:
    return f"ladder-{target.name}.svg" if op == DEFAULT_OP else f"ladder-{op}-{target.name}.svg"


def parser() -> Parser:
    p = Parser(
        prog="python -m cutex.report",
        description="Write report.html, and the ladders into README.md, from the ledgers.",
    )
    for name, usual, kind, what in (
        ("results", "results", "DIR", "the ledgers"),
        ("readme", "README.md", "FILE", "with the marks that the ladders are written between"),
        ("html", "report.html", "FILE", "the page"),
    ):
        p.add_argument(
            f"--{name}", type=Path, default=Path(usual), metavar=kind,
            help=f"{what}; default: {usual}",
        )  # fmt: skip
    return p


def _replace(file: Path, text: str) -> None:
    """Write a file that has more than this command can make again: completely or not at all."""
    file = file.resolve()  # a link stays one
    fd, scratch = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
    try:
        with os.fdopen(fd, "w") as out:
            out.write(text)
        shutil.copymode(file, scratch)
        os.replace(scratch, file)
    except BaseException:
        os.unlink(scratch)
        raise


def _readme(file: Path) -> str:
    try:
        return file.read_text()
    except UnicodeDecodeError as error:
        raise ValueError(f"--readme {file}: {error}") from None


def _check_page(file: Path) -> None:
    """Raise BadOption unless a page can be written to `file`, which holds nothing else."""
    writable("--html", str(file))
    start = file.read_bytes()[: len(DOCTYPE)] if file.is_file() else b""
    if start not in (b"", DOCTYPE.encode()):
        raise BadOption(f"--html {file}: this file is no page, and is left as it is")


@answered
def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        rows = [r for r in read_all(folder_given(args.results), notice) if r.known]
        models = sweeps.read_sweeps(args.results)
        text = rewrite(_readme(args.readme), rows, models)
        html = page(rows, sweeps.sections(models))
        _check_page(args.html)
        writable("--readme", str(args.readme))
        for name, svg in {**pictures(rows), **sweeps.pictures(models)}.items():
            picture = args.readme.parent / PICTURES / name
            picture.parent.mkdir(exist_ok=True)
            picture.write_text(svg)
        _replace(args.readme, text)
        args.html.write_text(html)
    except ValueError as error:
        print(f"cutex: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.readme} and {args.html}")
    return 0
