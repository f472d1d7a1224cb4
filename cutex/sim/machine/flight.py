"""Operations in flight: TMA copies, tensor-core operations, bulk stores.

An asynchronous operation takes effect when the scheduler completes it, at any moment between its
issue and the time when something waits for it. Operations of one queue complete in order (tcgen05
of a CTA, wgmma of a warpgroup); queues are unordered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

from cutex.sim.machine.operation import Operation

if TYPE_CHECKING:
    from cutex.sim.machine.core import Core

_number = attrgetter("number")


class Flight:
    """All operations in flight, by queue, in order of issue."""

    def __init__(self, machine: Core) -> None:
        self.machine = machine
        self.clear()

    def clear(self) -> None:
        self.queues: dict[Hashable, deque[Operation]] = {}
        # the same by first CTA of the cluster, bulk stores separately; completed ones leave late
        self.lines: dict[bool, dict[int, deque[Operation]]] = {False: {}, True: {}}
        self.count = 0
        self.issued = 0
        # the operations that a thread (warp, lane, cta_group) issued to the tensor cores since its
        # last commit; if there are none, the last one before it
        self.latest: dict[tuple[int, int, int], list[Operation]] = {}
        self.committed: dict[tuple[int, int, int], int] = {}  # the number of that last one

    def __iter__(self) -> Iterator[Operation]:
        for queue in self.queues.values():
            yield from queue

    def issue(self, *ops: Operation) -> None:
        """Put operations in flight. Several are of one instruction, in different clusters, with the
        same places in all.
        """
        for op in ops:
            self._add(op)
        self.machine.events.issued(ops)

    def _add(self, op: Operation) -> None:
        self.machine.progress += 1
        self.issued += 1
        op.number = self.issued
        if op.queue is None:
            op.queue = self.issued
        self.queues.setdefault(op.queue, deque()).append(op)
        cluster = self.machine.grid.first_cta[op.warp]
        line = self.lines[op.is_store].setdefault(cluster, deque())
        while line and line[0].done:
            line.popleft()
        line.append(op)
        self.count += 1

    def heads(self) -> list[Operation]:
        """The operations that may complete next, oldest first."""
        return sorted((q[0] for q in self.queues.values()), key=_number)

    def oldest(self, stores: bool) -> list[Operation]:
        """For each cluster, the oldest bulk store, or the oldest other operation."""
        found = []
        for line in self.lines[stores].values():
            while line and line[0].done:
                line.popleft()
            if line:
                found.append(line[0])
        return sorted(found, key=_number)

    def uncommitted(self) -> list[Operation]:
        """The first operation of each thread on the tensor cores of which no commit tells."""
        left = (
            [op for op in ops if op.number > self.committed.get(thread, 0)]
            for thread, ops in self.latest.items()
        )
        return [ops[0] for ops in left if ops]

    def complete(self, op: Operation) -> None:
        queue = self.queues[op.queue]
        assert queue[0] is op
        queue.popleft()
        if not queue:
            del self.queues[op.queue]
        self.count -= 1
        op.done = True
        self.machine.events.completing(op)
        self.machine.progress += 1
        op.complete()
        for consequence in op.then:
            consequence()

    def complete_all(self) -> None:
        """Complete everything in flight, in order of issue."""
        for op in sorted(self, key=_number):
            self.complete(op)
