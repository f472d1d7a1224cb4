"""The registers of wgmmas (PTX ISA 9.7.15.7): a fence before, a wait after.

Ordinary accesses to registers of a wgmma come before a ``wgmma.fence`` that comes before it; its
accumulators are neither read nor written, and its A not written, before a ``wgmma.wait_group`` of
the warp that waits for it. A ``mov`` of an accumulator is no read: it gives it another name, and
the copy is in flight as well (see ptx/renames).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cutex.sim.machine.events import Observer, RegisterUse
from cutex.sim.machine.operation import Kind
from cutex.sim.machine.registers import Registers
from cutex.sim.ptx.once import once
from cutex.sim.ptx.operands import Reg, Vector
from cutex.sim.ptx.program import Instruction, Program
from cutex.sim.ptx.renames import accumulators, rename

if TYPE_CHECKING:
    from cutex.sim.machine.batch import Batch
    from cutex.sim.machine.machine import Machine

SEEN, CHANGED = 1, 2  # how a register was accessed


class _Unwaited(NamedTuple):
    """Registers of wgmmas that their warp has not waited for."""

    group: int  # number of the last one's group
    by: Instruction


class _Step(NamedTuple):
    """The registers used by a wgmma that another instruction reads and writes."""

    read: set[int]
    written: set[int]
    marks: tuple[tuple[int, int], ...]  # each register and how it is accessed: SEEN or CHANGED
    copies: tuple[int, int] | None  # a mov (to, from) of what may be an accumulator


@dataclass
class _Warp:
    """The registers of a warp's wgmmas in flight."""

    results: dict[Registers, _Unwaited] = field(default_factory=dict)  # accumulators
    sources: dict[Registers, _Unwaited] = field(default_factory=dict)  # A
    names: dict[int, _Unwaited] = field(default_factory=dict)  # copies of accumulators by mov

    def forget(self, number: int) -> bool:
        """Forget what the warp's first groups, of which it has waited for this many, use; return
        whether that is anything.
        """
        held = *self.results.values(), *self.sources.values(), *self.names.values()
        if all(u.group > number for u in held):
            return False
        self.results = {r: u for r, u in self.results.items() if u.group > number}
        self.sources = {r: u for r, u in self.sources.items() if u.group > number}
        self.names = {to: u for to, u in self.names.items() if u.group > number}
        return True


