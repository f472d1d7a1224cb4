"""Streams of a script: which of its work on the GPU comes after which.

Work of one stream comes in order. Of two streams, an event that one records and the other waits
for, `wait_stream`, or the host, which has waited for one before it calls on the other, order it
(CUDA C++ Programming Guide, Streams); torch's streams do not wait for the default one. The
simulator runs a launch when it is made, so that values are right in any case; on a GPU the two
overlap. Each stream, event and the host has a vector clock: of each stream, the number of launches
and of torch's functions that it comes after.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cutex.sim.finding import Finding
from cutex.sim.hazards.global_marks import Touched

DEFAULT = 0  # the handle of the default stream
MOST, MOST_BYTES = 16, 1 << 24  # pieces of work, and bytes of them, that are kept of each tensor

Clock = dict[int, int]  # by stream: how many of its pieces of work
_FIX = "an event that the other stream records and this one waits for, as wait_stream()"


class Work(NamedTuple):
    """A launch or a function of torch, and the bytes of a tensor that it has touched, as packed
    bits; None for all of them."""

    stream: int
    number: int
    what: str
    written: np.ndarray | None
    read: np.ndarray | None
    writes: bool
    reads: bool
    kernel: bool

    @property
    def size(self) -> int:
        """The bytes of its bits, or 1."""
        return 1 + sum(bits.nbytes for bits in (self.written, self.read) if bits is not None)

    def meets(self, other: Work) -> bool:
        """Whether both touch a byte that one of them writes."""
        pairs = [(self.writes and other.writes, self.written, other.written)]
        pairs += [(self.writes and other.reads, self.written, other.read)]
        pairs += [(self.reads and other.writes, self.read, other.written)]
        return any(both and _overlap(a, b) for both, a, b in pairs)


def _overlap(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    if a is None or b is None:
        return any(x is None or bool(x.any()) for x in (a, b))
    return bool((a & b).any())


@dataclass
class _Tensor:
    """The work on a tensor that is still held."""

    owner: Any  # the weak reference to its storage
    work: list[Work]


class Streams:
    """The streams of a script that runs in the simulator."""

    def __init__(self) -> None:
        self.begin(lambda _: None)

    def begin(self, tell: Callable[[Finding], None]) -> None:
        """Begin with another script, of which ``tell`` takes the findings."""
        self.tell = tell
        self.clocks: dict[int, Clock] = {DEFAULT: {}}
        self.host: Clock = {}
        self.tensors: dict[int, _Tensor] = {}  # by address
        self._current = threading.local()
        self._replays = 0  # graphs that are replayed now

    # -- what the script calls ---------------------------------------------------------------------

    @property
    def several(self) -> bool:
        return len(self.clocks) > 1

    @property
    def current(self) -> int:
        return getattr(self._current, "handle", DEFAULT)

    @current.setter
    def current(self, handle: int) -> None:
        self._current.handle = handle

    def make(self) -> int:
        """A new stream's handle."""
        return self.known((len(self.clocks) + 1) << 12)

    def known(self, handle: int) -> int:
        """A handle, perhaps of a stream that the script has not made by torch."""
        self.clocks.setdefault(handle, {})
        return handle

    def recorded(self, handle: int) -> Clock:
        """What an event comes after that a stream records now."""
        return _join(dict(self.clocks[handle]), self.host)

    def wait(self, handle: int, clock: Clock) -> None:
        """Let a stream wait for an event."""
        _join(self.clocks[handle], clock)

    def host_waits(self, clock: Clock) -> None:
        _join(self.host, clock)

    def all_wait(self, *_: Any, **__: Any) -> None:
        """Let the host wait for all streams, and what it calls next with it."""
        for clock in self.clocks.values():
            _join(self.host, clock)

    @contextmanager
    def replay(self) -> Iterator[None]:
        """A context in which a graph is replayed: its work is the current stream's."""
        self._replays += 1
        try:
            yield
        finally:
            self._replays -= 1

    # -- work --------------------------------------------------------------------------------------

    def launched(
        self, handle: int | None, what: str, touched: Touched, owners: dict[int, Any]
    ) -> None:
        """A kernel has touched these bytes; ``owners``: of each tensor's address, its storage."""
        handle = self.current if handle is None or self._replays else self.known(handle)
        count = self._count(handle)
        for base in touched.written.keys() | touched.read.keys() | touched.loaded:
            if base in owners:
                written, read = touched.written.get(base), touched.read.get(base)
                whole = base in touched.loaded
                reads = whole or (read is not None and bool(read.any()))
                writes = written is not None and bool(written.any())
                work = Work(
                    handle, count, what, written, None if whole else read, writes, reads, True
                )
                self._add(base, owners[base], work)

    def computed(
        self, what: str, read: Iterable[tuple[int, Any]], written: Iterable[tuple[int, Any]]
    ) -> None:
        """A function of torch has read and written tensors, given by address and storage."""
        count = self._count(self.current)
        for tensors, writes in ((read, False), (written, True)):
            for base, owner in tensors:
                work = Work(self.current, count, what, None, None, writes, not writes, False)
                self._add(base, owner, work)

    def _count(self, handle: int) -> int:
        """Take up a piece of work into a stream; its number."""
        clock = _join(self.clocks[handle], self.host)
        clock[handle] = clock.get(handle, 0) + 1
        return clock[handle]

    def _add(self, base: int, owner: Any, work: Work) -> None:
        tensor = self.tensors.get(base)
        if tensor is None or tensor.owner != owner:
            tensor = self.tensors[base] = _Tensor(owner, [])
        clock = self.clocks[work.stream]
        for before in tensor.work:
            if clock.get(before.stream, 0) < before.number and work.meets(before):
                self._race(work, before)
                break
        kept = max(1, min(MOST, MOST_BYTES // work.size))
        tensor.work = [*tensor.work, work][-kept:]

    def _race(self, work: Work, before: Work) -> None:
        verb = "writes" if work.writes else "reads"
        did = "writes" if before.writes else "reads"
        self.tell(
            Finding(
                "race",
                f"{work.what} on {_name(work.stream)} {verb} what {before.what} on "
                f"{_name(before.stream)}, called before it, {did}: nothing orders the two streams",
                work.what,
                advisory=not (work.kernel and before.kernel),
                remedy=_FIX,
            )
        )


def _name(handle: int) -> str:
    return "the default stream" if handle == DEFAULT else f"stream 0x{handle:x}"


def _join(into: Clock, other: Clock) -> Clock:
    for stream, count in other.items():
        if into.get(stream, 0) < count:
            into[stream] = count
    return into


STREAMS = Streams()
