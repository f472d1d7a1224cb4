"""Older values of a flag that a load might have read as well.

A strong load may return any value that its place has had since what the loading warp knows of it
(PTX ISA 8.10.6, coherence). Which one the simulator returns depends on the order of events, and a
wait for too small a count, or for a value that the round before has set already, then looks like
one that waits long enough. So where a kernel only compares what it has loaded (see flag_tests), the
load is taken to have read the oldest value with the same outcome: the kernel goes on in the same
way, and has acquired no more than that value's release.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from cutex.sim.hazards.clocks import Clocks
from cutex.sim.hazards.cluster_order import KEPT, ClusterOrder
from cutex.sim.machine.batch import Lanes
from cutex.sim.ptx.flag_tests import FlagTest, flag_tests, only_reads
from cutex.sim.ptx.operands import Imm, Reg
from cutex.sim.ptx.program import Instruction
from cutex.sim.ptx.strength import Strength

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

_RESULT: dict[str, Any] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
    "hs": np.greater_equal, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "add": np.add, "sub": np.subtract, "not": lambda x, _: ~x,
    "shl": lambda x, n: _shifted(np.left_shift, x, n),
    "shr": lambda x, n: _shifted(np.right_shift, x, n), "rem": np.fmod,
}  # fmt: skip


def _shifted(shift: Any, values: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Shifted values; by their width or more, what as many shifts by one give (PTX ISA 9.7.8.7)."""
    most = 8 * values.dtype.itemsize - 1
    by = by.view(f"u{by.dtype.itemsize}")
    shifted = shift(values, np.minimum(by, most).astype(values.dtype))
    return shifted if (by <= most).all() else shift(shifted, np.array(1, values.dtype))


class Version(NamedTuple):
    """A value that a place has had, as bytes (None: what is there now), and who wrote it: the
    cluster, the slot and the count of a warp; None if it was there before.
    """

    value: bytes | None
    size: int
    by: tuple[int, int, int] | None


class AccessOrder(Protocol):
    """What orders warps: see `ClusterOrder.includes`."""

    def includes(self, warp: int, cluster: int, slot: int, count: int) -> bool: ...


