"""The non-bulk copies in flight of the resident warps (PTX ISA 9.7.9.25.3).

All copies of a warp's lanes for one group are one operation, which grows until they commit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cutex.sim.machine.batch import Lanes
from cutex.sim.machine.events import LateArrival, SharedBytes
from cutex.sim.machine.operation import Engine, Kind, Operation
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.core import Core
    from cutex.sim.machine.flight import Flight


class Part(NamedTuple):
    """The copies of one instruction of a warp, one per lane."""

    to: Lanes  # addresses: offsets in the CTA's shared memory
    complete: Callable[[], None]


@dataclass(eq=False)
class PendingCopy:
    """The copies of a warp for one group that are not known to be complete; ``group`` (32,) is each
    lane's group number.
    """

    op: Operation
    group: np.ndarray  # -1 where the lane takes no part
    parts: list[Part] = field(default_factory=list)


class AsyncCopies:
    """Asynchronous copies of all resident warps."""

    def __init__(self, machine: Core, flight: Flight) -> None:
        self.m, self.flight = machine, flight
        self.clear()

    def clear(self) -> None:
        self.pending: dict[int, list[PendingCopy]] = {}  # in flight
        self.unwaited: dict[int, list[PendingCopy]] = {}  # complete or not
        self.committed: dict[int, np.ndarray] = {}  # (32,) groups that each lane has committed

    def groups(self, warp: int) -> np.ndarray:
        return self.committed.setdefault(warp, np.zeros(32, int))

    def issue(self, warp: int, part: Part, at: SharedBytes, ins: Instruction) -> None:
        """Add a copy to these bytes of shared memory to the operation of the same lanes and group,
        if that is still in flight and no one waits for its end; else start a new one.
        """
        size = at.width * len(at.offset)
        group = np.full(32, -1)
        group[part.to.lanes] = self.groups(warp)[part.to.lanes]
        pending = self.pending.setdefault(warp, [])
        last = pending[-1] if pending else None
        if last is not None and not last.op.then and (last.group == group).all():
            last.parts.append(part)
            last.op.bytes += size
            self.m.progress += 1
            self.m.events.copying(at, last.op, ins)
            return
        op = Operation(
            "the cp.async",
            warp,
            ins,
            ("cp.async", self.flight.issued),
            lambda: self._complete(copy),
            Engine.CP_ASYNC,
            size,
        )
        copy = PendingCopy(op, group, [part])
        pending.append(copy)
        self.unwaited.setdefault(warp, []).append(copy)
        self.flight.issue(op)
        self.m.events.copying(at, op, ins)

    def _complete(self, copy: PendingCopy) -> None:
        warp = copy.op.warp
        for part in copy.parts:
            part.complete()
        self.pending[warp].remove(copy)
        self.m.wake(("cp.async", warp))

    def overdue(self, warp: int, lanes: np.ndarray, allowed: int) -> bool:
        """Whether a group of one of the ``lanes``, older than its ``allowed`` last ones, is
        pending; if none is, the warp is ordered after all of these.
        """
        limit = self.groups(warp) - allowed
        copies = self.unwaited.get(warp, [])
        older = [c for c in copies if (lanes & (c.group >= 0) & (c.group < limit)).any()]
        if not all(c.op.done for c in older):
            return True
        if older:
            self.m.events.waited([warp], Kind.COPY, [older[-1].op.number])
            self.unwaited[warp] = [c for c in copies if c not in older]
        ops = [(c.op, c.group) for c in older]
        self.m.events.copies_waited(warp, lanes, limit, ops)
        return False

    def left_out(self, warp: int, lanes: np.ndarray, allowed: int) -> tuple[Operation, int] | None:
        """A copy that a wait of ``lanes`` is for, but not for what one of these copies: that lane,
        which has put it into no group yet.
        """
        groups = self.groups(warp)
        for copy in self.unwaited.get(warp, ()):
            mine = lanes & (copy.group >= 0)
            out = mine & (copy.group == groups)
            if out.any() and (mine & (copy.group < groups - allowed)).any():
                return copy.op, int(out.argmax())
        return None

    def after(
        self,
        warp: int,
        lanes: np.ndarray,
        then: Callable[[LateArrival], None],
        ins: Instruction,
    ) -> None:
        """Call ``then`` once all copies issued by the ``lanes`` are complete."""
        issued = [c for c in self.unwaited.get(warp, ()) if (lanes & (c.group >= 0)).any()]
        number = issued[-1].op.number if issued else 0
        arrival = LateArrival(warp, Kind.COPY, number, ins)
        self.m.events.arrives_late(arrival)
        waited = [c for c in issued if not c.op.done]
        left = len(waited)

        def one_is() -> None:
            nonlocal left
            left -= 1
            if not left:
                then(arrival)

        for copy in waited:
            copy.op.then.append(one_is)
        if not waited:
            then(arrival)
