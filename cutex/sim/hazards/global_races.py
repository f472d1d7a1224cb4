"""Races on global memory, where at least one of two accesses writes.

The warps of a cluster are ordered by the vector clocks (see clocks), which follow barriers of every
kind and flags (see flag_order). Only communication through global memory orders the clusters of a
grid (PTX ISA 8.8, 8.9; see cluster_order). Unordered accesses are a race, in whichever order they
were simulated: the place keeps the last write, and a load may return either value. Writing the same
bytes twice is no fault. Two strong accesses, atomics among them, never race (8.7.1); a strong and
an ordinary access race by the letter, and in fact if an atomic and an ordinary store meet: one is
lost. So atomics, and writes of the same bytes, need not know of each other, and whatever else comes
must come after all of them (see `unordered`).

Of a bulk store the write counts: it is complete after ``wait_group``, not after ``.read``, and it
comes after what its thread knew when it issued it. Loads by ordinary instructions are recorded by
byte: all that no later one is ordered after. TMA and bulk loads are compared
with earlier writes when they are issued and, recorded as boxes, at the end with those of other
clusters; if clusters have an order, only when they are issued.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cutex.sim.hazards.bulk_sums import BulkSums
from cutex.sim.hazards.clocks import Clocks
from cutex.sim.hazards.cluster_order import ClusterOrder
from cutex.sim.hazards.flag_values import ClusterFlags
from cutex.sim.hazards.global_clashes import GlobalClashes
from cutex.sim.hazards.global_lanes import GlobalLanes
from cutex.sim.hazards.global_marks import (
    ATOMIC,
    LANE,
    PLAIN,
    STRONG,
    BoxRead,
    By,
    Clash,
    Records,
    Touched,
)
from cutex.sim.hazards.global_proxies import GlobalProxies
from cutex.sim.hazards.global_reports import GlobalReports
from cutex.sim.hazards.rechecks import Rechecks
from cutex.sim.hazards.sparse_marks import (
    LARGEST,
    MOST_PAGES,
    PAGE,
    Marks,
    Pages,
    SparseMarks,
    marked,
    marks_of,
)
from cutex.sim.hazards.unordered import AccessSets, Readers, Unordered
from cutex.sim.isa.boxes import box_places
from cutex.sim.isa.tensormap import MAP_BYTES
from cutex.sim.machine.batch import Lanes
from cutex.sim.machine.events import Observer, Storing
from cutex.sim.machine.memory import Part, Region
from cutex.sim.machine.operation import Engine, Operation
from cutex.sim.ptx.program import Instruction
from cutex.sim.ptx.strength import WEAK, Strength, strength

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

_CHANGES = Strength(True, True, False, False)
# atomics that change what another value was written over, whichever comes first
_SUM = re.compile(r"(atom|red|cp\.reduce)\b.*\.(add|inc|dec|xor)\b")


class GlobalRaces(Observer):
    """The last write to each byte of the launch's tensors, and its readers, as marks of the
    records; by the region's address.
    """

    def __init__(self, machine: Machine, rechecks: Rechecks) -> None:
        self.m = machine
        code = machine.program.code
        self.order, self.lenient = ClusterOrder(machine), ClusterOrder(machine, lenient=True)
        self.records, self.flags = Records(), ClusterFlags(machine, self.order, self.lenient)
        self.clashes = GlobalClashes(machine, self.order, self.lenient, self.records)
        self.reports = GlobalReports(machine, self.records, rechecks, self.flags.values)
        self.lanes = GlobalLanes(machine, self.clashes, self.records, self.reports)
        self.proxies = GlobalProxies(machine, self.clashes, self.records, self.reports)
        self.bulk_sums = BulkSums(machine, self.clashes, self.records)
        self.pages = Pages()
        self.sets = AccessSets(self.records)
        self.writes: dict[int, Marks] = {}
        self.unordered: dict[int, Unordered] = {}  # writes before the last
        self.sums = [ins.line for ins in code if _SUM.match(ins.op)]
        self.results = [ins.line for ins in code if ins.name == "atom"]
        self.stored_to: set[int] = set()  # of these, where not only bulk stores have written
        self.beneath: dict[int, Marks] = {}  # the last ordinary write before atomics
        self.reads: dict[int, Readers] = {}
        self.boxes: dict[tuple[Any, ...], BoxRead] = {}

    def start(self, clocks: Clocks) -> None:
        """Begin with other resident clusters."""
        self.clocks = self.reports.clocks = self.clashes.clocks = clocks
        self.proxies.start(clocks)
        self.flags.values.start(clocks)
        self.at_issue: dict[int, np.ndarray] = {}  # by bulk store in flight: its thread's clock

    # -- accesses ----------------------------------------------------------------------------------

    def global_loaded(self, where: Lanes, size: int, ins: Instruction) -> None:
        addresses = where.addresses
        if not len(addresses):
            return
        region = self.m.memory.find(int(addresses[0]))
        if region is None:
            return
        how = strength(ins.op)
        ends = addresses + np.uint64(size)
        inside = (addresses >= np.uint64(region.base)) & (ends <= np.uint64(region.end))
        if not inside.all():
            where = where.pick(inside)
            addresses = where.addresses
        places = (addresses - np.uint64(region.base)).astype(np.int64)[:, None] + np.arange(size)
        by = self._lanes(where, how, ins)
        if how.atomic:
            self._atomic(region, places, by, ins)
        else:
            self._read(region, places, by, ins)
        self.flags.loaded(where, size, how, ins)

    def global_stores(
        self, where: Lanes, values: np.ndarray, parts: Sequence[Part], ins: Instruction
    ) -> None:
        how = strength(ins.op)
        if how.atomic:  # NOTE: an atomic was recorded as a load, as both
            return
        for region, members, offsets in parts:
            by = self._lanes(where.pick(members), how, ins)
            self._write(region, offsets, values[members], by, ins)
        self.flags.stored(where, values, how)

    def global_proxy_fenced(self, warps: np.ndarray) -> None:
        self.proxies.fenced(warps)

    def issued(self, ops: Sequence[Operation]) -> None:
        for op in ops:
            if op.engine is Engine.TMA_STORE:
                self.at_issue[op.number] = self.clocks.known[op.warp].copy()
                if self.order.active and self.proxies.fences_of:
                    self.bulk_sums.issued(op, self.proxies.fences_of)

    def bulk_writes(
        self,
        region: Region,
        offsets: np.ndarray,
        values: np.ndarray,
        by: Storing,
        ins: Instruction,
    ) -> None:
        self._write(region, offsets, values, self._stores(by, WEAK, ins), ins)

    def bulk_reduced(
        self, region: Region, offsets: np.ndarray, size: int, by: Storing, ins: Instruction
    ) -> None:
        """An element at a time."""
        places = offsets[:, None] + np.arange(size)
        self._atomic(region, places, self._stores(by, _CHANGES, ins), ins)

    def _stores(self, by: Storing, how: Strength, ins: Instruction) -> By:
        """The agent of a bulk store's writes."""
        slot, clock = self.clocks.written_slot(by.warp), self.at_issue.get(by.number)
        warp, lane, slots, counts = (np.array([x]) for x in (by.warp, 0, slot, by.number))
        return By(warp, lane, slots, counts, how, ins.line, clock)

    def _lanes(self, where: Lanes, how: Strength, ins: Instruction) -> By:
        slots = self.clocks.slot[where.warps]
        counts = self.clocks.known[where.warps, slots]
        return By(where.warps, where.lanes, slots, counts, how, ins.line)

    def box_issued(
        self, warp: int, tmap: Any, at: tuple[int, ...], write: bool, ins: Instruction
    ) -> None:
        """Record a TMA load; check what a store changes."""
        if write:
            if self.stored_to and self._is_stored_to(tmap.address):
                self._check_box_store(warp, tmap, at, ins)
            return
        read = BoxRead(tmap, at, int(self.clashes.clusters(np.array([warp]))[0]), ins)
        if not self.order.active:
            self.boxes.setdefault((id(tmap), at, read.owner), read)
        if self.writes:
            self._check_box(read, warp)

    def bulk_issued(
        self, warp: int, address: int, size: int, write: bool, ins: Instruction
    ) -> None:
        """Check a bulk copy of contiguous bytes against the writes so far."""
        if write:
            region = self.m.memory.find(address)
            if region is not None and region.base in self.stored_to:
                places = address - region.base + np.arange(size)[None]
                last = self.writes[region.base][places]
                self.proxies.check(warp, last, places, region, ins, write)
        elif (found := self._bulk_read(warp, address, size, ins)) is not None:
            self.proxies.check(warp, *found, ins)

    def map_used(self, warp: int, address: int, ins: Instruction) -> None:
        """A tensor map is read by a proxy of its own (see map_changes)."""
        self._bulk_read(warp, address, MAP_BYTES, ins)

    def _bulk_read(
        self, warp: int, address: int, size: int, ins: Instruction
    ) -> tuple[np.ndarray, np.ndarray, Region] | None:
        """Record and check a read of contiguous bytes; if it races with nothing, the last writes
        there, the places and their region."""
        if not self.order.active:
            owner = int(self.clashes.clusters(np.array([warp]))[0])
            read = BoxRead(None, (address, size), owner, ins)
            self.boxes.setdefault((0, read.at, owner), read)
        region = self.m.memory.find(address)
        if region is None or region.base not in self.writes:
            return None
        places = address - region.base + np.arange(size)[None]
        one = np.array([warp])
        by = self._lanes(Lanes(one, 0 * one, one), WEAK, ins)
        last = self.writes[region.base][places[0, 0] : places[0, 0] + size][None]
        clash = self.clashes.first(last, places, by)
        if clash := clash or self._before_last(region, last, places, by):
            did = "changes it by atomics" if self._changes(clash.earlier) else "wrote it"
            self.reports.race(by, clash, region, "reads", did, ins)
            return None
        return last, places, region

    def last_stores(self, address: int, size: int) -> list[int]:
        """The records of the last stores of this launch to bytes of a watched tensor."""
        region = self.m.memory.find(address)
        if region is None or region.base not in self.writes:
            return []
        at = address - region.base
        last = self.writes[region.base][at : at + size] >> LANE
        return [x for x in np.unique(last).tolist() if x]

    def written(self) -> dict[int, np.ndarray]:
        """The written bytes of the tensors that have all their marks, as packed bits by the
        regions' addresses.
        """
        each = self.writes.items()
        return {b: np.packbits(m != 0) for b, m in each if not isinstance(m, SparseMarks)}

    def unwatched(self) -> list[str]:
        """What races are not looked for in, as sentences: tensors of which not all accesses are
        marked (see `sparse_marks`).
        """
        kernel = self.m.program.title
        kept = [(base, marks) for base, marks in self.writes.items()]
        kept += [(base, m) for base, r in self.reads.items() for m in (r.last, r.before)]
        kept += [(base, w.before) for base, w in self.unordered.items()]
        full = {base for base, m in kept if isinstance(m, SparseMarks) and m.full}
        regions = [r for base in sorted(full) if (r := self.m.memory.find(base)) is not None]
        return [
            f"{kernel} touches more than {MOST_PAGES * PAGE >> 20} MB of large tensors: races on "
            f"{r.description or r.name} were looked for in part of it only"
            for r in regions
        ]

    def touched(self, among: Container[int] | None = None) -> Touched:
        """The accesses of the clusters that have run; boxes ``among`` these tensors by byte, by
        default among those that are written."""
        among = self.writes if among is None else among
        read = {b: marked(r.last) for b, r in self.reads.items() if len(r.last) <= LARGEST}
        loaded = set()
        for box in self.boxes.values():
            found = box.places(self.m.memory, among)
            address = box.at[0] if box.tmap is None else box.tmap.address
            if found is not None:
                region, offsets = found
                marks = read.setdefault(region.base, np.zeros(len(region.data), bool))
                marks[offsets[:, None] + np.arange(box.itemsize)] = True
            elif (region_of := self.m.memory.find(address)) is not None:
                loaded.add(region_of.base)
        return Touched(
            self.written(),
            {base: np.packbits(marks) for base, marks in read.items()},
            loaded - self.writes.keys(),
        )

    def finish(self) -> None:
        """Check the recorded boxes at the end of the grid."""
        if self.writes:
            for read in self.boxes.values():
                self._check_box(read)

    # -- checks ------------------------------------------------------------------------------------

    def _read(self, region: Region, places: np.ndarray, by: By, ins: Instruction) -> None:
        if region.base in self.writes:
            last = self.writes[region.base][places]
            clash = self.clashes.first(last, places, by)
            if clash := clash or self._before_last(region, last, places, by):
                kind, slot = (f[clash.earlier] for f in (self.records.kind, self.records.slot))
                bulk = slot >= self.clocks.warps  # NOTE: a reduction, which no event has reported
                letter = by.how.strong or (kind != PLAIN and not bulk)
                did = "changes it by atomics" if kind == ATOMIC and letter else "wrote it"
                load = ins.line if letter and not by.how.strong else 0
                self.reports.race(by, clash, region, "reads", did, ins, letter, load)
            elif not by.how.strong:
                self.lanes.check(last, places, by, region, ins)
                self.lanes.check_constant(last, places, by, region, ins)
        if by.how.far:
            return
        self._readers(region).add(places, by, self._mark(by), self.clashes)

    def _write(
        self, region: Region, offsets: np.ndarray, values: np.ndarray, by: By, ins: Instruction
    ) -> None:
        """A write of ``values`` (n, size) bytes at ``offsets`` (n,) of the region, before it
        happens.
        """
        places = offsets[:, None] + np.arange(values.shape[1])
        last = self._marks(region)[places]
        differs: np.ndarray | None = None
        if last.any() or region.base in self.reads:
            differs = region.data[places] != values
            among = differs
            if self.sums:
                among = differs | np.isin(self.records.line[last >> LANE], self.sums)
            clash = self.clashes.first(last, places, by, among)
            if clash := clash or self._before_last(region, last, places, by, among):
                kind = int(self.records.kind[clash.earlier])
                did = "changes it by atomics" if kind == ATOMIC else "wrote another value there"
                did = "set it by a strong store" if kind == STRONG else did
                letter = by.how.strong or kind not in (PLAIN, ATOMIC)
                self.reports.race(by, clash, region, "writes", did, ins, letter)
            elif by.clock is None and not by.how.strong:
                self.lanes.check(last * differs, places, by, region, ins, write=True)
            self._after_loads(region, places, differs, by, ins)
        self._keep(region, last, places, by)

    def _keep(self, region: Region, last: np.ndarray, places: np.ndarray, by: By) -> np.ndarray:
        """Mark a write after ``last``; the marks, (n,)."""
        marks, new = self._marks(region), self._mark(by)
        apart = self.clashes.late(last, by, alike=True)
        if apart is not None:
            apart &= ~self._own(last, by)  # NOTE: who knows of a later bulk store knows of both
            if apart.any():
                self._writers(region).push(places[apart], last[apart])
        marks[places] = new[:, None]
        if (marks[places[:, 0]] >> LANE != new >> LANE).any():
            self._writers(region).keep(marks, places, new)
        if by.clock is None:
            self.stored_to.add(region.base)
        return new

    def _before_last(
        self,
        region: Region,
        last: np.ndarray,
        places: np.ndarray,
        by: By,
        among: np.ndarray | None = None,
    ) -> Clash | None:
        """As `first` of the clashes, with the writes before the last; not where that is an atomic
        of the same agent, which may have told it that it came last.
        """
        if region.base not in self.unordered:
            return None
        told = self._own(last, by) & np.isin(self.records.line[last >> LANE], self.results)
        among = ~told if among is None else among & ~told
        return self.unordered[region.base].first(places, by, among, self.clashes)

    def _own(self, last: np.ndarray, by: By) -> np.ndarray:
        rec, r = last >> LANE, self.records
        own = r.who[rec] == self.clashes.who(by)[:, None]
        return own & (r.slot[rec] == by.slots[:, None])

    def _after_loads(
        self, region: Region, places: np.ndarray, differs: np.ndarray, by: By, ins: Instruction
    ) -> None:
        """Report a write that is not ordered after loads."""
        if region.base not in self.reads:
            return
        readers = self.reads[region.base]
        clash = self.clashes.first(readers.last[places], places, by, differs)
        if clash := clash or readers.first(places, by, differs, self.clashes):
            load = int(self.records.line[clash.earlier]) if by.how.strong else 0
            self.reports.race(by, clash, region, "writes", "has read", ins, by.how.strong, load)
        if self.order.active:
            readers.forget(places)

    def _atomic(self, region: Region, places: np.ndarray, by: By, ins: Instruction) -> None:
        """An atomic, which is a read and a write; ordinary accesses must be ordered with it."""
        last = self._marks(region)[places]
        clash = self.clashes.first(last, places, by)
        clash = clash or self._before_last(region, last, places, by)
        if clash := clash or self._clash_beneath(region, last, places, by):
            self.reports.race(by, clash, region, "changes", "by an ordinary store", ins)
        else:
            self.bulk_sums.check(last, places, by, region, ins)
        self._after_loads(region, places, np.ones(places.shape, bool), by, ins)
        self.bulk_sums.made(self._keep(region, last, places, by)[:, None], by)

    def _clash_beneath(
        self, region: Region, last: np.ndarray, places: np.ndarray, by: By
    ) -> Clash | None:
        """As `first` of an atomic, with ordinary writes that come before other atomics: these are
        ordered after it, this one need not be.
        """
        plain = (last != 0) & (self.records.kind[last >> LANE] == PLAIN)
        beneath = self.beneath.get(region.base)
        if beneath is None:
            if not plain.any():
                return None
            beneath = self.beneath[region.base] = marks_of(len(region.data), self.pages)
        beneath[places[plain]] = last[plain]
        return self.clashes.first(np.where(plain, 0, beneath[places]), places, by)

    def _check_box(self, read: BoxRead, warp: int | None = None) -> None:
        """Check a TMA load against the writes so far: when it is issued by ``warp``, or at the end
        against those of other clusters.
        """
        found = read.places(self.m.memory, self.writes)
        if found is None:
            return
        region, offsets = found
        last, places = self.writes[region.base][offsets][:, None], offsets[:, None]
        who = self.records.who[last >> LANE]
        wrong: np.ndarray | None = (last != 0) & (who != read.owner + 1)
        if warp is not None:
            one = np.array([warp])
            by = self._lanes(Lanes(one, 0 * one, one), WEAK, read.instruction)
            mine = last if self.order.active else np.where(who == read.owner + 1, last, 0)
            wrong = self.clashes.late(mine, by)
        if wrong is not None and wrong.any():
            k = int(wrong.reshape(-1).argmax())
            self.reports.race_of_box(read, region, int(places[k, 0]), int(last[k, 0]) >> LANE, warp)
        elif (before := self._before_box(region, places, read)) and not self.order.active:
            self.reports.race_of_box(read, region, *before, warp)
        elif warp is not None:
            self.proxies.check(warp, last, places, region, read.instruction)

    def _before_box(
        self, region: Region, places: np.ndarray, read: BoxRead
    ) -> tuple[int, int] | None:
        """Of a write before the last, by another cluster than the one that reads the box, a byte
        and the record."""
        if region.base not in self.unordered:
            return None
        unordered = self.unordered[region.base]
        for number in np.unique(kept := unordered.before[places]).tolist():
            rec = self.sets.marks(number) >> LANE
            others = rec[self.records.who[rec] != read.owner + 1]
            if len(others):
                return int(places[kept == number][0]), int(others[0])
        return None

    def _is_stored_to(self, address: int) -> bool:
        region = self.m.memory.find(address)
        return region is not None and region.base in self.stored_to

    def _check_box_store(self, warp: int, tmap: Any, at: tuple[int, ...], ins: Instruction) -> None:
        found = box_places(self.m.memory, tmap, at, self.writes)
        if found is not None:
            region, offsets = found
            last = self.writes[region.base][offsets][:, None]
            self.proxies.check(warp, last, offsets[:, None], region, ins, write=True)

    def _changes(self, record: int) -> bool:
        """Whether a record is of an atomic, and not of a bulk reduction."""
        r = self.records
        return bool(r.kind[record] == ATOMIC and r.slot[record] < self.clocks.warps)

    # -- marks and names ---------------------------------------------------------------------------

    def _mark(self, by: By) -> np.ndarray:
        partial = self.lanes.partial(by) if by.clock is None else np.zeros(1, np.int32)
        return self.records.add(by, self.clashes.who(by), partial)

    def _marks(self, region: Region) -> Marks:
        if region.base not in self.writes:
            self.writes[region.base] = marks_of(len(region.data), self.pages)
        return self.writes[region.base]

    def _writers(self, region: Region) -> Unordered:
        if region.base not in self.unordered:
            new = Unordered(len(region.data), self.sets, self.pages)
            self.unordered[region.base] = new
        return self.unordered[region.base]

    def _readers(self, region: Region) -> Readers:
        if region.base not in self.reads:
            self.reads[region.base] = Readers(len(region.data), self.sets, self.pages)
        return self.reads[region.base]
