"""Memory of mbarriers that something else is written to, or read from.

An mbarrier is an opaque object of 8 bytes: until mbarrier.inval nothing else may write there, and
no operation on it works after that (PTX ISA 9.7.13.15.1, 9.7.13.15.10). Kernels do reuse the memory
of barriers that they are done with, so a write is reported when the mbarrier is used again. What
another instruction reads of one that nothing has overwritten is not defined either. An
mbarrier.inval comes after all uses of other warps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cutex.sim.hazards.clocks import Clocks
from cutex.sim.machine.events import Observer, SharedBytes
from cutex.sim.machine.operation import Operation, Span
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine
    from cutex.sim.machine.phase import MBarrier

BYTES = 8


class _Access(NamedTuple):
    """An access of the memory of an mbarrier by a warp; ``what``: the operation's name, if it is
    one."""

    what: str
    warp: int
    instruction: Instruction


class MBarrierMemory(Observer):
    """The writes to the memory of all resident CTAs' mbarriers."""

    def __init__(self, machine: Machine, clocks: Clocks) -> None:
        self.m, self.clocks = machine, clocks
        self.invalidates = any("inval" in ins.parts for ins in machine.program.code)
        # by CTA and offset: the warps that have used the mbarrier, with their counts
        self.uses: dict[tuple[int, int], dict[int, tuple[int, Instruction]]] = defaultdict(dict)
        self.low, self.high = machine.smem_bytes, 0  # bounds of the mbarriers of all CTAs
        self.written: dict[tuple[int, int], _Access] = {}  # by CTA and offset

    def mbarrier_made(self, barrier: MBarrier, warp: int, lane: int, again: bool) -> None:
        self.written.pop((barrier.cta, barrier.offset), None)
        self.low = min(self.low, barrier.offset)
        self.high = max(self.high, barrier.offset + BYTES)

    def mbarrier_used(self, barrier: MBarrier, warp: int, ins: Instruction) -> None:
        if self.invalidates:
            self._use(barrier, warp, ins)
        wrote = self.written.pop((barrier.cta, barrier.offset), None)
        if wrote is None:
            return
        name = self.m.grid.name_warp
        self.m.findings.add(
            "barrier misuse",
            f"{wrote.what}{name(wrote.warp)} writes to the memory of "
            f"{self.m.mbarriers.name(barrier.cta, barrier.offset)}, which {name(warp)} uses after "
            f"that, at {ins.where()}",
            wrote.instruction,
            remedy="memory of its own for what is written, or mbarrier.inval and a new init",
        )

    def _use(self, barrier: MBarrier, warp: int, ins: Instruction) -> None:
        """Keep a use; report an invalidation that is not ordered after those of other warps."""
        uses, name = self.uses[barrier.cta, barrier.offset], self.m.grid.name_warp
        if "inval" not in ins.parts:
            uses[warp] = self.clocks.now(warp), ins
            return
        known = self.clocks.known[warp]
        what = self.m.mbarriers.name(barrier.cta, barrier.offset)
        for peer, (count, use) in uses.items():
            if peer != warp and known[self.clocks.slot[peer]] < count:
                self.m.findings.add(
                    "race",
                    f"{name(warp)} invalidates {what}, which {name(peer)} uses at {use.where()}: "
                    "no barrier orders the two",
                    ins,
                    remedy="a barrier of all who use it before mbarrier.inval",
                )
                break
        uses.clear()

    def shared(self, at: SharedBytes, write: bool, ordinary: bool, ins: Instruction) -> None:
        for k in self._near(at).tolist():
            low, cta, warp = int(at.offset[k]), int(at.cta[k]), int(at.warps[k])
            if write:
                self._write(cta, low, low + at.width, _Access("", warp, ins))
            else:
                self._read(cta, low, low + at.width, _Access("", warp, ins))

    def copying(self, at: SharedBytes, op: Operation, ins: Instruction) -> None:
        for k in self._near(at).tolist():
            low, by = int(at.offset[k]), _Access("the cp.async of ", int(at.warps[k]), ins)
            self._write(int(at.cta[k]), low, low + at.width, by)

    def _near(self, at: SharedBytes) -> np.ndarray:
        """The places of an access between the first and the last of the mbarriers."""
        if not self.high:
            return np.zeros(0, np.int64)
        return np.flatnonzero((at.offset < self.high) & (at.offset + at.width > self.low))

    def issued(self, ops: Sequence[Operation]) -> None:
        for op in ops if self.high else ():
            by = _Access(f"{op.what} of ", op.warp, op.instruction)
            for place in op.reads:
                if isinstance(place, Span) and place.low < self.high and place.high > self.low:
                    self._read(place.cta, place.low, place.high, by, place)
            for place in op.writes:
                if isinstance(place, Span) and place.low < self.high and place.high > self.low:
                    self._write(place.cta, place.low, place.high, by, place)

    def _mbarriers(self, cta: int, low: int, high: int, place: Span | None) -> Iterator[int]:
        """The offsets of the mbarriers in these bytes; of a ``place`` with gaps, in its chunks."""
        first = max(low, self.low) // BYTES * BYTES
        for offset in range(first, min(high, self.high), BYTES):
            if (cta, offset) in self.m.mbarriers.barriers and (
                place is None or place.holds(np.array([offset]), BYTES).any()
            ):
                yield offset

    def _write(self, cta: int, low: int, high: int, by: _Access, place: Span | None = None) -> None:
        """Keep a write of these bytes."""
        for offset in self._mbarriers(cta, low, high, place):
            self.written.setdefault((cta, offset), by)

    def _read(self, cta: int, low: int, high: int, by: _Access, place: Span | None = None) -> None:
        """Report a read of these bytes, where nothing has overwritten the mbarrier."""
        for offset in self._mbarriers(cta, low, high, place):
            if (cta, offset) not in self.written:
                self.m.findings.add(
                    "barrier misuse",
                    f"{by.what}{self.m.grid.name_warp(by.warp)} reads the memory of "
                    f"{self.m.mbarriers.name(cta, offset)}, which is opaque: what it gets is not "
                    "defined",
                    by.instruction,
                    remedy="mbarrier.test_wait, which tells whether a phase is complete",
                )
                return
