"""What is asked of the clock, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from cutex.sim.timing.units import Interval


@dataclass(frozen=True)
class Whole:
    """What the whole grid has to do, where the kernel does not say: MMA FLOPs, and those of one
    CTA for one output tile; 0: not known, the record is of all that a cluster does.
    """

    flops: float = 0.0
    tile_flops: float = 0.0


@dataclass
class Timed:
    """Cycles of one launch, and where they went."""

    cycles: float
    detailed: float  # cycles that were replayed event by event
    busy: dict[str, float]  # part of the replayed time, by unit of an SM
    worked: dict[str, float]  # part of the replayed time, by role
    waited: dict[str, dict[str, float]]  # the same, by role and what for
    intervals: list[Interval] = field(default_factory=list)
    miss: float = 0.0
    rounds: int = 1
    flops: float = 0.0
    loaded: float = 0.0  # bytes through L2
    stored: float = 0.0
    dram: float = 0.0
    side_by_side: int = 1  # CTAs of an SM

    @property
    def binds(self) -> str:
        return max(self.busy, key=lambda u: self.busy[u])
