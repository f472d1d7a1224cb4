"""The registers of a program's instructions, as values go from one to the next."""

from __future__ import annotations

from typing import NamedTuple

from cutex.sim.hazards.tmem_loads import effects
from cutex.sim.ptx.once import once
from cutex.sim.ptx.operands import Address, Reg, RegisterId, registers_of
from cutex.sim.ptx.program import Instruction, Program
from cutex.sim.ptx.unassigned import unassigned


class Step(NamedTuple):
    """The registers of an instruction: those that it writes, its sources, one set for each that is
    not part of an address, and those of addresses.
    """

    written: frozenset[RegisterId]
    sources: tuple[tuple[RegisterId, ...], ...]
    addresses: frozenset[RegisterId]


@once
def steps_of(program: Program) -> list[Step]:
    return [_step(ins) for ins in program.code]


def _step(ins: Instruction) -> Step:
    written = frozenset(_written(ins))
    results = ins.name not in ("st", "red", "bra", "bar", "barrier") or "red" in ins.parts[1:]
    first = int(results)  # of the operands that are no results
    addresses = {p for o in ins.operands if isinstance(o, Address) for p in registers_of(o)}
    sources = [tuple(registers_of(o)) for o in list(ins.operands)[first:] if not _address(o)]
    return Step(written, tuple(sources), frozenset(addresses))


def _written(ins: Instruction) -> set[RegisterId]:
    """The registers that an instruction writes, the result of a bar.red or a call, too."""
    written = effects(ins)[0]
    if ins.name == "call" or "red" in ins.parts[1:]:
        written |= set(registers_of(next(iter(ins.operands))))
    return written


def _address(operand: object) -> bool:
    return isinstance(operand, Address)


@once
def uses_of(program: Program) -> dict[RegisterId, set[int]]:
    """The places that read or write each register."""
    uses: dict[RegisterId, set[int]] = {}
    for pc, ins in enumerate(program.code):
        written, read = effects(ins)
        for register in written | read:
            uses.setdefault(register, set()).add(pc)
    return uses


@once
def unassigned_of(program: Program) -> dict[RegisterId, str]:
    """The registers that may be read before they are written, and their names."""
    wanted = unassigned(program)
    read = dict[RegisterId, str]()
    for ins in program.code if wanted else ():
        for operand in list(ins.operands):
            registers = operand.items if hasattr(operand, "items") else (operand,)
            named = [r for r in registers if isinstance(r, Reg)]
            named += [ins.guard] if ins.guard is not None else []
            read |= {(r.bank, r.index): r.name.partition("@")[0] for r in named}
    return {register: read.get(register, "") for register in wanted}
