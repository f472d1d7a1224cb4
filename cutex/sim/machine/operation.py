"""Asynchronous operations: their engines, and the places that they read and write."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from functools import cached_property

import numpy as np

from cutex.sim.ptx.program import Instruction

WORD = 4  # bytes, the unit of shadow memory
CHUNK = 16  # bytes, the unit of swizzles


@dataclass
class Span:
    """Bytes ``[low, high)`` of a CTA's shared memory; where they have gaps, ``chunks`` has the
    numbers of their 16-byte units, and ``form`` is a hashable key for ``chunks``. ``part``: for an
    operation issued by several warps together, the number of the warp that reads this part; None
    for all.
    """

    cta: int
    low: int
    high: int
    chunks: np.ndarray | None = None
    form: Hashable = None
    part: int | None = None

    @property
    def size(self) -> int:
        return self.high - self.low if self.chunks is None else self.chunks.size * CHUNK

    @property
    def key(self) -> Hashable:
        """A key that is the same for the same place of any CTA."""
        return (self.low, self.high) if self.chunks is None else self.form

    def anywhere(self) -> Span:
        return replace(self, cta=0)

    def meets(self, other: Footprint) -> bool:
        if not isinstance(other, Span) or self.cta != other.cta:
            return False
        if self.low >= other.high or other.low >= self.high:
            return False
        if self.chunks is None and other.chunks is None:
            return True
        return not self._chunks.isdisjoint(other._chunks)

    def covers(self, other: Footprint) -> bool:
        if not isinstance(other, Span) or self.low > other.low:
            return False
        if self.high < other.high:
            return False
        return self.chunks is None or other._chunks <= self._chunks

    def holds(self, offset: np.ndarray, width: int) -> np.ndarray:
        """Whether the ``width`` bytes at each offset overlap it, (n,)."""
        if self.chunks is None:
            return (offset < self.high) & (offset + width > self.low)
        return np.isin(offset // CHUNK, self._numbers)

    @cached_property
    def _numbers(self) -> np.ndarray:
        if self.chunks is not None:
            return self.chunks.reshape(-1)
        return np.arange(self.low // CHUNK, -(-self.high // CHUNK))

    @cached_property
    def _chunks(self) -> frozenset[int]:
        return frozenset(self._numbers.tolist())

    def __str__(self) -> str:
        return f"shared memory 0x{self.low:x}..0x{self.high:x}"


@dataclass
class Rectangle:
    """Columns ``[low, high)`` of all lanes ``[lane, lane_end)`` of a CTA's tensor memory."""

    cta: int
    lane: int
    lane_end: int
    low: int
    high: int
    part: int | None = None

    @property
    def key(self) -> Hashable:
        return self.lane, self.lane_end, self.low, self.high

    def anywhere(self) -> Rectangle:
        return replace(self, cta=0)

    def meets(self, other: Footprint) -> bool:
        return (
            isinstance(other, Rectangle)
            and self.cta == other.cta
            and self.low < other.high
            and other.low < self.high
            and self.lane < other.lane_end
            and other.lane < self.lane_end
        )

    def covers(self, other: Footprint) -> bool:
        return (
            isinstance(other, Rectangle)
            and self.low <= other.low
            and other.high <= self.high
            and self.lane <= other.lane
            and other.lane_end <= self.lane_end
        )

    def __str__(self) -> str:
        return f"tensor memory columns {self.low}..{self.high - 1}"


Footprint = Span | Rectangle


class Engine(StrEnum):
    """The unit that executes an operation."""

    TMA_LOAD = "TMA load"
    TMA_STORE = "TMA store"
    DSMEM = "distributed shared memory"  # bulk copies, st.async and red.async between CTAs
    CP_ASYNC = "cp.async"
    WGMMA = "wgmma"
    TCGEN05_MMA = "tcgen05.mma"
    TCGEN05_CP = "tcgen05.cp"
    LAUNCH_CONTROL = "cluster launch control"


Barrier = tuple[int, int]  # cta, offset


class Kind(IntEnum):
    """Who does the work of a warp: the warp, or a unit that executes its operations."""

    ITSELF = 0
    TENSOR = 1  # wgmma, tcgen05
    BULK = 2  # bulk stores
    COPY = 3  # non-bulk cp.async
    LOAD = 4  # tcgen05.ld
    STORE = 5  # tcgen05.st


Agent = tuple[int, int]  # the warp of a unit, and the operation's number among those of the unit


@dataclass
class Operation:
    """One asynchronous operation.

    ``queue``: operations of one queue complete in order; None for a queue of its own. ``signals``:
    the mbarriers that it completes on, one in each CTA that it writes, or one for all. ``agents``:
    the agents whose counts mark its completion, if it has no mbarrier: of each warp of a wgmma, or
    of the thread whose commits or bulk groups wait for it.
    """

    what: str
    warp: int
    instruction: Instruction
    queue: Hashable
    complete: Callable[[], None]
    engine: Engine
    bytes: int  # bytes that it moves to or from shared memory, in all CTAs
    flops: int = 0
    reads: list[Footprint] = field(default_factory=list)
    writes: list[Footprint] = field(default_factory=list)
    signals: list[Barrier] = field(default_factory=list)
    agents: list[Agent] = field(default_factory=list)
    issuers: list[int] = field(default_factory=list)  # the warps that issue it together
    number: int = 0
    done: bool = False
    source: Hashable = None  # a key of what a copy reads, if others may copy the same to there
    then: list[Callable[[], None]] = field(default_factory=list)  # called on its completion

    def __post_init__(self) -> None:
        self.issuers = self.issuers or [self.warp]

    @property
    def kind(self) -> Kind:
        """The unit of each of its agents."""
        return Kind.BULK if self.is_store else Kind.TENSOR

    @property
    def generic(self) -> bool:
        """Whether it is of the generic proxy, as ordinary accesses are (CUDA Programming Guide,
        Asynchronous Execution): st.async and red.async, but no bulk copy.
        """
        return self.engine is Engine.DSMEM and self.instruction.name in ("st", "red")

    @property
    def is_store(self) -> bool:
        """Whether it goes from shared to global memory, so that bulk groups wait for it."""
        return self.engine is Engine.TMA_STORE

    def signal_on(self, cta: int) -> Barrier:
        return next((s for s in self.signals if s[0] == cta), self.signals[0])
