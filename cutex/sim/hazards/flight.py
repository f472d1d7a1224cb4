"""Operations in flight: TMA copies, tensor-core operations, bulk stores.

An asynchronous operation takes effect when the scheduler completes it, at any moment between its
issue and the time when something waits for it. While it is in flight, whoever touches what it reads
or writes races with it. Operations of one queue complete in order (tcgen05 of a CTA, wgmma of a
warpgroup); queues are unordered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.ptx.parse import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine


WORD = 4  # bytes, the unit of shadow memory


@dataclass
class Span:
    """Bytes ``[low, high)`` of a CTA's shared memory; ``chunks`` the exact 16-byte pieces where
    they have gaps, ``words`` the exact 4-byte ones where those are not whole.
    """

    cta: int
    low: int
    high: int
    chunks: np.ndarray | None = None
    words: np.ndarray | None = None

    @classmethod
    def of_words(cls, cta: int, words: np.ndarray) -> Span:
        low, high = int(words.min()) * WORD, int(words.max()) * WORD + WORD
        return cls(cta, low, high, np.unique(words // (16 // WORD)), words.reshape(-1))

    def meets(self, other: Span) -> bool:
        if self.cta != other.cta or self.low >= other.high or other.low >= self.high:
            return False
        if self.words is not None and other.words is not None:
            return bool(np.isin(self.words, other.words).any())
        if self.chunks is None and other.chunks is None:
            return True
        return bool(np.isin(self._pieces(), other._pieces()).any())

    def _pieces(self) -> np.ndarray:
        return (
            np.arange(self.low >> 4, (self.high + 15) >> 4)
            if self.chunks is None
            else self.chunks.reshape(-1)
        )


@dataclass
class Rectangle:
    """Columns ``[low, high)`` of all lanes ``[lane, lane_end)`` of a CTA's tensor memory."""

    cta: int
    lane: int
    lane_end: int
    low: int
    high: int

    def meets(self, other: Rectangle) -> bool:
        return (
            self.cta == other.cta
            and self.low < other.high
            and other.low < self.high
            and self.lane < other.lane_end
            and other.lane < self.lane_end
        )


Place = Span | Rectangle


def _meet(a: Place, b: Place) -> bool:
    if isinstance(a, Span):
        return isinstance(b, Span) and a.meets(b)
    return isinstance(b, Rectangle) and a.meets(b)


@dataclass
class Operation:
    """One asynchronous operation; ``signals`` is the (cta, offset) of the mbarrier that it
    completes on, if any.
    """

    what: str
    warp: int
    instruction: Instruction
    queue: Hashable
    complete: Callable[[], None]
    reads: list[Place] = field(default_factory=list)
    writes: list[Place] = field(default_factory=list)
    signals: tuple[int, int] | None = None
    is_store: bool = False  # from shared to global memory, which bulk groups wait for
    number: int = 0
    done: bool = False
    then: list[Callable[[], None]] = field(default_factory=list)  # what its completion sets off


