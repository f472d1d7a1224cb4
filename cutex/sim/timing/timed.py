"""`Whole`, an input of the clock, and `Timed`, its result."""

from __future__ import annotations

from dataclasses import dataclass, field

from cutex.sim.timing.units import Interval


@dataclass(frozen=True)
class Whole:
    """The work of the whole grid, which a part of it does not show: MMA FLOPs, and those of one CTA
    for one output tile; 0: unknown, the record has all that a cluster does.
    """

    flops: float = 0.0
    tile_flops: float = 0.0


@dataclass
class Timed:
    """Cycles of one launch, and the shares of its units and roles."""

    cycles: float
    detailed: float  # cycles that were replayed event by event
    busy: dict[str, float]  # share of the replayed time, by unit of an SM
    worked: dict[str, float]  # share of the replayed time, by role
    waited: dict[str, dict[str, float]]  # share of the replayed time, by role and who ends the wait
    intervals: list[Interval] = field(default_factory=list)
    miss: float = 0.0
    rounds: int = 1
    flops: float = 0.0
    narrow: float = 1.0  # tensor core cycles of its FLOPs, relative to those of 16-bit operands
    loaded: float = 0.0  # bytes through L2
    stored: float = 0.0
    written: float = 0.0  # bytes of them that go to HBM
    dram: float = 0.0
    side_by_side: int = 1  # CTAs of an SM
    sampled: tuple[int, int] = (0, 0)  # recorded clusters that differ, of how many; none if alike
    sampling_error: float = 0.0  # relative, of the cycles: that of a mean over the recorded ones

    @property
    def binds(self) -> str:
        return max(self.busy, key=lambda u: self.busy[u])
