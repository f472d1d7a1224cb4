"""Global memory that an asynchronous copy may still read.

A TMA load, a bulk copy or a cp.async reads its source at some moment between its issue and its
completion. A write to the source needs to come after that: its thread has waited for the copy, or
for a barrier behind such a wait (PTX ISA 8.9.1, 9.7.9.25). That the copy was issued before says
nothing. Looked at is the last copy to each place of shared memory, as a ring's slot is filled again
only behind a wait for what was there; and writes of the resident clusters: of another than the
copy's only where flags or atomics may order the two (see cluster_order), as a grid without compares
all at its end (see global_races).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from cutex.sim.hazards.async_accesses import AsyncAccesses
from cutex.sim.hazards.clocks import Clocks
from cutex.sim.hazards.cluster_order import ClusterOrder
from cutex.sim.isa.boxes import box_places, box_range
from cutex.sim.isa.tensormap import MAP_BYTES
from cutex.sim.machine.batch import Lanes
from cutex.sim.machine.events import Observer, SharedBytes
from cutex.sim.machine.memory import Part, Region
from cutex.sim.machine.operation import Engine, Kind, Operation
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

_USERS = 32  # copies that take a map, looked at
_KEPT = 64  # cp.asyncs of a warp that are looked at, in the mean
_REMEDY = "a wait for the copy by this warp, or a barrier behind such a wait of another"
_FLAG = "a flag that the copy's CTA sets behind a wait for the copy, and that this warp acquires"


class _Lanes(NamedTuple):
    """What a cp.async of a warp reads: ``width`` bytes at each of these addresses."""

    op: Operation
    addresses: np.ndarray
    width: int

    @property
    def ends(self) -> tuple[int, int]:
        """The addresses of its first byte, and behind its last."""
        return int(self.addresses.min()), int(self.addresses.max()) + self.width


class CopySources(Observer):
    """The copies from global memory of the resident clusters."""

    def __init__(
        self,
        machine: Machine,
        clocks: Clocks,
        copies: AsyncAccesses,
        orders: Sequence[ClusterOrder],
    ) -> None:
        """``orders``: those of clusters, of which any may order a write after a copy."""
        self.m, self.clocks, self.copies = machine, clocks, copies
        self.orders = [order for order in orders if order.active]
        # by CTA and first byte: the last TMA load or bulk copy there
        self.loads: dict[int, dict[int, Operation]] = defaultdict(dict)
        self.of_lanes: dict[int, list[_Lanes]] = defaultdict(list)  # by CTA: its cp.asyncs
        self.read: dict[int, Region] = {}  # the regions that anything reads, by their addresses
        self.of_maps: dict[int, Any] = {}  # the tensor maps that were looked at, by their ids
        self.about_to: tuple[Lanes, int] | None = None  # what a cp.async reads
        # by address: the last copies that take the tensor map there
        self.users: dict[int, deque[Operation]] = defaultdict(partial(deque, maxlen=_USERS))
        self.taking: dict[int, tuple[int, Instruction]] = {}  # by warp: the map, of what it issues
        # by tensor map and coordinates: the addresses at which a box begins and ends
        self.ends: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}

    # -- copies ------------------------------------------------------------------------------------

    def map_used(self, warp: int, address: int, ins: Instruction) -> None:
        self.taking[warp] = address, ins

    def issued(self, ops: Sequence[Operation]) -> None:
        for op in ops if self.taking else ():
            address, ins = self.taking.get(op.warp, (0, None))
            if ins is op.instruction:
                self.users[address].append(op)
                self._add(address)
        if ops[0].engine is not Engine.TMA_LOAD:
            return
        for op in ops:
            place, source = op.writes[0], cast(Any, op.source)
            self.loads[place.cta][place.low] = op
            if source[0] == "global":
                self._add(source[1])
            elif id(source[0]) not in self.of_maps:
                self.of_maps[id(source[0])] = source[0]
                self._add(source[0].address)

    def _add(self, address: int) -> None:
        region = self.m.memory.find(address)
        if region is not None:
            self.read[region.base] = region

    def global_loaded(self, where: Lanes, size: int, ins: Instruction) -> None:
        if ins.name == "cp":
            self.about_to = where, size

    def copying(self, at: SharedBytes, op: Operation, ins: Instruction) -> None:
        if self.about_to is None:
            return
        where, size = self.about_to
        addresses = where.addresses[where.warps == op.warp]
        if len(addresses):
            self._add(int(addresses[0]))
            copies = self.of_lanes[self.m.grid.cta_of(op.warp)]
            copies.append(_Lanes(op, addresses, size))
            if len(copies) > _KEPT * self.m.grid.warps_per_cta:
                del copies[: len(copies) // 2]

    # -- writes ------------------------------------------------------------------------------------

    def global_stores(
        self, where: Lanes, values: np.ndarray, parts: Sequence[Part], ins: Instruction
    ) -> None:
        for region, members, offsets in parts:
            if region.base in self.read:
                at = offsets[:, None] + np.arange(values.shape[1])
                mine = where.pick(members).warps
                for warp in np.unique(mine).tolist():
                    self._check(warp, region, at[mine == warp].reshape(-1), "writes", ins)

    def bulk_issued(
        self, warp: int, address: int, size: int, write: bool, ins: Instruction
    ) -> None:
        region = self.m.memory.find(address) if write else None
        if region is not None and region.base in self.read:
            at = address - region.base + np.arange(size)
            self._check(warp, region, at, "issues a bulk store to", ins)

    def box_issued(
        self, warp: int, tmap: Any, at: tuple[int, ...], write: bool, ins: Instruction
    ) -> None:
        found = box_places(self.m.memory, tmap, at, self.read) if write and self.read else None
        if found is not None:
            region, first = found
            places = (first[:, None] + np.arange(tmap.itemsize)).reshape(-1)
            self._check(warp, region, places, "issues a TMA store to", ins)

    def _check(
        self, warp: int, region: Region, places: np.ndarray, verb: str, ins: Instruction
    ) -> None:
        """Report a write by a warp to ``places`` (n,) of a region while a copy that it does not
        know to be complete reads them.
        """
        low, high = int(places.min()), int(places.max()) + 1
        copies = chain(
            self._unknown(warp, region, low, high), self._with_map(warp, region, low, high)
        )
        if self.orders:
            copies = chain(copies, self._unknown_elsewhere(warp, region, low, high))
        for op, first, width in copies:
            both = np.intersect1d(places, (first[:, None] + np.arange(width)).reshape(-1))
            if len(both):
                self._tell(warp, op, region.element(int(both[0])), verb, ins)
                return

    def _unknown(
        self, warp: int, region: Region, low: int, high: int
    ) -> Iterator[tuple[Operation, np.ndarray, int]]:
        """The copies by the warp's cluster that it does not know to be complete, which read bytes
        ``[low, high)`` of a region: the offsets at which they read, and how many bytes of each.

        NOTE: of the parts that a multicast load brings to several CTAs, one that it knows of will
        do.
        """
        known, grid = self.clocks.known[warp], self.m.grid
        first = grid.first_cta[warp]
        late, complete = list[Operation](), list[Operation]()
        for cta in range(first, first + grid.cluster_size):
            for op in self.loads[cta].values():
                last = self.copies.tracks[op.writes[0].key].write
                unknown = last.operation[cta] is op and last.count[cta] > known[last.slot[cta]]
                (late if unknown else complete).append(op)
            for copy in self.of_lanes[cta]:
                if known[self.clocks.agent(Kind.COPY, copy.op.warp)] < copy.op.number:
                    yield copy.op, copy.addresses.astype(np.int64) - region.base, copy.width
        for op in late:
            for at, width in self._reads(op.source, region, low, high):
                if not any(o.warp == op.warp and o.source == op.source for o in complete):
                    yield op, at, width

    def _with_map(
        self, warp: int, region: Region, low: int, high: int
    ) -> Iterator[tuple[Operation, np.ndarray, int]]:
        """As `_unknown`, the copies that take a tensor map there."""
        known, first = self.clocks.known[warp], self.m.grid.first_cta
        for address, ops in self.users.items():
            if not region.base + low < address + MAP_BYTES or address >= region.base + high:
                continue
            for op in ops:
                if first[op.warp] == first[warp] and not self._is_known(op, known):
                    yield op, np.arange(address, address + MAP_BYTES) - region.base, 1

    def _is_known(self, op: Operation, known: np.ndarray) -> bool:
        """Whether a warp of the copy's cluster that has this clock knows it to be complete."""
        if op.is_store:
            return bool(known[self.clocks.agent(Kind.BULK, op.warp)] >= op.number)
        place = op.writes[0]
        last = self.copies.tracks[place.key].write
        late = (
            last.operation[place.cta] is op and last.count[place.cta] > known[last.slot[place.cta]]
        )
        return not late

    def _unknown_elsewhere(
        self, warp: int, region: Region, low: int, high: int
    ) -> Iterator[tuple[Operation, np.ndarray, int]]:
        """As `_unknown`, the copies by other clusters."""
        grid, low, high = self.m.grid, low + region.base, high + region.base
        own = int(grid.cta_cluster[grid.warp_cta[warp]])
        for cta, loads in self.loads.items():
            if (cluster := int(grid.cta_cluster[cta])) == own:
                continue
            for op in loads.values():
                if any(start < high and low < end for start, end in self._ends(op.source)):
                    last = self.copies.tracks[op.writes[0].key].write
                    agent = int(last.slot[cta]), int(last.count[cta])
                    if last.operation[cta] is op and not self._ordered(warp, cluster, *agent):
                        for at, width in self._reads(
                            op.source, region, low - region.base, high - region.base
                        ):
                            yield op, at, width
        for cta, copies in self.of_lanes.items():
            if (cluster := int(grid.cta_cluster[cta])) == own:
                continue
            for copy in copies:
                start, end = copy.ends
                agent = self.clocks.agent(Kind.COPY, copy.op.warp), copy.op.number
                if start < high and low < end and not self._ordered(warp, cluster, *agent):
                    yield copy.op, copy.addresses.astype(np.int64) - region.base, copy.width

    def _ordered(self, warp: int, cluster: int, slot: int, count: int) -> bool:
        """Whether ``warp`` is ordered after an agent's first ``count`` operations."""
        return any(order.known(warp, cluster, slot) >= count for order in self.orders)

    def _ends(self, source: Any) -> Iterator[tuple[int, int]]:
        """The addresses of the first byte that a load reads, and behind the last: of each box."""
        if source[0] == "global":
            yield source[1], source[1] + source[2]
            return
        tmap, boxes = source
        for at in boxes:
            key = id(tmap), tuple(at)  # NOTE: `of_maps` keeps each map
            if key not in self.ends:
                first, size = box_range(self.m.memory, tmap, at)
                self.ends[key] = first, first + size
            yield self.ends[key]

    def _reads(
        self, source: Any, region: Region, low: int, high: int
    ) -> Iterator[tuple[np.ndarray, int]]:
        """The offsets in a region at which a load reads, and the bytes from each, unless all are
        outside of ``[low, high)``.
        """
        if source[0] == "global":
            start = source[1] - region.base
            if start < high and low < start + source[2]:
                yield np.arange(start, start + source[2]), 1
            return
        tmap, boxes = source
        for at in boxes:
            first, size = box_range(self.m.memory, tmap, at)
            if size and first - region.base < high and low < first - region.base + size:
                found = box_places(self.m.memory, tmap, at, (region.base,))
                if found is not None:
                    yield found[1], tmap.itemsize

    def _tell(self, warp: int, op: Operation, place: str, verb: str, ins: Instruction) -> None:
        name = self.m.grid.name_warp
        done = "it is complete, but nothing that this warp has waited for says so"
        first = self.m.grid.first_cta
        self.m.findings.add(
            "race",
            f"{name(warp)} {verb} {place}, which {op.what} of {name(op.warp)} reads (PTX line "
            f"{op.instruction.line}): {done if op.done else 'it is not complete'}",
            ins,
            remedy=_REMEDY if first[warp] == first[op.warp] else _FLAG,
        )
