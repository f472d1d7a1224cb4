"""The calls that a command rents: its requests by GPU, their cost, and their time limits."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Any

from cutex.cloud import prices
from cutex.cloud.prices import Rental
from cutex.problem import size_name

START = 40.0  # seconds in which a container starts, imports torch and the DSL; once per GPU
SLACK = 4.0  # times the estimate, after which a call is ended
SHORTEST_LIMIT = 120
LEAST_LIMIT = 60  # under --max-cost: the first call of a container still imports torch and the DSL
STARTUP_LIMIT = 180  # seconds after which Modal gives up on a container that does not start
RESTARTS = 1  # restarts of each call, after a preemption, that the highest cost includes
NOT_COVERED = (
    "not counted: a second preemption of one call, building the image (once), and the volume of "
    "compiled kernels (cents a month)"
)


@dataclass(frozen=True)
class Request:
    """One call in one container; `remote.execute` takes it as a dict."""

    index: int
    run: str  # UTC time, the same for all requests of one command
    gpu: str
    arch: str
    seconds: float  # estimate
    op: str = ""
    stages: list[int] = field(default_factory=list)
    problem: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    probes: bool = False
    pytest: list[str] | None = None
    script: str | None = None  # the name of a file
    source: bytes = b""  # its text
    arguments: list[str] = field(default_factory=list)  # arguments of the script, or of cutex.sweep
    layers: list[str] = field(default_factory=list)  # names of problems of cutex.sweep
    commit: str | None = None
    kernels: bytes = b""

    def __str__(self) -> str:
        if self.pytest is not None:
            return f"pytest {shlex.join(self.pytest)}"
        if self.script is not None:
            return shlex.join(["python", self.script, *self.arguments])
        if self.layers:
            return f"{len(self.layers)} layers of models {shlex.join(self.arguments)}"
        if self.problem is None:
            return "timing probes"
        size, dtype = size_name(self.op, self.problem), self.problem["dtype"]
        stages = ",".join(map(str, self.stages))
        peers = " ".join(("beside", *self.options["compare"])) if self.options["compare"] else ""
        return f"stage {stages} on {size} {dtype} {peers}".rstrip()


@dataclass(frozen=True)
class Plan:
    """All requests of one command, by GPU, and their cost."""

    rentals: list[Rental]
    requests: list[Request]
    max_cost: float | None

    def on(self, gpu: str) -> list[Request]:
        return [r for r in self.requests if r.gpu == gpu]

    def seconds(self, rental: Rental) -> float:
        return START + sum(r.seconds for r in self.on(rental.gpu))

    @property
    def usd(self) -> float:
        return sum(r.usd(self.seconds(r)) for r in self.rentals)

    def limit(self, rental: Rental) -> int:
        """The seconds after which Modal ends a call: generous, yet within --max-cost in all.

        The start of a container has a limit of its own, STARTUP_LIMIT.
        """
        longest = max(r.seconds for r in self.on(rental.gpu))
        limit = max(SHORTEST_LIMIT, SLACK * longest)
        if self.max_cost is not None:
            share = self.max_cost / self.usd * self.seconds(rental)
            limit = min(limit, self._each(rental, share))
        return max(LEAST_LIMIT, int(longest), int(limit))

    def _each(self, rental: Rental, seconds: float) -> float:
        """The seconds of each call if all of them share `seconds`, and each is restarted once."""
        runs = 1 + RESTARTS
        return (seconds - runs * STARTUP_LIMIT) / (runs * len(self.on(rental.gpu)))

    @property
    def max_usd(self) -> float:
        """Worst-case cost in dollars: every call restarted and run to its time limit."""
        return sum(
            r.usd((1 + RESTARTS) * (STARTUP_LIMIT + len(self.on(r.gpu)) * self.limit(r)))
            for r in self.rentals
        )

    def __str__(self) -> str:
        lines = []
        for rental in self.rentals:
            seconds = self.seconds(rental)
            lines.append(
                f"{rental.gpu}: {seconds:.0f} s, about ${rental.usd(seconds):.2f} at "
                f"${rental.usd_per_second * 3600:.2f} an hour (rates of {prices.AS_OF})"
            )
            lines += [f"  {request.seconds:4.0f} s  {request}" for request in self.on(rental.gpu)]
        lines.append(f"in all about ${self.usd:.2f}, at most ${self.max_usd:.2f}; {NOT_COVERED}")
        return "\n".join(lines)
