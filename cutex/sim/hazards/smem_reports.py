"""The reports of races on shared memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from cutex.sim.hazards.clocks import Clocks
from cutex.sim.hazards.rechecks import Rechecks
from cutex.sim.machine.operation import WORD, Engine, Operation
from cutex.sim.ptx.program import Instruction
from cutex.sim.ptx.strength import Strength, strength

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

_BARRIER = "a barrier that both warps pass in between, as sync_threads()"
_CLUSTER = (
    "a barrier of the cluster that both pass in between, as cluster_arrive() and cluster_wait()"
)
_FREED = "an arrival of the reader behind its read on an mbarrier for which the thread that issues "
_FREED += "the copy waits, as that of an empty slot; or a barrier of both"
_FENCE = "fence.proxy.async of shared memory, as fence_view_async_shared(), by each thread that "


class SmemAccess(NamedTuple):
    """An access that is checked: of a warp's lanes or, named by ``what``, of an operation that a
    warp has issued."""

    write: bool
    instruction: Instruction
    what: str = ""

    @property
    def verb(self) -> str:
        return "overwrites" if self.write else "reads"


class LastStore(NamedTuple):
    """The last store to a word: by a lane of a warp, at a PTX line."""

    slot: int
    lane: int
    line: int


class SmemReports:
    """Composes the findings of races on the resident CTAs."""

    def __init__(self, machine: Machine, clocks: Clocks, rechecks: Rechecks) -> None:
        self.m, self.clocks, self.rechecks = machine, clocks, rechecks

    def race(
        self, access: SmemAccess, warp: int, word: int, other: int, did: str, line: int | None
    ) -> None:
        """An access that is not ordered after that of the agent in slot ``other``, at a PTX line if
        that is known."""
        peer, why = self._peer(warp, other), "no barrier orders the two"
        remedy = _FREED if access.what and did == "read" else self._barrier(warp, other)
        if other >= self.clocks.warps:
            peer = f"a cp.async of {peer}"
            why = "nothing that this warp has waited for says that it is complete"
            remedy = "cp.async.wait_group by the thread that copies, then a barrier of both warps"
        self.m.findings.add(
            "race",
            f"{self._who(access, warp)} {access.verb} {_name(word)}, which {peer} {did}"
            f"{'' if line is None else f' at PTX line {line}'}: {why}",
            access.instruction,
            remedy=remedy,
        )

    def lanes(self, access: SmemAccess, warp: int, word: int, store: LastStore, sure: bool) -> None:
        """An access ordered after a warp's store, but not after the lane's that made it."""
        peer = self.clocks.peer(warp, store.slot)
        same = self.m.grid.warp_cta[peer] == self.m.grid.warp_cta[warp]
        why = "by the letter, a bar.warp.sync is missing between these lanes"
        if store.slot != self.clocks.slot[warp]:
            why = "by the letter, one lane's arrival does not tell of the others' stores: a "
            why += "bar.warp.sync is missing before it"
        if sure:
            why = "no bar.warp.sync orders the two lanes"
        if not same:
            why = "by the letter, an arrival at another CTA's mbarrier has to be .release.cluster, "
            why += "and the wait for it .acquire.cluster"
        self.m.findings.add(
            "race",
            f"{self._who(access, warp)} {access.verb} {_name(word)}, which "
            f"{self.m.grid.name_warp(peer)} lane {store.lane} wrote at PTX line {store.line}: "
            f"{why}",
            access.instruction,
            advisory=not sure,
            remedy="sync_warp() in between" if sure else "",
        )

    def readers(self, access: SmemAccess, warp: int, word: int, other: int, line: int) -> None:
        """A write ordered after one lane of the warp in slot ``other``, whose lanes have read."""
        peer = self.clocks.peer(warp, other)
        why = "one lane's arrival does not tell of the others' loads: a bar.warp.sync is missing "
        why += "before it"
        if peer == warp:
            why = "a bar.warp.sync is missing between the loads of all lanes and the copy of one"
        if self.m.grid.warp_cta[peer] != self.m.grid.warp_cta[warp]:
            return
        self.m.findings.add(
            "race",
            f"{self._who(access, warp)} {access.verb} {_name(word)}, which "
            f"{self.m.grid.name_warp(peer)} read at PTX line {line}: by the letter, {why}",
            access.instruction,
            advisory=True,
        )

    def copied(self, warp: int, lane: int, word: int, store: LastStore, ins: Instruction) -> None:
        """A lane that reads what another lane of its warp has copied."""
        who = "" if ins.name == "ldmatrix" else f" lane {lane}"
        self.m.findings.add(
            "race",
            f"{self.m.grid.name_warp(warp)}{who} reads {_name(word)}, which the cp.async of "
            f"its lane {store.lane} at PTX line {store.line} wrote: by the letter, a wait tells a "
            "thread of its own copies only, and a bar.warp.sync is missing",
            ins,
            advisory=True,
        )

    def copies(self, access: SmemAccess, warp: int, word: int, store: LastStore) -> None:
        """An access ordered after the wait of one lane of a warp, all of which have copied."""
        peer = self.clocks.peer(warp, store.slot)
        why = "one lane's arrival does not tell of the others' copies: a bar.warp.sync is missing "
        why += "before it"
        if peer == warp:
            why = "a bar.warp.sync is missing between the copies of all lanes, which each has "
            why += "waited for, and the operation of one"
        self.m.findings.add(
            "race",
            f"{self._who(access, warp)} {access.verb} {_name(word)}, which a cp.async of "
            f"{self.m.grid.name_warp(peer)} wrote at PTX line {store.line}: by the letter, {why}",
            access.instruction,
            advisory=True,
        )

    def unwritten(self, warp: int, lane: int, offset: int, ins: Instruction) -> None:
        """An atomic on shared memory that nothing has written."""
        self.m.findings.add(
            "uninitialised",
            f"{self.m.grid.name_warp(warp)} lane {lane} changes shared memory 0x{offset:x} by an "
            "atomic, and nothing has written it",
            ins,
            remedy="a store of the first value, and a barrier behind it",
        )

    def strong(
        self, ins: Instruction, warp: int, word: int, other: int, did: str, line: int | None
    ) -> None:
        """A strong access that no barrier orders after an ordinary one, at a PTX line if known."""
        how = strength(ins.op)
        verb = "changes" if how.atomic else "reads" if ins.name == "ld" else "overwrites"
        message = (
            f"{self.m.grid.name_warp(warp)} {verb} {_name(word)}{_by(how)}, which "
            f"{self._peer(warp, other)} {did} by an ordinary "
            f"{'load' if did == 'read' else 'store'}"
            f"{'' if line is None else f' at PTX line {line}'}: no barrier orders the two"
        )
        tell = partial(self.m.findings.add, "race", message, ins, remedy=self._barrier(warp, other))
        if did == "read" and line is not None and how.atomic:
            self.rechecks.race(line, tell)
        else:
            tell(not how.atomic)

    def scopes(
        self, ins: Instruction, warp: int, word: int, other: int, change: Instruction
    ) -> None:
        """Strong accesses of two CTAs, one with the scope of its own."""
        self.m.findings.add(
            "race",
            f"{self.m.grid.name_warp(warp)} changes {_name(word)}, which "
            f"{self._peer(warp, other)} of another CTA changes at PTX line {change.line}: one of "
            "the two has the scope of its CTA only, so they are not atomic to each other",
            ins,
            remedy="the scope of the cluster for both",
        )

    def changed(
        self, access: SmemAccess, warp: int, word: int, other: int, change: Instruction
    ) -> None:
        """An ordinary access that no barrier orders after a strong store."""
        atomic = strength(change.op).atomic
        message = (
            f"{self._who(access, warp)} {access.verb} {_name(word)}, which "
            f"{self._peer(warp, other)} {'changes by an atomic' if atomic else 'wrote'} at PTX "
            f"line {change.line}: no barrier orders the two"
        )
        remedy = self._barrier(warp, other)
        tell = partial(self.m.findings.add, "race", message, access.instruction, remedy=remedy)
        if access.write or access.what:
            tell(not atomic)
        else:
            self.rechecks.race(access.instruction.line, tell)

    def proxy(
        self, op: Operation, warp: int, word: int, before: str, write: bool, copied: bool
    ) -> None:
        """An operation of the async proxy that no fence orders after an ordinary access."""
        self.m.findings.add(
            "proxy",
            f"{op.what} of {self.m.grid.name_warp(warp)} {'overwrites' if write else 'reads'} "
            f"{_name(word)}, which {before}, with no fence.proxy.async in between",
            op.instruction,
            advisory=copied or (write and op.engine is not Engine.LAUNCH_CONTROL),
            remedy=f"{_FENCE}{'copied' if copied else 'read' if write else 'stored'}, before the "
            "barrier or the arrival that tells of it",
        )

    def _who(self, access: SmemAccess, warp: int) -> str:
        name = self.m.grid.name_warp(warp)
        return f"{access.what} of {name}" if access.what else name

    def _barrier(self, warp: int, slot: int) -> str:
        """A barrier that would order a warp's access after that of the agent in a slot."""
        ctas = self.m.grid.warp_cta[[warp, self.clocks.peer(warp, slot)]]
        return _BARRIER if ctas[0] == ctas[1] else _CLUSTER

    def _peer(self, warp: int, slot: int) -> str:
        return self.m.grid.name_warp(self.clocks.peer(warp, slot))


def _name(word: int) -> str:
    return f"shared memory 0x{word * WORD:x}"


def _by(how: Strength) -> str:
    return " by an atomic" if how.atomic else ""
