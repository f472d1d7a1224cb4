"""The sweeps over models' layers and products of any sizes, in the report and in the README."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cutex.problem.any_shapes import MULTIPLES, shapes
from cutex.problem.models import corpus
from cutex.report import charts
from cutex.results import slug, sweep
from cutex.results.sweep import Summary, SweepRow
from cutex.svg import alone

WIDTH = 760
ANY = " any"  # behind the dtype, of problems that are no layers


def read_sweeps(results: Path) -> dict[str, list[SweepRow]]:
    """By device, the untuned rows of problems that are only for reporting, timed beside other
    libraries."""
    found: dict[str, list[SweepRow]] = {}
    for file in sorted(results.glob("sweep/*.jsonl")):
        for row in sweep.read(file):
            if row.ratio is not None and not row.fits and not row.tuned:
                found.setdefault(row.device_name, []).append(row)
    return found


def by_dtype(rows: Sequence[SweepRow]) -> dict[str, list[SweepRow]]:
    """The rows of each dtype, those of any sizes for themselves."""
    found: dict[str, list[SweepRow]] = {}
    for row in sorted(rows, key=_kind):
        found.setdefault(_kind(row), []).append(row)
    return found


def _kind(row: SweepRow) -> str:
    return f"{row.dtype}{ANY}" if row.layer.startswith(MULTIPLES) else row.dtype


def _what(kind: str) -> str:
    return "products of any sizes" if kind.endswith(ANY) else "layers of public models"


def picture_name(device_name: str, dtype: str) -> str:
    return f"sweep-{slug(device_name)}-{slug(dtype)}.svg"


def picture(device_name: str, dtype: str, rows: Sequence[SweepRow]) -> str:
    """The sorted ratios, coloured by M."""
    of_m = sweep.CLASSES["M"]
    names = [name for title, name, _ in sweep.by_class(rows) if title == "M"]
    points = [
        charts.Ratio(r.ratio, f"{r.name}: {r.ratio:.3f}", names.index(of_m(r)))
        for r in rows
        if r.ratio is not None
    ]
    best = f"the best of {others(rows)}" if " and " in others(rows) else others(rows)
    title = f"Speed beside {best}, {_what(dtype)}, {rows[0].dtype}, {device_name}"
    return charts.ratios(title, points, [f"M {name}" for name in names], WIDTH)


def others(rows: Sequence[SweepRow]) -> str:
    return " and ".join(sorted({name for r in rows for name in r.peers}))


def markdown(sweeps: dict[str, list[SweepRow]], docs: str = "", main: bool = False) -> list[str]:
    """A section for each device: a picture and a table by class for each dtype; with `main` one row
    a dtype. docs: the way to the folder of pictures."""
    parts = []
    for device_name, rows in sweeps.items():
        parts.append(f"### Layers of public models, and products of any sizes, on {device_name}")
        for dtype, members in by_dtype(rows).items():
            parts.append(f"![Sorted ratios, {dtype}]({docs}{picture_name(device_name, dtype)})")
            parts += table(dtype, members, main)
    return parts


def table(dtype: str, rows: Sequence[SweepRow], main: bool = False) -> tuple[str, str]:
    """A caption, and the summary of all problems and, but for `main`, of each class of them."""
    when = max(r.run for r in rows)[:10]
    plain = rows[0].dtype
    of = sum(not e.fits for e in (shapes if dtype.endswith(ANY) else corpus)(plain))
    caption = (
        f"`cutex.matmul` untuned, {_what(dtype)}, times the best of {others(rows)} in the same "
        f"run, {rows[0].device_name}: {plain}, Gaussian data, cold L2, {when}; {len(rows)} of the "
        f"{of} problems that nothing was fitted on, {sweep.commits(rows)}."
    )
    cells = [("all", Summary.of(rows))]
    by_class = () if main else sweep.by_class(rows)
    cells += [(f"{title} {name}", summary) for title, name, summary in by_class]
    lines = [
        "| problems | count | geometric mean | worst | below 0.97 |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {name} | {s.count} | {s.mean:.3f} | {s.worst:.2f} | {s.below:.0%} |"
        for name, s in cells
    ]
    return caption, "\n".join(lines)


def pictures(sweeps: dict[str, list[SweepRow]]) -> dict[str, str]:
    """SVG by file name."""
    return {
        picture_name(name, dtype): alone(picture(name, dtype, members))
        for name, rows in sweeps.items()
        for dtype, members in by_dtype(rows).items()
    }


def sections(sweeps: dict[str, list[SweepRow]]) -> list[tuple[str, str]]:
    """Titles and HTML for the report: the picture, and the summary with the ten worst."""
    from html import escape

    return [
        (
            f"{_what(dtype).capitalize()}, {members[0].dtype}, {name}",
            picture(name, dtype, members) + f"<pre>{escape(sweep.text(members))}</pre>",
        )
        for name, rows in sweeps.items()
        for dtype, members in by_dtype(rows).items()
    ]
