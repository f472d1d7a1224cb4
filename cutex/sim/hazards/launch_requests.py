"""The rules of cluster launch control: after a refusal has been seen no further request may follow,
and a refused reply has no coordinates (PTX ISA 9.7.13.16; CUDA C++ Programming Guide, Cluster
Launch Control). Code may take them from the reply before it looks whether they are there, as the
DSL's does; but no access to memory may depend on them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cutex.sim.hazards.clocks import Clocks
from cutex.sim.hazards.tmem_loads import effects
from cutex.sim.machine.events import Observer
from cutex.sim.ptx.once import once
from cutex.sim.ptx.operands import Address, RegisterId, registers_of
from cutex.sim.ptx.program import Instruction, Program

if TYPE_CHECKING:
    from cutex.sim.machine.batch import Batch
    from cutex.sim.machine.machine import Machine


class _Seen(NamedTuple):
    """A refusal that a warp has seen, and the warp's count then."""

    warp: int
    when: int
    instruction: Instruction


_ACCESSES = ("ld", "st", "atom", "red", "cp")


class _Coordinates(NamedTuple):
    """The registers that may hold coordinates of a reply, or what is computed from them."""

    columns: dict[RegisterId, int]
    steps: dict[int, tuple[list[int], list[int]]]  # by place in the program: written, read


@once
def _coordinates(program: Program) -> _Coordinates:
    moves = [effects(ins) for ins in program.code if ins.name not in (*_ACCESSES, "setp", "bra")]
    reached = {p for ins in program.code if "get_first_ctaid" in ins.op for p in effects(ins)[0]}
    more = bool(reached)
    while more:
        found = {p for written, read in moves if read & reached for p in written} - reached
        reached |= found
        more = bool(found)
    columns = {place: i for i, place in enumerate(sorted(reached))}
    steps = {}
    for pc, ins in enumerate(program.code if reached else ()):
        written, read = ([columns[p] for p in places & reached] for places in _effects(ins))
        if written or read:
            steps[pc] = written, read
    return _Coordinates(columns, steps)


def _effects(ins: Instruction) -> tuple[set[RegisterId], set[RegisterId]]:
    """As `effects`, but of a store to shared memory only the address: a warp may hand a refused
    reply on, beside the word that says so.
    """
    written, read = effects(ins)
    if ins.name == "st" and any(part.startswith("shared") for part in ins.parts):
        read = {p for o in ins.operands if isinstance(o, Address) for p in registers_of(o)}
    return written, read


class LaunchRequests(Observer):
    """The refusals that the resident clusters have seen."""

    def __init__(self, machine: Machine, clocks: Clocks) -> None:
        self.m, self.clocks = machine, clocks
        self.seen: dict[int, dict[int, _Seen]] = {}  # by cluster's first CTA and warp: the first
        self.coordinates = _coordinates(machine.program)
        # by warp and register that may hold coordinates: whether they are of a refusal
        self.refused = np.zeros((machine.grid.num_warps, len(self.coordinates.columns)), bool)

    def watched_places(self) -> set[int]:
        return set(self.coordinates.steps)

    def using_registers(self, b: Batch, pc: int) -> None:
        """Follow refused coordinates through the registers; report an access by them."""
        if pc not in self.coordinates.steps or not self.refused.any():
            return
        (written, read), ins = self.coordinates.steps[pc], self.m.program.code[pc]
        warps = b.idx if b.mask is None else b.idx[b.any_active()]
        wrong = np.any(self.refused[warps[:, None], read], axis=1)
        if wrong.any() and ins.name in _ACCESSES and "prefetch" not in ins.parts:
            self.m.findings.add(
                "launch control",
                f"{self.m.grid.name_warp(int(warps[wrong][0]))} accesses memory by the coordinates "
                "of a reply of cluster launch control that refuses: what they are is not defined",
                ins,
                remedy="query_cancel.is_canceled of the reply before, and a branch on it",
            )
        if ins.name in ("selp", *_ACCESSES):
            wrong[:] = False  # NOTE: a selp takes the other where the reply refuses
        if b.mask is not None:
            wrong |= np.any(self.refused[warps[:, None], written], axis=1)
        self.refused[warps[:, None], written] = wrong[:, None]

    def reply_read(self, warps: np.ndarray, coordinates: bool, ins: Instruction) -> None:
        if coordinates:
            columns = self.coordinates.columns
            written = [columns[p] for p in effects(ins)[0]]
            self.refused[warps[:, None], written] = True
        for warp in warps.tolist():
            first = self.m.grid.first_cta[warp]
            seen = _Seen(warp, self.clocks.now(warp), ins)
            self.seen.setdefault(first, {}).setdefault(warp, seen)

    def launch_requested(self, warp: int, ins: Instruction) -> None:
        """Report a request of a warp that has seen a refusal, or is ordered after a warp that
        has.
        """
        for seen in self.seen.get(self.m.grid.first_cta[warp], {}).values():
            slot = self.clocks.slot[seen.warp]
            if seen.warp != warp and self.clocks.known[warp, slot] < seen.when:
                continue
            name = self.m.grid.name_warp
            who = "it" if seen.warp == warp else name(seen.warp)
            self.m.findings.add(
                "launch control",
                f"{name(warp)} requests another cluster after {who} has seen a refusal at "
                f"{seen.instruction.where()}: what that does is not defined",
                ins,
                remedy="the end of the loop of requests, for every warp, at the first refusal",
            )
            return