class WgmmaRegisters(Observer):
    """The registers that wgmmas of the resident warps use."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        num_warps, self.steps = machine.grid.num_warps, _steps(machine.program)
        self.numbers = {pc: number for number, pc in enumerate(self.steps)}
        self.at_once = np.zeros(num_warps, bool)  # fenced at least once
        # the steps executed since the last wgmma.fence, and whether there are any
        self.ran = np.zeros((num_warps, len(self.steps)), bool)
        self.unfenced = np.zeros(num_warps, bool)
        # by registers of a wgmma: how each step accesses them
        self.marks: dict[tuple[Registers, Registers | None], np.ndarray] = {}
        # by wgmmas that the warp has not waited for
        self.held = np.zeros((num_warps, machine.program.registers.get(32, 0)), bool)
        self.waits = np.zeros(num_warps, bool)  # whether the warp has to wait for any
        self.warps: dict[int, _Warp] = defaultdict(_Warp)

    def wgmma_executes(self, warps: np.ndarray, use: RegisterUse, ins: Instruction) -> None:
        fenced = bool(self.at_once[warps].all()) and not self.unfenced[warps].any()
        fresh = []
        for warp, group in zip(warps.tolist(), use.groups, strict=True):
            mine, unwaited = self.warps[warp], _Unwaited(group, ins)
            if mine.names:
                self._check_names(warp, set(use.all.tolist()), set(), ins)
            if not fenced:
                self._check_fence(warp, use, ins)
            if use.results not in mine.results or use.sources is not None:
                fresh.append(warp)  # NOTE: the others' registers are held already
            mine.results[use.results] = unwaited
            if use.sources is not None:
                mine.sources[use.sources] = unwaited
        if fresh:
            self.held[np.array(fresh)[:, None], use.all] = True
            self.waits[fresh] = True

    def waited(self, warps: Sequence[int], kind: Kind, numbers: Sequence[int]) -> None:
        """They have, each for its first groups."""
        if kind is not Kind.TENSOR:
            return
        for warp, number in zip(warps, numbers, strict=True):
            mine = self.warps.get(warp)
            if mine is not None and mine.forget(number):
                self.held[warp] = False
                for registers in (*mine.results, *mine.sources):
                    self.held[warp, registers.array] = True
                self.held[warp, list(mine.names)] = True
                self.waits[warp] = bool(mine.results or mine.sources or mine.names)

    def wgmma_fenced(self, warps: np.ndarray) -> None:
        self.at_once[warps] = True
        if self.unfenced[warps].any():
            self.ran[warps] = False
            self.unfenced[warps] = False

    def watched_places(self) -> set[int]:
        return set(self.steps)

    def using_registers(self, b: Batch, pc: int) -> None:
        """Check an instruction other than a wgmma that reads and writes registers used by some
        wgmma.
        """
        if pc not in self.steps:
            return
        read, written, marks, copies = self.steps[pc]
        if marks:
            self.ran[b.sel, self.numbers[pc]] = True
            self.unfenced[b.sel] = True
        registers = [*read, *written]
        if not self.waits[b.sel].any():
            return
        # NOTE: few; one at a time is faster than indexing by arrays
        if not any(self.held[b.sel, register].any() for register in registers):
            return
        for warp in b.idx[self.held[b.idx[:, None], registers].any(1)].tolist():
            if copies is None or not self._renamed(warp, *copies):
                self._check_waited(warp, read, written, self.m.program.code[pc])

    def _renamed(self, warp: int, to: int, of: int) -> bool:
        """Let a mov of what is in flight name it; return whether it is."""
        mine = self.warps[warp]
        found = mine.names.get(of)
        for registers, unwaited in mine.results.items():
            if of in registers.members and found is None:
                found = unwaited
        if found is None:
            return False
        mine.names[to] = found
        self.held[warp, to] = self.waits[warp] = True
        return True

    def _check_names(self, warp: int, read: set[int], written: set[int], ins: Instruction) -> None:
        """Report a read of a copy whose accumulator is in flight; another write ends the copy."""
        mine = self.warps[warp]
        for to in [to for to in mine.names if to in read | written]:
            unwaited = mine.names.pop(to)
            if to in read:
                self._report("reads", warp, unwaited, ins)

    def _report(self, verb: str, warp: int, unwaited: _Unwaited, ins: Instruction) -> None:
        self.m.findings.add(
            "race",
            f"{self.m.grid.name_warp(warp)} {verb} an accumulator register before "
            f"wgmma.wait_group; it is in flight since {unwaited.by.where()}",
            ins,
        )

    def _check_waited(self, warp: int, read: set[int], written: set[int], ins: Instruction) -> None:
        mine, name = self.warps[warp], self.m.grid.name_warp(warp)
        for registers, unwaited in mine.results.items():
            if not registers.members.isdisjoint(read | written):
                verb = "writes" if registers.members.isdisjoint(read) else "reads"
                self._report(verb, warp, unwaited, ins)
        self._check_names(warp, read, written, ins)
        for registers, unwaited in mine.sources.items():
            if not registers.members.isdisjoint(written):
                self.m.findings.add(
                    "race",
                    f"{name} writes an A register that the wgmma issued at "
                    f"{unwaited.by.where()} may still read: no wgmma.wait_group says that it is "
                    "complete",
                    ins,
                )

    def _check_fence(self, warp: int, use: RegisterUse, ins: Instruction) -> None:
        """Report wgmma registers whose ordinary accesses are not followed by a wgmma.fence
        (9.7.15.7.1).

        NOTE: a mov may be the compiler's, for a loop that carries an accumulator, and vanish in the
        end: such movs follow the fence of NVIDIA's persistent GEMM of Hopper. And its GEMM of fp8
        with two accumulators reads one, then has wgmma overwrite it, with no fence in between.
        """
        how = self._accessed(warp, use)
        if self.at_once[warp] and not how:
            return
        why = "its first wgmma comes without a wgmma.fence before it"
        if how:
            why = (
                "its wgmma accesses a register that the warp has accessed since its last "
                "wgmma.fence"
            )
        seen = bool(self.at_once[warp]) and how == SEEN
        self.m.findings.add(
            "race",
            f"{self.m.grid.name_warp(warp)}: {why}",
            ins,
            advisory=seen,
            remedy="wgmma.fence, as warpgroup.fence(), by all four warps before it",
        )

    def _accessed(self, warp: int, use: RegisterUse) -> int:
        """How the warp has accessed a wgmma's registers since its last fence: 0, SEEN or
        CHANGED.
        """
        marks = self.marks.get((use.results, use.sources))
        if marks is None:
            of = set(use.all.tolist())
            most = [max((m for r, m in s.marks if r in of), default=0) for s in self.steps.values()]
            marks = self.marks[use.results, use.sources] = np.array(most, np.uint8)
        return int((marks * self.ran[warp]).max(initial=0))


@once
def _steps(program: Program) -> dict[int, _Step]:
    """The instructions, other than wgmma's own, that read or write registers used by a wgmma."""
    used = _used(program.code)
    names = accumulators(program)
    out: dict[int, _Step] = {}
    if not used:
        return out
    for pc, ins in enumerate(program.code):
        if ins.op.startswith("wgmma"):
            continue
        touched = [_indices(o) & (used | names) for o in ins.operands]
        if any(touched):
            stores = ins.name in ("st", "stmatrix", "red", "bar") or not ins.operands
            written = set() if stores else touched[0]
            read = set().union(*(touched if stores else touched[1:]))
            changed = set() if ins.name == "mov" else written
            marks = {r: CHANGED if r in changed else SEEN for r in (read | written) & used}
            copies = rename(ins)
            copies = copies if copies and copies[1] in names else None
            out[pc] = _Step(read, written, tuple(marks.items()), copies)
    return out


def _indices(operand: object) -> set[int]:
    if isinstance(operand, Reg):
        return {operand.index} if operand.bank == 32 else set()
    if isinstance(operand, Vector):
        return set().union(*map(_indices, operand.items)) if operand.items else set()
    base = getattr(operand, "base", None)
    return _indices(base) if base is not None else set()


def _used(code: list[Instruction]) -> set[int]:
    """The 32-bit registers that any wgmma of the program uses."""
    found: set[int] = set()
    for ins in code:
        if ins.op.startswith("wgmma.mma_async"):
            for operand in ins.operands[:2]:
                if isinstance(operand, Vector):
                    found |= {r.index for r in operand.items if isinstance(r, Reg)}
    return found
