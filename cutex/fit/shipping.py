"""python -m cutex.fit.shipping: make the shipped choices for Hopper (see --help).

A class of calls is in the table if a config measured on H200s is faster than the cost model's first
by the factor SLOWER, or if that first was not measured and at least MEASURED others were. To be run
after fitting the model (cutex/fit/costs.py).
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from cutex.arch import arch
from cutex.command import Parser, answered
from cutex.dtypes import DTYPES
from cutex.fit import costs as fit
from cutex.kernels.gemm.layouts import OperandLayout
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm90.cost_model import candidates as all_candidates
from cutex.kernels.gemm.sm90.tile_order import in_order
from cutex.ops.matmul.choices import CallClass, name_of, shipped_file
from cutex.ops.matmul.plan import call_class, candidates, fitted, majors_of, problem_of
from cutex.whole_file import write_whole

FILE = shipped_file("sm_90a")
SLOWER = 1.03
MEASURED = 3

Layouts = tuple[OperandLayout, OperandLayout, OperandLayout]


def measured() -> Iterator[tuple[CallClass, dict[Sm90Config, float]]]:
    """Classes of calls, with the mean times of their configs relative to other libraries on the
    same cards; without calls that take the choice of a larger M."""
    configs, rows = fit.measured_rows()
    found: dict[tuple[Any, ...], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for i, us in row["us"].items():
            found[fit.problem_of(row)][int(i)].append(us / min(row["others"].values()))
    for (m, n, k, direction, dtype), times in sorted(found.items()):
        a, b = fit.MAJORS[direction]
        layouts = (
            OperandLayout(dtype, "row" if a else "column"),
            OperandLayout(dtype, "column" if b else "row"),
            OperandLayout(),
        )
        calls = call_class((m, n, k, 1), layouts, (), "sm_90a")
        if calls.sizes == (m, n, DTYPES[dtype].bytes(k) // 2, 1):
            yield calls, {configs[i]: fmean(t) for i, t in times.items()}


def better(calls: CallClass, times: dict[Sm90Config, float]) -> Sm90Config | None:
    """The config to take instead of the model's first; None if that is as good."""
    every = all_candidates(problem_of(calls), arch("sm_90a"), majors_of(calls))
    allowed = {fit.tiling(c) for c in every}
    times = {c: t for c, t in times.items() if fit.tiling(c) in allowed and fitted(c, calls)}
    if not times:
        return None
    best = min(times, key=times.__getitem__)
    today = in_order(best)
    first = next(candidates(calls)).tiles
    assert isinstance(first, Sm90Config)
    of_first = [t for c, t in times.items() if fit.tiling(c) == fit.tiling(first)]
    if of_first:
        return today if min(of_first) > SLOWER * times[best] else None
    return today if len(times) >= MEASURED else None


def table() -> dict[str, dict[str, Any]]:
    """The config fields that differ from the defaults, by the name of a class of calls."""
    usual = asdict(Sm90Config())
    found = {}
    for calls, times in measured():
        if config := better(calls, times):
            found[name_of(calls)] = {f: v for f, v in asdict(config).items() if v != usual[f]}
    return found


def text(rows: dict[str, dict[str, Any]]) -> str:
    """The text of the file, one class per line."""
    lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


@answered
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m cutex.fit.shipping",
        description="Find the classes of calls whose best measured config the cost model of "
        "Hopper's GEMM does not choose. Run after it was fitted.",
    )
    parser.add_argument("--write", action="store_true", help=f"change {FILE.name}, not only look")
    args = parser.parse_args(argv)
    rows = table()
    print(f"{len(rows)} classes of calls")
    if args.write:
        write_whole(FILE, text(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
