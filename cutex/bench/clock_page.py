"""The parts of docs/time.md that are made from the code: constants, and the table of errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from cutex.bench.clock_errors import FOLDER, board, errors, ladder, measured, table, traces
from cutex.sim.timing import stored
from cutex.sim.timing.gpus import GPUS, SOURCES

PAGE = Path("docs/time.md")
MEASURED = FOLDER / "cycles-nvidia-h200.jsonl"
TRACES = FOLDER / "traces-sm90.json.gz"


def constants() -> str:
    """Markdown: every constant of every GPU, with its source and band."""
    lines = ["| constant | H200 | how known | B200 | how known |", "| --- | ---: | --- | ---: | --- |"]
    a, b = GPUS["h200"], GPUS["b200"]
    for name, (ours, theirs) in SOURCES.items():
        lines.append(f"| `{name}` | {getattr(a, name):g} | {ours} | {getattr(b, name):g} | {theirs} |")
    for f in fields(a.power):
        values = getattr(a.power, f.name), getattr(b.power, f.name)
        lines.append(f"| `power.{f.name}` | {values[0]:g} | fit, clocks | {values[1]:g} | prior |")
    return "\n".join(lines)


def written(page: str, name: str, text: str) -> str:
    """``page`` with ``text`` between the marks of ``name``."""
    first, last = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = page.partition(first)
    _, found, after = rest.partition(last)
    if not found:
        raise ValueError(f"{PAGE} has no marks for {name}")
    return f"{before}{first}\n{text}\n\n{last}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m cutex.clock", description="How far off the simulator's clock is."
    )
    p.add_argument("--page", action="store_true", help=f"write {PAGE}")
    p.add_argument("--store", action="store_true", help="record all measured rows anew")
    p.add_argument("--rows", action="store_true", help="print every row")
    args = p.parse_args(argv)
    rows = ladder(measured(MEASURED))
    if args.store:
        TRACES.unlink(missing_ok=True)
    traced = traces(rows, TRACES)
    if args.store:
        stored.save(traced, TRACES)
    found = list(errors(rows, traced, board()))
    if args.rows:
        for e in found:
            held = "held" if e.row.held_out else "fit"
            print(
                f"{e.row.key:48} {held:4} {e.row.cycles:11.0f} {e.timed.cycles:11.0f} "
                f"{100 * e.cycles:6.1f} %  {e.row.mhz:6.0f} {e.mhz:6.0f}  {e.timed.binds}"
            )
    text = table(found)
    print(text)
    if args.page:
        try:
            page = PAGE.read_text()
            page = written(written(page, "constants", constants()), "errors", text)
        except (OSError, ValueError) as error:
            print(f"cutex: {error}", file=sys.stderr)
            return 2
        PAGE.write_text(page)
    return 0
