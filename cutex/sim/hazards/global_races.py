"""Two clusters that access the same place of global memory, one of them to write it.

Nothing orders the clusters of a grid but what they tell each other through global memory (PTX ISA
8.7, causality order). Where a kernel has no instruction that could, such a place holds whatever
came last, and a load gets that or what was before: a race, whichever it was in the order at hand.
The same bytes written twice are no fault. Loads of ordinary instructions are remembered by byte;
TMA loads as what they are, and compared at the end with what has been written in their tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cutex.sim.machine.memory import Region
from cutex.sim.ptx.parse import Instruction, Program

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

LARGEST = 1 << 26  # bytes of a tensor that is watched: eight bytes are kept for each
LARGEST_READ = 1 << 18  # of one whose loads are: four more, and time
# Instructions by which clusters may order what they do: atomics, ordered accesses and fences.
_ORDERS = re.compile(
    r"(atom|red|multimem)\.|(ld|st)(\.global)?\.(acquire|release|relaxed|volatile|mmio)"
    r"|fence\.[\w.]*(gpu|sys)|membar\.(gl|sys)"
)


MANY = np.uint32(0xFFFFFFFF)  # clusters that have read a byte

_REMEDY = "an atomic instead, or one CTA that does both, or a flag with release and acquire"


class Touched(NamedTuple):
    """What some clusters of a grid have accessed, by the regions' addresses; bits are packed."""

    written: dict[int, np.ndarray]  # bytes
    read: dict[int, np.ndarray]
    loaded: set[int]  # by TMA, of regions that these clusters do not write

    def clashes(self, other: Touched) -> bool:
        """Whether both touch a byte, and one of them writes it."""
        pairs = [(self.written, other.written), (self.written, other.read)]
        pairs += [(self.read, other.written)]
        if self.loaded & other.written.keys() or other.loaded & self.written.keys():
            return True
        return any(bool((a[base] & b[base]).any()) for a, b in pairs for base in a.keys() & b)


Places = Callable[
    ["Machine", Any, tuple[int, ...], Container[int]], tuple[Region, np.ndarray] | None
]


class BoxRead(NamedTuple):
    """A TMA load: of what, by which cluster of the grid."""

    tmap: Any
    at: tuple[int, ...]
    owner: int
    instruction: Instruction


def orders_clusters(program: Program) -> bool:
    """Whether clusters may order what they do, through global memory."""
    return any(_ORDERS.match(ins.op) and "shared" not in ins.op for ins in program.code)


