"""The time that a script measures: that of the simulation, or what --time predicts of its launches.

A NaN would end scripts that compute with it (`statistics.stdev`, `int(rep / estimate)`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

LEAST = 1e-3  # ms between two events of a GPU with nothing between them


@dataclass
class Stopwatch:
    """Milliseconds as a script's events and benchmarks read them."""

    predicted: float | None = None  # of all launches so far; None: the host's clock counts
    read: bool = False  # whether the script has asked for a time

    def now(self) -> float:
        return time.perf_counter() * 1e3 if self.predicted is None else self.predicted

    def between(self, start: float, end: float) -> float:
        self.read = True
        return max(end - start, LEAST)

    def of(self, call: Callable[[], object]) -> float:
        """The milliseconds that a call takes."""
        start = self.now()
        call()
        return self.between(start, self.now())

    def __str__(self) -> str:
        if self.predicted is not None:
            return "times that the script measured are the predictions of its launches, no more"
        return (
            "times that the script measured are the simulation's, not a GPU's, as --time predicts"
        )


STOPWATCH = Stopwatch()
