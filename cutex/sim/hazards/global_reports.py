"""The reports of races on global memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from cutex.sim.hazards.clocks import Clocks
from cutex.sim.hazards.flag_values import FlagValues
from cutex.sim.hazards.global_marks import ATOMIC, LANE, BoxRead, By, Clash, Records
from cutex.sim.hazards.rechecks import Rechecks
from cutex.sim.machine.memory import Region
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

_REMEDY = "an atomic instead, or one CTA that does both, or a flag with release and acquire"
_BARRIER = "a barrier that both warps pass in between, as sync_threads()"
_WRITTEN = (
    "cp.async.bulk.wait_group without .read by the thread that stores, then a barrier of both"
)
_LANES = "sync_warp() in between"
_BY_LETTER = (
    " by the letter, as the thread that sets the flag has no fence of its own between the barrier "
    "and that, or the one that reads it none before the next barrier"
)
_OWN_FENCE = "a fence of the whole GPU by the thread that sets or reads the flag, beside that"


class GlobalReports:
    """Composes the findings of races of a launch."""

    clocks: Clocks  # of the resident clusters

    def __init__(
        self, machine: Machine, records: Records, rechecks: Rechecks, values: FlagValues
    ) -> None:
        self.m, self.records, self.rechecks, self.values = machine, records, rechecks, values

    def lanes(
        self, by: By, row: int, verb: str, place: str, mark: int, advisory: bool, ins: Instruction
    ) -> None:
        """A lane that reads or overwrites what another of its warp has stored."""
        line = self.records.line[mark >> LANE]
        self.m.findings.add(
            "race",
            f"lane {by.lanes[row]} of {self.m.grid.name_warp(int(by.warps[row]))} {verb} "
            f"{place}, "
            f"and its lane {mark & 31} wrote it (PTX line {line}): no bar.warp.sync orders the two "
            "lanes",
            ins,
            advisory=advisory,
            remedy=_LANES,
        )

    def constant(self, by: By, row: int, place: str, earlier: int, ins: Instruction) -> None:
        """A load by the cache of constants of what the kernel has written."""
        r, name = self.records, self.m.grid.name_warp
        self.m.findings.add(
            "race",
            f"{name(int(by.warps[row if len(by.warps) > 1 else 0]))} reads {place} by ld.global.nc,"
            f" and {self._name(int(r.who[earlier]))} wrote it (PTX line {r.line[earlier]}): what "
            "such a load returns of memory that the kernel itself writes is not defined",
            ins,
            remedy="a load without .nc",
        )

    def proxy(
        self, warp: int, place: str, earlier: int, ins: Instruction, write: bool = False
    ) -> None:
        """A copy by TMA of what ordinary stores have written, or onto it, which a barrier
        orders.
        """
        what, verb = ("bulk store", "overwrites") if write else ("copy", "reads")
        if write and ins.op.startswith("cp.reduce"):
            what, verb = "bulk reduction", "changes"
        in_bulk = bool(self.records.slot[earlier] >= self.clocks.warps)
        by_atomics = self.records.kind[earlier] == ATOMIC and not in_bulk
        stores = "atomics of " if by_atomics else "" if in_bulk else "ordinary stores of "
        self.m.findings.add(
            "proxy",
            f"a {what} that {self.m.grid.name_warp(warp)} issues {verb} {place}, which {stores}"
            f"{self._agent(earlier)} wrote (PTX line {self.records.line[earlier]}), with no "
            "fence.proxy.async in between",
            ins,
            verb == "overwrites" or in_bulk or bool(write and by_atomics),
            remedy="fence_proxy('async') by the threads that store, before the barrier",
        )

    def race_of_box(
        self, read: BoxRead, region: Region, place: int, earlier: int, warp: int | None
    ) -> None:
        who, line = self._name(read.owner + 1), self.records.line[earlier]
        by, remedy = self._name(int(self.records.who[earlier])), _REMEDY
        if warp is not None and self.records.who[earlier] == read.owner + 1:
            who, by, remedy = self.m.grid.name_warp(warp), self._agent(earlier), _BARRIER
        load = "a TMA load" if read.tmap is not None else "a bulk copy"
        self.m.findings.add(
            "race",
            f"{load} of {who} reads byte {place} of {region.description or region.name}, which "
            f"{by} writes (PTX line {line}): nothing orders the two",
            read.instruction,
            remedy=remedy,
        )

    def race(
        self,
        by: By,
        clash: Clash,
        region: Region,
        verb: str,
        did: str,
        ins: Instruction,
        letter: Any = False,
        load: int = 0,
    ) -> None:
        """Report a race; ``letter``: whether one of the two accesses is strong. ``load``: the PTX
        line of the other one, if it is an ordinary load.
        """
        r, place = self.records, region.element(clash.place)
        warp, earlier = int(by.warps[clash.later if len(by.warps) > 1 else 0]), clash.earlier
        who = int(self.m.grid.cta_cluster[self.m.grid.warp_cta[warp]]) + 1
        later, before, remedy = self._name(who), self._name(int(r.who[earlier])), _REMEDY
        why = "nothing orders the two"
        if who == r.who[earlier]:
            later, before, remedy = self.m.grid.name_warp(warp), self._agent(earlier), _BARRIER
            later = later if by.clock is None else f"a bulk store of {later}"
            why = "no barrier orders the two"
            if r.slot[earlier] >= self.clocks.warps:
                why, remedy = "nothing that this warp has waited for says that it is done", _WRITTEN
        line = f"(PTX line {r.line[earlier]})"
        if did == "has read":
            message = f"{later} {verb} {place}, which {before} has read {line}"
        elif verb == "changes":
            message = f"{later} changes {place} by an atomic, and {before} "
            message += f"wrote another value there by an ordinary store {line}"
        else:
            message = f"{later} {verb} {place}, and {before} {did} {line}"
        message += f": {why}"
        if who != r.who[earlier] and (wait := self.values.older.get(who - 1)) is not None:
            message += f", as the load at PTX line {wait.line} may have read an older value, by "
            message += "which the kernel goes on in the same way"
        if clash.fenced:
            message, remedy, letter, load = f"{message}{_BY_LETTER}", _OWN_FENCE, True, 0
        elif letter:
            message += ", and only one of them is an atomic, volatile, relaxed or the like"
        if load:
            tell = partial(self.m.findings.add, "race", message, ins, remedy=remedy)
            self.rechecks.race(load, tell)
        else:
            self.m.findings.add("race", message, ins, bool(letter), remedy=remedy)

    def _agent(self, record: int) -> str:
        """Who made an access: a warp, or a bulk store of one."""
        name = self.m.grid.name_warp(int(self.records.warp[record]))
        bulk = self.records.slot[record] >= self.clocks.warps
        return f"a bulk store of {name}" if bulk else name

    def _name(self, who: int) -> str:
        x, y, z = self.m.grid.coordinates((int(who) - 1) * self.m.grid.cluster_size)
        what = "CTA" if self.m.grid.cluster_size == 1 else "the cluster of CTA"
        return f"{what} ({x},{y},{z})"
