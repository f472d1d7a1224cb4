"""The simulator's clock as a ranking of the configs of a problem, against a GPU's.

Of each problem of the README eight configs of the last stage were measured, those that the
library's choice ranks first (results/timing/cycles-*.jsonl, set "configs").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cutex.clock_errors.rows import FOLDER, Error, Row, Summary, board, errors
from cutex.sim.timing import stored
from cutex.sim.timing.stored import Recorded

TRACES = FOLDER / "traces-configs-sm_90a.json.gz"


def configs(rows: Iterable[Row]) -> list[Row]:
    """The rows that are configs of one stage."""
    return [r for r in rows if r.set == "configs"]


def traces() -> Mapping[str, Recorded]:
    """The stored records of configs."""
    return stored.load(TRACES)


def found(rows: Sequence[Row]) -> list[Error]:
    """The errors of the rows that are recorded."""
    traced = traces()
    return list(errors([r for r in rows if r.key in traced], traced, board()))


@dataclass(frozen=True)
class Choice:
    """The loss from choosing a problem's config by the clock, relative to the best measured one."""

    problem: str
    errors: Sequence[Error]

    @property
    def cycles(self) -> float:
        return self._lost(lambda e: e.timed.cycles, lambda e: e.row.cycles)

    @property
    def time(self) -> float:
        """The loss in time, at the clock rate of each measurement."""
        return self._lost(
            lambda e: e.timed.cycles / e.row.mhz, lambda e: e.row.cycles / e.row.mhz
        )  # fmt: skip

    def _lost(self, by: Callable[[Error], float], ran: Callable[[Error], float]) -> float:
        return ran(min(self.errors, key=by)) / min(map(ran, self.errors)) - 1


def choices(all_errors: Sequence[Error]) -> list[Choice]:
    sizes = dict.fromkeys(e.row.problem.size for e in all_errors)
    return [Choice(s, [e for e in all_errors if e.row.problem.size == s]) for s in sizes]


def table(all_errors: Sequence[Error]) -> str:
    """Markdown: by problem, the loss of the config that the clock ranks first, and the errors of
    all."""
    lines = [
        "| problem | cycles lost % | time lost % | rows | median % | nine of ten % | largest % |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for c in choices(all_errors):
        lost = f"{100 * c.cycles:.1f} | {100 * c.time:.1f}"
        lines.append(f"| {c.problem} | {lost} | {Summary.of(e.cycles for e in c.errors)} |")
    lines.append(f"| all | | | {Summary.of(e.cycles for e in all_errors)} |")
    return "\n".join(lines)
