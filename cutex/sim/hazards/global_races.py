"""Races of two clusters on global memory, where at least one of them writes.

Only communication through global memory orders the clusters of a grid (PTX ISA 8.8, 8.9; see
cluster_order). Unordered accesses are a race, in whichever order they were simulated: the place
keeps the last write, and a load may return either value. Writing the same bytes twice is no fault.
Two strong accesses, atomics among them, never race (8.7.1); a strong and an ordinary access race by
the letter, and in fact if an atomic and an ordinary store meet: one is lost.

Loads by ordinary instructions are recorded by byte. TMA loads are recorded as boxes if clusters
have no order, and compared at the end with all writes to their tensors; otherwise they are compared
with earlier writes when they are issued.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cutex.sim.hazards.clocks import Clocks
from cutex.sim.hazards.cluster_order import ClusterOrder
from cutex.sim.isa.boxes import box_places
from cutex.sim.machine.batch import Lanes
from cutex.sim.machine.events import Observer, Storing
from cutex.sim.machine.memory import Part, Region
from cutex.sim.ptx.parse import Instruction, Program
from cutex.sim.ptx.strength import Strength, is_fence, strength

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

LARGEST = 1 << 26  # bytes of the largest watched tensor: the state takes 9 or 15 times as many
LARGEST_READ = 1 << 18  # bytes of the largest tensor whose loads are watched, at the same cost
MANY = np.uint32(0xFFFFFFFF)  # marks a byte that several clusters have read
_PLAIN, _STRONG, _ATOMIC = range(3)  # kinds of writes

_REMEDY = "an atomic instead, or one CTA that does both, or a flag with release and acquire"
_WEAK = Strength(False, False, False, False)
_CHANGES = Strength(True, True, False, False)


class Touched(NamedTuple):
    """The accesses of some clusters of a grid, by the regions' addresses; bits are packed."""

    written: dict[int, np.ndarray]  # bytes
    read: dict[int, np.ndarray]
    loaded: set[int]  # regions loaded by TMA that these clusters do not write

    def clashes(self, other: Touched) -> bool:
        """Whether both touch a byte that one of them writes."""
        pairs = [(self.written, other.written), (self.written, other.read)]
        pairs += [(self.read, other.written)]
        if self.loaded & other.written.keys() or other.loaded & self.written.keys():
            return True
        return any(bool((a[base] & b[base]).any()) for a, b in pairs for base in a.keys() & b)


class BoxRead(NamedTuple):
    """A TMA load of a box, by the cluster ``owner`` of the grid."""

    tmap: Any
    at: tuple[int, ...]
    owner: int
    instruction: Instruction


class By(NamedTuple):
    """The agents of an access: warps, their slots and their counts, (n,) each or (1,)."""

    warps: np.ndarray
    slots: np.ndarray
    counts: np.ndarray


class Clash(NamedTuple):
    """Two unordered accesses of a byte by different clusters: the numbers of the later and of the
    earlier one, as in `Last.who`, and the byte's place in its region.
    """

    later: int
    earlier: int
    place: int


class Last:
    """The last access of a kind to each byte of a tensor."""

    def __init__(self, size: int, counted: bool) -> None:
        """``counted``: whether clusters may have an order, so that counts matter."""
        self.who = np.zeros(size, np.uint32)  # 1 + the number of the cluster in the grid; 0: none
        self.line = np.zeros(size, np.int32)  # of the PTX
        self.how = np.zeros(size, np.uint8)
        self.slot = np.zeros(size if counted else 0, np.int16)
        self.count = np.zeros(size if counted else 0, np.int32)

    def set(self, at: np.ndarray, who: np.ndarray, by: By, line: int, how: int = 0) -> None:
        """Set the last access of the places ``at`` (n, bytes) by ``who``, of the same shape."""
        self.who[at], self.line[at], self.how[at] = who, line, how
        if len(self.slot):
            self.slot[at], self.count[at] = by.slots[:, None], by.counts[:, None]


