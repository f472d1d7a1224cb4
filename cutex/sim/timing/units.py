"""The units of an SM, and the intervals in which they work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import exp, inf
from typing import NamedTuple

from cutex.sim.timing.machine_code import PIPES


class FirstTouch(NamedTuple):
    """What of a tensor's bytes comes from HBM where all CTAs run in step: of the first ones that a
    CTA loads of it, and of all further ones."""

    size: float  # bytes of the first step
    first: float  # the share of them that no other CTA loads at the same time
    later: float  # the share of all further ones that nobody has loaded before

    def miss(self, loaded: float) -> float:
        """The share of a box that comes from HBM, before which the CTA has `loaded` so many bytes
        of the tensor."""
        return self.first if loaded < self.size else self.later


class Missed(NamedTuple):
    """The share of the bytes of a tensor that ordinary loads get from HBM: of all, of those that a
    CTA fetches first, and of those that it fetches again."""

    all: float = 1.0
    first: float = 1.0
    again: float = 1.0
    in_l1: bool = False  # whether L1 keeps what one CTA has loaded for the next
    scattered: float = 0.0  # of those that are alone in their 64 bytes, as a gather's
    together: float = 1.0  # CTAs side by side that fetch the same bytes

    def waits(self, miss: float, alone: int) -> float:
        """The share of loads that wait for memory, if it brings the share `miss` of their bytes:
        CTAs that walk along the same bytes, in step, all wait for the one that asked first; what is
        at random places is mostly there.
        """
        return miss if alone else min(1.0, miss * self.together)

    def of(self, new: float) -> float:
        """The share of a fetch of which the share `new` is a CTA's first; -1: not known."""
        return self.all if new < 0 else new * self.first + (1 - new) * self.again

    def brought(self, size: float, new: float, alone: int, each: float) -> float:
        """The bytes whose time memory takes for a fetch of `size` bytes, `alone` sectors of which
        are at random places: `each` for such a one, or 0: as for others."""
        if not each or not alone:
            return size * self.of(new)
        return (size - 32 * alone) * self.of(new) + alone * self.scattered * each


@dataclass
class Memory:
    """The rest of the GPU as an SM's copies see it: the share of its loads that misses L2, and the
    number of SMs that share the rates.
    """

    miss: float  # share of the bytes that come from HBM
    sms: int  # busy SMs
    shared: float = 0.0  # share of the bytes that other SMs request at the same time
    write_back: float = 1.0  # share of stored bytes that go on to HBM, those of sums aside
    waits: float = 1.0  # share of loads that wait for HBM: all where CTAs run in step
    fetched: dict[int, Missed] = field(default_factory=dict)  # of ordinary loads, by tensor
    stream: float = inf  # bytes per cycle that one SM takes from HBM, at most
    ahead: float = 0.0  # cycles by which an SM may exceed its share of L2, as others are idle
    slices: float = 1.0  # of L2 that add at one time
    # by tensor, in place of `miss`, where one tile a CTA is all there is
    touches: dict[int, FirstTouch] = field(default_factory=dict)


@dataclass
class Unit:
    """A queue; ``busy`` adds up the cycles that it served."""

    name: str
    free: float = 0.0
    busy: float = 0.0

    def serve(self, at: float, cycles: float) -> float:
        """Serve ``cycles`` cycles requested at ``at``, and return their end."""
        end = (at if at > self.free else self.free) + cycles
        self.free = end
        self.busy += cycles
        return end


@dataclass
class Barrier:
    arrivals: int
    pending: int
    tx: int = 0
    phases: int = 0
    by: str = ""  # the role from which the last arrival of a phase came, and its track
    track: str = ""
    waiting: list[tuple[int, Callable[[float], None]]] = field(default_factory=list)


@dataclass
class Interval:
    """Something on a track, from ``start`` to ``end``."""

    track: str
    name: str
    start: float
    end: float
    kind: str = ""  # "work", "wait", "unit"
    cta: int = 0
    # the track that ended a wait, or that started what a unit does, and the time
    by: tuple[str, float] | None = None


class SubCore:
    """A sub-core: issue slots, and the pipes behind them, each a queue of its own."""

    def __init__(self) -> None:
        self.slots = Unit("issue slots")
        self.pipes = [Unit(f"{name} pipe") for name in PIPES]

    def serve(self, at: float, slots: float, pipes: Iterable[float]) -> float:
        """Serve work of so many issue slots and cycles of each pipe, requested at ``at``; return
        its end.
        """
        end = self.slots.serve(at, slots)
        for unit, cycles in zip(self.pipes, pipes, strict=True):
            if cycles:
                done = unit.serve(at, cycles)
                if done > end:
                    end = done
        return end


class Crowd:
    """How long requests to memory queue, by how busy it has been lately: of a queue whose requests
    come at random, the busy share over the idle one."""

    WINDOW = 2000.0  # cycles
    MOST = 0.9

    def __init__(self) -> None:
        self.busy, self.at = 0.0, 0.0

    def add(self, now: float, cycles: float) -> float:
        """Add a request that is served for `cycles`; return the share that it finds, over the
        rest."""
        self.busy *= exp((self.at - now) / self.WINDOW)
        self.at = now
        busy = min(self.busy / self.WINDOW, self.MOST)
        self.busy += cycles
        return busy / (1 - busy)


class Sm:
    def __init__(self, number: int) -> None:
        self.missed: set[int] = set()  # tensors of which it has loaded from HBM
        self.cores = [SubCore() for _ in range(4)]
        self.port = Unit("smem port")
        self.tensor = Unit("tensor core")
        self.tmem = Unit("tensor memory")
        self.issue = Unit("TMA issue")
        self.ingest = Unit("TMA bytes")
        self.outside = Unit("TMA outside")
        self.out = Unit("stores")
        self.passes = Unit("lines of stores")
        self.sums = Unit("sums in L2")
        self.lines = Unit("loads")
        self.banks = Unit("L1 banks")
        self.fills = Unit("copies to smem")
        self.peers = Unit("other CTAs' smem")
        self.sent = Unit("bytes to other CTAs")
        self.received = Unit("bytes from other CTAs")
        self.l2 = Unit("L2 share")
        self.hbm = Unit("HBM share")
        self.crowd = Crowd()
        self.missing = 0.5  # loads that wait for memory, less those that have

    def misses(self, share: float) -> bool:
        """Whether the next load waits for memory, as this share of such loads do: of several that a
        warp waits for together, the latest counts."""
        self.missing += share
        late = self.missing >= 1.0
        self.missing -= late
        return late

    @property
    def units(self) -> list[Unit]:
        cores = [u for core in self.cores for u in (core.slots, *core.pipes)]
        return [
            *cores, self.port, self.tensor, self.tmem, self.issue, self.ingest, self.outside,
            self.out, self.passes, self.sums, self.lines, self.banks, self.fills, self.peers,
            self.sent, self.received, self.l2, self.hbm,
        ]  # fmt: skip
