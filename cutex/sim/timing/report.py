"""The report of a timed launch: a short table, JSON, and a trace for Perfetto."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cutex.sim.timing.picture import UNITS, draw
from cutex.sim.timing.timed import Timed
from cutex.sim.timing.units import Interval
from cutex.whole_file import write_whole

WAYS_LOST = "  steps: in which ways they came is not known: no function that takes one was recorded"
SPILLED = "  {} bytes of a thread are spilled: the time of their loads and stores is not in this"


@dataclass
class Role:
    """The warps of one role: the share of time in which they work, and in which they wait for
    whom."""

    name: str
    warps: float  # of a CTA; of a pair's leader, half of that
    worked: float
    waited: dict[str, float]


@dataclass
class TimeReport:
    """The time of a launch on a GPU, by the model. ``band`` is the expected relative error of the
    cycles, ``clock_band`` that of the clock, both from docs/time.md.
    """

    kernel: str
    gpu: str
    cycles: float
    clock_ghz: float
    band: float
    clock_band: float
    flops: float
    binds: str
    busy: dict[str, float]
    roles: list[Role]
    timed: Timed
    intervals: list[Interval] = field(default_factory=list, repr=False)
    # where the data steers the kernel: the share of its steps that came in each way, and how often
    # one of its rare events happened a step
    ways: dict[str, float] = field(default_factory=dict)
    ways_lost: bool = False  # it has such ways, but none of their functions was seen
    # where nothing binds, the cycles of the longest chain by what they are
    chain: dict[str, float] = field(default_factory=dict)
    stack: int = 0  # bytes of a thread, for whose loads and stores no time is counted

    @property
    def us(self) -> float:
        return self.cycles / self.clock_ghz / 1e3

    @property
    def tflops(self) -> float:
        return self.flops / self.us / 1e6

    @property
    def us_band(self) -> tuple[float, float]:
        both = (self.band**2 + self.clock_band**2) ** 0.5
        return self.us * (1 - both), self.us * (1 + both)

    def __str__(self) -> str:
        low, high = self.us_band
        ran, count = self.timed.sampled
        top = sorted(self.busy.items(), key=lambda item: -item[1])
        busy = ", ".join(f"{name} {100 * part:.0f} %" for name, part in top if part >= 0.05)
        used = f"busy {busy}" if busy else "no unit is busy for 5 % of it"
        lines = [
            f"{self.kernel} on {self.gpu}: predicted, not measured",
            f"  {self.cycles:12,.0f} cycles (+-{100 * self.band:.0f} %) "
            f"at {self.clock_ghz:.2f} GHz (+-{100 * self.clock_band:.0f} %)",
            f"  {self.us:12,.1f} us ({low:,.1f} to {high:,.1f})"
            + (f", {self.tflops:,.0f} TFLOPS" if self.flops else ""),
            *([f"  clusters differ: {ran} of {count} were recorded"] if ran else []),
            f"  binds: {self.binds}; {used}",
            *([f"  its time: {_shares(self.chain, self.cycles)}"] if self.chain else []),
            *([f"  steps: {_parts(self.ways)}"] if self.ways else []),
            *([WAYS_LOST] if self.ways_lost else []),
            *([SPILLED.format(self.stack)] if self.stack else []),
            f"  {'role':<16}{'warps':>6}{'works':>8}   waits for",
        ]
        for role in self.roles:
            waits = sorted(role.waited.items(), key=lambda item: -item[1])
            waited = [f"{name} {100 * part:.0f} %" for name, part in waits if part >= 0.01]
            lines.append(
                f"  {role.name:<16}{role.warps:>6g}{100 * role.worked:>7.0f}%   {', '.join(waited)}"
            )
        return "\n".join(lines)

    def chrome_trace(self) -> dict[str, Any]:
        """The replayed clusters as Chrome-trace JSON for Perfetto; cycles as microseconds."""
        return chrome_trace(self.intervals, f"{self.kernel} on {self.gpu}")

    def to_json(self) -> str:
        """The report as one line of JSON."""
        low, high = self.us_band
        found = {
            "kernel": self.kernel, "gpu": self.gpu, "predicted": True, "cycles": self.cycles,
            "clock_ghz": self.clock_ghz, "us": self.us, "us_low": low, "us_high": high,
            "tflops": self.tflops, "binds": self.binds, "busy": self.busy, "chain": self.chain,
            "clusters_recorded": self.timed.sampled[0] or None,
            "stack_bytes": self.stack, "roles": [asdict(r) for r in self.roles], "ways": self.ways,
        }  # fmt: skip
        return json.dumps(found)

    def write_trace(self, file: Path) -> None:
        """Write a picture of the first CTA if ``file`` ends in .svg; else JSON for Perfetto."""
        if file.suffix == ".svg":
            title = f"the first CTA on {self.gpu}, predicted: {self.cycles:,.0f} cycles in all"
            write_whole(file, draw(self.intervals, title))
        else:
            write_whole(file, json.dumps(self.chrome_trace()))


def _parts(ways: dict[str, float]) -> str:
    return ", ".join(f"{name} {100 * part:.1f} %" for name, part in ways.items() if part)


def _shares(chain: dict[str, float], cycles: float) -> str:
    """The parts of a chain beside all cycles of a launch, the small ones together."""
    shares = {name: part / cycles for name, part in chain.items()}
    large = {name: part for name, part in shares.items() if part >= 0.03}
    rest = sum(shares.values()) - sum(large.values())
    return ", ".join(f"{name} {100 * part:.0f} %" for name, part in [*large.items(), ("rest", rest)]
                     if part >= 0.005)  # fmt: skip


def chrome_trace(intervals: list[Interval], title: str) -> dict[str, Any]:
    """Tracks of each CTA: each warp of a role, the tensor core, TMA in and out; an arrow leads from
    the track that ends a wait to the waiter.
    """
    tracks: dict[tuple[int, str], int] = {}
    events: list[dict[str, Any]] = []
    order = {name: i for i, name in enumerate(UNITS)}

    def track(cta: int, name: str) -> int:
        if (cta, name) not in tracks:
            tracks[cta, name] = len(tracks) + 1
            number = tracks[cta, name]
            base = {"ph": "M", "pid": cta, "tid": number}
            events.append({**base, "name": "thread_name", "args": {"name": name}})
            sort = order.get(name, 10 + number)
            events.append({**base, "name": "thread_sort_index", "args": {"sort_index": sort}})
        return tracks[cta, name]

    for cta in sorted({i.cta for i in intervals}):
        args = {"name": f"CTA {cta}: {title}"}
        events.append({"ph": "M", "pid": cta, "name": "process_name", "args": args})
    for n, i in enumerate(intervals):
        name = f"wait: {i.name}" if i.kind == "wait" else i.name or i.kind
        color = {"wait": "grey", "work": "good"}.get(i.kind, "thread_state_running")
        events.append(
            {
                "ph": "X", "pid": i.cta, "tid": track(i.cta, i.track), "name": name,
                "cat": i.kind, "ts": i.start, "dur": i.end - i.start, "cname": color,
            }
        )  # fmt: skip
        if i.kind == "wait" and i.by is not None:
            flow = {"cat": "arrive", "name": "arrive", "id": n, "pid": i.cta}
            events.append({**flow, "ph": "s", "tid": track(i.cta, i.by[0]), "ts": i.by[1]})
            events.append({**flow, "ph": "f", "bp": "e", "tid": track(i.cta, i.track), "ts": i.end})
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def busiest(intervals: list[Interval]) -> dict[str, float]:
    """Busy cycles by track."""
    total: dict[str, float] = defaultdict(float)
    for i in intervals:
        total[i.track] += i.end - i.start
    return dict(total)
