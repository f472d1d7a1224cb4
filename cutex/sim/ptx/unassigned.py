"""Registers that an instruction may read before any has written them."""

from __future__ import annotations

from collections import deque

from cutex.sim.ptx.flow import LEAVES
from cutex.sim.ptx.once import once
from cutex.sim.ptx.operands import Address, RegisterId, registers_of
from cutex.sim.ptx.program import Instruction, Program

READS_ALL = ("bar", "barrier", "bra", "nanosleep", "red", "st")  # no operand is a result


@once
def unassigned(program: Program) -> set[RegisterId]:
    """The registers that are read on some path from the program's start with no write before. A
    write under a predicate counts as none, so some of them are right.
    """
    heads, followers = blocks_of(program)
    ends = [*heads[1:], None]
    effects = [_effects(program.code[a:b]) for a, b in zip(heads, ends, strict=True)]
    read = set[RegisterId]().union(*(exposed for exposed, _ in effects))
    bit = {register: 1 << n for n, register in enumerate(read)}
    writes = [sum(bit[r] for r in written & read) for _, written in effects]
    assigned = [-1] * len(heads)  # at each block's start, on every path; -1: all
    todo, reached = deque([0]), {0}
    assigned[0] = 0
    while todo:
        block = todo.popleft()
        behind = assigned[block] | writes[block]
        for follower in followers[block]:
            both = assigned[follower] & behind
            if both != assigned[follower] or follower not in reached:
                assigned[follower] = both
                reached.add(follower)
                todo.append(follower)
    return {r for block in reached for r in effects[block][0] if not assigned[block] & bit[r]}


@once
def blocks_of(program: Program) -> tuple[list[int], list[list[int]]]:
    """The places where basic blocks begin, and for each block those that may follow it."""
    code = program.code
    ends = [pc for pc, ins in enumerate(code) if ins.name == "bra" or ins.name in LEAVES]
    places = {0, *(code[pc].target for pc in ends if code[pc].name == "bra")}
    heads = sorted(places | {pc + 1 for pc in ends if pc + 1 < len(code)})
    number = {head: n for n, head in enumerate(heads)}
    followers = []
    for after in [*heads[1:], len(code)]:
        last = code[after - 1]
        ends_here = last.name == "bra" or last.name in LEAVES
        targets = [last.target] if last.name == "bra" else []
        if not ends_here or last.guard is not None:
            targets.append(after)
        followers.append([number[t] for t in targets if t in number])
    return heads, followers


def _effects(code: list[Instruction]) -> tuple[set[RegisterId], set[RegisterId]]:
    """The registers that a block reads before it writes them, and those that it writes."""
    exposed, written = set[RegisterId](), set[RegisterId]()
    for ins in code:
        guard = ins.guard
        if guard is not None and (guard.bank, guard.index) not in written:
            exposed.add((guard.bank, guard.index))
        results = set[RegisterId]()
        for n, operand in enumerate(ins.operands):
            registers = registers_of(operand)
            if n or isinstance(operand, Address) or ins.name in READS_ALL:
                exposed.update(r for r in registers if r not in written)
            else:
                results.update(registers)
        if guard is None:
            written |= results
    return exposed, written
