"""Virtual registers that can share storage.

PTX gives every value a register of its own, tens of thousands in unrolled code, most of which live
for a few instructions. One that a basic block writes before it reads it, and that is touched only
by instructions that work lane by lane, is a temporary there: it gets storage that is free from its
first write to its last use, and old content of the storage can never be read. All other registers
have storage of their own.
"""

from __future__ import annotations

import numpy as np

from cutex.sim.ptx.flow import LEAVES
from cutex.sim.ptx.once import once
from cutex.sim.ptx.operands import RegisterId, registers_of
from cutex.sim.ptx.program import Instruction, Program

# Instructions that read and write the registers of their own lane only, and immediately.
_LOCAL = frozenset((
    "abs", "add", "and", "bfe", "bfi", "brev", "clz", "cos", "cvt", "cvta", "div", "ex2", "fma",
    "ld", "lg2", "lop3", "mad", "max", "min", "mov", "mul", "neg", "not", "or", "popc", "prmt",
    "rcp", "rem", "rsqrt", "selp", "set", "setp", "shf", "shl", "shr", "sin", "sqrt", "st", "sub",
    "tanh", "xor",
))  # fmt: skip
_LATER = frozenset(("async", "bulk"))  # modifiers of stores that read registers on completion
_SHARED_BANKS = (1, 16, 32, 64)


@once
def homes(program: Program) -> dict[int, list[int]]:
    """Return, by bank and register, the register whose storage it uses: its own if it shares none,
    or if it is the first of those that share it.
    """
    found = {bank: list(range(count)) for bank, count in program.registers.items()}
    pool: dict[int, list[int]] = {bank: [] for bank in found}
    spans = _temporaries(program)
    last: dict[int, list[RegisterId]] = {}
    for place, (_, end) in spans.items():
        last.setdefault(end, []).append(place)
    first: dict[int, list[RegisterId]] = {}
    for place, (start, _) in spans.items():
        first.setdefault(start, []).append(place)
    free: dict[int, list[int]] = {bank: [] for bank in found}
    for pc in sorted(first.keys() | last.keys()):
        for bank, index in first.get(pc, ()):
            if not free[bank]:
                pool[bank].append(index)
                free[bank].append(index)
            found[bank][index] = free[bank].pop()
        for bank, index in last.get(pc, ()):
            free[bank].append(found[bank][index])
    return found


@once
def used(program: Program) -> dict[int, np.ndarray]:
    """Return, by bank, the storage indices that are in use."""
    return {bank: np.unique(np.array(at, np.int64)) for bank, at in homes(program).items()}


@once
def lasting(program: Program) -> dict[int, list[int]]:
    """Return, by bank, the registers that are not temporaries."""
    spans = _temporaries(program)
    return {
        bank: [i for i in range(count) if (bank, i) not in spans]
        for bank, count in program.registers.items()
    }


@once
def _temporaries(program: Program) -> dict[RegisterId, tuple[int, int]]:
    """Each temporary, with the instructions of its first write and its last use."""
    block = _blocks(program.code)
    spans: dict[RegisterId, tuple[int, int]] = {}
    others: set[RegisterId] = set()
    for pc, ins in enumerate(program.code):
        local = ins.name in _LOCAL and _LATER.isdisjoint(ins.parts)
        guard = {(1, ins.guard.index)} if ins.guard is not None else set()
        written, read = touched(ins) if local else (set(), set())
        if not local:
            others.update(p for o in ins.operands for p in registers_of(o))
        for place in guard | read:
            if place not in spans or block[spans[place][0]] != block[pc]:
                others.add(place)
            else:
                spans[place] = spans[place][0], pc
        for place in written:
            if place not in spans:
                if guard or place in read or place[0] not in _SHARED_BANKS:
                    others.add(place)
                spans[place] = pc, pc
            elif block[spans[place][0]] != block[pc]:
                others.add(place)
            else:
                spans[place] = spans[place][0], pc
    return {place: span for place, span in spans.items() if place not in others}


def touched(ins: Instruction) -> tuple[set[RegisterId], set[RegisterId]]:
    """The registers that an instruction writes, and those that it reads."""
    split = 0 if ins.name == "st" else 1
    operands = list(ins.operands)
    written = {p for o in operands[:split] for p in registers_of(o)}
    return written, {p for o in operands[split:] for p in registers_of(o)}


def _blocks(code: list[Instruction]) -> list[int]:
    """Return, by instruction, the number of its basic block."""
    heads = {ins.target for ins in code if ins.name == "bra"}
    out, number = [], 0
    for pc, ins in enumerate(code):
        number += pc in heads
        out.append(number)
        number += ins.name == "bra" or ins.name in LEAVES
    return out
