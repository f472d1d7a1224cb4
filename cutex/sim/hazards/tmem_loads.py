"""The registers that hold results of a tcgen05.ld in flight.

A load is complete after its warp's ``tcgen05.wait::ld``. An instruction that uses one of its
registers before that waits for the value, since true dependencies are respected (PTX ISA
9.7.16.6.4.5); but a ``mov``, which compilers put between a load and its wait, only renames the
register: the copy is in flight, too. A load whose registers are only copied before a wait of the
same block needs no watching, so kernels that wait correctly cost nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from cutex.sim.ptx.flow import LEAVES
from cutex.sim.ptx.once import once
from cutex.sim.ptx.operands import Address, RegisterId, registers_of
from cutex.sim.ptx.program import Instruction, Program

_READS_ALL = ("bar", "barrier", "nanosleep", "call")  # opcodes whose first operand is no result


class Step(NamedTuple):
    """The watched registers that an instruction reads and writes, by their columns."""

    reads: np.ndarray
    writes: np.ndarray
    copies: bool


class Watched(NamedTuple):
    """The loads of a program whose registers are used before a wait."""

    loads: dict[int, np.ndarray]  # by PTX line: the columns of the registers that it fills
    steps: dict[int, Step]  # by place in the program
    columns: int


@once
def watched(program: Program) -> Watched:
    code = program.code
    heads = {ins.target for ins in code if ins.name == "bra"}
    loads = [pc for pc, ins in enumerate(code) if is_load(ins) and not _waited(code, pc, heads)]
    columns = _copied(code, {place for pc in loads for place in effects(code[pc])[0]})
    steps = {}
    for pc, ins in enumerate(code if loads else ()):
        written, read = (_columns(columns, places) for places in effects(ins))
        if len(read) or (len(written) and not is_load(ins)):
            steps[pc] = Step(read, written, _copies(ins))
    filled = {code[pc].line: _columns(columns, effects(code[pc])[0]) for pc in loads}
    return Watched(filled, steps, len(columns))


def is_load(ins: Instruction) -> bool:
    return ins.op.startswith("tcgen05.ld")


def _copies(ins: Instruction) -> bool:
    return ins.name == "mov"


def _waited(code: list[Instruction], pc: int, heads: set[int]) -> bool:
    """Whether the block of a load waits for it before an instruction other than a copy uses its
    registers.
    """
    filled = effects(code[pc])[0]
    for at in range(pc + 1, len(code)):
        ins = code[at]
        if at in heads or ins.name == "bra" or ins.name in LEAVES:
            return False
        if ins.op.startswith("tcgen05.wait::ld"):
            return ins.guard is None
        written, read = effects(ins)
        if read & filled:
            if not _copies(ins):
                return False
            filled |= written
    return False


def _copied(code: list[Instruction], filled: set[RegisterId]) -> dict[RegisterId, int]:
    """A column for each of these registers, and for each that copies of them may reach."""
    moves = [effects(ins) for ins in code if _copies(ins)] if filled else []
    reached, more = set(filled), True
    while more:
        found = {p for written, read in moves if read & reached for p in written} - reached
        reached |= found
        more = bool(found)
    return {place: i for i, place in enumerate(sorted(reached))}


def _columns(columns: dict[RegisterId, int], places: Iterable[RegisterId]) -> np.ndarray:
    return np.array([columns[p] for p in places if p in columns], np.int64)


def effects(ins: Instruction) -> tuple[set[RegisterId], set[RegisterId]]:
    """The registers that an instruction writes, and those that it reads."""
    split = int(ins.name not in _READS_ALL and ins.parts[1:2] != ("dealloc",))
    written, read = set[RegisterId](), set[RegisterId]()
    for i, operand in enumerate(ins.operands):
        into = written if i < split and not isinstance(operand, Address) else read
        into.update(registers_of(operand))
    if ins.guard is not None:
        read.add((ins.guard.bank, ins.guard.index))
    return written, read
