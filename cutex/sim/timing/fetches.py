"""The bytes that warps load by ordinary instructions, from global memory and from other CTAs'
shared memory, and by cp.async that is not bulk, and the instruction at which a warp first needs
them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from math import log2
from typing import TYPE_CHECKING, Any

import numpy as np

from cutex.sim.machine.batch import Batch
from cutex.sim.machine.memory import shared_addresses
from cutex.sim.ptx.decode import Decoder
from cutex.sim.ptx.operands import Address
from cutex.sim.ptx.program import Instruction
from cutex.sim.ptx.temporaries import touched
from cutex.sim.timing.events import Event, Fetch, Fetched, Need, Peer

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

SECTOR = 32  # bytes


def into_registers(ins: Instruction) -> bool:
    return ins.name == "ld" and ("global" in ins.parts or from_peer(ins))


def from_peer(ins: Instruction) -> bool:
    """Whether the instruction loads from the shared memory of a CTA of the cluster."""
    return ins.name == "ld" and "shared::cluster" in ins.op


class Fetches:
    """Records the loads of the warps of a machine; ``add`` appends an event to a warp's program."""

    def __init__(
        self, machine: Machine, code: list[Instruction], add: Callable[[int, Event], None]
    ) -> None:
        self.m, self.add = machine, add
        self.loaded: dict[int, float] = defaultdict(float)  # bytes, by the base of their tensor
        self.sectors: dict[int, set[int]] = defaultdict(set)
        self.reuse: dict[tuple[int, int], Reuse] = defaultdict(Reuse)  # by tensor and CTA
        self.count: dict[int, int] = defaultdict(int)  # loads into registers, of a warp
        self.needed: dict[int, int] = defaultdict(int)  # the last that the warp waited for
        self.loads: dict[int, dict[Any, int]] = defaultdict(dict)  # of a warp, by register
        both = [touched(ins) for ins in code]
        self.written, self.read = [w for w, _ in both], [r for _, r in both]
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
                    self.add(warp, Need(number))

    def kind(self, pc: int, ins: Instruction) -> Callable[[Batch, Any], None]:
        """The function that records a load, or a copy, after it has executed."""
        d = Decoder(ins, self.m)
        registers, peer = into_registers(ins), from_peer(ins)
        addresses = [i for i, o in enumerate(ins.operands) if isinstance(o, Address)]
        address = d.address(addresses[-1])
        size = width(ins) if registers else int(ins.operands[addresses[-1] + 1].value)  # type: ignore[union-attr]
        part = None if registers or len(ins.operands) < 4 else d.src(3, "u32")

        def add(b: Batch, verdict: Any) -> None:
            found = b.lanes(address(b)).astype(np.int64)
            active = b.active()
            if part is not None and "ignore" not in ins.op:
                active = active & (b.lanes(part(b)) > 0)
            for row in np.nonzero(b.any_active())[0].tolist():
                warp = int(b.idx[row])
                at = found[row][active[row]]
                if registers:
                    self.count[warp] += 1
                    numbers = dict.fromkeys(self.written[pc], self.count[warp])
                    self.loads[warp].update(numbers)
                event = (
                    self._peer(warp, at, size) if peer else self._fetch(warp, at, size, registers)
                )
                self.add(warp, event)

        return add

    def _peer(self, warp: int, at: np.ndarray, size: int) -> Peer:
        """What a warp's own CTA holds comes as fast as by any load from shared memory."""
        g = self.m.grid
        addresses = shared_addresses(at.view(np.uint64))
        cta, _ = g.shared_location(np.full(len(at), warp), addresses)
        return Peer(size * int((cta != g.warp_cta[warp]).sum()))

    def _fetch(self, warp: int, at: np.ndarray, size: int, registers: bool) -> Fetch:
        if not len(at):
            return Fetch(0, 0, 0, registers)
        steps = np.arange(0, size, SECTOR)
        ends = np.concatenate([at + size - 1, (at[:, None] + steps).ravel()])
        sectors = np.unique(ends // SECTOR)
        region = self.m.memory.find(int(at[0]))
        base = region.base if region is not None else 0
        self.loaded[base] += SECTOR * len(sectors)
        self.sectors[base].update(sectors.tolist())
        self.reuse[base, int(self.m.grid.warp_cta[warp])].fetch(sectors.tolist())
        return Fetch(len(sectors), len(np.unique(sectors // 4)), base, registers)

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
            )
            for base, loaded in self.loaded.items()
        }


class Reuse:
    """How much of a tensor a CTA fetches between two fetches of the same sector."""

    def __init__(self) -> None:
        self.loaded = 0
        self.latest: dict[int, int] = {}  # by sector: the bytes loaded before it
        self.again: dict[float, float] = defaultdict(float)  # bytes, by those fetched in between

    def fetch(self, sectors: list[int]) -> None:
        for sector in sectors:
            if (before := self.latest.get(sector)) is not None:
                self.again[_rounded(self.loaded - before)] += SECTOR
            self.latest[sector] = self.loaded
            self.loaded += SECTOR


def _rounded(size: int) -> float:
    """A number of bytes to an eighth of a power of two, so that few are different."""
    return float(round(2 ** (round(8 * log2(size)) / 8)))


def width(ins: Instruction) -> int:
    """Bytes of a lane's access."""
    bits = next((int(p[1:]) for p in reversed(ins.parts) if re.fullmatch(r"[bufs]\d+", p)), 32)
    return bits // 8 * int(next((p[1:] for p in ins.parts if re.fullmatch(r"v\d", p)), 1))
