"""Shadow of tensor memory: who stored and loaded each column with tcgen05.st and ld.

It remembers, for each column of 16 lanes, the last warp that stored there and the last that loaded,
with the counts of these agents (see clocks). Both instructions are asynchronous: a warp's stores
are complete after its wait::st, its loads after wait::ld, or once it has used what was loaded, as a
true dependency of registers is respected (PTX ISA 9.7.16.6.4.5). Whoever touches the same columns
comes after that, or races; MMAs and copies when they are issued (what they do themselves,
async_accesses remembers), tcgen05.dealloc as a write.

By the letter (9.7.16.6.3, 9.7.16.6.4.4) a load that others wait for needs its wait::ld however its
registers were used, and every hand-over between threads a tcgen05.fence::before_thread_sync (which
a commit implies) and an ::after_thread_sync. Kernels of NVIDIA leave these out: an advisory.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.hazards.clocks import Kind
from cutex.sim.machine.operation import Rectangle
from cutex.sim.ptx.once import once
from cutex.sim.ptx.operands import Reg, Vector
from cutex.sim.ptx.parse import Instruction, Program

if TYPE_CHECKING:
    from cutex.sim.machine.batch import Batch
    from cutex.sim.machine.machine import Machine

_LANES = 16  # of a unit: half of what a warp may touch
_UNITS, _COLUMNS = 128 // _LANES, 512


class TmemAccesses:
    """The tcgen05.ld and st of each warp, and how far it has waited for them."""

    def __init__(self, machine: Machine) -> None:
        self.m, self.clocks = machine, machine.clocks
        warps = machine.grid.num_warps
        self.issued = {Kind.LOAD: np.zeros(warps, int), Kind.STORE: np.zeros(warps, int)}
        self.waited = {Kind.LOAD: np.zeros(warps, int), Kind.STORE: np.zeros(warps, int)}
        self.sites, self.users = load_sites(machine.program)
        # by warp and tcgen05.ld of the program: its number, where registers are not used yet
        self.pending = np.zeros((warps, len(self.sites)), int)
        self.any_pending = False

    def issue(self, kind: Kind, warp: int, ins: Instruction) -> int:
        """The number of a new ld or st of the warp."""
        self.issued[kind][warp] += 1
        number = int(self.issued[kind][warp])
        if kind is Kind.LOAD:
            self.pending[warp, self.sites[ins.line]] = number
            self.any_pending = True
        return number

    def wait(self, kind: Kind, warps: np.ndarray) -> None:
        """wait::ld or wait::st of these warps."""
        slots, counts = self._slots(kind, warps), self.issued[kind][warps]
        self.waited[kind][warps] = counts
        for row in (self.clocks.known, self.clocks.follows, self.clocks.usable):
            row[warps, slots] = counts
        if kind is Kind.LOAD:
            self.pending[warps] = 0
            self.any_pending = bool(self.pending.any())

    def use(self, b: Batch, pc: int) -> None:
        """An instruction reads registers that some tcgen05.ld loads."""
        if not self.any_pending:
            return
        last = self.pending[b.idx][:, self.users[pc]].max(1)
        for row in np.nonzero(last)[0].tolist():
            warp, number = int(b.idx[row]), int(last[row])
            self.clocks.learn(warp, self.clocks.agent(Kind.LOAD, warp), number)
            self.pending[warp][self.pending[warp] <= number] = 0

    def before_sync(self, warps: np.ndarray) -> None:
        for kind in (Kind.LOAD, Kind.STORE):
            self.clocks.ordered[warps, self._slots(kind, warps)] = self.waited[kind][warps]

    def after_sync(self, warps: np.ndarray) -> None:
        usable = self.clocks.usable
        usable[warps] = np.maximum(usable[warps], self.clocks.ordered[warps])

    def _slots(self, kind: Kind, warps: np.ndarray) -> np.ndarray:
        return int(kind) * self.clocks.warps + self.clocks.slot[warps]


@once
def load_sites(program: Program) -> tuple[dict[int, int], dict[int, list[int]]]:
    """Each tcgen05.ld by its PTX line, numbered; and which of them other instructions use."""
    sites: dict[int, int] = {}
    by_register: dict[int, list[int]] = {}
    for ins in program.code:
        if ins.op.startswith("tcgen05.ld") and ins.operands:
            site = sites.setdefault(ins.line, len(sites))
            target = ins.operands[0]
            for item in target.items if isinstance(target, Vector) else (target,):
                if isinstance(item, Reg):
                    by_register.setdefault(item.index, []).append(site)
    users: dict[int, list[int]] = {}
    if sites:
        for pc, ins in enumerate(program.code):
            stores = ins.name in ("st", "stmatrix", "red", "bar") or ins.op.startswith("tcgen05.st")
            read = set().union(*map(_registers, ins.operands[0 if stores else 1 :]))
            used = {site for r in read for site in by_register.get(r, ())}
            if used:
                users[pc] = sorted(used)
    return sites, users


def _registers(operand: object) -> set[int]:
    if isinstance(operand, Reg):
        return {operand.index} if operand.bank == 32 else set()
    if isinstance(operand, Vector):
        return set().union(*map(_registers, operand.items))
    base = getattr(operand, "base", None)
    return set() if base is None else _registers(base)


class TmemShadow:
    """By CTA, 16 lanes and column."""

    def __init__(self, machine: Machine) -> None:
        self.m, self.clocks = machine, machine.clocks
        shape = (machine.grid.num_ctas, _UNITS, _COLUMNS)
        self.writer, self.reader = np.zeros(shape, np.int16), np.zeros(shape, np.int16)  # slots
        self.written, self.read = np.zeros(shape, np.int32), np.zeros(shape, np.int32)  # 0: none
        self.line = np.zeros(shape, np.int32)  # of the last store in the PTX
        self.read_line = np.zeros(shape, np.int32)
        # by CTA: places that operations have overwritten since its last ld or st
        self.overwritten: dict[int, set[Hashable]] = {}

    def access(self, warp: int, place: Rectangle, write: bool, ins: Instruction) -> None:
        """A tcgen05.ld or st of ``warp``."""
        what = "tcgen05.st" if write else "tcgen05.ld"
        self._check(warp, place, write, what, ins, self.clocks.usable[warp])
        self.m.async_accesses.touch(place, write, what, warp, ins, self.clocks.usable[warp])
        kind = Kind.STORE if write else Kind.LOAD
        number = self.m.tmem.accesses.issue(kind, warp, ins)
        self.overwritten.pop(place.cta, None)
        at = _units(place)
        who, when = (self.writer, self.written) if write else (self.reader, self.read)
        who[at], when[at] = self.clocks.agent(kind, warp), number
        (self.line if write else self.read_line)[at] = ins.line

    def issue(self, warp: int, place: Rectangle, write: bool, what: str, ins: Instruction) -> None:
        """An operation of the tensor cores by ``warp``; ``write``: it overwrites the place."""
        overwritten = self.overwritten.setdefault(place.cta, set())
        if place.key in overwritten:
            return
        self._check(warp, place, write, what, ins, self.clocks.usable[warp])
        if write:
            self._forget(place)
            overwritten.add(place.key)

    def before_free(self, warp: int, place: Rectangle, ins: Instruction) -> None:
        """tcgen05.dealloc, which is synchronous: it needs no fence of its own before it."""
        usable = np.maximum(self.clocks.usable[warp], self.clocks.ordered[warp])
        self._check(warp, place, True, "tcgen05.dealloc", ins, usable)
        self.m.async_accesses.touch(place, True, "tcgen05.dealloc", warp, ins, usable)

    def free(self, place: Rectangle) -> None:
        """The place is nobody's."""
        self.m.async_accesses.forget(place)
        self._forget(place)

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
    ) -> None:
        """``usable`` (slots,): what the access comes after by the letter."""
        at, known = _units(place), self.clocks.known[warp]
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
