"""Bulk async-groups (PTX ISA 9.7.9.25.4): which bulk stores of a thread are still in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutex.sim.hazards.clocks import Kind

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

Thread = tuple[int, int]  # warp, lane


class BulkGroup:
    """Bulk copies of one thread that were (or will be) committed together."""

    def __init__(self, machine: Machine, thread: Thread) -> None:
        self.m, self.thread, self.in_flight = machine, thread, 0
        self.last = 0  # number of its last operation

    def finished(self) -> None:
        self.in_flight -= 1
        self.m.wake(("bulk", *self.thread))


class BulkGroups:
    """Per thread: the group that is still open, and the committed ones."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        self.clear()

    def clear(self) -> None:
        self.open: dict[Thread, BulkGroup] = {}
        self.committed: dict[Thread, list[BulkGroup]] = {}

    def joined(self, thread: Thread) -> BulkGroup:
        """The group of the operation that is issued next."""
        group = self.open.setdefault(thread, BulkGroup(self.m, thread))
        group.in_flight += 1
        group.last = self.m.flight.issued + 1
        return group

    def commit(self, thread: Thread) -> None:
        group = self.open.pop(thread) if thread in self.open else BulkGroup(self.m, thread)
        self.committed.setdefault(thread, []).append(group)

    def overdue(self, thread: Thread, allowed: int) -> bool:
        """Whether a group older than the ``allowed`` most recent ones is still in flight; the
        thread knows of all of these if none is.
        """
        groups = self.committed.setdefault(thread, [])
        older = groups[: max(0, len(groups) - allowed)]
        if any(g.in_flight for g in older):
            return True
        if older:
            clocks, warp = self.m.clocks, thread[0]
            clocks.learn(warp, clocks.agent(Kind.BULK, warp), max(g.last for g in older))
            del groups[: len(older)]
        return False
