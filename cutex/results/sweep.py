"""The rows of a sweep over many problems: speed relative to other libraries, by class of problem.

One JSON line per problem in results/sweep/<device>.jsonl, append-only; the newest of a problem's
rows counts.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from cutex.dtypes import DTYPES
from cutex.problem.any_shapes import alignment
from cutex.results import slug
from cutex.results.appending import appending
from cutex.results.schema import fields_of, positive

LOW, LOWEST = 0.97, 0.90  # ratios below which a summary counts problems

TOKENS = ((1, 16), (17, 64), (65, 128), (129, 384), (385, 1024), (1025, None))
WIDE = ((1, 2048), (2049, 8192), (8193, None))
DEEP = ((1, 1024), (1025, 8192), (8193, None))
LAYOUTS = {"forward": "TN", "dgrad": "NN", "wgrad": "NT"}  # BLAS's names of a pass's operands


@dataclass(frozen=True)
class SweepRow:
    """The times of one problem of a corpus, ours and others', interleaved in one process."""

    name: str
    source: str
    layer: str
    mnk: tuple[int, int, int]
    direction: str
    dtype: str
    fits: bool  # it is of the half on which choices may be fitted
    ok: bool
    message: str
    us: float | None  # ours, the median; None if wrong
    peers: dict[str, float]  # microseconds, medians
    tuned: bool  # ours was tuned for the problem
    device_name: str
    run: str  # UTC time at which the sweep began
    flops: int = 0
    bytes: int = 0
    kernel: str = ""  # the tiles that ran: fields of their config
    environment: dict[str, Any] = field(default_factory=dict)
    asked: tuple[str, ...] = ()  # the peers asked for; one that failed is not in `peers`

    @property
    def ratio(self) -> float | None:
        """The speed relative to the best of the others: above 1 is faster than all of them."""
        if self.us is None or not self.peers:
            return None
        return min(self.peers.values()) / self.us

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> SweepRow:
        row = json.loads(line)
        if type(row) is not dict:
            raise ValueError(f"{type(row).__name__} where a row belongs")
        known = {f.name for f in fields(SweepRow)}
        row = {k: v for k, v in row.items() if k in known}
        return SweepRow(**{**row, "mnk": (*row["mnk"],), "asked": (*row.get("asked", ()),)})


_RULES = fields_of(SweepRow) | {  # what a summary computes with
    "mnk": lambda v: len(v) == 3 and all(type(size) is int and size > 0 for size in v),
    "direction": lambda v: v in LAYOUTS,
    "dtype": lambda v: v in DTYPES,
    "us": lambda v: v is None or positive(v),
    "peers": lambda v: type(v) is dict and all(map(positive, v.values())),
}


def file_of(folder: Path, device_name: str) -> Path:
    """The file in `folder` for this device, such as sweep/nvidia-h200.jsonl."""
    return folder / "sweep" / f"{slug(device_name)}.jsonl"


def append(file: Path, row: SweepRow) -> None:
    with appending(file) as add:
        add(row.to_json())


def read(file: Path) -> list[SweepRow]:
    """The newest row of each problem, tuned and not; a line that was cut off or holds invalid
    values is left out."""
    newest: dict[tuple[str, str, bool], SweepRow] = {}
    for line in (
        file.read_text(errors="replace", encoding="utf-8").splitlines() if file.exists() else ()
    ):
        try:
            row = SweepRow.from_json(line)
            valid = all(holds(getattr(row, name)) for name, holds in _RULES.items())
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if valid:
            newest[row.device_name, row.name, row.tuned] = row
    return list(newest.values())


def timed(
    rows: Iterable[SweepRow], commit: str | None, tuned: bool, peers: Sequence[str]
) -> set[str]:
    """The names of the problems that need not be timed again: those with a row in `rows` from the
    same commit, tuned alike, beside at least `peers`."""
    return {
        r.name
        for r in rows
        if r.tuned == tuned
        and r.environment.get("commit") == commit
        and {*peers} <= {*r.asked, *r.peers}
    }


# ---- classes


def _range(value: int, ranges: Sequence[tuple[int, int | None]]) -> str:
    for low, high in ranges:
        if low <= value and (high is None or value <= high):
            return f"{low}-{high}" if high is not None else f"over {low - 1}"
    raise ValueError(f"{value} is in none of the ranges")


