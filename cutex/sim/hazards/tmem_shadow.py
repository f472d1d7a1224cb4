"""Shadow of tensor memory: the last tcgen05.st and ld of each column.

It keeps, for each column of 16 lanes, the last warp that stored there and the last that loaded,
with the counts of these agents (see clocks). Both instructions are asynchronous; tmem_accesses
defines their completion. A later access to the same columns must be ordered after it, or races:
MMAs and copies when they are issued (their own accesses are recorded by async_accesses),
tcgen05.dealloc as a write.

By the letter (9.7.16.6.3, 9.7.16.6.4.4) a load that others wait for needs its wait::ld however its
registers were used, and every hand-over between threads a tcgen05.fence::before_thread_sync (which
a commit implies) and an ::after_thread_sync. Kernels of NVIDIA leave these out: an advisory. The
fences compose with whatever orders execution, a relaxed cluster barrier too.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.hazards.clocks import Clocks
from cutex.sim.hazards.early_loads import EarlyLoads
from cutex.sim.hazards.tmem_accesses import TmemAccesses
from cutex.sim.machine.events import Observer
from cutex.sim.machine.operation import Kind, Rectangle
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine
    from cutex.sim.machine.phase import MBarrier

PEERS = "only the peer's tcgen05.dealloc, for which this one need not wait"  # comes after that

_LANES = 16  # lanes of a unit: half of a warp's quarter
_UNITS, _COLUMNS = 128 // _LANES, 512


class TmemShadow(Observer):
    """The shadow by CTA, 16 lanes and column."""

    def __init__(self, machine: Machine, clocks: Clocks, accesses: TmemAccesses) -> None:
        self.m, self.clocks, self.accesses = machine, clocks, accesses
        shape = (machine.grid.num_ctas, _UNITS, _COLUMNS)
        self.writer, self.reader = np.zeros(shape, np.int16), np.zeros(shape, np.int16)  # slots
        self.written, self.read = np.zeros(shape, np.int32), np.zeros(shape, np.int32)  # 0: none
        self.line = np.zeros(shape, np.int32)  # PTX line of the last store
        self.read_line = np.zeros(shape, np.int32)
        self.early = EarlyLoads(machine, shape)
        # by CTA: places that operations have overwritten since its last ld or st
        self.overwritten: dict[int, set[Hashable]] = {}
        # by CTA of a pair: the warp that has allocated last, its count at that, and the PTX line
        self.allocated: dict[int, tuple[int, int, int]] = {}

    def tmem_accessed(self, warp: int, place: Rectangle, write: bool, ins: Instruction) -> None:
        """Check and record a tcgen05.ld or st of ``warp``."""
        what = "tcgen05.st" if write else "tcgen05.ld"
        self._check(warp, place, write, what, ins, self.clocks.usable[warp])
        kind = Kind.STORE if write else Kind.LOAD
        number = self.accesses.issue(kind, warp, ins)
        self.overwritten.pop(place.cta, None)
        at = _units(place)
        who, when = (self.writer, self.written) if write else (self.reader, self.read)
        who[at], when[at] = self.clocks.agent(kind, warp), number
        (self.line if write else self.read_line)[at] = ins.line
        self.early.accessed(at, write)

    def issue(self, warp: int, place: Rectangle, write: bool, what: str, ins: Instruction) -> None:
        """Check an operation of the tensor cores issued by ``warp``; ``write``: whether it
        overwrites the place.
        """
        overwritten = self.overwritten.setdefault(place.cta, set())
        if place.key in overwritten:
            return
        self._check(warp, place, write, what, ins, self.clocks.usable[warp])
        if write:
            self._forget(place)
            overwritten.add(place.key)
            self.early.filled[_units(place)] = True

    def tmem_allocated(self, warp: int, cta: int, pair: bool, ins: Instruction) -> None:
        """Record that a pair's CTA has allocated."""
        if pair:
            self.allocated[cta] = warp, self.clocks.now(warp), ins.line

    def tmem_freeing(self, warp: int, place: Rectangle, own: bool, ins: Instruction) -> None:
        """Check a tcgen05.dealloc, which is synchronous and so needs no fence before it. ``own``:
        whether the place is in the warp's CTA.

        NOTE: the warps of a pair must be ordered after the accesses of both CTAs (9.7.16.7.1).
        Examples of NVIDIA order each only after its own CTA's: as the two deallocate together, that
        is right where dealloc waits for the peer, which it may, and need not. The peer's alloc is
        another matter: it need not wait either, and a B300 fails where it comes after the dealloc
        (NVIDIA/cutlass#3435).
        """
        if not own and place.cta in self.allocated:
            self._after_alloc(warp, place.cta, ins)
        usable = np.maximum(self.clocks.usable[warp], self.clocks.ordered[warp])
        self._check(warp, place, True, "tcgen05.dealloc", ins, usable, "" if own else PEERS)

    def _after_alloc(self, warp: int, peer: int, ins: Instruction) -> None:
        by, count, line = self.allocated[peer]
        if self.clocks.follows[warp, self.clocks.slot[by]] < count:
            self.m.findings.add(
                "race",
                f"tcgen05.dealloc of {self.m.grid.name_warp(warp)} may come before the "
                f"tcgen05.alloc of {self.m.grid.name_warp(by)} at PTX line {line}, for which "
                "neither need wait: no barrier orders the two",
                ins,
                remedy="a barrier of both CTAs between the tcgen05.alloc of one and the "
                "tcgen05.dealloc of the other",
            )

    def tmem_freed(self, place: Rectangle) -> None:
        """Drop the accesses there."""
        self._forget(place)
        self.early.filled[_units(place)] = False

    def mbarrier_used(self, barrier: MBarrier, warp: int, ins: Instruction) -> None:
        if ins.name == "tcgen05":
            self.early.committed((barrier.cta, barrier.offset), warp)

    def warps_left(self, warps: np.ndarray) -> None:
        self.early.warps_left(warps)

    def _forget(self, place: Rectangle) -> None:
        at = _units(place)
        self.written[at] = self.read[at] = 0

    def _check(
        self,
        warp: int,
        place: Rectangle,
        write: bool,
        what: str,
        ins: Instruction,
        usable: np.ndarray,
        advisory_reason: str = "",
    ) -> None:
        """Report a race; ``usable`` (slots,): the counts that strictly precede the access.
        ``advisory_reason``: the reason why a missing order is an advisory only, if it is.
        """
        at, known = _units(place), self.clocks.follows[warp]
        others = [(self.writer, self.written, self.line, "stored")]
        if write:
            others.append((self.reader, self.read, self.read_line, "loaded"))
        for who, when, lines, did in others:
            other, count = who[at], when[at]
            unknown = count > known[other]
            if not unknown.any():
                unknown = count > usable[other]
                if not unknown.any():
                    continue
                why = "by the letter, a wait or a tcgen05.fence is missing between the two"
            else:
                why = "no barrier orders the two"
            unit, column = (int(v[0]) for v in np.nonzero(unknown))
            slot, advisory = int(other[unit, column]), why.startswith("by")
            peer = self.clocks.peer(warp, slot)
            if peer == warp and not advisory:
                wait = "st" if did == "stored" else "ld"
                why = f"no tcgen05.wait::{wait} stands in between"
                advisory = write  # NOTE: hardware keeps the order of a warp's own accesses
            elif not advisory and int(self.clocks.known[peer, slot]) < count[unit, column]:
                wait = "st" if did == "stored" else "ld"
                why += f", and that warp has not waited with tcgen05.wait::{wait}"
            if advisory_reason and not advisory:
                why, advisory = f"{advisory_reason}, comes after that", True
            if did == "loaded" and not advisory:
                cell = place.cta, at[1].start + unit, place.low + column
                self.early.raced(cell, peer, int(lines[at][unit, column]), warp, what, ins)
            self.m.findings.add(
                "race",
                f"{what} of {self.m.grid.name_warp(warp)} {'overwrites' if write else 'reads'} "
                f"tensor memory column {place.low + column}, which {self.m.grid.name_warp(peer)} "
                f"{did} at PTX line {lines[at][unit, column]}: {why}",
                ins,
                advisory,
                remedy=f"tcgen05.wait::{'st' if did == 'stored' else 'ld'} by the warp that {did}"
                + (", then a barrier of both" if peer != warp else ""),
            )


def _units(place: Rectangle) -> tuple[int, slice, slice]:
    lanes = slice(place.lane // _LANES, -(-place.lane_end // _LANES))
    return place.cta, lanes, slice(place.low, place.high)
