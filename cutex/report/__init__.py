"""python -m cutex.report: a page of all results, and the ladders in README.md, from results/."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from cutex.command import Parser, answered, writable
from cutex.errors import BadOption
from cutex.report import charts, sweeps
from cutex.report.page import DOCTYPE, page
from cutex.report.rows import all_ladders, caption, heading, kinds, ladder_bars, main_sizes
from cutex.report.tables import ladders, picture_name
from cutex.results import Result, folder_given, notice, read_all
from cutex.results.history import kind as kind_of
from cutex.results.rate import rate_of
from cutex.results.sweep import SweepRow
from cutex.svg import alone
from cutex.whole_file import write_whole

BEGIN = "<!-- ladders: written by python -m cutex.report from results/ -->"
END = "<!-- end of ladders -->"

DOCS = "docs"  # folder beside the README, with the pictures and the page of all tables
TABLES = "results.md"
MORE = f"All sizes, peers and classes of problems: [{DOCS}/{TABLES}]({DOCS}/{TABLES})."
TITLE = """# Results

Written by `python -m cutex.report` from `results/`. How a time is taken stands in the README."""


def rewrite(
    readme: str, results: Iterable[Result], models: dict[str, list[SweepRow]] | None = None
) -> str:
    """Return `readme` with the part between the marks made anew, from results and from sweeps over
    models' layers by device: of each the main figures. Raises ValueError without marks."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"there is no {BEGIN} with {END} after it to write between")
    folder = f"{DOCS}/"
    text = ladders(results, folder, main=True)
    text = "\n\n".join([text, *sweeps.markdown(models or {}, folder, main=True), MORE])
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def results_page(results: Iterable[Result], models: dict[str, list[SweepRow]] | None = None) -> str:
    """The page of all tables."""
    return "\n\n".join([TITLE, ladders(results), *sweeps.markdown(models or {})]) + "\n"


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
            drawn[picture_name(op, target)] = alone(charts.bars(title, bars, top))
    return drawn


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


def _readme(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
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
        docs = args.readme.parent / DOCS
        docs.mkdir(exist_ok=True)
        for name, svg in {**pictures(rows), **sweeps.pictures(models)}.items():
            write_whole(docs / name, svg)
        write_whole(docs / TABLES, results_page(rows, models))
        write_whole(args.readme, text)
        write_whole(args.html, html)
    except ValueError as error:
        print(f"cutex: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.readme} and {args.html}")
    return 0
