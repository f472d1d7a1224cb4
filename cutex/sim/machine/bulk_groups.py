"""Bulk async-groups (PTX ISA 9.7.9.25.4): the bulk stores of each thread that are in flight."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cutex.sim.machine.events import Storing
from cutex.sim.machine.operation import Kind, Operation

if TYPE_CHECKING:
    from cutex.sim.machine.core import Core
    from cutex.sim.machine.flight import Flight

Thread = tuple[int, int]  # warp, lane


class BulkGroup:
    """Bulk copies of one thread that were (or will be) committed together."""

    def __init__(self, machine: Core, thread: Thread) -> None:
        self.m, self.thread, self.in_flight = machine, thread, 0
        self.first = self.last = 0  # numbers of its first and last operation

    @property
    def storing(self) -> Storing:
        """The operation that has joined it last."""
        return Storing(self.thread[0], self.last)

    def finished(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self.m.wake(("bulk", *self.thread))


class BulkGroups:
    """Per thread: the open group, and the committed ones."""

    def __init__(self, machine: Core, flight: Flight) -> None:
        self.m, self.flight = machine, flight
        self.clear()

    def clear(self) -> None:
        self.open: dict[Thread, BulkGroup] = {}
        self.committed: dict[Thread, list[BulkGroup]] = {}
        # the last operation of each group whose writes are not known to be complete
        self.unwritten: dict[Thread, list[int]] = {}

    def joined(self, thread: Thread) -> BulkGroup:
        """The open group, with one more operation in flight: the one that is issued next."""
        group = self.open.get(thread)
        if group is None:
            group = self.open[thread] = BulkGroup(self.m, thread)
            group.first = self.flight.issued + 1
        group.in_flight += 1
        group.last = self.flight.issued + 1
        return group

    def uncommitted(self, op: Operation) -> bool:
        """Whether no commit has put an operation of a bulk store in a group."""
        return op.is_store and any(
            thread[0] == op.warp and group.first <= op.number <= group.last
            for thread, group in self.open.items()
        )

    def commit(self, thread: Thread) -> None:
        group = self.open.pop(thread, None)
        if group is None:
            if self.idle(thread):
                return
            group = BulkGroup(self.m, thread)
        self.committed.setdefault(thread, []).append(group)
        self.unwritten.setdefault(thread, []).append(group.last)

    def idle(self, thread: Thread) -> bool:
        """Whether the thread has committed nothing that it has yet to wait for, so that an empty
        group or a wait changes nothing.
        """
        return not self.committed.get(thread) and not self.unwritten.get(thread)

    def busy(self) -> set[Thread]:
        """The threads that are not idle."""
        both = *self.committed.items(), *self.unwritten.items()
        return {thread for thread, groups in both if groups}

    def overdue(self, warp: int, lanes: Iterable[int], allowed: int, written: bool) -> int | None:
        """The first of a warp's ``lanes`` of which a group older than the ``allowed`` most recent
        ones is still in flight. Before it, and if there is none, the warp is ordered after their
        reads of shared memory and, if ``written``, after their writes to global memory.
        """
        read = wrote = 0  # the last operation
        late = None
        for lane in lanes:
            thread = warp, lane
            groups = self.committed.get(thread, [])
            older = groups[:-allowed] if allowed else groups[:]
            last = 0
            for group in older:
                if group.in_flight:
                    late = lane
                    break
                last = max(last, group.last)
            if late is not None:
                break
            if written and (unwritten := self.unwritten.get(thread)):
                known = unwritten[:-allowed] if allowed else unwritten[:]
                wrote = max(wrote, *known) if known else wrote
                del unwritten[: len(known)]
            read = max(read, last)
            del groups[: len(older)]
        if wrote:
            self.m.events.waited_writes(warp, wrote)
        if read:
            self.m.events.waited([warp], Kind.BULK, [read])
        return late
