"""Bulk reductions beside atomics, and those whose order a flag does not give: advisories.

An atomic and a bulk reduction are of different proxies, so by the letter they are not atomic to
each other where nothing orders the two (PTX ISA 8.7.1); an L2 adds them up one after another.

Where CTAs add in turn, so that a sum is the same in each run, a flag says whose turn it is. A
reduction is complete in global memory when its thread has waited by ``wait_group``; one that has
waited by ``wait_group.read`` may set the flag before that, and the next CTA's may come first. The
flag is of the generic proxy: by the letter a fence.proxy.async stands behind it (8.9.5).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.hazards.global_clashes import GlobalClashes
from cutex.sim.hazards.global_marks import ATOMIC, LANE, By, Records
from cutex.sim.machine.memory import Region
from cutex.sim.machine.operation import Operation
from cutex.sim.ptx.program import Instruction
from cutex.sim.ptx.strength import WEAK

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

_OTHER_PROXY = (
    "by the letter they are not atomic to each other, as one of the two is a bulk reduction, which "
    "is of the async proxy"
)


class BulkSums:
    """The bulk reductions of a launch, by their records."""

    def __init__(self, machine: Machine, clashes: GlobalClashes, records: Records) -> None:
        self.m, self.clashes, self.records = machine, clashes, records
        # by record: the slot and count of the warp at the issue
        self.issues: dict[int, tuple[int, int]] = {}
        # by operation: the clock of the proxy fences before its issue
        self.fenced: dict[int, np.ndarray] = {}

    def issued(self, op: Operation, fences: Mapping[int, np.ndarray]) -> None:
        """A bulk store or reduction; ``fences``: by warp, the clock at its last fence of proxies of
        global memory.
        """
        clocks, first, warp = self.clashes.clocks, self.m.grid.first_cta, op.warp
        known = clocks.known[warp]
        out = self.fenced[op.number] = np.zeros_like(known)
        for other, clock in fences.items():
            own = clocks.slot[other]
            if other == warp or (first[other] == first[warp] and known[own] > clock[own]):
                np.maximum(out[: len(clock)], clock, out=out[: len(clock)])

    def made(self, mark: np.ndarray, by: By) -> None:
        """A bulk reduction was recorded, if ``by`` is one."""
        if by.clock is not None:
            slot = int(self.clashes.clocks.slot[int(by.warps[0])])
            self.issues[int(mark.flat[0]) >> LANE] = slot, int(by.clock[slot])

    def check(
        self, last: np.ndarray, places: np.ndarray, by: By, region: Region, ins: Instruction
    ) -> None:
        """Compare an atomic or a bulk reduction with the last changes of its places."""
        bulk = by.clock is not None
        if not (bulk or self.issues):
            return
        last, places = last[:, :1], places[:, :1]  # of each element its first byte
        rec, r = last >> LANE, self.records
        changed = (last != 0) & (r.kind[rec] == ATOMIC)
        mixed = changed & ((r.slot[rec] >= self.clashes.clocks.warps) != bulk)
        if mixed.any():
            weak = by._replace(how=WEAK)
            if clash := self.clashes.first(np.where(mixed, last, 0), places, weak):
                self._tell(by, clash.later, clash.earlier, clash.place, region, ins, _OTHER_PROXY)
                return
        if bulk and self.clashes.order.active and changed.any():
            self._check_turn(rec, changed & ~mixed, places, by, region, ins)

    def _check_turn(
        self,
        rec: np.ndarray,
        changed: np.ndarray,
        places: np.ndarray,
        by: By,
        region: Region,
        ins: Instruction,
    ) -> None:
        """Tell of a bulk reduction that comes after the issue of another cluster's, and not after
        its end, or with no fence of proxies behind the flag.
        """
        warp, order, r = int(by.warps[0]), self.clashes.order, self.records
        own = int(self.clashes.who(by)[0])
        for earlier in np.unique(rec[changed]).tolist():
            who = int(r.who[earlier])
            if who == own or earlier not in self.issues:
                continue
            (slot, issue), agent = self.issues[earlier], (who - 1, int(r.slot[earlier]))
            if order.known(warp, who - 1, slot, by.clock) < issue:
                continue
            fenced, why = self.fenced.get(int(by.counts[0]), np.zeros(0, np.int32)), ""
            if order.known(warp, *agent, by.clock) < r.count[earlier]:
                why = "a flag orders the two but the first may still be under way, as its thread "
                why += "has waited by wait_group.read at most: their order may differ each time"
            elif order.known(warp, *agent, fenced) < r.count[earlier]:
                why = "a flag orders the two, but by the letter with no fence.proxy.async of "
                why += "global memory behind it, as they are of the async proxy"
            if why:
                at = tuple(int(v[0]) for v in np.nonzero(changed & (rec == earlier)))
                self._tell(by, at[0], earlier, int(places[at]), region, ins, why)
                return

    def _tell(
        self,
        by: By,
        row: int,
        earlier: int,
        place: int,
        region: Region,
        ins: Instruction,
        why: str,
    ) -> None:
        r, grid = self.records, self.m.grid
        warp = int(by.warps[row if len(by.warps) > 1 else 0])
        what = "adds to" if by.clock is None else "adds in bulk to"
        who = (int(r.who[earlier]) - 1) * grid.cluster_size
        x, y, z = grid.coordinates(who)
        self.m.findings.add(
            "race",
            f"{grid.name_warp(warp)} {what} {region.element(place)}, which CTA ({x},{y},{z}) "
            f"changes at PTX line {r.line[earlier]}: {why}",
            ins,
            advisory=True,
        )
