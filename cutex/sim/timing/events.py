"""The events of a warp that the clock replays: ordinary instructions, added up, and one event for
each instruction that is asynchronous, signals or waits; and `Record`, the events of a few clusters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

BarrierId = tuple[int, int]  # an mbarrier: CTA, offset


class Work(NamedTuple):
    """Ordinary instructions: the cycles that one warp alone takes, issue slots, and cycles of each
    pipe of a sub-core and of the smem port.
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
    fp64: float = 0.0
    mma: float = 0.0  # mma.sync

    @property
    def pipes(self) -> tuple[float, ...]:
        """The cycles of each pipe of a sub-core, in the order of `machine_code.PIPES`."""
        return (*self[2:7], self.fp64, self.mma)

    def part(self, share: float) -> Work:
        return Work(*(x * share for x in self))


class Wait(NamedTuple):
    """A wait until ``phases`` phases of an mbarrier are complete, counted from its
    initialization."""

    barrier: BarrierId
    phases: int
    line: int


class Arrive(NamedTuple):
    barrier: BarrierId
    arrivals: int
    expect: int  # transaction bytes that the arrival adds, by expect_tx
    remote: bool


class Load(NamedTuple):
    """A copy into shared memory by TMA."""

    signals: tuple[BarrierId, ...]
    size: int  # bytes, for each of the signals
    source: tuple[Any, ...]  # the tensor map's address, and the box's coordinates
    rows: int  # rows of the box, each a request of its own
    ctas: tuple[int, ...] = ()  # the CTAs that it writes to, one for each of the signals
    outside: int = 0  # bytes of the box's rows that are outside its tensor


class Store(NamedTuple):
    """A copy out of shared memory by TMA; ``adds``: to what global memory holds, which is done in
    L2."""

    size: int
    adds: bool = False


class Mma(NamedTuple):
    """One wgmma, an event of each of the four warps of its warpgroup; or one tcgen05.mma."""

    m: int
    n: int
    flops: int
    smem: int  # bytes that an SM's port moves for it
    ctas: tuple[int, ...]
    rate: float  # FLOPs a cycle, relative to 16-bit operands


class Commit(NamedTuple):
    """The end of a group of "wgmma", "bulk" or "cp.async" operations; or tcgen05.commit, with its
    barriers.
    """

    what: str
    barriers: tuple[BarrierId, ...] = ()


class Group(NamedTuple):
    """A wait until at most ``pending`` groups of "wgmma", "bulk" or "cp.async" operations are in
    flight; with ``read``, until the others' sources have been read.
    """

    what: str
    pending: int
    read: bool = False


class Named(NamedTuple):
    """An arrival at a named barrier, which ``threads`` threads complete; 0: all threads of the
    CTA."""

    number: int
    threads: int
    waits: bool


class Cluster(NamedTuple):
    waits: bool


class Touch(NamedTuple):
    """An access to global memory by ordinary instructions; ``waits``: the warp waits for the
    data; ``adds``: to what memory holds, as `Store` does."""

    sectors: int
    lines: int
    waits: bool
    adds: bool = False
    partial: int = 0  # sectors that it writes in part, or changes
    queued: int = 0  # of what it adds, for each sector the most lanes of one word, if several
    packets: int = 0  # lines that it sends to L2, of which no sector is written by half
    again: int = 0  # of the sectors, those that its CTA has sent before, which L2 still holds
    sums: float = 0.0  # of a slice of L2, the time of what it changes, in that of a sector


