"""The error of the clock on other libraries' kernels on Hopper: CUTLASS's and quack's GEMMs, and
flash-attn-4's forward.

Their cycles were measured on the H200 beside ours. CUTLASS's records were made from a clone of its
examples (commit of 2026-08-20), the others by cutex/clock_errors/record_peers.py. Nothing is fitted
to any.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutex.clock_errors.rows import FOLDER, Summary
from cutex.problem import problem_class
from cutex.sim.timing import stored
from cutex.sim.timing.gpus import Gpu
from cutex.sim.timing.predict import predict
from cutex.sim.timing.stored import Recorded
from cutex.sim.timing.timed import Whole

LIBRARIES = {"cutlass": "CUTLASS", "quack": "quack 0.6.5", "fa4": "flash-attn-4 4.0.0b36"}
QUACK = {"tile_m": 128, "tile_n": 192, "pingpong": True, "cluster_m": 2}  # its default
STATED = ("dtype", "init", "seed")


@dataclass(frozen=True)
class ForeignRow:
    """A kernel of another library on one problem, measured. ``work`` is given for a GEMM."""

    library: str
    kernel: str  # its name in tables
    problem: str
    key: str  # the name of its record
    cycles: float
    mhz: float
    work: Whole | None = None


@dataclass(frozen=True)
class ForeignError:
    row: ForeignRow
    cycles: float  # relative


def measured(file: Path) -> list[ForeignRow]:
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [row_of(r) for r in rows if r.get("kernel") in LIBRARIES]


def row_of(r: Mapping[str, Any]) -> ForeignRow:
    """A row of the file of measured cycles."""
    library, p, c = r["kernel"], r["problem"], r.get("config", {})
    if r["op"] == "attention":
        sizes = {name: value for name, value in p.items() if name not in STATED}
        size = problem_class("attention").of(sizes).size
        return ForeignRow(library, "forward", size, f"{library}/{size}", r["cycles"], r["mhz"])
    mnk = m, n, k = p["m"], p["n"], p["k"]
    size = _by(mnk)
    if library == "cutlass":
        tile = c["tile"]
        key = "/".join((library, c["example"], _by(tile), _by(c["cluster"]), size))
        name = f"{c['example'].removeprefix('hopper_')} {_by(tile)}, {_by(c['cluster'])}"
    else:
        name, c = (_quack_name(c), c) if c else ("default", QUACK)
        tile = c["tile_m"], c["tile_n"]
        key = f"{library}/{name}/{size}"
    work = Whole(2.0 * m * n * k, 2.0 * tile[0] * tile[1] * k)
    return ForeignRow(library, name, size, key, r["cycles"], r["mhz"], work)


def _by(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes))


def _quack_name(c: Mapping[str, Any]) -> str:
    turns = " pingpong" if c["pingpong"] else ""
    return f"{c['tile_m']}x{c['tile_n']}{turns}, {c['cluster_m']}x1"


def traces_file(library: str) -> Path:
    return FOLDER / f"traces-{library}-sm_90a.json.gz"


def traces(libraries: Iterable[str] = LIBRARIES) -> Mapping[str, Recorded]:
    """All stored records of these libraries' kernels."""
    return stored.load(*(file for file in map(traces_file, libraries) if file.exists()))


def errors(
    rows: Sequence[ForeignRow], traced: Mapping[str, Recorded], gpu: Gpu
) -> Iterator[ForeignError]:
    """The errors of the rows whose kernel was recorded."""
    for row in rows:
        if row.key in traced:
            yield error(row, traced, gpu)


def error(row: ForeignRow, traced: Mapping[str, Recorded], gpu: Gpu) -> ForeignError:
    """The error of a row that was recorded."""
    timed = predict(traced[row.key], gpu.at(row.mhz / 1e3), row.work)
    return ForeignError(row, timed.cycles / row.cycles - 1)


def table(found: Sequence[ForeignError]) -> str:
    """Markdown: by library, and each row's error in %."""
    lines = [
        "| kernels of | rows | median % | nine of ten % | largest % |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    mine = {name: [e for e in found if e.row.library == name] for name in LIBRARIES}
    for name, part in mine.items():
        lines.append(f"| {LIBRARIES[name]} | {Summary.of(e.cycles for e in part)} |")
    lines.append(f"| all | {Summary.of(e.cycles for e in found)} |")
    for name, part in mine.items():
        lines += ["", *_each(LIBRARIES[name], part)]
    return "\n".join(lines)


def _each(library: str, found: Sequence[ForeignError]) -> list[str]:
    kernels = list(dict.fromkeys(e.row.kernel for e in found))
    lines = [f"| {library} | {' | '.join(kernels)} |", "| --- |" + " ---: |" * len(kernels)]
    for problem in dict.fromkeys(e.row.problem for e in found):
        of = {e.row.kernel: e for e in found if e.row.problem == problem}
        cells = (f"{100 * of[k].cycles:+.1f} %" if k in of else "" for k in kernels)
        lines.append(f"| {problem} | {' | '.join(cells)} |")
    return lines