def orders_clusters(program: Program) -> bool:
    """Whether the program's clusters may communicate, or order their accesses, through global
    memory.
    """
    return any(
        (strength(ins.op).strong or is_fence(ins.op) or ins.name == "multimem")
        and "shared" not in ins.op
        for ins in program.code
    )


class GlobalRaces(Observer):
    """The last write to each byte of the launch's tensors, and its readers."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        code = machine.program.code
        self.active = not any(ins.name == "multimem" for ins in code)
        self.order = ClusterOrder(machine)
        self.writes: dict[int, Last] = {}  # by the region's address
        self.reads: dict[int, Last] = {}
        self.boxes: dict[tuple[Any, ...], BoxRead] = {}

    def start(self, clocks: Clocks) -> None:
        """Begin with other resident clusters."""
        self.clocks = clocks

    # -- accesses ----------------------------------------------------------------------------------

    def global_loaded(self, where: Lanes, size: int, ins: Instruction) -> None:
        warps, _, addresses = where
        if not self.active or not len(addresses):
            return
        region = self.m.memory.find(int(addresses[0]))
        if region is None:
            return
        how = strength(ins.op)
        if len(region.data) > (LARGEST if how.strong else LARGEST_READ):
            return
        ends = addresses + np.uint64(size)
        inside = (addresses >= np.uint64(region.base)) & (ends <= np.uint64(region.end))
        addresses, warps = addresses[inside], warps[inside]
        places = (addresses - np.uint64(region.base)).astype(np.int64)[:, None] + np.arange(size)
        if how.atomic:
            self._atomic(region, places, self._lanes(warps), ins)
        else:
            self._read(region, places, warps, how, ins)
        if how.strong and self.order.active:
            for warp, address in set(zip(warps.tolist(), addresses.tolist(), strict=True)):
                self.order.read(warp, address, how)
                if how.atomic:
                    self.order.write(warp, address, how)

    def global_stores(
        self, where: Lanes, values: np.ndarray, parts: Sequence[Part], ins: Instruction
    ) -> None:
        how = strength(ins.op)
        if not self.active or how.atomic:  # NOTE: an atomic was recorded as a load, as both
            return
        by = self._lanes(where.warps)
        for region, members, offsets in parts:
            mine = By(*(x[members] for x in by))
            self._write(region, offsets, values[members], mine, ins, how)
        if how.strong and self.order.active:
            written = zip(where.warps.tolist(), where.addresses.tolist(), strict=True)
            for warp, address in set(written):
                self.order.write(warp, address, how)

    def bulk_writes(
        self,
        region: Region,
        offsets: np.ndarray,
        values: np.ndarray,
        by: Storing,
        ins: Instruction,
    ) -> None:
        self._write(region, offsets, values, self._stores(by), ins)

    def bulk_reduced(
        self, region: Region, offsets: np.ndarray, size: int, by: Storing, ins: Instruction
    ) -> None:
        """An element at a time."""
        if self.active and len(region.data) <= LARGEST:
            places = offsets[:, None] + np.arange(size)
            self._atomic(region, places, self._stores(by), ins)

    def _stores(self, by: Storing) -> By:
        """The agent of its writes."""
        slot = self.clocks.written_slot(by.warp)
        return By(*(np.array([x]) for x in (by.warp, slot, by.number)))

    def _write(
        self,
        region: Region,
        offsets: np.ndarray,
        values: np.ndarray,
        by: By,
        ins: Instruction,
        how: Strength = _WEAK,
    ) -> None:
        """A write of ``values`` (n, size) bytes at ``offsets`` (n,) of the region, before it
        happens.
        """
        if not self.active or len(region.data) > LARGEST:
            return
        places = offsets[:, None] + np.arange(values.shape[1])
        differs = region.data[places] != values
        last = self._last(region, self.writes)
        among = differs & (last.how[places] == _PLAIN) if how.strong else differs
        if clash := self._clash(last, places, by, among):
            before = last.how[clash.place]
            self._race(
                f"{self._name(clash.later)} writes {region.element(clash.place)}, and "
                f"{self._name(clash.earlier)} {_DID[before]} (PTX line {last.line[clash.place]})",
                ins,
                how.strong or before == _STRONG,
            )
        self._after_loads(region, places, differs, by, ins, how)
        last.set(places, self._mine(by, places), by, ins.line, _STRONG if how.strong else _PLAIN)

    def box_issued(
        self, warp: int, tmap: Any, at: tuple[int, ...], write: bool, ins: Instruction
    ) -> None:
        """Record a TMA load."""
        if not self.active or write:
            return
        read = BoxRead(tmap, at, int(self._clusters(np.array([warp]))[0]), ins)
        if not self.order.active:
            self.boxes.setdefault((id(tmap), at, read.owner), read)
        elif self.writes:
            self._check_box(read, warp)

    def written(self) -> dict[int, np.ndarray]:
        """The written bytes of the watched tensors, as packed bits by the regions' addresses."""
        return {base: np.packbits(last.who != 0) for base, last in self.writes.items()}

    def touched(self) -> Touched:
        """The accesses of the clusters that have run."""
        written = self.writes
        read = {base: last.who != 0 for base, last in self.reads.items()}
        loaded = set()
        for box in self.boxes.values():
            found = box_places(self.m.memory, box.tmap, box.at, written)
            if found is not None:
                region, offsets = found
                marks = read.setdefault(region.base, np.zeros(len(region.data), bool))
                marks[offsets[:, None] + np.arange(box.tmap.itemsize)] = True
            elif (region_of := self.m.memory.find(box.tmap.address)) is not None:
                loaded.add(region_of.base)
        return Touched(
            self.written(),
            {base: np.packbits(marks) for base, marks in read.items()},
            loaded - written.keys(),
        )

    def finish(self) -> None:
        """Check the recorded boxes at the end of the grid."""
        if self.writes:
            for read in self.boxes.values():
                self._check_box(read)

    # -- checks ------------------------------------------------------------------------------------

    def _read(
        self,
        region: Region,
        places: np.ndarray,
        warps: np.ndarray,
        how: Strength,
        ins: Instruction,
    ) -> None:
        by = self._lanes(warps)
        if region.base in self.writes:
            last = self.writes[region.base]
            among = last.how[places] == _PLAIN if how.strong else True
            if clash := self._clash(last, places, by, among):
                self._race(
                    f"{self._name(clash.later)} reads {region.element(clash.place)}, and "
                    f"{self._name(clash.earlier)} wrote it (PTX line {last.line[clash.place]})",
                    ins,
                    how.strong or last.how[clash.place] != _PLAIN,
                )
        if how.strong:
            return
        mine, readers = self._mine(by, places), self._last(region, self.reads)
        other = self._others(readers, places, by)
        readers.set(places, np.where(other, MANY, mine), by, ins.line)
        readers.who[places[readers.who[places] != mine]] = MANY  # several readers in one batch

    def _after_loads(
        self,
        region: Region,
        places: np.ndarray,
        differs: np.ndarray,
        by: By,
        ins: Instruction,
        how: Strength,
    ) -> None:
        """Report a write that is not ordered after the loads of other clusters."""
        readers = self.reads.get(region.base)
        if readers is None:
            return
        if self.order.active:  # NOTE: only one of several readers' counts is kept
            differs = differs & (readers.who[places] != MANY)
        clash = self._clash(readers, places, by, differs)
        if self.order.active:
            readers.who[places] = 0
        if clash:
            several = clash.earlier == MANY
            peer = "others have" if several else f"{self._name(clash.earlier)} has"
            self._race(
                f"{self._name(clash.later)} writes {region.element(clash.place)}, which {peer} "
                "read",
                ins,
                how.strong,
            )

    def _atomic(self, region: Region, places: np.ndarray, by: By, ins: Instruction) -> None:
        """An atomic, which is a read and a write; ordinary accesses must be ordered with it."""
        last = self._last(region, self.writes)
        if clash := self._clash(last, places, by, last.how[places] == _PLAIN):
            self._race(
                f"{self._name(clash.later)} changes {region.element(clash.place)} by an atomic, "
                f"and {self._name(clash.earlier)} {_DID[_PLAIN]} by an ordinary store (PTX line "
                f"{last.line[clash.place]})",
                ins,
            )
        self._after_loads(region, places, np.ones(places.shape, bool), by, ins, _CHANGES)
        last.set(places, self._mine(by, places), by, ins.line, _ATOMIC)

    def _check_box(self, read: BoxRead, warp: int | None = None) -> None:
        found = box_places(self.m.memory, read.tmap, read.at, self.writes)
        if found is None:
            return
        region, offsets = found
        last, at = self.writes[region.base], offsets[:, None]
        other = (last.who[at] != 0) & (last.who[at] != read.owner + 1)
        if warp is not None:
            self._unordered(other, last, at, self._lanes(np.array([warp])))
        if other.any():
            place = int(offsets[int(other.argmax())])
            self._race(
                f"a TMA load of {self._name(read.owner + 1)} reads byte {place} of "
                f"{region.description or region.name}, which {self._name(last.who[place])} "
                f"writes (PTX line {last.line[place]})",
                read.instruction,
            )

    def _clash(
        self, last: Last, places: np.ndarray, by: By, among: np.ndarray | bool
    ) -> Clash | None:
        """The first of the places of ``_others`` at which ``among`` holds, or None."""
        other = self._others(last, places, by, among)
        if not other.any():
            return None
        at = tuple(int(v[0]) for v in np.nonzero(other))
        place = int(places[at])
        return Clash(int(self._mine(by, places)[at]), int(last.who[place]), place)

    def _others(
        self, last: Last, places: np.ndarray, by: By, among: np.ndarray | bool = True
    ) -> np.ndarray:
        """The places (n, bytes) whose last access was another cluster's and is not ordered before
        the warps of ``by``; only where ``among`` holds.
        """
        who = last.who[places]
        other = (who != 0) & (who != self._mine(by, places)) & among
        self._unordered(other, last, places, by)
        return other

    def _unordered(self, other: np.ndarray, last: Last, places: np.ndarray, by: By) -> None:
        """Keep of ``other``, places whose last access was another cluster's, those not ordered
        before the warps of ``by``.
        """
        if not self.order.active or not other.any():
            return
        row, column = np.nonzero(other)
        at = places[row, column]
        warps = np.broadcast_to(by.warps, len(places))[row]
        keys = np.stack([warps, last.who[at].astype(np.int64) - 1, last.slot[at]])
        found, which = np.unique(keys, axis=1, return_inverse=True)
        limits = np.array([self.order.known(*map(int, key)) for key in found.T])
        other[row, column] = last.count[at] > limits[which.reshape(-1)]

    # -- names -------------------------------------------------------------------------------------

    def _clusters(self, warps: np.ndarray) -> np.ndarray:
        return self.m.grid.cta_cluster[self.m.grid.warp_cta[warps]]

    def _lanes(self, warps: np.ndarray) -> By:
        slots = self.clocks.slot[warps]
        return By(warps, slots, self.clocks.known[warps, slots])

    def _mine(self, by: By, places: np.ndarray) -> np.ndarray:
        who = (self._clusters(by.warps) + 1).astype(np.uint32)
        return np.broadcast_to(who[:, None], places.shape)

    def _last(self, region: Region, accesses: dict[int, Last]) -> Last:
        if region.base not in accesses:
            accesses[region.base] = Last(len(region.data), self.order.active)
        return accesses[region.base]

    def _race(self, message: str, ins: Instruction, letter: Any = False) -> None:
        """Report a race; ``letter``: whether one of the two accesses is strong."""
        message += ": nothing orders the two"
        if letter:
            message += ", and only one of them is an atomic, volatile, relaxed or the like"
        self.m.findings.add("race", message, ins, bool(letter), remedy=_REMEDY)

    def _name(self, who: int) -> str:
        x, y, z = self.m.grid.coordinates((int(who) - 1) * self.m.grid.cluster_size)
        what = "CTA" if self.m.grid.cluster_size == 1 else "the cluster of CTA"
        return f"{what} ({x},{y},{z})"


_DID = ("wrote another value there", "set it by a strong store", "changes it by atomics")
