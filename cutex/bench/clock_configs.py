"""Whether the simulator's clock ranks the configs of a problem as a GPU does.

Of each problem of the README eight configs of the last stage were measured, those that the
library's choice ranks first (results/timing/cycles-*.jsonl, set "configs").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cutex.bench.clock import record
from cutex.bench.clock_errors import FOLDER, Error, Row, Summary, board, errors
from cutex.sim.timing import stored
from cutex.sim.timing.lengths import Lengths
from cutex.sim.timing.trace import Traced

TRACES = FOLDER / "traces-configs-sm_90a.json.gz"


def configs(rows: Iterable[Row]) -> list[Row]:
    """Those of configs of one stage."""
    return [r for r in rows if r.set == "configs"]


def store(rows: Sequence[Row]) -> None:
    """Records these rows anew, and keeps the records."""
    stored.save({r.key: record(r.problem, r.as_stage())[0] for r in rows}, TRACES)


def found(rows: Sequence[Row]) -> list[Error]:
    """The errors of those that are recorded."""
    traced: Mapping[str, Traced | Lengths] = stored.load(TRACES)
    return list(errors([r for r in rows if r.key in traced], traced, board()))


@dataclass(frozen=True)
class Choice:
    """What choosing a problem's config by the clock costs, relative to the best measured one."""

    problem: str
    errors: Sequence[Error]

    @property
    def cycles(self) -> float:
        return self._lost(lambda e: e.timed.cycles, lambda e: e.row.cycles)

    @property
    def time(self) -> float:
        """At the clock that each ran at."""
        return self._lost(
            lambda e: e.timed.cycles / e.row.mhz, lambda e: e.row.cycles / e.row.mhz
        )  # fmt: skip

    def _lost(self, told: Callable[[Error], float], ran: Callable[[Error], float]) -> float:
        return ran(min(self.errors, key=told)) / min(map(ran, self.errors)) - 1


def choices(all_errors: Sequence[Error]) -> list[Choice]:
    sizes = dict.fromkeys(e.row.problem.size for e in all_errors)
    return [Choice(s, [e for e in all_errors if e.row.problem.size == s]) for s in sizes]


def table(all_errors: Sequence[Error]) -> str:
    """Markdown: by problem, what the config called best loses, and how far off all are."""
    lines = [
        "| problem | cycles lost % | time lost % | rows | median % | nine of ten % | largest % |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for c in choices(all_errors):
        lost = f"{100 * c.cycles:.1f} | {100 * c.time:.1f}"
        lines.append(f"| {c.problem} | {lost} | {Summary.of(e.cycles for e in c.errors)} |")
    lines.append(f"| all | | | {Summary.of(e.cycles for e in all_errors)} |")
    return "\n".join(lines)
