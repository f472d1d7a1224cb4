"""The error of the simulator's clock: its cycles against measured ones.

Rows of results/timing/cycles-*.jsonl were measured on a GPU: a CUDA graph of launches for a quarter
of a second, and the SMs' own cycle counters read by a kernel before and one behind it, so the
cycles are exact at any clock rate. Half of them are held out of every fit, by a hash of `Row.key`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cutex.bench.clock import record
from cutex.bench.progress import progress
from cutex.problem import Problem, problem_class
from cutex.problem.stage import AnyStage
from cutex.problem.stage import stage as stage_of
from cutex.sim.timing import stored
from cutex.sim.timing.gpus import Gpu, gpu, of_arch
from cutex.sim.timing.power import clock_ghz
from cutex.sim.timing.predict import predict
from cutex.sim.timing.stored import Recorded
from cutex.sim.timing.timed import Timed, Whole

FOLDER = Path("results/timing")


@dataclass(frozen=True)
class Row:
    """One stage, measured: ``cycles`` of the SMs for a launch, ``mhz`` their mean clock."""

    arch: str
    op: str
    stage: int
    problem: Problem
    config: dict[str, Any]
    cycles: float
    mhz: float
    watts: float
    set: str  # "ladder", "configs" of stage 9, or "sustained"

    @property
    def key(self) -> str:
        """The stage, the problem and the config, as text: also the name of its record."""
        key = f"{self.op}/{self.arch}/{self.stage}/{self.problem.size}"
        return f"{key}/{json.dumps(self.config)}" if self.set == "configs" else key

    @property
    def held_out(self) -> bool:
        return int(hashlib.sha256(self.key.encode()).hexdigest(), 16) % 2 == 1

    def as_stage(self) -> AnyStage:
        found = stage_of(self.op, self.arch, self.stage)
        config = found.config_from_row(self.config)
        return replace(found, default=config, chooses=False)


@dataclass(frozen=True)
class Error:
    row: Row
    timed: Timed
    mhz: float  # predicted

    @property
    def cycles(self) -> float:
        """The relative error of the cycles."""
        return self.timed.cycles / self.row.cycles - 1

    @property
    def clock(self) -> float:
        return self.mhz / self.row.mhz - 1


def measured(file: Path, arch: str = "sm_90a") -> list[Row]:
    """Rows of our stages; kernels of other libraries are left out."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        r = json.loads(line)
        if "stage" not in r:
            continue
        sizes = {k: v for k, v in r["problem"].items() if k not in ("dtype", "init", "seed")}
        kind = problem_class(r["op"])
        problem = kind.of(sizes, r["problem"]["dtype"], r["problem"]["init"])
        found.append(
            Row(
                arch, r["op"], r["stage"], problem, r.get("config", {}), r["cycles"], r["mhz"],
                r["watts"] or 0.0, r["set"],
            )
        )  # fmt: skip
    return found


def ladder(rows: Iterable[Row]) -> list[Row]:
    """The rows of the ladders on Gaussian data."""
    return [r for r in rows if r.set == "ladder" and r.problem.init == "normal"]


def traces_file(op: str, arch: str) -> Path:
    """The file of the records of an operator's stages."""
    return FOLDER / f"traces-{op}-{arch}.json.gz"


def stored_traces(rows: Iterable[Row]) -> Mapping[str, Recorded]:
    """All stored records of the operators and archs of these rows."""
    files = {traces_file(r.op, r.arch): None for r in rows}
    return stored.load(*(file for file in files if file.exists()))


def store_traces(rows: Sequence[Row]) -> None:
    """Record these rows again, and write the records to their files."""
    for file in {traces_file(r.op, r.arch): None for r in rows}:
        store([r for r in rows if traces_file(r.op, r.arch) == file], file)


def store(rows: Sequence[Row], file: Path) -> None:
    """Record these rows again, and write the records to `file`."""
    traced = {}
    with progress(f"rows of {file.name} are recorded", len(rows)) as step:
        for r in rows:
            traced[r.key] = record(r.problem, r.as_stage())[0]
            step()
    stored.save(traced, file)


def errors(rows: Sequence[Row], traced: Mapping[str, Recorded], board: Gpu) -> Iterator[Error]:
    for row in rows:
        yield error(row, traced, board)


def error(row: Row, traced: Mapping[str, Recorded], board: Gpu) -> Error:
    """The error of a row that was recorded."""
    whole = Whole(*row.problem.work(row.as_stage().fitted(row.problem).config()))
    timed = predict(traced[row.key], board.at(row.mhz / 1e3), whole)
    return Error(row, timed, 1e3 * clock_ghz(timed, board, row.problem.init))


@dataclass(frozen=True)
class Summary:
    count: int
    median: float
    ninth: float  # nine of ten are within it
    largest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Summary:
        found = sorted(abs(v) for v in values)
        if not found:
            return cls(0, 0.0, 0.0, 0.0)
        at = min(len(found) - 1, round(0.9 * (len(found) - 1)))
        return cls(len(found), found[len(found) // 2], found[at], found[-1])

    def __str__(self) -> str:
        parts = (f"{100 * x:.1f}" for x in (self.median, self.ninth, self.largest))
        return " | ".join([str(self.count), *parts])


def in_order(found: Sequence[Error], least: float = 0.05) -> tuple[int, int]:
    """The number of pairs of stages on one problem that the clock has in the right order, and of
    all such pairs whose measured cycles differ by more than ``least``, relative."""
    right = total = 0
    for i, a in enumerate(found):
        for b in found[:i]:
            if (a.row.op, a.row.problem) != (b.row.op, b.row.problem):
                continue
            if abs(a.row.cycles / b.row.cycles - 1) > least:
                total += 1
                right += (a.timed.cycles < b.timed.cycles) == (a.row.cycles < b.row.cycles)
    return right, total


def table(found: Sequence[Error]) -> str:
    """Markdown: by operator and stage, fitted and held out."""
    lines = [
        "| | rows | median % | nine of ten % | largest % |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for op in dict.fromkeys(e.row.op for e in found):
        mine = [e for e in found if e.row.op == op]
        for name, part in (
            (f"{op}, held out", [e for e in mine if e.row.held_out]),
            (f"{op}, fitted", [e for e in mine if not e.row.held_out]),
            *(
                (f"{op}, stage {n}", [e for e in mine if e.row.stage == n])
                for n in sorted({e.row.stage for e in mine})
            ),
        ):
            lines.append(f"| {name} | {Summary.of(e.cycles for e in part)} |")
        right, total = in_order(mine)
        lines.append(f"| {op}, pairs of stages in the right order | {right} of {total} | | | |")
        lines.append(f"| {op}, clock | {Summary.of(e.clock for e in mine)} |")
    return "\n".join(lines)


def board(arch: str = "sm_90a") -> Gpu:
    return gpu(of_arch(arch))
