"""What warps do, as the clock knows it: ordinary instructions, and each event that is asynchronous,
signals or waits; and the programs of a few clusters that are made of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

Place = tuple[int, int]  # an mbarrier: CTA, offset


class Work(NamedTuple):
    """Ordinary instructions: cycles of a warp alone, issue slots, and cycles of each pipe of a
    sub-core and of the smem port.
    """

    cycles: float
    slots: float
    fma: float
    alu: float
    mufu: float
    lsu: float
    uniform: float
    port: float
    beside: float = 0.0  # cycles that a warp alone takes longer beside a wgmma

    def part(self, share: float) -> Work:
        return Work(*(x * share for x in self))


class Wait(NamedTuple):
    """Until ``phases`` of an mbarrier are complete."""

    barrier: Place
    phases: int
    line: int


class Arrive(NamedTuple):
    barrier: Place
    arrivals: int
    expect: int  # bytes, announced with it
    remote: bool


class Load(NamedTuple):
    """A copy into shared memory by TMA."""

    signals: tuple[Place, ...]
    size: int  # bytes, for each of the signals
    source: tuple[Any, ...]  # which box of which tensor
    rows: int  # of the box, each a request of its own
    ctas: tuple[int, ...] = ()  # into whose memory it goes, one for each of the signals
    outside: bool = False  # a part of the box lies outside its tensor


class Store(NamedTuple):
    """A copy out of shared memory by TMA."""

    size: int


class Mma(NamedTuple):
    """One wgmma of a warpgroup, as each of its warps issues it; or one tcgen05.mma."""

    m: int
    n: int
    flops: int
    smem: int  # bytes that an SM's port moves for it
    ctas: tuple[int, ...]
    rate: float  # FLOPs a cycle, relative to 16-bit operands


class Commit(NamedTuple):
    """Of a group of "wgmma", "bulk" or "cp.async"; of tcgen05 with the barriers that it arrives
    on.
    """

    what: str
    barriers: tuple[Place, ...] = ()


class Group(NamedTuple):
    """Until at most ``pending`` groups of "wgmma", "bulk" or "cp.async" are in flight; of bulk with
    ``read`` until they have been read.
    """

    what: str
    pending: int
    read: bool = False


class Named(NamedTuple):
    """A named barrier: ``threads`` complete it; 0 for all of the CTA."""

    number: int
    threads: int
    waits: bool


class Cluster(NamedTuple):
    waits: bool


class Touch(NamedTuple):
    """Global memory by ordinary instructions: sectors; ``waits`` where the warp waits for them."""

    sectors: int
    lines: int
    waits: bool


class Fetch(NamedTuple):
    """A load from global memory by ordinary instructions, or by cp.async that is not bulk."""

    sectors: int
    lines: int
    tensor: int  # its address
    registers: bool  # or, by cp.async, shared memory


class Need(NamedTuple):
    """Until the warp's first ``loads`` into registers are there."""

    loads: int


class Landed(NamedTuple):
    """Arrivals on an mbarrier when all cp.async of the warp before are complete."""

    barrier: Place
    arrivals: int


class Columns(NamedTuple):
    """Tensor memory by tcgen05.ld or st: columns of 32 lanes."""

    columns: int


class Settled(NamedTuple):
    """tcgen05.wait::ld or ::st."""


class Copy(NamedTuple):
    """tcgen05.cp: columns of tensor memory that it fills, in each of the CTAs."""

    columns: int
    ctas: tuple[int, ...]


class Reply(NamedTuple):
    """A cluster launch request, with the barriers that its answer arrives on."""

    barriers: tuple[Place, ...]


Event = Any  # one of the above


class Fetched(NamedTuple):
    """What a cluster fetches of one tensor: bytes in all, bytes that differ, and its size."""

    loaded: float
    different: float
    size: float


@dataclass
class Record:
    """The programs of the warps of a few clusters."""

    programs: dict[int, list[Event]]  # by warp
    barriers: dict[Place, int]  # arrivals of a phase
    cta: dict[int, int]  # of each warp
    place: dict[int, int]  # of each warp, in its CTA
    cluster_size: int
    ctas: int
    warps_per_cta: int
    complete: bool  # whether the CTAs came to their end
    flops: float = 0.0  # of all MMAs
    steps: int = 0
    roles: dict[int, str] = field(default_factory=dict)  # of each warp
    fetched: dict[int, Fetched] = field(default_factory=dict)  # by the tensor's address