class FlagValues:
    """The values that strong accesses have given to places: of global memory by address, of shared
    memory by -1 less the number of the byte among those of all CTAs.
    """

    clocks: Clocks  # of the resident clusters

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        self.tests = flag_tests(machine.program)
        self.versions: dict[int, list[Version]] = {}  # by place; the first: before any
        self.dropped: dict[int, int] = {}  # by place: how many are not kept any more
        # by order, warp and place: the number of the version that it has read or written last
        self.last: dict[tuple[int, int, int], int] = {}
        # by cluster: the last load that may have read an older value
        self.older: dict[int, Instruction] = {}

    def start(self, clocks: Clocks) -> None:
        """Begin with other resident clusters."""
        self.clocks = clocks
        self.last.clear()

    def wrote(self, warp: int, place: int, size: int, value: bytes | None = None) -> None:
        """A strong store, before it happens; ``value``: None if it is not known yet."""
        versions = self.versions.setdefault(place, [])
        if not versions:
            versions.append(Version(self._now(place, size), size, None))
        self._settle(place)
        grid = self.m.grid
        own = int(grid.cta_cluster[grid.warp_cta[warp]])
        by = own, int(self.clocks.slot[warp]), self.clocks.now(warp)
        versions.append(Version(value, size, by))
        if len(versions) > KEPT:
            del versions[0]
            self.dropped[place] = self.dropped.get(place, 0) + 1

    def newest(self, place: int) -> int:
        """The number of the present version."""
        return self.dropped.get(place, 0) + len(self.versions.get(place, ())) - 1

    def back(
        self, order: AccessOrder, warp: int, lanes: int, place: int, size: int, ins: Instruction
    ) -> int:
        """How many versions before the present one a load by these lanes (bits) of ``warp`` may
        have read, in an order, with the same outcome.
        """
        tests, versions = self.tests.get(id(ins)), self.versions.get(place)
        if not tests or not versions:
            return 0
        self._settle(place)
        dropped, newest = self.dropped.get(place, 0), len(versions) - 1
        key = id(order), warp, place
        known = max(self.last.get(key, 0) - dropped, 0)
        present = versions[newest]
        if present.value != self._now(place, size) or any(v.size != size for v in versions):
            return 0
        found = newest
        same = self._outcomes(tests, warp, lanes, [v.value for v in versions[known:]], size)
        if same[:-1].any():
            for at in range(newest, known, -1):
                by = versions[at].by
                if by is not None and order.includes(warp, *by):
                    break
                if same[at - 1 - known]:
                    found = at - 1
        self.last[key] = found + dropped
        if found != newest:
            grid = self.m.grid
            self.older[int(grid.cta_cluster[grid.warp_cta[warp]])] = ins
        return newest - found

    def _outcomes(
        self,
        tests: list[FlagTest],
        warp: int,
        lanes: int,
        values: list[bytes | None],
        size: int,
    ) -> np.ndarray:
        """Which of these values compare as the last of them does."""
        same = np.ones(len(values), bool)
        for test in tests:
            flags = np.frombuffer(b"".join(v or b"" for v in values), f"u{size}")
            for step in test:
                kind = np.dtype(f"{'i' if step.kind[0] == 's' else 'u'}{size}")
                flags, other = flags.view(kind), self._other(step.other, warp, lanes, kind)
                if other is None or int(step.kind[1:]) != 8 * size:
                    return np.arange(len(values)) == len(values) - 1
                sides = (flags, other) if step.first else (other, flags)
                flags = np.broadcast_to(_RESULT[step.name](*sides), flags.shape)
            same &= flags == flags[-1]
        return same

    def _other(
        self, operand: Reg | Imm | None, warp: int, lanes: int, kind: np.dtype[Any]
    ) -> np.ndarray | None:
        """The value beside a flag, in these lanes (bits); None if they have several."""
        if not isinstance(operand, Reg):
            return np.array([int(operand.value) if operand else 0]).astype(kind)
        # NOTE: what other lanes have there is of another path, or was never written
        row = np.unique(self.m.register(operand)[warp][_of_bits(lanes)].astype(kind))
        return row if len(row) == 1 else None

    def _now(self, place: int, size: int) -> bytes:
        if place < 0:
            return self.m.smem.reshape(-1)[-1 - place :][:size].tobytes()
        region = self.m.memory.find(place)
        assert region is not None
        at = place - region.base
        return region.data[at : at + size].tobytes()

    def _settle(self, place: int) -> None:
        """Note the value that the last store has left."""
        versions = self.versions[place]
        if versions[-1].value is None:
            last = versions[-1]
            versions[-1] = last._replace(value=self._now(place, last.size))


class ClusterFlags:
    """The strong accesses of global memory, as the orders of clusters see them."""

    def __init__(self, machine: Machine, *orders: ClusterOrder) -> None:
        self.orders, self.values = orders, FlagValues(machine)
        self.active = orders[0].active

    def loaded(self, where: Lanes, size: int, how: Strength, ins: Instruction) -> None:
        """Lanes load, or an atomic does."""
        if not (how.far and self.active):
            return
        writes = how.atomic and not only_reads(ins)
        for (warp, address), lanes in lanes_by_place(where).items():
            for order in self.orders:
                back = self.values.back(order, warp, lanes, address, size, ins)
                order.read(warp, address, how, lanes, back)
                if writes:
                    order.write(warp, address, how, lanes)
            if writes:
                self.values.wrote(warp, address, size)

    def stored(self, where: Lanes, values: np.ndarray, how: Strength) -> None:
        """Lanes store, not by an atomic."""
        if not (how.far and self.active):
            return
        each = zip(where.warps.tolist(), where.addresses.tolist(), values, strict=True)
        by = lanes_by_place(where)
        for (warp, address), value in {(w, a): v.tobytes() for w, a, v in each}.items():
            self.values.wrote(warp, address, len(value), value)
            for order in self.orders:
                order.write(warp, address, how, by[warp, address])


def _of_bits(lanes: int) -> list[int]:
    return [lane for lane in range(32) if lanes >> lane & 1]


def lanes_by_place(where: Lanes) -> dict[tuple[int, int], int]:
    """By warp and address: the lanes (bits) that access it."""
    out: dict[tuple[int, int], int] = {}
    each = (x.tolist() for x in (where.warps, where.addresses, where.lanes))
    for warp, address, lane in zip(*each, strict=True):
        out[warp, address] = out.get((warp, address), 0) | 1 << lane
    return out
