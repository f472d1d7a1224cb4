"""The predicted rates of ladders that no GPU has run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutex.problem import BESIDE_SIZES, Problem, problem_class
from cutex.results.rate import Rate, rate

FOLDER = Path("results/timing")


@dataclass(frozen=True)
class Predicted:
    """The rate of a stage by the simulator's clock, with the band in which it should be."""

    stage: int
    size: str  # with the dtype, where those of a ladder's problems differ
    rate: Rate
    low: Rate
    high: Rate

    def __str__(self) -> str:
        """As tables show it: '655 (571 to 760)', '5932 GB/s, 90.5 us (5069 to 7149)'."""
        digits = 0 if self.rate.by_memory or self.rate.value >= 10 else 1
        return f"{self.rate} ({self.low.value:.{digits}f} to {self.high.value:.{digits}f})"


def predicted(op: str, arch: str) -> list[Predicted]:
    """What `python -m cutex.clock --predict` wrote of a ladder without measurements."""
    file = FOLDER / f"predicted-{arch}.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    try:
        every = [json.loads(line) for line in lines]
        rows = [row for row in every if row["op"] == op]
        problems = [_problem(row) for row in rows]
        times = [(row["stage"], row["us"], row["us_low"], row["us_high"]) for row in rows]
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{file} is damaged: python -m cutex.clock --predict writes it anew"
        ) from None
    differ = len({problem.dtype for problem in problems}) > 1
    return [
        Predicted(
            stage,
            f"{problem.size} {problem.dtype}" if differ else problem.size,
            *(rate(problem, arch, x) for x in (us, high, low)),
        )
        for problem, (stage, us, low, high) in zip(problems, times, strict=True)
    ]


def _problem(row: Mapping[str, Any]) -> Problem:
    sizes = {name: x for name, x in row["problem"].items() if name not in BESIDE_SIZES}
    return problem_class(row["op"]).of(sizes, row["problem"]["dtype"], row["problem"]["init"])
