"""The bytes that warps load by ordinary instructions, from global memory and from other CTAs'
shared memory, and by cp.async that is not bulk, and the instruction at which a warp first needs
them.

Which loads are under way when a warp waits for one says the machine code: ptxas moves the loads of
a basic block, and those of several turns of a loop that it unrolls, before the first use. So a wait
is recorded behind the loads that stand before the use there.

What a CTA has loaded lately is in L1, if the instruction puts it there: until the CTA has brought
in as many bytes as its share of L1 has.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import inf, log2
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cutex.sim.machine.batch import Batch
from cutex.sim.machine.memory import shared_addresses
from cutex.sim.ptx.decode import Decoder
from cutex.sim.ptx.operands import Address
from cutex.sim.ptx.program import Instruction
from cutex.sim.ptx.temporaries import touched
from cutex.sim.timing.events import Event, Fetch, Fetched, Need, Peer
from cutex.sim.timing.machine_code import Cost
from cutex.sim.timing.regions import regions
from cutex.sim.timing.wavefronts import l1_cycles

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

SECTOR = 32  # bytes
LINE = 128
# of the bytes of L1 that a CTA has: after how many it begins to lose what it holds, and has lost
# all; and how many a line takes that is stored. Probe: rows that threads walk along, H200
KEPT, LOST, STORED_LINE = 0.95, 1.25, 1.2 * LINE
AHEAD = -2  # the block of loads that stand before their loop
_PAST_L1 = ("cg", "cv", "volatile", "relaxed", "acquire", "mmio")


class Place(NamedTuple):
    """Where the machine code has an instruction: its basic block, its address in each turn of a
    loop that is unrolled, and whether that is in fewer loops than what runs as often as it."""

    block: int
    turns: tuple[int, ...]
    hoisted: bool = False


class _Use(NamedTuple):
    """The first use of a load that is not recorded yet: the load's number; the basic block, how
    often the warp had come through it, and the address there."""

    number: int
    block: int
    passed: int
    at: int


def places(code: Sequence[Instruction], costs: Mapping[int, Cost]) -> list[Place | None]:
    """The place of each instruction, of a load that of what loads; None where it is not known."""
    on_line = Counter(ins.line for ins in code)
    found: list[Place | None] = []
    depths = {
        block: p.depth
        for c in costs.values()
        for (block, _), p in zip(c.sass, c.parts, strict=True)
    }
    deepest: dict[int, int] = defaultdict(int)  # by region
    alike = regions(code) if costs else []
    for ins, region in zip(code, alike, strict=False):
        if (cost := costs.get(ins.line)) is not None and on_line[ins.line] == 1:
            deepest[region] = max(deepest[region], *(p.depth for p in cost.parts))
    for pc, ins in enumerate(code):
        cost = costs.get(ins.line)
        if cost is None or on_line[ins.line] > 1:
            found.append(None)
            continue
        loads = set(cost.asynchronous) if into_registers(ins) else set()
        mine = [(block, at) for block, at in cost.sass if not loads or at in loads]
        often = Counter(block for block, _ in mine)
        block = max(often, key=lambda b: (depths[b], often[b]), default=0)
        turns = tuple(sorted(at for b, at in mine if b == block))
        hoisted = bool(turns) and depths[block] < deepest[alike[pc]]
        found.append(Place(block, turns, hoisted) if turns else None)
    return found


def cached(ins: Instruction) -> bool:
    """Whether L1 keeps what the instruction loads."""
    return not ({*_PAST_L1} & {*ins.parts} or "no_allocate" in ins.op)


def into_registers(ins: Instruction) -> bool:
    return ins.name == "ld" and ("global" in ins.parts or from_peer(ins))


def from_peer(ins: Instruction) -> bool:
    """Whether the instruction loads from the shared memory of a CTA of the cluster."""
    return ins.name == "ld" and "shared::cluster" in ins.op


class Fetches:
    """Records the loads of the warps of a machine; ``add`` appends an event to a warp's program."""

    def __init__(
        self,
        machine: Machine,
        code: list[Instruction],
        add: Callable[[int, Event], None],
        costs: Mapping[int, Cost],
        programs: Mapping[int, list[Event]],
        l1: float = 0.0,
    ) -> None:
        """``programs``: to which `add` adds; ``l1``: bytes of L1 that a CTA has."""
        self.m, self.add, self.programs, self.l1 = machine, add, programs, l1
        self.places = places(code, costs)
        self.turn: dict[tuple[int, int], int] = defaultdict(int)  # of a warp and an instruction
        # by warp: of each load its block, how often the warp had come through, and the turn
        self.issued: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
        self.pending: dict[int, list[_Use]] = {}  # by warp
        # of a warp, a load that stands before its loop, and a turn: the addresses, and the number
        self.once: dict[tuple[int, int, int], tuple[bytes, int]] = {}
        # by CTA: what it has brought into L1, and by line how much that was when it was used last,
        # and which of its sectors are there, a mask
        self.brought: dict[int, float] = defaultdict(float)
        self.held: dict[int, dict[int, tuple[float, int]]] = defaultdict(dict)
        # by warp: the run of loads that it issues together, and by line that which used it last
        self.run: dict[int, tuple[int, int, int]] = {}
        self.together: dict[int, dict[int, tuple[int, int, int]]] = defaultdict(dict)
        self.stores: dict[int, int] = defaultdict(int)  # of a warp
        self.losing: dict[int, float] = defaultdict(float)  # by CTA: lines that L1 has nearly lost
        self.loaded: dict[int, float] = defaultdict(float)  # bytes, by the base of their tensor
        self.sectors: dict[int, set[int]] = defaultdict(set)
        self.reuse: dict[tuple[int, int], Reuse] = defaultdict(Reuse)  # by tensor and CTA
        # by CTA and sector: the fetch that counts it as alone, its warp and place in the program
        self.lone: dict[tuple[int, int], tuple[int, int]] = {}
        self.now_alone: list[tuple[int, int]] = []  # those of the fetch that is being recorded
        self.count: dict[int, int] = defaultdict(int)  # loads into registers, of a warp
        self.needed: dict[int, int] = defaultdict(int)  # the last that the warp waited for
        self.loads: dict[int, dict[Any, int]] = defaultdict(dict)  # of a warp, by register
        both = [touched(ins) for ins in code]
        self.written, self.read = [w for w, _ in both], [r for _, r in both]
        # by basic block: its loads, by their place in the program, and their addresses
        self.of_block: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for pc, ins in enumerate(code):
            if into_registers(ins) and (place := self.places[pc]) is not None:
                self.of_block[place.block] += [(pc, at) for at in place.turns]
        held: set[Any] = set()
        moves = [pc for pc, ins in enumerate(code) if ins.name == "mov"]
        for pc, ins in enumerate(code):
            if into_registers(ins):
                held |= self.written[pc]
        while True:  # NOTE: mov only renames, so what it copies is not needed yet
            new = {p for pc in moves if self.read[pc] & held for p in self.written[pc]} - held
            if not new:
                break
            held |= new
        self.moves = {pc for pc in moves if self.read[pc] & held}
        self.uses = {pc for pc in range(len(code)) if self.read[pc] & held} - self.moves

    def step(self, batch: Batch, pc: int) -> None:
        """Record the wait for loads that the instruction needs, before it executes."""
        if self.pending and (here := self.places[pc]) is not None and not here.hoisted:
            for warp in batch.idx.tolist():
                if any(u.block not in (here.block, AHEAD) for u in self.pending.get(warp, ())):
                    self.flush(warp)
        if pc in self.moves:
            for warp in batch.idx.tolist():
                loads = self.loads[warp]
                number = max((loads.get(p, 0) for p in self.read[pc]), default=0)
                loads.update(dict.fromkeys(self.written[pc], number))
        elif pc in self.uses:
            for warp in batch.idx.tolist():
                loads = self.loads[warp]
                number = max(loads.get(p, 0) for p in self.read[pc])
                if number > self.needed[warp]:
                    self.needed[warp] = number
                    self._use(warp, number, self.places[pc])
                    self._settle(warp, pc)

    def _settle(self, warp: int, pc: int) -> None:
        """Record the waits at uses before which no load is left that stands behind ``pc``."""
        if not (uses := self.pending.get(warp)):
            return
        ready = [u for u in uses if u.block != AHEAD and not self._loads_left(u, pc)]
        if ready and len(ready) == len(uses):
            del self.pending[warp]
            self.add(warp, Need(max(u.number for u in ready)))

    def _loads_left(self, use: _Use, pc: int) -> bool:
        """Whether the block of a use has a load that comes before it and stands behind ``pc``, or
        several turns of a loop.
        """
        loads = self.of_block[use.block]
        several = len({place for place, _ in loads}) < len(loads)
        return several or any(place > pc and at < use.at for place, at in loads)

    def _use(self, warp: int, number: int, here: Place | None) -> None:
        """Record the first use of a load: at once, or behind the loads that come before it."""
        block, passed, turn, turns = self.issued[warp][number - 1]
        if block == AHEAD:  # NOTE: all loads before the loop come first
            self.pending.setdefault(warp, []).append(_Use(number, AHEAD, 0, 0))
            return
        if here is None or here.block != block:
            self.flush(warp)
            self.add(warp, Need(number))
            return
        at = here.turns[min(turn * len(here.turns) // turns, len(here.turns) - 1)]
        self.pending.setdefault(warp, []).append(_Use(number, block, passed, at))

    def flush(self, warp: int, before: tuple[int, int, float] = (-1, -1, inf)) -> None:
        """Record the waits that are left; with a block, how often the warp has come through, and an
        address: those that are not in it, or before that.
        """
        if warp not in self.pending:
            return
        uses = self.pending.pop(warp)
        block, passed, at = before
        later = [
            u
            for u in uses
            if ((u.block, u.passed) == (block, passed) and u.at > at)
            or (u.block == AHEAD and at < inf)
        ]
        if number := max((u.number for u in uses if u not in later), default=0):
            self.add(warp, Need(number))
        if later:
            self.pending[warp] = later

    def kind(self, pc: int, ins: Instruction) -> Callable[[Batch, Any], None]:
        """The function that records a load, or a copy, after it has executed."""
        d = Decoder(ins, self.m)
        registers, peer = into_registers(ins), from_peer(ins)
        addresses = [i for i, o in enumerate(ins.operands) if isinstance(o, Address)]
        address, into = d.address(addresses[-1]), d.address(addresses[0])
        size = width(ins) if registers else int(ins.operands[addresses[-1] + 1].value)  # type: ignore[union-attr]
        part = None if registers or len(ins.operands) < 4 else d.src(3, "u32")
        place, kept = self.places[pc], cached(ins)
        turns = len(place.turns) if place else 1

        def add(b: Batch, verdict: Any) -> None:
            found = b.lanes(address(b)).astype(np.int64)
            targets = None if registers else b.lanes(into(b)).astype(np.int64)
            active = b.active()
            if part is not None and "ignore" not in ins.op:
                active = active & (b.lanes(part(b)) > 0)
            for row in np.nonzero(b.any_active())[0].tolist():
                warp = int(b.idx[row])
                lanes = np.nonzero(active[row])[0]
                at = found[row][lanes]
                passed, turn = divmod(self.turn[warp, pc], turns)
                self.turn[warp, pc] += 1
                self.run[warp] = place.block if place else -1, passed, self.stores[warp]
                ahead = place is not None and place.hoisted
                if ahead and self._same(warp, pc, turn, at):
                    numbers = dict.fromkeys(self.written[pc], self.once[warp, pc, turn][1])
                    self.loads[warp].update(numbers)
                    continue
                if registers:
                    self.count[warp] += 1
                    block = AHEAD if ahead else place.block if place else -1
                    self.issued[warp].append((block, passed, turn, turns))
                    if place:
                        self.flush(warp, (block, passed, place.turns[turn]))
                    numbers = dict.fromkeys(self.written[pc], self.count[warp])
                    if ahead:
                        self.once[warp, pc, turn] = at.tobytes(), self.count[warp]
                    self.loads[warp].update(numbers)
                if peer:
                    self.add(warp, self._peer(warp, at, size))
                    continue
                event = self._fetch(warp, at, size, lanes if registers else None, kept)
                if targets is not None:
                    event = event._replace(apart=spread(at // SECTOR, targets[row][lanes]))
                self.add(warp, event)
                self._settle(warp, pc)
                self.lone.update(
                    dict.fromkeys(self.now_alone, (warp, len(self.programs[warp]) - 1))
                )
                self.now_alone = []

        return add

    def _same(self, warp: int, pc: int, turn: int, at: np.ndarray) -> bool:
        """Whether a load that stands before its loop is of what it has loaded there."""
        return self.once.get((warp, pc, turn), (b"", 0))[0] == at.tobytes()

    def _peer(self, warp: int, at: np.ndarray, size: int) -> Peer:
        """What a warp's own CTA holds comes as fast as by any load from shared memory."""
        g = self.m.grid
        addresses = shared_addresses(at.view(np.uint64))
        cta, _ = g.shared_location(np.full(len(at), warp), addresses)
        return Peer(size * int((cta != g.warp_cta[warp]).sum()))

    def _fetch(
        self, warp: int, at: np.ndarray, size: int, lanes: np.ndarray | None, kept: bool
    ) -> Fetch:
        """``lanes``: those that load into registers."""
        registers = lanes is not None
        if not len(at):
            return Fetch(0, 0, 0, registers)
        steps = np.arange(0, size, SECTOR)
        ends = np.concatenate([at + size - 1, (at[:, None] + steps).ravel()])
        sectors = np.unique(ends // SECTOR)
        lines = len(np.unique(sectors // 4))
        if kept and self.l1:
            sectors = self._not_in_l1(warp, sectors)
        region = self.m.memory.find(int(at[0]))
        base = region.base if region is not None else 0
        self.loaded[base] += SECTOR * len(sectors)
        self.sectors[base].update(sectors.tolist())
        again = self.reuse[base, int(self.m.grid.warp_cta[warp])].fetch(sectors.tolist())
        new = 1 - again / len(sectors) if len(sectors) else 0.0
        missed = len(np.unique(sectors // 4))
        alone = self._alone(base, int(self.m.grid.warp_cta[warp]), sectors)
        asked = size * len(np.unique(at))
        held = lines - missed
        banks = 0.0 if lanes is None else l1_cycles(at, lanes, size)
        return Fetch(len(sectors), missed, base, registers, held, new, kept, alone, asked, banks)

    def _alone(self, base: int, cta: int, sectors: np.ndarray) -> int:
        """How many of the sectors are the only ones that a CTA fetches of their 64 bytes; one that
        an earlier fetch counts among these is none any more where this one brings the other."""
        had = self.reuse[base, cta].latest
        each = set(sectors.tolist())
        for s in each:
            if s ^ 1 not in each and (place := self.lone.pop((cta, s ^ 1), None)) is not None:
                program, at = self.programs[place[0]], place[1]
                program[at] = program[at]._replace(alone=program[at].alone - 1)
        alone = [(cta, s) for s in each if s ^ 1 not in each and s ^ 1 not in had]
        self.now_alone = alone
        return len(alone)

    def _not_in_l1(self, warp: int, sectors: np.ndarray) -> np.ndarray:
        """The sectors that a warp does not find in L1, where they are from now on."""
        cta, run = int(self.m.grid.warp_cta[warp]), self.run[warp]
        held, now, together = self.held[cta], self.brought[cta], self.together[warp]
        missed = []
        for sector in sectors.tolist():
            line, bit = sector // 4, 1 << sector % 4
            last, has = held.get(line, (-inf, 0))
            if has and together.get(line) != run and self._lost(cta, now - last):
                has = 0
            together[line] = run
            if now - last > self.l1:
                now += LINE
            missed.append(not has & bit)
            held[line] = (now, has | bit)
        self.brought[cta] = now
        return sectors[missed]

    def _lost(self, cta: int, since: float) -> bool:
        """Whether L1 has lost a line, into which a CTA has brought so much since: of those that it
        may have lost so many as the share says."""
        share = (since / self.l1 - KEPT) / (LOST - KEPT)
        if share <= 0.0 or share >= 1.0:
            return share >= 1.0
        self.losing[cta] += share
        lost = self.losing[cta] >= 1.0
        self.losing[cta] -= lost
        return lost

    def store(self, warp: int, at: np.ndarray) -> None:
        """Stores take lines of L1, too, and leave in these what had been loaded."""
        self.stores[warp] += 1
        if self.l1:
            cta = int(self.m.grid.warp_cta[warp])
            held, now = self.held[cta], self.brought[cta]
            for line in np.unique(at // LINE).tolist():
                last, has = held.get(line, (-inf, 0))
                if now - last > self.l1:
                    now += STORED_LINE
                held[line] = (now, has)
            self.brought[cta] = now

    def _span(self, base: int) -> tuple[float, float]:
        sectors = self.sectors[base]
        ends = min(sectors, default=0), max(sectors, default=-1) + 1
        return max(0.0, SECTOR * ends[0] - base), max(0.0, SECTOR * ends[1] - base)

    def fetched(self) -> dict[int, Fetched]:
        sizes = {r.base: float(len(r.data)) for r in self.m.memory.regions}
        again: dict[int, dict[float, float]] = defaultdict(lambda: defaultdict(float))
        for (base, _), reuse in self.reuse.items():
            for between, size in reuse.again.items():
                again[base][between] += size
        return {
            base: Fetched(
                loaded,
                float(SECTOR * len(self.sectors[base])),
                sizes.get(base, loaded),
                tuple(sorted(again[base].items())),
                self._span(base),
            )
            for base, loaded in self.loaded.items()
        }


def spread(sectors: np.ndarray, targets: np.ndarray) -> float:
    """How many of the sectors a copy spreads over several 32 bytes of shared memory."""
    places = np.unique(np.stack([sectors, targets // SECTOR]), axis=1).shape[1]
    return float(places - len(np.unique(sectors)))


class Reuse:
    """How much of a tensor a CTA fetches between two fetches of the same sector."""

    def __init__(self) -> None:
        self.loaded = 0
        self.latest: dict[int, int] = {}  # by sector: the bytes loaded before it
        self.again: dict[float, float] = defaultdict(float)  # bytes, by those fetched in between

    def fetch(self, sectors: list[int]) -> int:
        """Add a fetch; return how many of the sectors have been fetched before."""
        again = 0
        for sector in sectors:
            if (before := self.latest.get(sector)) is not None:
                self.again[_rounded(self.loaded - before)] += SECTOR
                again += 1
            self.latest[sector] = self.loaded
            self.loaded += SECTOR
        return again


def _rounded(size: int) -> float:
    """A number of bytes to an eighth of a power of two, so that few are different."""
    return float(round(2 ** (round(8 * log2(size)) / 8)))


def width(ins: Instruction) -> int:
    """Bytes of a lane's access."""
    bits = next((int(p[1:]) for p in reversed(ins.parts) if re.fullmatch(r"[bufs]\d+", p)), 32)
    return bits // 8 * int(next((p[1:] for p in ins.parts if re.fullmatch(r"v\d", p)), 1))
