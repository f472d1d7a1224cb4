"""Lanes that read what a copy brought, or overwrite what a bulk store reads, of which only other
lanes of their warp have waited.

The wait for an mbarrier's phase orders the thread that executes it (PTX ISA 8.9.1, 9.7.13.15.16),
and so does one for groups of bulk stores (9.7.9.25.4.6). Where one lane waits for all, as the
elected one, the others may run ahead of it, and know of the copy's end by a bar.warp.sync or
another barrier behind the wait. Of a bulk store that is an advisory: its wait is one instruction,
which the warp executes before the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cutex.sim.hazards.async_accesses import AsyncAccesses
from cutex.sim.hazards.clocks import Clocks
from cutex.sim.machine.events import Observer, SharedBytes
from cutex.sim.machine.operation import Kind, Span
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine
    from cutex.sim.machine.phase import MBarrier


class _Wait(NamedTuple):
    """The last wait at an mbarrier of some lanes of a warp, and the number of phases then."""

    lanes: np.ndarray
    phases: int
    instruction: Instruction


class _StoreWait(NamedTuple):
    """The last wait of some lanes of a warp for their bulk stores: those behind number ``low``, up
    to ``high``, of which the other lanes do not know.
    """

    lanes: np.ndarray
    low: int
    high: int
    instruction: Instruction


class LaneWaits(Observer):
    """The waits of single lanes, since their warps have synchronised."""

    def __init__(self, machine: Machine, clocks: Clocks, copies: AsyncAccesses) -> None:
        self.m, self.clocks, self.copies = machine, clocks, copies
        self.waits: dict[int, dict[tuple[int, int], _Wait]] = {}  # by warp and mbarrier
        self.stores: dict[int, _StoreWait] = {}  # by warp
        self.ended: dict[int, tuple[int, int]] = {}  # by warp: stores known before, and now
        self.some = np.zeros(machine.grid.num_warps, bool)  # warps that have such

    def mbarrier_passed(
        self, barrier: MBarrier, warp: int, lanes: np.ndarray, ins: Instruction
    ) -> None:
        if len(lanes) == 32:
            self.stores.pop(warp, None)  # NOTE: the lane may have arrived there behind its wait
            return
        waits, key = self.waits.setdefault(warp, {}), (barrier.cta, barrier.offset)
        before = waits.get(key)
        if before is not None and before.phases == barrier.phases:
            lanes = np.union1d(before.lanes, lanes)
        waits[key] = _Wait(lanes, barrier.phases, ins)
        self.some[warp] = True

    def waited(self, warps: Sequence[int], kind: Kind, numbers: Sequence[int]) -> None:
        """NOTE: the clocks have to count the wait after this."""
        if kind is Kind.BULK:
            (warp,), (number,) = warps, numbers
            self.ended[warp] = self.clocks.known.item(warp, self.clocks.agent(kind, warp)), number

    def lanes_waited(self, warp: int, lanes: np.ndarray, ins: Instruction) -> None:
        ended, before = self.ended.pop(warp, None), self.stores.get(warp)
        if len(lanes) == self.m.live[warp].sum():
            self.stores.pop(warp, None)
        elif ended is not None and before is None:
            self.stores[warp] = _StoreWait(lanes, *ended, ins)
            self.some[warp] = True
        elif ended is not None and before is not None:
            both = np.union1d(before.lanes, lanes)
            self.stores[warp] = _StoreWait(both, before.low, ended[1], ins)

    def shared(self, at: SharedBytes, write: bool, ordinary: bool, ins: Instruction) -> None:
        if not (self.waits or self.stores) or not self.some[at.warps].any():
            return
        for warp in np.unique(at.warps[self.some[at.warps]]).tolist():
            which = np.flatnonzero(at.warps == warp)
            if write and warp in self.stores:
                self._overwritten(warp, self.stores[warp], at, which, ins)
            for key, wait in self.waits.get(warp, {}).items():
                others = which[~np.isin(at.lanes[which], wait.lanes)]
                for span in self._spans(key, wait.phases) if len(others) else ():
                    hit = others[span.holds(at.offset[others], at.width)]
                    hit = hit[at.cta[hit] == key[0]]
                    if len(hit):
                        self._tell(warp, wait, at, int(hit[0]), write, ins)
                        return

    def _spans(self, barrier: tuple[int, int], phases: int) -> Iterator[Span]:
        """The places of the barrier's CTA that copies have written which completed on it in the
        last of so many phases.
        """
        cta = barrier[0]
        for track in self.copies.spans:
            op, count = track.write.operation[cta], track.write.count.item(cta)
            if op is None or count != phases or not op.signals:
                continue
            if op.signal_on(cta) == barrier and isinstance(track.place, Span):
                yield track.place

    def _overwritten(
        self, warp: int, wait: _StoreWait, at: SharedBytes, which: np.ndarray, ins: Instruction
    ) -> None:
        """Tell of a lane that stores where only others know that a bulk store no longer reads."""
        others = which[~np.isin(at.lanes[which], wait.lanes)]
        slot = self.clocks.agent(Kind.BULK, warp)
        for track in self.copies.spans if len(others) else ():
            last = track.reads.get(slot)
            assert isinstance(track.place, Span)
            if last is None:
                continue
            hit = others[track.place.holds(at.offset[others], at.width)]
            count = last.count[at.cta[hit]]
            hit = hit[(count > wait.low) & (count <= wait.high)]
            if len(hit):
                self._tell(warp, wait, at, int(hit[0]), True, ins)
                return

    def _tell(
        self,
        warp: int,
        wait: _Wait | _StoreWait,
        at: SharedBytes,
        k: int,
        write: bool,
        ins: Instruction,
    ) -> None:
        who, of_store = wait.lanes, isinstance(wait, _StoreWait)
        only = f"lane {who[0]} has" if len(who) == 1 else f"{len(who)} other lanes have"
        self.m.findings.add(
            "race",
            f"lane {at.lanes[k]} of {self.m.grid.name_warp(warp)} "
            f"{'overwrites' if write else 'reads'} shared memory 0x{int(at.offset[k]):x}, and of "
            f"the {'bulk store from' if of_store else 'copy to'} there only {only} waited, at PTX "
            f"line {wait.instruction.line}: {'by the letter, ' if of_store else ''}no "
            "bar.warp.sync orders the lanes",
            ins,
            advisory=of_store,
            remedy="a wait by all lanes, or sync_warp() behind that of one",
        )

    # -- what orders the lanes ---------------------------------------------------------------------

    def lanes_met(self, warps: np.ndarray) -> None:
        if self.waits or self.stores:
            for warp in warps.tolist():
                self._met(warp)

    def some_lanes_met(self, warp: int, lanes: int) -> None:
        named = np.flatnonzero(lanes >> np.arange(32) & 1)
        for key, wait in self.waits.get(warp, {}).items():
            if np.isin(wait.lanes, named).any():
                self.waits[warp][key] = wait._replace(lanes=np.union1d(wait.lanes, named))
        store = self.stores.get(warp)
        if store is not None and np.isin(store.lanes, named).any():
            self.stores[warp] = store._replace(lanes=np.union1d(store.lanes, named))

    def named_passed(self, key: tuple[int, int], warp: int) -> None:
        self._met(warp)

    def cluster_passed(self, which: int, warp: int) -> None:
        self._met(warp)

    def _met(self, warp: int) -> None:
        if self.some[warp]:
            self.waits.pop(warp, None)
            self.stores.pop(warp, None)
            self.some[warp] = False