class Flight:
    """All operations in flight, by queue, in order of issue."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.clear()

    def clear(self) -> None:
        self.queues: dict[Hashable, deque[Operation]] = {}
        self.count = 0
        self.issued = 0
        # what a thread (warp, lane, cta_group) issued to the tensor cores since its last commit;
        # where that is nothing, the last before it
        self.latest: dict[tuple[int, int, int], list[Operation]] = {}
        self.at: dict[
            tuple[type, int], dict[int, Operation]
        ] = {}  # those that touch a CTA's shared or tensor memory

    def __iter__(self) -> Iterator[Operation]:
        for queue in self.queues.values():
            yield from queue

    def issue(self, op: Operation) -> None:
        """Puts ``op`` in flight; compares it with everything that it is not ordered with."""
        self.machine.progress += 1
        self.issued += 1
        op.number = self.issued
        self._take_place(op, op.reads, op.writes)
        self.queues.setdefault(op.queue, deque()).append(op)
        self.count += 1

    def extend(self, op: Operation, span: Span) -> None:
        """``op``, still in flight, writes ``span`` too."""
        self.machine.progress += 1
        self._take_place(op, [], [span])
        op.writes.append(span)

    def _take_place(self, op: Operation, reads: list[Place], writes: list[Place]) -> None:
        places = {(type(p), p.cta) for p in (*reads, *writes)}
        m = self.machine
        for write, mine in ((False, reads), (True, writes)):
            for p in mine:
                if isinstance(p, Span):
                    m.clocks.asynchronous(op.warp, p, write, op.what, op.instruction)
                else:
                    m.tmem.shadow.issue(op.warp, p, write, op.what, op.instruction)
        for place in places:
            for other in self.at.get(place, {}).values():
                if other.queue != op.queue:
                    self._compare(op, reads, writes, other)
        for place in places:
            self.at.setdefault(place, {})[op.number] = op

    def busy(self, kind: type, cta: int) -> bool:
        """Whether anything in flight is on the CTA's shared (Span) or tensor (Rectangle) memory."""
        return bool(self.at.get((kind, cta)))

    def _compare(
        self, op: Operation, reads: list[Place], writes: list[Place], other: Operation
    ) -> None:
        for kind, mine, theirs in (
            ("write", reads, other.writes),
            ("read", writes, other.reads),
            ("write", writes, other.writes),
        ):
            for a in mine:
                for b in theirs:
                    if _meet(a, b):
                        verb = "reads" if mine is reads else "overwrites"
                        self._race(op.what, verb, op.warp, op.instruction, a, other, kind)
                        return

    def touch(
        self, place: Place, write: bool, what: str, warp: int, instruction: Instruction
    ) -> None:
        """A synchronous access by a warp: races with what is in flight on the same place."""
        for other in list(self.at.get((type(place), place.cta), {}).values()):
            for kind, theirs in (
                ("write", other.writes),
                *([("read", other.reads)] if write else []),
            ):
                if any(_meet(place, b) for b in theirs):
                    self._race(
                        what,
                        "overwrites" if write else "reads",
                        warp,
                        instruction,
                        place,
                        other,
                        kind,
                    )
                    return

    def _race(
        self,
        what: str,
        verb: str,
        warp: int,
        ins: Instruction,
        place: Place,
        other: Operation,
        kind: str,
    ) -> None:
        m = self.machine
        if isinstance(place, Span):
            where = f"shared memory 0x{place.low:x}..0x{place.high:x}"
        else:
            where = f"tensor memory columns {place.low}..{place.high - 1}"
        doing = "being written by" if kind == "write" else "being read by"
        message = (
            f"{what} of {m.name_warp(warp)} {verb} {where} while it is still {doing} {other.what} "
            f"issued by {m.name_warp(other.warp)} at {other.instruction.where()}"
        )
        if other.signals is not None:
            message += f"; {self._last_wait(warp, other.signals)}"
        m.find("race", message, ins)

    def _last_wait(self, warp: int, barrier: tuple[int, int]) -> str:
        """What the racing warp knows of the barrier on which the operation completes."""
        m = self.machine
        name = m.mbarriers.name(*barrier)
        seen = m.last_wait[warp].get(barrier)
        if seen is None:
            return f"it completes on {name}, on which this warp never waited"
        parity, phases, ins = seen
        return (
            f"it completes on {name}, on which this warp last waited with parity {parity} at "
            f"{ins.where()}: that passed after {phases} completed "
            f"phase{'s' if phases != 1 else ''}, {m.mbarriers.phases(*barrier)} are complete now"
        )

    def heads(self) -> list[Operation]:
        """The operations that may complete next, oldest first."""
        return sorted((q[0] for q in self.queues.values()), key=lambda op: op.number)

    def complete(self, op: Operation) -> None:
        queue = self.queues[op.queue]
        assert queue[0] is op
        queue.popleft()
        if not queue:
            del self.queues[op.queue]
        self.count -= 1
        op.done = True
        for place in (*op.reads, *op.writes):
            self.at[type(place), place.cta].pop(op.number, None)
        self.machine.progress += 1
        op.complete()
        for consequence in op.then:
            consequence()

    def complete_all(self) -> None:
        """Everything in flight, in order of issue."""
        for op in sorted(self, key=lambda op: op.number):
            self.complete(op)

    def complete_late(self) -> None:
        """The oldest operation of each cluster, and no more: whoever waits for one but needs
        another meets that one in flight. Bulk stores only when nothing else is.
        """
        heads = self.heads()
        oldest: dict[int, Operation] = {}
        for op in [op for op in heads if not op.is_store] or heads:
            oldest.setdefault(self.machine.clusters.of(op.warp), op)
        for op in oldest.values():
            self.complete(op)
