"""The generated parts of docs/time.md: the constants, and the tables of errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

from cutex.clock_errors import b200, backward, foreign, published
from cutex.clock_errors import configs as clock_configs
from cutex.clock_errors.b200 import ROWS
from cutex.clock_errors.fit import report_b200, report_power
from cutex.clock_errors.picture import ARCHS, timelines
from cutex.clock_errors.predictions import ARCH, PREDICTED, predicted, predicted_ops
from cutex.clock_errors.processes import in_groups, results
from cutex.clock_errors.rows import (
    FOLDER,
    Error,
    Row,
    board,
    error,
    ladder,
    measured,
    store,
    store_traces,
    stored_traces,
    table,
)
from cutex.command import Parser, answered, in_clone, refuse
from cutex.problem import OPS
from cutex.problem.stage import ladders, stages
from cutex.sim.timing import stored
from cutex.sim.timing.gpus import GPUS, SOURCES
from cutex.whole_file import write_whole

PAGE = Path("docs/time.md")
BOUNDS = Path("docs/attention-bounds.md")
MEASURED = FOLDER / "cycles-nvidia-h200.jsonl"
MEASURED_H100 = FOLDER / "cycles-nvidia-h100.jsonl"
FITTED = "fit, two published rates"
# of a B200's energies, those that are no priors
OF_B200_POWER = {"flop_pj": FITTED, "issue_pj": FITTED, "burst_ghz": "the H200's"}


def constants() -> str:
    """Markdown: every constant of every GPU, with its source and error."""
    lines = [
        "| constant | H200 | how known | B200 | how known |",
        "| --- | ---: | --- | ---: | --- |",
    ]
    a, b = GPUS["h200"], GPUS["b200"]
    for name, (ours, theirs) in SOURCES.items():
        lines.append(
            f"| `{name}` | {getattr(a, name):g} | {ours} | {getattr(b, name):g} | {theirs} |"
        )
    for f in fields(a.power):
        values = getattr(a.power, f.name), getattr(b.power, f.name)
        known = OF_B200_POWER.get(f.name, "prior")
        cells = f"{values[0]:g} | fit, clocks | {values[1]:g} | {known}"
        lines.append(f"| `power.{f.name}` | {cells} |")
    return "\n".join(lines)


def written(page: str, name: str, text: str) -> str:
    """``page`` with ``text`` between the marks of ``name``."""
    first, last = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = page.partition(first)
    _, found, after = rest.partition(last)
    if not found:
        raise ValueError(f"the page has no marks for {name}")
    return f"{before}{first}\n{text}\n\n{last}{after}"


def _of_b200(file: Path, fit: bool, page: bool) -> int:
    try:
        rows = b200.measured(file)
    except ValueError as error:
        return refuse(f"--b200: {error}")
    traced: Mapping[str, Any] = stored.load(b200.TRACES)
    if fit:
        print(report_b200(rows, traced))
        return 0
    of_kernels = results("kernels of a B200 are timed", b200.jobs(rows, traced))
    found = b200.table(list(chain(*of_kernels)))
    print(found)
    return _write({"constants": constants(), "b200": found}) if page else 0


def _write(parts: dict[str, str], file: Path = PAGE) -> int:
    """Write each of the parts between its marks on the page."""
    try:
        page = file.read_text(encoding="utf-8")
        for name, text in parts.items():
            page = written(page, name, text)
    except ValueError as error:
        return refuse(str(error))
    write_whole(file, page)
    return 0


def _draw() -> int:
    """Draw a tile of each stage, for report.html."""
    in_clone(FOLDER / "timeline")
    for op, arch in product(OPS, ARCHS):
        if arch not in ladders(op).archs:
            continue
        if html := timelines(op, arch, stages(op, arch)):
            file = FOLDER / f"timeline-{op}-{arch}.html"
            write_whole(file, html)
            print(f"wrote {file}")
    return 0


@answered
def main(argv: Sequence[str] | None = None) -> int:
    p = Parser(prog="python -m cutex.clock", description="How far off the simulator's clock is.")
    p.add_argument("--page", action="store_true", help=f"write {PAGE}")
    p.add_argument("--store", action="store_true", help="record all measured rows anew")
    p.add_argument(
        "--timelines", action="store_true", help="draw a tile of each stage, for report.html"
    )
    p.add_argument(
        "--predict", action="store_true",
        help=f"write {PREDICTED}, from stored records; with --store from the stages as they are",
    )  # fmt: skip
    p.add_argument("--rows", action="store_true", help="print every row")
    p.add_argument("--b200", nargs="?", type=Path, const=ROWS, metavar="FILE",
                   help=f"only against published rows of a B200, by default {ROWS}")  # fmt: skip
    p.add_argument("--fit", choices=("power", "b200"), help="print constants fitted anew")
    args = p.parse_args(argv)
    if args.b200 or args.fit == "b200":
        return _of_b200(args.b200 or ROWS, args.fit == "b200", args.page)
    if args.predict:
        in_clone(PREDICTED)
        found_ = [row for op in predicted_ops() for row in predicted(op, ARCH, args.store)]
        write_whole(PREDICTED, "".join(json.dumps(row) + "\n" for row in found_))
        print(f"wrote {PREDICTED}")
        return 0
    if args.timelines:
        return _draw()
    every = measured(MEASURED)
    rows, configs = ladder(every), clock_configs.configs(every)
    if args.store:
        store_traces(rows)
        store(configs, clock_configs.TRACES)
    return _of_h200(rows, configs, args)


def _of_h200(rows: Sequence[Row], configs: Sequence[Row], args: Any) -> int:
    """Print the errors of these rows of an H200, and of all others that are stored."""
    traced = stored_traces(rows)
    of_rows = [partial(error, r, traced, board()) for r in rows if r.key in traced]
    if args.fit:
        print(report_power(results("kernels are timed", of_rows), board()))
        return 0
    h100 = [r for r in ladder(measured(MEASURED_H100)) if r.key in traced]
    of_configs, of_others = clock_configs.traces(), foreign.traces()
    others = [r for r in foreign.measured(MEASURED) if r.key in of_others]
    backwards = stored.load(backward.TRACES)
    found, on_h100, chosen, theirs, rates, times = in_groups(
        "kernels are timed",
        (
            of_rows,
            [partial(error, r, traced, GPUS["h100"]) for r in h100],
            [partial(error, r, of_configs, board()) for r in configs if r.key in of_configs],
            [partial(foreign.error, r, of_others, board()) for r in others],
            published.jobs(),
            backward.jobs(backwards),
        ),
    )
    if args.rows:
        print("\n".join(map(_line, found)))
    parts = {
        "errors": table(found), "h100": table(on_h100), "foreign": foreign.table(theirs),
        "configs": clock_configs.table(chosen), "published": published.table(rates),
        "backward": backward.table(backwards, dict(zip(backward.TIMED, times, strict=True))),
    }  # fmt: skip
    print("\n\n".join(parts.values()))
    if not args.page:
        return 0
    code = _write({"instructions": backward.instructions_table(backwards)}, BOUNDS)
    return code or _write({"constants": constants(), **parts})


def _line(e: Error) -> str:
    """A row: its cycles and its clock, measured and predicted."""
    held = "held" if e.row.held_out else "fit"
    return (
        f"{e.row.key:48} {held:4} {e.row.cycles:11.0f} {e.timed.cycles:11.0f} "
        f"{100 * e.cycles:6.1f} %  {e.row.mhz:6.0f} {e.mhz:6.0f}  {e.timed.binds}"
    )