class GlobalRaces:
    """Who wrote each byte of the launch's tensors last, and who has read it."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        self.active = machine.checks and not orders_clusters(machine.program)
        # by the region's address: 1 + the number of the cluster in the grid (0: none), PTX line
        self.shadows: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.readers: dict[int, np.ndarray] = {}  # likewise; MANY where there are several
        self.boxes: dict[tuple[Any, ...], BoxRead] = {}

    def load(self, addresses: np.ndarray, size: int, warps: np.ndarray, ins: Instruction) -> None:
        """``size`` bytes at each address, which lie in tensors, are read by ``warps`` (n,)."""
        if not self.active or not len(addresses):
            return
        region = self.m.memory.find(int(addresses[0]))
        if region is None or len(region.data) > LARGEST_READ:
            return
        inside = (addresses >= np.uint64(region.base)) & (addresses < np.uint64(region.end))
        owners = self.m.grid.cta_cluster[self.m.grid.warp_cta[warps]].astype(np.uint32) + 1
        places = (addresses[inside] - np.uint64(region.base)).astype(np.int64)[:, None]
        places = places + np.arange(size)
        mine = np.broadcast_to(owners[inside, None], places.shape)
        if region.base in self.shadows:
            who, line = self.shadows[region.base]
            other = (who[places] != 0) & (who[places] != mine)
            if other.any():
                at = tuple(int(v[0]) for v in np.nonzero(other))
                place = int(places[at])
                self.m.findings.add(
                    "race",
                    f"{self._name(int(mine[at]) - 1)} reads {region.element(place)}, and "
                    f"{self._name(int(who[place]) - 1)} wrote it (PTX line {line[place]}): nothing "
                    "orders the two",
                    ins,
                    remedy=_REMEDY,
                )
        readers = self.readers.setdefault(region.base, np.zeros(len(region.data), np.uint32))
        before = readers[places]
        readers[places] = np.where((before == 0) | (before == mine), mine, MANY)
        readers[places[readers[places] != mine]] = MANY  # of several in one batch

    def store(
        self, addresses: np.ndarray, values: np.ndarray, complain: Any, warps: np.ndarray, ins: Any
    ) -> None:
        """As `GlobalMemory.store`, by ``warps`` (n,)."""
        memory = self.m.memory
        if not self.active:
            memory.store(addresses, values, complain)
            return
        owners = self.m.grid.cta_cluster[self.m.grid.warp_cta[warps]]
        alone = len(np.unique(addresses)) == len(addresses) or len(np.unique(owners)) == 1
        for owner in (None,) if alone else np.unique(owners).tolist():
            some = slice(None) if owner is None else owners == owner
            where, new, mine = addresses[some], values[some], owners[some]
            for region, members, offsets in memory.by_region(where, values.shape[1], complain):
                self.note(region, offsets, new[members], mine[members], ins)
            memory.store(where, new, complain)

    def note(
        self,
        region: Region,
        offsets: np.ndarray,
        values: np.ndarray,
        owners: np.ndarray,
        ins: Instruction,
    ) -> None:
        """``values`` (n, size) bytes are about to be written at ``offsets`` (n,) of the region, by
        the clusters ``owners`` (n,) or (1,)."""
        if not self.active or len(region.data) > LARGEST:
            return
        if region.base not in self.shadows:
            size = len(region.data)
            self.shadows[region.base] = np.zeros(size, np.uint32), np.zeros(size, np.uint32)
        who, line = self.shadows[region.base]
        places = offsets[:, None] + np.arange(values.shape[1])
        mine = np.broadcast_to((owners + 1).astype(np.uint32)[:, None], places.shape)
        before = who[places]
        other = (before != 0) & (before != mine) & (region.data[places] != values)
        if other.any():
            at = tuple(int(v[0]) for v in np.nonzero(other))
            place = int(places[at])
            self.m.findings.add(
                "race",
                f"{self._name(int(mine[at]) - 1)} writes {region.element(place)}, and "
                f"{self._name(int(before[at]) - 1)} wrote another value there (PTX line "
                f"{line[place]}): nothing orders the two",
                ins,
                remedy=_REMEDY,
            )
        if region.base in self.readers:
            reader = self.readers[region.base][places]
            other = (reader != 0) & (reader != mine) & (region.data[places] != values)
            if other.any():
                at = tuple(int(v[0]) for v in np.nonzero(other))
                peer = "others have" if reader[at] == MANY else ""
                peer = peer or f"{self._name(int(reader[at]) - 1)} has"
                self.m.findings.add(
                    "race",
                    f"{self._name(int(mine[at]) - 1)} writes "
                    f"{region.element(int(places[at]))}, which {peer} read: nothing orders the two",
                    ins,
                    remedy=_REMEDY,
                )
        who[places], line[places] = mine, ins.line

    def box(self, tmap: Any, at: tuple[int, ...], cta: int, ins: Instruction) -> None:
        """A TMA load into ``cta``."""
        if self.active:
            owner = int(self.m.grid.cta_cluster[cta])
            key = id(tmap), at, owner
            if key not in self.boxes:
                self.boxes[key] = BoxRead(tmap, at, owner, ins)

    def touched(self, places: Places) -> Touched:
        """By the clusters that have run."""
        written = {base: who != 0 for base, (who, _) in self.shadows.items()}
        read = {base: reader != 0 for base, reader in self.readers.items()}
        loaded = set()
        for box in self.boxes.values():
            found = places(self.m, box.tmap, box.at, written)
            if found is not None:
                region, offsets = found
                marks = read.setdefault(region.base, np.zeros(len(region.data), bool))
                marks[offsets[:, None] + np.arange(box.tmap.itemsize)] = True
            elif (region_of := self.m.memory.find(box.tmap.address)) is not None:
                loaded.add(region_of.base)
        return Touched(
            {base: np.packbits(marks) for base, marks in written.items()},
            {base: np.packbits(marks) for base, marks in read.items()},
            loaded - written.keys(),
        )

    def finish(self, places: Places) -> None:
        """The grid has run. ``places``: the tensor and the bytes of it that a TMA load reads."""
        if not self.shadows:
            return
        for read in self.boxes.values():
            found = places(self.m, read.tmap, read.at, self.shadows)
            if found is None:
                continue
            region, offsets = found
            who, line = self.shadows[region.base]
            other = (who[offsets] != 0) & (who[offsets] != read.owner + 1)
            if other.any():
                place = int(offsets[int(other.argmax())])
                self.m.findings.add(
                    "race",
                    f"a TMA load of {self._name(read.owner)} reads byte {place} of "
                    f"{region.description or region.name}, which {self._name(int(who[place]) - 1)} "
                    f"writes (PTX line {line[place]}): nothing orders the two",
                    read.instruction,
                )

    def _name(self, cluster: int) -> str:
        x, y, z = self.m.grid.coordinates(cluster * self.m.grid.cluster_size)
        what = "CTA" if self.m.grid.cluster_size == 1 else "the cluster of CTA"
        return f"{what} ({x},{y},{z})"
