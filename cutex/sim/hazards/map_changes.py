"""Tensor maps in global memory that a kernel changes, and the fences that make changes visible to
TMA.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cutex.sim.hazards.clocks import Clocks
from cutex.sim.hazards.global_races import GlobalRaces
from cutex.sim.isa.tensormap import MAP_BYTES
from cutex.sim.machine.batch import Lanes
from cutex.sim.machine.events import Observer
from cutex.sim.machine.memory import Part
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

_KEPT = 8  # releases of a warp that are looked at, the last


class _Fence(NamedTuple):
    """A release or an acquire: its agent, that one's count then, and as far as it goes."""

    warp: int
    cluster: int
    slot: int
    when: int
    scope: str


class _Release(NamedTuple):
    """by: whose; known: its clock then; records: the number of stores before it."""

    by: _Fence
    known: np.ndarray
    records: int


class TensorMapChanges(Observer):
    """The releases of maps, and by CTA and map the acquires, each of the stores that came before
    it in the order of the memory model.

    A TMA operation may use an older copy of a map that this launch has changed, unless there is a
    ``fence.proxy.tensormap::generic.acquire`` of the map by its CTA behind the change and before
    the operation (9.7.9.29), and behind a ``release`` of a thread that knows of the change, which
    ``cp_fenceproxy`` is; where only that is missing it is an advisory. That the change itself comes
    before the operation is a matter of races (see global_races).
    """

    def __init__(self, machine: Machine, races: GlobalRaces) -> None:
        self.m, self.races = machine, races
        self.releases: dict[tuple[int, int], deque[_Release]] = {}  # by cluster and slot
        self.fences = any("proxy.tensormap" in ins.op for ins in machine.program.code)

    def start(self, clocks: Clocks) -> None:
        """Begin with other resident clusters."""
        self.clocks = clocks
        # by CTA and address: the records that are acquired, by whom, and whether released
        self.acquired: dict[tuple[int, int], dict[int, list[tuple[_Fence, bool]]]] = {}
        self.wrote: set[tuple[int, int]] = set()  # warps, and of what they wrote to the 64 bytes
        # by CTA and address: the bytes that a warp which wrote them has acquired
        self.own: dict[tuple[int, int], tuple[_Fence, bytes]] = {}

    def global_stores(
        self, where: Lanes, values: np.ndarray, parts: Sequence[Part], ins: Instruction
    ) -> None:
        if self.fences:
            lines = (where.addresses >> np.uint64(6)).tolist()
            self.wrote.update(zip(where.warps.tolist(), lines, strict=True))

    def maps_released(self, warps: np.ndarray, scope: str) -> None:
        for warp in warps.tolist():
            by = self._fence(warp, scope)
            kept = self.releases.setdefault((by.cluster, by.slot), deque(maxlen=_KEPT))
            kept.append(_Release(by, self.clocks.known[warp].copy(), self.races.records.n))

    def map_fenced(self, warp: int, address: int, scope: str) -> None:
        records = self.races.last_stores(address, MAP_BYTES)
        if not records:
            return
        by, key = self._fence(warp, scope), (self._cta(warp), address)
        if not self.wrote.isdisjoint({(warp, address >> 6), (warp, (address >> 6) + 1)}):
            self.own[key] = by, self._bytes(address)
        of = self.acquired[key] = {
            record: found for record, found in self.acquired.get(key, {}).items()
            if record in records
        }  # fmt: skip
        for record in records:
            if self._is_before(record, warp) and self._reaches(by, record):
                of.setdefault(record, []).append((by, self._is_released(record, warp)))

    def map_used(self, warp: int, address: int, ins: Instruction) -> None:
        fences = self.acquired.get((self._cta(warp), address), {})
        for record in self.races.last_stores(address, MAP_BYTES):
            if not self._is_before(record, warp):
                continue  # NOTE: a race, which is told
            behind = [
                released for by, released in fences.get(record, [])
                if self.clocks.known.item(warp, by.slot) >= by.when
            ]  # fmt: skip
            if not any(behind) and (behind or not self._are_own(warp, address)):
                self._tell(warp, address, record, bool(behind), ins)
                return

    def _are_own(self, warp: int, address: int) -> bool:
        """Whether the map is as a warp of the CTA has stored and acquired it: then others have
        stored the same bytes."""
        by, held = self.own.get((self._cta(warp), address), (None, b""))
        known = by is not None and self.clocks.known.item(warp, by.slot) >= by.when
        return known and held == self._bytes(address)

    def _bytes(self, address: int) -> bytes:
        return self.m.memory.view(address, MAP_BYTES, "a tensor map").tobytes()

    def _fence(self, warp: int, scope: str) -> _Fence:
        cluster = int(self.m.grid.cta_cluster[self.m.grid.warp_cta[warp]])
        return _Fence(warp, cluster, int(self.clocks.slot[warp]), self.clocks.now(warp), scope)

    def _cta(self, warp: int) -> int:
        return int(self.m.grid.warp_cta[warp])

    def _is_before(self, record: int, warp: int) -> bool:
        """Whether a store comes before what `warp` does now."""
        r = self.races.records
        what = int(r.who[record]) - 1, int(r.slot[record]), int(r.count[record])
        orders = self.races.order, self.races.lenient
        return any(order.includes(warp, *what) for order in orders)

    def _is_released(self, record: int, warp: int) -> bool:
        """Whether a release that knows of a store comes before what `warp` does now."""
        r, orders = self.races.records, (self.races.order, self.races.lenient)
        who, slot, count = int(r.who[record]) - 1, int(r.slot[record]), int(r.count[record])
        here = self._fence(warp, "gpu")
        for (cluster, _), kept in self.releases.items():
            for one in kept if cluster == who else ():
                known = slot < len(one.known) and one.known[slot] >= count
                if record < one.records and known and _within(one.by, here, self._per_cta):
                    what = cluster, one.by.slot, one.by.when
                    if any(order.includes(warp, *what) for order in orders):
                        return True
        return False

    def _reaches(self, by: _Fence, record: int) -> bool:
        """Whether an acquire's scope has the store's thread in it."""
        r = self.races.records
        other = by._replace(cluster=int(r.who[record]) - 1, slot=int(r.slot[record]))
        return _within(by, other, self._per_cta)

    @property
    def _per_cta(self) -> int:
        return self.m.grid.warps_per_cta

    def _tell(self, warp: int, address: int, record: int, fenced: bool, ins: Instruction) -> None:
        line = int(self.races.records.line[record])
        by = next((i.op for i in self.m.program.code if i.line == line), "")
        how = f"changed ({by})" if by.startswith("tensormap") else "wrote by an ordinary store"
        which = "release of the thread that did" if fenced else "acquire of its CTA"
        self.m.findings.add(
            "proxy",
            f"{ins.op} of {self.m.grid.name_warp(warp)} takes the tensor map at 0x{address:x}, "
            f"which PTX line {line} {how}, with no fence.proxy.tensormap::generic.{which} "
            "in between",
            ins,
            fenced,
            remedy="fence.proxy.tensormap::generic.release by the thread that changes the map, "
            "and ::generic.acquire of its 128 bytes by the one that uses it",
        )


def _within(fence: _Fence, other: _Fence, per_cta: int) -> bool:
    """Whether a fence's scope has another thread in it."""
    if fence.scope == "gpu" or fence.cluster != other.cluster:
        return fence.scope == "gpu"
    return fence.scope == "cluster" or fence.slot // per_cta == other.slot // per_cta
