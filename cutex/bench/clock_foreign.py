"""How far off the clock is on kernels that are not ours: CUTLASS's Hopper GEMMs.

Their cycles were measured on the H200 beside ours; their records were made from a clone of
CUTLASS's examples (commit of 2026-08-20). Nothing is fitted to them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cutex.bench.clock_errors import FOLDER, Summary
from cutex.sim.timing.gpus import Gpu
from cutex.sim.timing.predict import predict
from cutex.sim.timing.timed import Whole
from cutex.sim.timing.trace import Traced

TRACES = FOLDER / "traces-cutlass-sm_90a.json.gz"


@dataclass(frozen=True)
class ForeignRow:
    """One of CUTLASS's kernels on one problem, measured."""

    example: str
    tile: tuple[int, int]
    cluster: tuple[int, int]
    mnk: tuple[int, int, int]
    cycles: float
    mhz: float

    @property
    def key(self) -> str:
        sizes = ("x".join(map(str, x)) for x in (self.tile, self.cluster, self.mnk))
        return "/".join(("cutlass", self.example, *sizes))

    @property
    def work(self) -> Whole:
        m, n, k = self.mnk
        return Whole(2.0 * m * n * k, 2.0 * self.tile[0] * self.tile[1] * k)


@dataclass(frozen=True)
class ForeignError:
    row: ForeignRow
    cycles: float  # relative


def measured(file: Path) -> list[ForeignRow]:
    found = []
    for line in file.read_text().splitlines():
        r = json.loads(line)
        if r.get("kernel") == "cutlass":
            c, p = r["config"], r["problem"]
            found.append(
                ForeignRow(
                    c["example"], tuple(c["tile"]), tuple(c["cluster"]), (p["m"], p["n"], p["k"]),
                    r["cycles"], r["mhz"],
                )
            )  # fmt: skip
    return found


def errors(
    rows: Sequence[ForeignRow], traced: Mapping[str, Traced], gpu: Gpu
) -> Iterator[ForeignError]:
    """Of rows whose kernel was recorded."""
    for row in rows:
        if row.key in traced:
            timed = predict(traced[row.key], gpu.at(row.mhz / 1e3), row.work)
            yield ForeignError(row, timed.cycles / row.cycles - 1)


def table(found: Sequence[ForeignError]) -> str:
    """Markdown: errors in % by problem and kernel."""
    kernels = list(dict.fromkeys((e.row.example, e.row.tile, e.row.cluster) for e in found))
    named = ["{} {}x{}, {}x{}".format(e.removeprefix("hopper_"), *t, *c) for e, t, c in kernels]
    lines = [f"| problem | {' | '.join(named)} |", "| --- |" + " ---: |" * len(named)]
    for mnk in dict.fromkeys(e.row.mnk for e in found):
        of = {(e.row.example, e.row.tile, e.row.cluster): e for e in found if e.row.mnk == mnk}
        told = (f"{100 * of[k].cycles:+.1f} %" if k in of else "" for k in kernels)
        lines.append(f"| {'x'.join(map(str, mnk))} | {' | '.join(told)} |")
    lines += [
        "",
        f"Rows, median, nine of ten, largest in %: {Summary.of(e.cycles for e in found)}.",
    ]
    return "\n".join(lines)
