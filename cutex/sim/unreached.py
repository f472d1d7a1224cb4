"""Instructions that a run has not reached, and that the simulator could not have executed.

A definition is asked for each of them as if it were reached. What the PTX ISA has and the
simulator has not, or what ptxas is known to have taken, is an advisory: the result does not depend
on it. What is no PTX, as it misses an operand or names a register of another width, is an error.
(Modifiers that do not exist are an error before any run, see `cutex.sim.ptx.vocabulary`.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.errors import UnknownInstruction
from cutex.sim.ptx.decode import decode
from cutex.sim.ptx.forms import BRANCHES
from cutex.sim.ptx.program import Program

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

_KEY = "unreached"


def unknown(
    program: Program, machine: Machine, executed: np.ndarray
) -> dict[int, UnknownInstruction]:
    """The errors of the instructions of a launch that were not executed, by their place. Asks each
    definition once for a program, however often it is launched.
    """
    if _KEY not in program.derived:
        program.derived[_KEY] = _undefined(program, machine, executed)
    return {pc: error for pc, error in program.derived[_KEY].items() if not executed[pc]}


def _undefined(
    program: Program, machine: Machine, executed: np.ndarray
) -> dict[int, UnknownInstruction]:
    found = {}
    for pc in np.nonzero(executed == 0)[0].tolist():
        ins = program.code[pc]
        if ins.name in BRANCHES:
            continue
        try:
            decode(ins, machine)
        except UnknownInstruction as error:
            found[pc] = error
    return found


def tell(program: Program, machine: Machine, executed: np.ndarray) -> None:
    """Add an advisory for each instruction that was not reached and is not defined here. Raises
    the error of the first one that is no PTX.
    """
    for pc, error in unknown(program, machine, executed).items():
        if not program.assembled and not error.exists:
            raise error
        ins = program.code[pc]
        why = str(error).partition("\n")[0].partition(": ")[2]
        machine.findings.add(
            "unknown instruction", f"{ins.op} is not reached by this run; {why}", ins, advisory=True
        )