CLASSES: Mapping[str, Callable[[SweepRow], str]] = {
    "M": lambda row: _range(row.mnk[0], TOKENS),
    "N": lambda row: _range(row.mnk[1], WIDE),
    "K": lambda row: _range(row.mnk[2], DEEP),
    "layout": lambda row: f"{LAYOUTS[row.direction]} ({row.direction})",
    "sides": lambda row: f"{alignment(row.mnk)}-fold",
}


@dataclass(frozen=True)
class Summary:
    """The ratios of a set of problems to the best of the others."""

    count: int
    mean: float  # geometric
    worst: float
    below: float  # the share that is below LOW
    far_below: int  # how many are below LOWEST

    @staticmethod
    def of(rows: Iterable[SweepRow]) -> Summary:
        """The summary of `rows`; ValueError if none was timed beside others."""
        ratios = [r.ratio for r in rows if r.ratio is not None]
        if not ratios:
            raise ValueError("no row was timed beside others")
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        low, lowest = (sum(x < limit for x in ratios) for limit in (LOW, LOWEST))
        return Summary(len(ratios), mean, min(ratios), low / len(ratios), lowest)

    def __str__(self) -> str:
        return (
            f"{self.mean:.3f}x, worst {self.worst:.2f}, {self.below:.0%} below {LOW}, "
            f"{self.far_below} below {LOWEST:.2f}"
        )


def by_class(rows: Sequence[SweepRow]) -> Iterator[tuple[str, str, Summary]]:
    """The (classification, class, summary) of each class that has a problem."""
    timed = [r for r in rows if r.ratio is not None]
    for title, classify in CLASSES.items():
        groups: dict[str, list[SweepRow]] = {}
        for row in sorted(timed, key=lambda r: r.mnk):
            groups.setdefault(classify(row), []).append(row)
        for name in sorted(groups, key=lambda x: (x.startswith("over"), _first(x), x)):
            yield title, name, Summary.of(groups[name])


def _first(name: str) -> int:
    digits = name.partition("-")[0]
    return int(digits) if digits.isdecimal() else 0


def worst(rows: Iterable[SweepRow], count: int = 10) -> list[SweepRow]:
    """The problems with the lowest ratios."""
    timed = [r for r in rows if r.ratio is not None]
    return sorted(timed, key=lambda r: r.ratio or 0.0)[:count]


def spread(rows: Iterable[SweepRow]) -> list[float]:
    """Eleven of the sorted ratios: the lowest, every tenth part of the way, and the highest."""
    ratios = sorted(r.ratio for r in rows if r.ratio is not None)
    cuts = statistics.quantiles(ratios, n=10, method="inclusive") if len(ratios) > 1 else ratios * 9
    return [*ratios[:1], *cuts, *ratios[-1:]]


def text(rows: Sequence[SweepRow]) -> str:
    """A summary to print: all problems, their sorted ratios, by class, the ten worst, and the wrong
    ones."""
    wrong = [f"WRONG: {row.name}: {row.message}" for row in rows if not row.ok]
    if not any(row.ratio for row in rows):
        return "\n".join(["no problem was timed beside others", *wrong])
    lines = [f"all {Summary.of(rows).count}: {Summary.of(rows)}"]
    lines.append(f"sorted, by tenths: {' '.join(f'{ratio:.2f}' for ratio in spread(rows))}")
    for title, name, summary in by_class(rows):
        lines.append(f"  {title:>6} {name:<13} {summary.count:>4}  {summary}")
    lines.append("lowest:")
    for row in worst(rows):
        beside = ", ".join(f"{name} {us:.1f}" for name, us in row.peers.items())
        lines.append(f"  {row.ratio:.3f}  {row.name}  {row.us:.1f} us, {beside}  {row.source}")
    return "\n".join(lines + wrong)


def text_by_device(rows: Iterable[SweepRow]) -> str:
    """`text` of each device's rows, under its name and the commits that were timed."""
    devices: dict[str, list[SweepRow]] = {}
    for row in rows:
        devices.setdefault(row.device_name, []).append(row)
    return "\n\n".join(
        f"{name}: {commits(members)}\n{text(members)}" for name, members in sorted(devices.items())
    )


def commits(rows: Iterable[SweepRow]) -> str:
    """The number of `rows` of each commit."""
    counts = Counter(r.environment.get("commit") or "unknown" for r in rows)
    return " and ".join(f"{count} at {commit}" for commit, count in counts.items())