class Fetch(NamedTuple):
    """A load from global memory by ordinary instructions, or by cp.async that is not bulk: the
    sectors and lines that L1 does not hold, and lines of which it holds all."""

    sectors: int
    lines: int
    tensor: int  # its address
    registers: bool  # or, by cp.async, shared memory
    held: int = 0
    new: float = -1.0  # share of the sectors that its CTA has not fetched before; -1: not recorded
    cached: bool = False  # whether L1 keeps them
    alone: int = 0  # of the sectors, those whose 64 bytes its CTA has no use for but in them
    asked: int = 0  # bytes of all lanes
    banks: float = 0.0  # cycles of L1's banks; 0: not recorded
    apart: float = 0.0  # sectors that cp.async spreads over several 32 bytes of smem

    def held_alone(self, line: float) -> float:
        """The cycles of lines that L1 holds, each of which takes so many, where those of its banks
        were not recorded."""
        if self.banks or not self.held or not self.asked:
            return 0.0 if self.banks else self.held * line
        return max(self.held * line, self.held / (self.held + self.lines) * self.asked / 128)


class Peer(NamedTuple):
    """A load from the shared memory of a CTA of the cluster."""

    size: int  # bytes


class Send(NamedTuple):
    """A copy from registers or own shared memory into that of a CTA of the cluster, by st.async,
    red.async or a bulk copy, which counts on a barrier there."""

    signal: BarrierId
    size: int  # bytes


class Need(NamedTuple):
    """A wait for the data of the warp's first ``loads`` loads into registers."""

    loads: int


class Landed(NamedTuple):
    """Arrivals on an mbarrier when all earlier cp.async of the warp are complete."""

    barrier: BarrierId
    arrivals: int


class Columns(NamedTuple):
    """tcgen05.ld or st: columns of tensor memory, of 32 lanes."""

    columns: int


class Settled(NamedTuple):
    """A wait for this warp's tcgen05.ld and st: tcgen05.wait."""


class Copy(NamedTuple):
    """tcgen05.cp: the columns of tensor memory that it fills, in each of ``ctas``."""

    columns: int
    ctas: tuple[int, ...]


class Reply(NamedTuple):
    """A cluster launch control request, with the barriers on which its response arrives."""

    barriers: tuple[BarrierId, ...]


Event = Any  # one of the above


class Fetched(NamedTuple):
    """The bytes that a cluster fetches of one tensor: in all, and of different addresses; and its
    size. again: of bytes that a CTA fetches once more, how many of the tensor it has fetched since,
    and how many they are. span: its first byte, and behind its last, of the tensor's.
    """

    loaded: float
    different: float
    size: float
    again: tuple[tuple[float, float], ...] = ()
    span: tuple[float, float] = (0.0, inf)


class Added(NamedTuple):
    """The lines of global memory that a cluster adds to: how many, the first, and behind the last,
    of it or of all clusters that are known; ``span``: from its own first to behind its last."""

    lines: float = 0.0
    first: int = 0
    end: int = 0
    span: float = 0.0


@dataclass
class Record:
    """The programs of the warps of a few clusters."""

    programs: dict[int, list[Event]]  # by warp
    barriers: dict[BarrierId, int]  # arrivals of a phase
    cta: dict[int, int]  # the CTA of each warp
    place: dict[int, int]  # the number of each warp in its CTA
    cluster_size: int
    ctas: int
    warps_per_cta: int
    complete: bool  # whether the CTAs ran to their end
    flops: float = 0.0  # FLOPs of all MMAs
    steps: int = 0
    roles: dict[int, str] = field(default_factory=dict)  # the role of each warp
    fetched: dict[int, Fetched] = field(default_factory=dict)  # by the tensor's address
    added: Added = field(default_factory=Added)
    # how often all warps ran a function of the source, by its name; see `record.entries`
    entered: dict[str, int] = field(default_factory=dict)


def settles(program: list[Event]) -> set[int]:
    """The positions after a tcgen05.ld or st which a tcgen05.wait, or another ld or st, follows,
    ordinary instructions aside.
    """
    found: set[int] = set()
    waits = False
    for at in range(len(program), 0, -1):
        kind = type(program[at - 1])
        if kind is Columns:
            if waits:
                found.add(at)
            waits = True
        elif kind is not Work:
            waits = kind is Settled
    return found
